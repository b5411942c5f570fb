"""pure. Mechanisms of layers, each declared in one file as a `Part` (see `packing.layers`):
options, rules, parameters, costs, module. A part's file is pure and names its modules when they are
asked for; what needs torch stands beside it under its name.

    delta_net           gated delta net in place of self-attention
    global_attention    other heads in layers without a window
    latent_attention    latent attention in place of self-attention

All who build, save, count or refuse layers ask these; a new part is its file and a line here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron.packing.layers import Parameter, Part
from megatron.packing.model.parts import attention
from megatron.packing.model.parts.delta_net import DeltaNet
from megatron.packing.model.parts.global_attention import GlobalAttention
from megatron.packing.model.parts.latent_attention import LatentAttention
from megatron.packing.rules import check_rules

PARTS: tuple[type[Part], ...] = (DeltaNet, LatentAttention, GlobalAttention)
"""Every part; at most one is in a layer, in place of self-attention."""


def known_parts() -> tuple[type[Part], ...]:
    """Returns every part."""
    return PARTS


def part_in(options: Any, layer: int) -> type[Part] | None:
    """Returns the part of a layer, numbered over the whole model; None for self-attention.

    options: of a model, or megatron-core's config.
    """
    return next((part for part in PARTS if part.is_in(options, layer)), None)


def parts_in(options: Any) -> list[type[Part]]:
    """Returns the parts that any layer has."""
    layers = range(getattr(options, "num_layers", None) or 0)
    return [part for part in PARTS if any(part.is_in(options, layer) for layer in layers)]


def fewest_groups(options: Any) -> int:
    """Returns the groups of heads that the fewest of any layer's parameters cut by heads have."""
    groups = [part.of(options).num_groups for part in parts_in(options)]
    of_attention = options.num_query_groups or options.num_attention_heads
    return min([of_attention, *(one for one in groups if one is not None)])


def check_parts(options: Any, **known: Any) -> None:
    """Raises ValueError where a rule of a part that some layer has refuses the run.

    known: further facts by name (see `packing.rules`), such as layout=.
    """
    for part in parts_in(options):
        check_rules(part.rules, options=options, **known)


def check_options(options: Any) -> None:
    """Raises ValueError where options of parts contradict one another, also of a part that is in no
    layer.
    """
    for part in PARTS:
        check_rules(part.rules, options=options)


def parameter_at(path: str) -> Parameter | None:
    """Returns the parameter that megatron-core has at `path` below a layer, of attention or of a
    part in its place; None for others.
    """
    return _by_path(PARTS).get(path)


@cache
def _by_path(parts: tuple[type[Part], ...]) -> dict[str, Parameter]:
    every = (*attention.PARAMETERS, *(one for part in parts for one in part.parameters))
    return {parameter.path: parameter for parameter in every}
