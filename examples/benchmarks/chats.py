"""pure. CPU of encoding a chat, beside transformers' `apply_chat_template` on the same records.

    python -m examples.benchmarks.chats --tokenizers .released-tokenizers \
        --templates .../site-packages/trl/chat_templates \
        --output examples/benchmarks/results/chats.md

`make released-tokenizers` fetches the tokenizers. The templates are TRL's copies of released ones.

Theirs is `apply_chat_template(messages, tools=tools, tokenize=True)`, which renders and tokenizes a
chat. Ours is `ChatEncoder.encode`, which also reads the record, checks it and its rendering, finds
the trained tokens and makes labels and a loss mask. Both take the same records by turns, pass by
pass, in one process.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import date
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from examples.benchmarks.provenance import ROOT, commit, processor

_CHATML = """{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful AI assistant.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


class Family(NamedTuple):
    """A chat template, and the tokenizer that stands for the family's."""

    tokenizer: str
    """Folder of the tokenizer."""
    template: str | None = None
    """TRL's name of the template, or the template; None for the tokenizer's own."""
    takes_tools: bool = False
    added: tuple[str, ...] = ()
    """Tokens that the family's tokenizer has, and the one that stands for it has not."""


FAMILIES = {
    "Qwen3": Family("qwen3", "qwen3", True),
    "Qwen2.5": Family("qwen3", "qwen2_5", True),
    "Llama 3.1": Family("llama3_1"),
    "SmolLM2": Family("qwen3", _CHATML),
    "Gemma 3": Family("gemma3"),
    "GLM 4.5": Family(
        "qwen3",
        "glm4moe",
        True,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "DeepSeek-V3": Family("deepseek_v3"),
    "gpt-oss": Family("gptoss", "gptoss", True),
}
"""GLM's tokenizer is on no package index, and Qwen2.5 and SmolLM2 write ChatML, whose tokens Qwen3
has."""
_TODAY = date(2025, 6, 30)
_CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Name of the city."},
        "days": {"type": "integer", "description": "Days ahead, at most ten."},
    },
    "required": ["city"],
}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": said, "parameters": _CITY},
    }
    for name, said in {
        "get_weather": "Weather of a city over the next days.",
        "find_hotels": "Hotels in a city with a free room.",
        "get_events": "Concerts and fairs in a city.",
    }.items()
]


def _sentences() -> list[str]:
    """Returns sentences of this project's pages, as a text of which tokenizers know most words."""
    pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("megatron/**/*.md")])
    text = " ".join(page.read_text() for page in pages)
    return [one.strip() for one in re.split(r"(?<=[.:])\s+", text) if 20 < len(one) < 160]


def write_records(num_records: int, with_tools: bool, seed: int = 1) -> list[dict[str, Any]]:
    """Returns chats of one to three questions of 1 or 2 sentences, and answers of 1 to 4. With
    tools each answer follows a call and its result.
    """
    draw, sentences = random.Random(seed), _sentences()

    def text(most: int) -> str:
        return " ".join(draw.choices(sentences, k=draw.randint(1, most)))

    records: list[dict[str, Any]] = []
    for _ in range(num_records):
        turns: list[dict[str, Any]] = []
        for _ in range(draw.randint(1, 3)):
            turns.append({"role": "user", "content": text(2)})
            if with_tools:
                function = {"name": "get_weather", "arguments": {"city": text(1), "days": 3}}
                calls = [{"type": "function", "function": function}]
                turns.append({"role": "assistant", "content": "", "tool_calls": calls})
                turns.append({"role": "tool", "content": json.dumps({"weather": text(1)})})
            turns.append({"role": "assistant", "content": text(4)})
        records.append({"messages": turns, **({"tools": _TOOLS} if with_tools else {})})
    return records


def _source_of(family: Family, templates: Path) -> str | None:
    if family.template is None or "{" in family.template:
        return family.template
    return (templates / f"{family.template}.jinja").read_text()


class Case(NamedTuple):
    """Two functions that encode a record, and the records."""

    forget: Callable[[], None]
    """Empties what ours remembers of texts, as each pass has the same."""

    theirs: Callable[[Mapping[str, Any]], Any]
    ours: Callable[[Mapping[str, Any]], Any]
    records: Sequence[Mapping[str, Any]]


