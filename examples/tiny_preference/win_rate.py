"""pure. Asks two HuggingFace folders held-out questions, and counts which of them answers better.

python examples/tiny_preference/win_rate.py start preferred held_out.jsonl [--write PAGE]

A question is won by the folder whose answer alone is right; else it is a tie.
"""

import argparse
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny_finetune"))

from ask import answers


def main() -> None:
    """Reads the command line, prints the counts, writes the page."""
    parser = argparse.ArgumentParser(description="Compares the answers of two folders.")
    parser.add_argument("start", type=Path)
    parser.add_argument("preferred", type=Path)
    parser.add_argument("questions", type=Path, help="held_out.jsonl, as make_data.py writes it")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    lines = arguments.questions.read_text(encoding="utf-8").splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    wanted = [answer["content"] for _, answer in chats]
    rights = [
        [said == right for said, right in zip(answers(folder, [q for q, _ in chats]), wanted)]
        for folder in (arguments.start, arguments.preferred)
    ]
    before, after = map(sum, rights)
    wins = sum(b and not a for a, b in zip(*rights))
    losses = sum(a and not b for a, b in zip(*rights))
    text = (
        f"Right answers to {len(wanted)} held-out questions: {before} before, {after} after "
        f"training on pairs. It wins {wins} questions, loses {losses} and ties "
        f"{len(wanted) - wins - losses}: a win rate of {wins / max(wins + losses, 1):.0%} without "
        "ties."
    )
    print(text)
    if arguments.write is not None:
        arguments.write.write_text(page(text), encoding="utf-8")


def page(text: str) -> str:
    """Returns the page in Markdown."""
    return "\n".join(
        [
            "# A tiny model trained on pairs",
            "",
            f"`make preference` on {time.strftime('%Y-%m-%d')}, torch {version('torch')}, "
            f"megatron-core {version('megatron-core')}, float32 on CPU.",
            "",
            "A model of two layers learns from 1,255 chats how an answer looks, half of which are "
            "wrong. `--loss dpo --loss-type sigmoid sft` then trains it on pairs of a right and a "
            "wrong answer to the same questions. Held-out questions are about pairs of animals "
            "that neither compares.",
            "",
            text,
            "",
        ]
    )


if __name__ == "__main__":
    main()
