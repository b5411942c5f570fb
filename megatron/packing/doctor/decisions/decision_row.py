"""pure. A row of the decision table, and the properties that are examined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.packing.doctor.evidence import Evidence


@dataclass(frozen=True, kw_only=True)
class Row:
    """A fault, or something that is not one but looks like it."""

    name: str
    property: str
    """What is examined; see PROPERTIES."""
    applies: Callable[[Evidence], bool]
    text: Callable[[Evidence], str]
    mend: str = ""
    threads: tuple[str, ...] = ()
    """Where people met and mended the same."""
    is_fault: bool = True
    """False for what belongs to the model or the method: told, and no fault."""


PROPERTIES = {
    "repeat": "the same pack gives the same",
    "crossing": "sequences do not see one another",
    "causal": "no token sees a later one",
    "padding": "padding is not seen",
    "window": "attention windows are as wide as declared",
    "packed": "a sequence is in the pack what it is alone",
    "backward": "gradients do not cross",
    "labels": "tokens have their own labels",
    "weights": "the loss is one mean",
    "step": "a step is the sum of its sequences' own",
    "norm": "the gradients' norm counts each once",
}
"""What is examined -> how it is called in the report."""
