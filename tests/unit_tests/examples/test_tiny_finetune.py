"""The data of `make finetune`: what is held out is, and all of it is made again to the byte."""

import json
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_finetune.make_data import ANIMALS

ROOT = Path(__file__).parents[3]
FILES = (
    "texts.jsonl",
    "chats.jsonl",
    "held_out.jsonl",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
)


def make(folder: Path) -> Path:
    command = [sys.executable, "examples/tiny_finetune/make_data.py", "--output-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("data"))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def animals_in(sentence: str) -> list[str]:
    """Each of them once, in order."""
    return list(dict.fromkeys(word for word in re.findall(r"\w+", sentence) if word in ANIMALS))


def sentences_of(texts: Path) -> set[str]:
    return {f"{part}." for record in read(texts) for part in record["text"].rstrip(".").split(". ")}


def turns_of(chats: Path) -> set[tuple[str, str]]:
    """(question, answer) of each turn."""
    said = [[turn["content"] for turn in record["messages"]] for record in read(chats)]
    return {pair for chat in said for pair in zip(chat[::2], chat[1::2], strict=True)}


@pytest.mark.slow
def test_held_out_pairs_are_in_no_training_data(data: Path) -> None:
    """The model could have learned its answers by heart, and the example would show nothing."""
    texts = {frozenset(animals_in(sentence)) for sentence in sentences_of(data / "texts.jsonl")}
    chats = {frozenset(animals_in(question)) for question, _ in turns_of(data / "chats.jsonl")}
    held_out = {
        frozenset(animals_in(question)) for question, _ in turns_of(data / "held_out.jsonl")
    }
    assert len(held_out) > 50
    assert not held_out & texts
    assert held_out | texts == {frozenset(pair) for pair in combinations(ANIMALS, 2)}
    assert chats < texts
    assert len(chats) < len(texts) / 2


def test_what_is_said_is_true(data: Path) -> None:
    """One contradiction, and the order could not be learned."""
    pick: Any = {"lighter": min, "heavier": max}
    for sentence in sentences_of(data / "texts.jsonl"):
        kind = "heavier" if "heavier" in sentence else "lighter"
        animals = animals_in(sentence)
        chosen = pick[kind](animals, key=ANIMALS.index)
        choice = f"The {kind} of the {animals[0]} and the {animals[1]} is the {chosen}."
        assert sentence in (
            choice,
            f"The {chosen} is {kind} than the {next(a for a in animals if a != chosen)}.",
        )
    for question, answer in turns_of(data / "chats.jsonl") | turns_of(data / "held_out.jsonl"):
        kind = "heavier" if "heavier" in question else "lighter"
        assert answer == f"The {pick[kind](animals_in(question), key=ANIMALS.index)} is {kind}."


@pytest.mark.slow
def test_two_runs_write_identical_bytes(data: Path, tmp_path: Path) -> None:
    """Losses of two machines could not be compared."""
    again = make(tmp_path / "again")
    assert all((again / name).read_bytes() == (data / name).read_bytes() for name in FILES)


@pytest.mark.parametrize("name", ["Makefile", "README.md", "examples/tiny_finetune/README.md"])
def test_how_many_answers_are_right_is_a_range(name: str) -> None:
    """Whoever counts 76 where 71 are printed would look for a mistake, and there is none."""
    text = (ROOT / name).read_text()
    assert re.findall(r"\b(\d+) to (\d+) of 83\b", text) == [("71", "77")]
    single = re.findall(r"^ *(\d+) of 83 answers are right", text, re.MULTILINE)
    assert all(number == "0" or 71 <= int(number) <= 77 for number in single)
