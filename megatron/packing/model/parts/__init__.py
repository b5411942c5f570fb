"""pure. Mechanisms of layers, each declared in one file as a `Part` (see `packing.layers`):
options, rules, parameters, costs, module. A part's file is pure and names its modules when they are
asked for; what needs torch stands beside it under its name.

    delta_net           gated delta net in place of self-attention

All who build, save, count or refuse layers ask these; a new part is its file and a line here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.packing.layers import Parameter, Part
from megatron.packing.model.parts.delta_net import DeltaNet
from megatron.packing.rules import check_rules

PARTS: tuple[type[Part], ...] = (DeltaNet,)
"""Every part; at most one is in a layer, in place of self-attention."""


def part_in(options: Any, layer: int) -> type[Part] | None:
    """Returns the part of a layer, numbered over the whole model; None for self-attention.

    options: of a model, or megatron-core's config.
    """
    return next((part for part in PARTS if part.is_in(options, layer)), None)


def parts_in(options: Any) -> list[type[Part]]:
    """Returns the parts that any layer has."""
    layers = range(options.num_layers or 0)
    return [part for part in PARTS if any(part.is_in(options, layer) for layer in layers)]


def check_parts(options: Any, **known: Any) -> None:
    """Raises ValueError where a rule of a part that some layer has refuses the run.

    known: further facts by name (see `packing.rules`), such as layout=.
    """
    for part in parts_in(options):
        check_rules(part.rules, options=options, **known)


def parameters() -> Iterator[Parameter]:
    """Yields the parameters of every part."""
    return (parameter for part in PARTS for parameter in part.parameters)
