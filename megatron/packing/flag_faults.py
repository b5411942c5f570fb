"""pure. Faults of a command line, and the way out: unknown options, values that no option takes."""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
from collections.abc import Iterable, Sequence

from megatron.packing.flag_help import Command
from megatron.packing.quoting import shortened, shown

_MAX_IN_A_LINE = 3
"""Answers that still read well in one line."""
_MIN_LIKENESS = 0.75
"""Least share of a word that a suggestion must have in common with it, as difflib counts."""
_RECORDS = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class FlagError(ValueError):
    """A wrong option; the message is one line that says what to do."""

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(shortened(message))
        self.details = tuple(map(shortened, details))
        """Lines to print above the message, where one would be too long."""


def unknown_options(
    where: str, unknown: Sequence[str], known: Iterable[str], command: Command
) -> FlagError:
    """Returns the error about options that nobody declares: all of them if another trainer has one,
    else the first.

    where: the file that names them, with a colon; empty on a command line.
    """
    known, unknown = list(known), list(dict.fromkeys(unknown))
    flags = [name if name.startswith("--") else f"--{name}" for name in known]
    answers = {} if command.answers is None else command.answers(unknown, flags)
    if not answers:
        first = unknown[0]
        name = first if first.startswith("--") else first.replace("_", "-")
        return FlagError(
            f"{where}unknown option {shown(first) if where else first}{nearest(name, known)}"
        )
    if len(unknown) <= _MAX_IN_A_LINE:
        said = [f"{name} {answers[name]}" for name in unknown if name in answers]
        rest = [f"{name} is unknown" for name in unknown if name not in answers]
        return FlagError(f"{where}options of other trainers: {'; '.join(said + rest)}")
    width = max(map(len, unknown))
    lines = [
        f"  {name:{width}}  {_plain(answers[name]) if name in answers else 'unknown'}"
        for name in unknown
    ]
    message = f"{where}{len(unknown)} options are none of ours; above stands what to do about each"
    return FlagError(message, lines)


def _plain(answer: str) -> str:
    """`"is --lr here" -> "--lr"`, `"(drop it)" -> "drop it"`."""
    if answer.startswith("("):
        return answer[1:-1]
    return answer.removeprefix("is ").removesuffix(" here")


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the right one, or where to look.

    `"--pretrained" -> "; did you mean --pretrained-checkpoint?"`
    """
    # Without the dashes, which all flags share: they made --gpus look like --geglu.
    by_word = {one.lstrip("-"): one for one in names}
    word = name.lstrip("-").replace("_", "-")[:100]
    longer = sorted((one for one in by_word if _begins(one, word)), key=len)
    if longer and len(longer[0]) <= len(word) + 1:  # a letter was left out
        longer = longer[:1]
    # One wrong letter of two is half of a word.
    least = _MIN_LIKENESS if len(word) > 2 else 0.5
    close = longer[:_MAX_IN_A_LINE] or difflib.get_close_matches(word, by_word, 1, least)
    flags = " or ".join(by_word[one] for one in close)
    return f"; did you mean {flags}?" if close else "; see --help"


def _begins(name: str, word: str) -> bool:
    """Returns whether a name was cut off: behind one of its words, or behind four letters of it."""
    return name.startswith(word) and (len(word) > 3 or name.startswith(f"{word}-"))


def stray_value(
    value: str, arguments: Sequence[str], known: dict[str, argparse.Action]
) -> FlagError:
    """Returns the error about a word that belongs to no option.

    `["--bf16", "True"] -> "--bf16 takes no value; drop True"`
    """
    flag = next(
        (
            flag
            for flag, word in itertools.pairwise(arguments)
            if word == value and isinstance(known.get(flag), argparse.BooleanOptionalAction)
        ),
        None,
    )
    if flag is not None:
        if value.lower() in _TRUE:
            return FlagError(f"{flag} takes no value; drop {value}")
        if value.lower() in _FALSE:
            no = flag.replace("--", "--no-", 1)
            return FlagError(f"{flag} takes no value; drop both, or pass {no}")
    if value.endswith((".yaml", ".yml")) and "--config" in known:
        return FlagError(
            f"{shown(value)} belongs to no option; for a file of options pass --config"
        )
    for flag, is_meant in (
        ("--data-path", value.endswith(_RECORDS)),
        ("--pretrained-checkpoint", os.path.isfile(os.path.join(value, "config.json"))),
    ):
        if is_meant and flag in known:
            return FlagError(f"{shown(value)} belongs to no option; pass it as {flag} {value}")
    return FlagError(f"{shown(value)} belongs to no option; options begin with --, see --help")
