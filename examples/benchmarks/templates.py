"""pure. Released chat templates beside the variants that TRL marks for training: the same text, and
what of it each trains.

    python -m examples.benchmarks.templates --folder .../site-packages/trl/chat_templates \
        --output examples/benchmarks/results/templates.md

The folder holds NAME.jinja, as released, and NAME_training.jinja, with {% generation %} marks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

from megatron.sft.data.records.content import Conversation
from megatron.sft.data.records.messages import Message
from megatron.sft.data.records.values import SampleError
from megatron.sft.data.templates.chat_template import ChatTemplate

_CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}, "id": "abcdefghi"}
_PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
_TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": _PARAMETERS}}
]
_QUESTION, _ANSWER = Message("user", "q1"), Message("assistant", "a1")
_THINKING = Message("assistant", "a1", fields={"reasoning_content": "t1"})
_CALLING = Message("assistant", "", fields={"tool_calls": [_CALL]})
_RESULT = Message("tool", "r1", fields={"tool_call_id": "abcdefghi", "name": "f"})
KINDS = {
    "one turn": [_QUESTION, _ANSWER],
    "system": [Message("system", "s"), _QUESTION, _ANSWER],
    "two turns": [_QUESTION, _ANSWER] * 2,
    "thoughts": [_QUESTION, _THINKING],
    "in two turns": [_QUESTION, _THINKING] * 2,
    "call": [_QUESTION, _CALLING, _RESULT, _ANSWER],
    "call with thoughts": [
        _QUESTION,
        _CALLING._replace(fields={**_CALLING.fields, "reasoning_content": "t0"}),
        _RESULT,
        _THINKING,
    ],
}
_SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}
_TODAY = date(2025, 6, 30)


class Trained(NamedTuple):
    """A rendering, and what of it is trained."""

    text: str
    parts: list[str]


def trained(source: str, messages: Sequence[Message]) -> Trained | None:
    """Returns None for a conversation that is refused."""
    tools = _TOOLS if any("tool_calls" in one.fields for one in messages) else None
    try:
        found = ChatTemplate(source, _SPECIAL, _TODAY).render(Conversation(list(messages), tools))
    except (SampleError, ValueError):
        return None
    return Trained(found.text, [found.text[start:end] for start, end, _ in found.spans])


def relation(ours: Trained | None, theirs: Trained | None) -> str:
    """Returns how what is trained of the released template relates to what the marks say.

    `=`: the same characters. `prompt`: the marks hold what generation starts from, or white space
    behind the end, too. `end`: and an end of earlier turns, or of the text behind the last, that
    generation does not stop at. `no`: both refuse it.
    """
    if ours is None or theirs is None:
        refused = {(True, True): "no", (True, False): "refused", (False, True): "ours alone"}
        return refused[ours is None, theirs is None]
    if ours.text != theirs.text:
        return "other text"
    if ours.parts == theirs.parts:
        return "="
    marks = [part for part in theirs.parts if part != _SPECIAL["eos_token"]]
    if len(ours.parts) != len(marks):
        return "other parts"
    pairs = list(zip(ours.parts, marks))
    is_behind = all(marked.rstrip().endswith(own.rstrip()) for own, marked in pairs)
    if is_behind and len(marks) == len(theirs.parts):
        return "prompt"
    return "end" if all(own in marked for own, marked in pairs) else "other parts"


def table(folder: Path) -> str:
    """Returns Markdown: a row for each template that has a marked variant."""
    lines = [f"| template | contexts | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 2) + "|"]
    for marked in sorted(folder.glob("*_training.jinja")):
        released = marked.with_name(marked.name.replace("_training", ""))
        source, variant = released.read_text(), marked.read_text()
        found = [relation(trained(source, one), trained(variant, one)) for one in KINDS.values()]
        try:
            contexts: str = ChatTemplate(source, _SPECIAL, _TODAY).contexts
        except ValueError:
            contexts = "no end"
        lines.append(f"| {released.stem} | {contexts} | {' | '.join(found)} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table, or writes a page with it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--trl", default="", help="version of TRL, for the page")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = table(options.folder)
    if options.output is None:
        print(found)
        return
    about = (relation.__doc__ or "").split("\n\n")[1]
    told = " ".join(about.split())
    options.output.write_text(
        f"# Chat templates beside TRL's marked ones\n\n{date.today()}, TRL {options.trl}.\n\n```\n"
        "python -m examples.benchmarks.templates --folder .../site-packages/trl/chat_templates\n"
        f"```\n\nTemplates are TRL's copies of released ones, rendered as they are; {told}\n"
        "`refused`: here, and not with the marks; `ours alone`: the other way round. contexts: "
        f"`differ` trains each turn as it is served, by default.\n\n{found}\n"
    )


if __name__ == "__main__":
    main()
