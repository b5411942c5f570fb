"""pure. Options of Megatron-LM's recipes that are not options here, so that a recipe either runs or
fails with the reason. There are three kinds:

    READ_AS     translated to our options
    ACCEPTED    dropped: they ask for the default, or have no effect here
    REFUSED     an error that says what to do instead

Any other unknown option is an error.

    --use-varlen-dataset --use-mcore-models --nccl-ub    ->    --sequence-packing
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from megatron.packing.flags import FlagError
from megatron.packing.user_files import read_json, read_text
from megatron.sft.arguments.megatron_flag_table import (
    ACCEPTED,
    PATTERNS,
    REFUSED,
    TOKENIZERS,
    Accepted,
)


class ReadAs(NamedTuple):
    """An option that is translated to others."""

    others: str
    """The others, for the log."""
    arguments: Callable[[list[str]], list[str]]
    """Function from its values to arguments of ours. It raises ValueError if they are wrong."""


def _data_args(values: list[str]) -> list[str]:
    return ["--data-path", *read_text(_one_file(values)).split()]


def _per_split_data_args(values: list[str]) -> list[str]:
    paths = _paths_by_split(values)
    flags = {"train": "--data-path", "valid": "--valid-data-path"}
    beyond = [split for split, parts in paths.items() if parts and split not in flags]
    if beyond:
        raise ValueError(
            f"has data for {', '.join(beyond)}; take it out, only train and valid are read"
        )
    return [
        word
        for split, flag in flags.items()
        if paths.get(split)
        for word in (flag, *map(str, paths[split]))
    ]


def _paths_by_split(values: list[str]) -> dict[str, Any]:
    paths: Any = read_json(_one_file(values))
    if not isinstance(paths, dict) or not all(
        isinstance(parts or [], list) for parts in paths.values()
    ):
        raise ValueError(
            'must be a file with JSON such as {"train": ["a.jsonl"], "valid": ["b.jsonl"]}'
        )
    return paths


def _one_file(values: list[str]) -> str:
    if len(values) != 1:
        raise ValueError(f"must be one file, but is {' '.join(values) or 'missing'}")
    return values[0]


READ_AS = {
    "--data-args-path": ReadAs("--data-path, with what stands in the file", _data_args),
    "--num-layers-in-first-pipeline-stage": ReadAs(
        "--decoder-first-pipeline-num-layers",
        lambda values: ["--decoder-first-pipeline-num-layers", *values],
    ),
    "--num-layers-in-last-pipeline-stage": ReadAs(
        "--decoder-last-pipeline-num-layers",
        lambda values: ["--decoder-last-pipeline-num-layers", *values],
    ),
    "--per-split-data-args-path": ReadAs(
        "--data-path and --valid-data-path, by the JSON file", _per_split_data_args
    ),
    "--recompute-activations": ReadAs(
        "--recompute-granularity selective",
        lambda values: ["--recompute-granularity", "selective", *values],
    ),
    "--train-data-path": ReadAs("--data-path", lambda values: ["--data-path", *values]),
    "--use-rotary-position-embeddings": ReadAs(
        "--position-embedding-type rope",
        lambda values: ["--position-embedding-type", "rope", *values],
    ),
    "--use-varlen-dataset": ReadAs(
        "--sequence-packing", lambda values: ["--sequence-packing", *values]
    ),
    "--varlen-mock-dataset-config-json": ReadAs(
        "--sft-mock-dataset-config-json", lambda values: ["--sft-mock-dataset-config-json", *values]
    ),
}


def _refusal_of_value(name: str, given: list[str], known: tuple[str, ...]) -> str:
    wanted = f"be {' or '.join(known)}" if known else "have no value"
    return f"{name} (must {wanted}, but is {' '.join(given)}; drop it)"


def without_megatron_flags(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with options of Megatron-LM translated or dropped.

    Raises FlagError with all refused options, and what to do instead of each. If there are also
    names of other trainers, refused options are kept, and `other_trainers.answers_to` lists all of
    them in one message.
    """
    kept: list[str] = []
    refused: list[str] = []
    names = {flag.split("=", 1)[0] for flag, _ in _by_flag(arguments)}
    is_of_others = any("_" in name for name in names)  # neither ours nor Megatron's have one
    for flag, values in _by_flag(arguments):
        name, *equals = flag.split("=", 1)
        given = [*equals, *values]
        if name in READ_AS:
            kept += _read_as(name, given, names)
            continue
        if name == "--tokenizer-type":
            kept += [name, *map(_tokenizer, given)]
            continue
        found = _found(name)
        if found is None or (is_of_others and isinstance(found, str)):
            kept += [flag, *values]
        elif isinstance(found, str):
            refused.append(f"{name} ({found})")
        elif found.values is not None and not set(given) <= set(found.values):
            refused.append(_refusal_of_value(name, given, found.values))
    if refused:
        raise FlagError(f"options of Megatron-LM, refused: {', '.join(dict.fromkeys(refused))}")
    return kept


