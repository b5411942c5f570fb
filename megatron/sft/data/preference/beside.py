"""pure. Columns beside the answers of a pair that show that they are misread: copies of the prompt
that hold something else, and columns without a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.sft.data.records.columns import TURNS
from megatron.sft.data.records.values import SampleError


def said_empty(names: set[str]) -> str:
    """Returns words about columns of a record that are null or empty lists: `"chosen is empty: "`;
    "" for none.
    """
    verb = "is" if len(names) == 1 else "are"
    return f"{' and '.join(sorted(names))} {verb} empty: " if names else ""


def check_repeated(name: str, value: Any, within: Sequence[Any]) -> None:
    """Raises SampleError if a column that repeats what chosen and rejected have holds something
    else, which would be lost.
    """
    texts = [text.strip() for text in _texts(value)]
    there = " ".join(text for one in within for text in _texts(one))
    if not all(text in there for text in texts):
        what = f"{name} that chosen and rejected do not have"
        if name not in TURNS:
            what = f"a {name} that chosen and rejected do not begin with"
        raise SampleError(
            f"has {what}; give the answers alone in chosen and rejected, or leave {name} out with "
            f"--data-columns none={name}"
        )


def _texts(value: Any) -> list[str]:
    """Returns the texts of a prompt or of turns, by whatever key, without roles."""
    if isinstance(value, Mapping):
        named = [str(value[key]) for key in ("content", "value") if key in value]
        return named or [text for text in value.values() if isinstance(text, str)]
    if isinstance(value, list):
        return [text for one in value for text in _texts(one)]
    return [] if value is None else [str(value)]
