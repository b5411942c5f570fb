"""pure. Pairs of a right and a wrong answer, of the questions in chats.jsonl.

python examples/tiny_finetune/make_pairs.py chats.jsonl pairs.jsonl

The wrong answer names the other animal of the question. No question is one of held_out.jsonl.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

_QUESTION = re.compile(r"Which is \w+, the (\w+) or the (\w+)\?")


def pair(question: dict[str, str], answer: dict[str, str]) -> dict[str, Any]:
    """The record of a question with its right answer."""
    match = _QUESTION.fullmatch(question["content"])
    assert match is not None, question
    right = answer["content"].split()[1]
    (wrong,) = {*match.groups()} - {right}
    rejected = answer["content"].replace(f" {right} ", f" {wrong} ", 1)
    return {"prompt": [question], "chosen": answer["content"], "rejected": rejected}


def main() -> None:
    """Reads the command line, writes the pairs, prints one line."""
    parser = argparse.ArgumentParser(description="Makes pairs of answers to try --loss dpo.")
    parser.add_argument("chats", type=Path)
    parser.add_argument("pairs", type=Path)
    arguments = parser.parse_args()
    records = []
    for line in arguments.chats.read_text(encoding="utf-8").splitlines():
        turns = json.loads(line)["messages"]
        records += [pair(*two) for two in zip(turns[::2], turns[1::2])]
    unique = list({json.dumps(record): None for record in records})
    arguments.pairs.write_text("\n".join(unique) + "\n", encoding="utf-8")
    print(f"{arguments.pairs}: {len(unique):,} pairs")


if __name__ == "__main__":
    main()