def refusal_of(name: str) -> str | None:
    """Returns advice for an option of Megatron-LM that is always refused; else None."""
    found = _found(name)
    return found if isinstance(found, str) else None


def _found(name: str) -> Accepted | str | None:
    """Returns the entry of an option in the tables: advice if it is refused, None if it is unknown.

    A name takes precedence over a pattern. `--no-x` has the entry of `--x`, unless it has its own.
    """
    if name in ACCEPTED or name in REFUSED:
        return ACCEPTED.get(name) or REFUSED[name]
    without = "--" + name.removeprefix("--").removeprefix("no-")
    known = next((pattern for pattern in PATTERNS if _matches(without, pattern)), "")
    return ACCEPTED.get(known) or REFUSED.get(known)


def _matches(name: str, pattern: str) -> bool:
    """Returns whether a name matches a pattern with stars. `fnmatch` would compile 120 patterns, a
    tenth of a second at every start.
    """
    if "*" not in pattern:
        return name == pattern
    first, *middle, last = pattern.split("*")
    is_long_enough = len(name) >= len(first) + len(last)
    return (
        is_long_enough
        and name.startswith(first)
        and name.endswith(last)
        and all(part in name for part in middle)
    )


def _read_as(name: str, values: list[str], names: set[str]) -> list[str]:
    try:
        arguments = READ_AS[name].arguments(values)
    except ValueError as failure:
        raise FlagError(
            f"{name} {failure}" if len(values) != 1 else f"{name} {values[0]}: {failure}"
        ) from None
    # A value given under both names is ambiguous. A switch without a value is not.
    twice = names & set(arguments) if len(arguments) > 1 else set()
    if twice:
        raise FlagError(f"pass either {name} or {' '.join(sorted(twice))}, not both")
    return arguments


def _tokenizer(name: str) -> str:
    ours = TOKENIZERS.get(name, name)
    if ours is None:
        raise FlagError(
            f"--tokenizer-type {name} is not supported: pass --tokenizer-model with a HuggingFace "
            "folder"
        )
    return ours


def megatron_flag_notes(arguments: Sequence[str]) -> list[str]:
    """Returns a line for each kind of options that were translated or dropped."""
    names = [flag.split("=", 1)[0] for flag, _ in _by_flag(arguments)]
    kinds = {True: "as is the default", False: "without effect here"}
    read = [f"{name} as {READ_AS[name].others}" for name in dict.fromkeys(names) if name in READ_AS]
    lines = [f"options of Megatron-LM, read as ours: {'; '.join(read)}"] if read else []
    for is_default, text in kinds.items():
        found = [name for name in names if _is_accepted(name, is_default)]
        if found:
            lines.append(f"options of Megatron-LM, {text}: {' '.join(dict.fromkeys(found))}")
    return lines


def _is_accepted(name: str, is_default: bool) -> bool:
    found = _found(name)
    return isinstance(found, Accepted) and found.is_default == is_default


def _by_flag(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields each flag with its values. A word before the first flag counts as a flag.

    chats --lr 1 --sft    ->    ("chats", []), ("--lr", ["1"]), ("--sft", [])
    """
    flag: str | None = None
    values: list[str] = []
    for argument in arguments:
        if not argument.startswith("--") and flag is not None:
            values.append(argument)
            continue
        if flag is not None:
            yield flag, values
        flag, values = argument, []
    if flag is not None:
        yield flag, values
