"""pure. Pairs of a right and a wrong answer, of the questions in chats.jsonl.

python examples/tiny_preference/make_pairs.py chats.jsonl pairs.jsonl [--start start.jsonl]

The wrong answer names the other animal of the question. No question is one of held_out.jsonl.
`--start` writes chats beside them that know the form of an answer and nothing else: half of the
answers, by a fixed seed, are wrong.
"""

import argparse
import json
import re
from pathlib import Path
from random import Random
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


def any_chat(pair: dict[str, Any], random: Random) -> dict[str, Any]:
    """A chat with one of a pair's answers, either of them as often as the other."""
    content = pair[random.choice(("chosen", "rejected"))]
    return {"messages": [*pair["prompt"], {"role": "assistant", "content": content}]}


def main() -> None:
    """Reads the command line, writes the pairs, prints one line."""
    parser = argparse.ArgumentParser(description="Makes pairs of answers to try --loss dpo.")
    parser.add_argument("chats", type=Path)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--start", type=Path)
    arguments = parser.parse_args()
    records = []
    for line in arguments.chats.read_text(encoding="utf-8").splitlines():
        turns = json.loads(line)["messages"]
        records += [pair(*two) for two in zip(turns[::2], turns[1::2])]
    unique = list({json.dumps(record): None for record in records})
    arguments.pairs.write_text("\n".join(unique) + "\n", encoding="utf-8")
    print(f"{arguments.pairs}: {len(unique):,} pairs")
    if arguments.start is not None:
        random = Random(0)
        chats = [any_chat(json.loads(line), random) for line in unique]
        arguments.start.write_text("\n".join(map(json.dumps, chats)) + "\n", encoding="utf-8")
        print(f"{arguments.start}: {len(chats):,} chats, about half of whose answers are wrong")


if __name__ == "__main__":
    main()