def build(
    family: Family, with_tools: bool, train_turns: str, folders: argparse.Namespace, size: int
) -> Case:
    """Builds both sides of one case."""
    import transformers

    from megatron.sft.data.chat_encoder import ChatEncoder
    from megatron.sft.data.tokenizer import build_tokenizer
    from megatron.sft.options.chat_template import TemplateChoice

    folder, stack = folders.tokenizers / family.tokenizer, ExitStack()
    source = _source_of(family, folders.templates)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(folder)  # type: ignore[no-untyped-call]
    if family.added:
        theirs.add_special_tokens({"additional_special_tokens": list(family.added)})
        folder = Path(stack.enter_context(TemporaryDirectory()))
        theirs.save_pretrained(folder)
    file = None
    if source is not None:
        theirs.chat_template = source
        file = folders.tokenizers / f".template-{os.getpid()}.jinja"
        file.write_text(source)
    ours: Any = build_tokenizer(
        "HuggingFaceTokenizer",
        str(folder),
        template=TemplateChoice(file=None if file is None else str(file), today=_TODAY),
    )
    if file is not None:
        file.unlink()
    stack.close()  # the tokenizer is in memory
    turns: Any = train_turns
    if train_turns in ("default", "contexts"):
        turns = "served" if ours.contexts == "differ" else "all"
    encoder = ChatEncoder(ours, 1 << 20, "error", train_turns=turns)

    def apply(record: Mapping[str, Any]) -> Any:
        messages = record["messages"]
        ends = [len(messages)]
        if train_turns == "contexts":
            ends = [end for end, one in enumerate(messages, 1) if one["role"] == "assistant"]
        for end in ends:
            theirs.apply_chat_template(messages[:end], tools=record.get("tools"), tokenize=True)

    return Case(ours.forget_texts, apply, encoder.encode, write_records(size, with_tools))


def run_round(case: Case, passes: int) -> tuple[float, float]:
    """Returns the CPU of both, in milliseconds per record: the least of the passes for each record,
    as a machine that does other work, too, takes longer now and then.
    """
    least = [[float("inf")] * len(case.records) for _ in range(2)]
    for _ in range(passes):
        case.forget()
        for encode, times in zip((case.theirs, case.ours), least):
            for number, record in enumerate(case.records):
                started = time.process_time()
                encode(record)
                times[number] = min(times[number], time.process_time() - started)
    theirs, ours = (sum(times) / len(times) * 1e3 for times in least)
    return theirs, ours


def _cases() -> list[tuple[str, bool, str]]:
    cases = [(name, False, "all") for name in FAMILIES]
    cases += [(name, True, "all") for name, family in FAMILIES.items() if family.takes_tools]
    served = ("Qwen3", "GLM 4.5", "gpt-oss")
    cases += [(name, False, "default") for name in served]
    cases += [(name, True, "default") for name in served]
    return [*cases, *((name, tools, "contexts") for tools in (False, True) for name in served)]


def _range(values: Sequence[float], form: str) -> str:
    low, high = (format(value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def page(rounds: Sequence[Mapping[str, Sequence[float]]], arguments: argparse.Namespace) -> str:
    """Returns the page of results of all rounds."""
    rows = []
    for case in rounds[0]:
        name, tools, turns = case.split("|")
        theirs, ours = ([one[case][column] for one in rounds] for column in (0, 1))
        ratios = [mine / other for mine, other in zip(ours, theirs)]
        rows.append(
            [name, tools, turns, _range(theirs, ".2f"), _range(ours, ".2f"), _range(ratios, ".2f")]
        )
    head = ["template", "records", "turns", "theirs, ms", "ours, ms", "ours / theirs"]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
    head_line = (
        f"{date.today()}, commit {commit()}, {processor()}, transformers "
        f"{version('transformers')}, tokenizers {version('tokenizers')}."
    )
    command = (
        "python -m examples.benchmarks.chats --tokenizers .released-tokenizers "
        "--templates .../site-packages/trl/chat_templates"
    )
    notes = (
        f"CPU milliseconds per record, the least of {arguments.passes} passes for each of "
        f"{arguments.records} records, as a range over {len(rounds)} rounds. theirs: "
        "`apply_chat_template(messages, tools=tools, tokenize=True)`. ours: `ChatEncoder.encode`, "
        "with the record's checks, trained tokens, labels and loss mask.",
        "turns: `all` is one rendering of the chat, as theirs. `default` is what a run takes for a "
        "template that renders a turn again once more follow: each turn in the context that it is "
        "served in, several renderings where theirs has one. `contexts` is the same beside a call "
        "of theirs for each turn, up to its end.",
        "What ours remembers of texts is emptied before each pass: within one, records share a "
        "system prompt or tools, as those of a file do.",
    )
    fence = "```"
    parts = ["# CPU of encoding a chat", head_line, f"{fence}\n{command}\n{fence}", *notes, table]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all cases, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tokenizers", type=Path, required=True)
    parser.add_argument("--templates", type=Path, required=True)
    parser.add_argument("--records", type=int, default=20)
    parser.add_argument("--passes", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", nargs="+", help="cases, NAME|chats or calls|all, default or contexts"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)
    # Threads of `tokenizers` that look for work count as CPU of whatever runs then.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.disable()
    rounds: list[dict[str, tuple[float, float]]] = [{} for _ in range(arguments.rounds)]
    for name, with_tools, turns in _cases():
        key = f"{name}|{'calls' if with_tools else 'chats'}|{turns}"
        if arguments.only is None or key in arguments.only:
            case = build(FAMILIES[name], with_tools, turns, arguments, arguments.records)
            for times in rounds:
                times[key] = run_round(case, arguments.passes)
                print(key, times[key], file=sys.stderr)
    text = page(rounds, arguments)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
