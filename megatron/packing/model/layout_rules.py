"""pure. Rules of parallel layouts, by which a model can be divided or not. What a shape leaves open
is taken to fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.packing.model.parts import check_parts
from megatron.packing.model.shape import ModelShape
from megatron.packing.rules import Layout, Rule, check_rules

_OF_ENDS = {
    "first": "--decoder-first-pipeline-num-layers",
    "last": "--decoder-last-pipeline-num-layers",
}
_OF_COUNTS = {
    "counts_embedding": "--account-for-embedding-in-pipeline-split",
    "counts_loss": "--account-for-loss-in-pipeline-split",
}


def _given(layout: Layout, flags: Mapping[str, str]) -> list[str]:
    """Returns the flags of stages that were given, with their values."""
    values = {flag: getattr(layout.stages, name) for name, flag in flags.items()}
    return [flag if value is True else f"{flag} {value}" for flag, value in values.items() if value]


def _ends_and_counts(layout: Layout) -> dict[str, str]:
    ends, counts = _given(layout, _OF_ENDS), _given(layout, _OF_COUNTS)
    return {"end": ends[0], "count": counts[0]} if ends and counts else {}


def _unequal_stages(options: Any, layout: Layout) -> dict[str, str]:
    if options.num_layers is None or layout.stages.has_own_ends:
        return {}
    counted = layout.stages.num_counted(options.num_layers)
    if counted % (layout.pipeline * layout.virtual) == 0:
        return {}
    counts = " and ".join(_given(layout, _OF_COUNTS))
    is_virtual = counted % layout.pipeline == 0
    return {
        "also": f" and {counts}, {counted} together," if counts else "",
        "times": f" times {layout.flags['virtual']} {layout.virtual}" if is_virtual else "",
    }


def _impossible_stages(options: Any, layout: Layout) -> dict[str, str]:
    if options.num_layers is None:
        return {}
    try:
        layout.stages.of_parts(options.num_layers)
    except ValueError as failure:
        given = _given(layout, _OF_ENDS) or _given(layout, _OF_COUNTS)
        return {"given": " and ".join(given), "failure": str(failure)}
    return {}


def _groups_are_torn(options: Any, layout: Layout) -> object:
    # More ranks than groups may share them, if each group has equally many ranks.
    groups = options.num_query_groups or 1
    return layout.tensor % groups and groups % layout.tensor


def _torn_mlp(options: Any, layout: Layout) -> dict[str, int]:
    has_mlp = options.num_experts is None or 0 in options.moe_layer_freq
    is_known = options.hidden_size is not None
    width = options.resolved_ffn_hidden_size if is_known else options.ffn_hidden_size
    return {"width": width} if has_mlp and (width or 0) % layout.tensor else {}


def _unsummed_experts(options: Any, layout: Layout) -> dict[str, str]:
    if options.num_experts is None or layout.tensor == 1 or layout.experts > 1:
        return {}
    return {"also": "" if layout.sequence_parallel else " and --sequence-parallel"}


LAYOUT_RULES = (
    Rule(_ends_and_counts, "{end} and {count} exclude one another", "drop one"),
    Rule(
        when=_unequal_stages,
        why="{num_layers}{also} must be a multiple of {pipeline}{times}: stages are alike",
        way_out="change one, or pass --decoder-first-pipeline-num-layers or "
        "--decoder-last-pipeline-num-layers",
    ),
    Rule(_impossible_stages, "{given} with {num_layers} and {pipeline} {failure}", "change one"),
    *(
        Rule(
            when=lambda options, layout, name=name: (getattr(options, name) or 0) % layout.tensor,
            why=f"{{{name}}} must be a multiple of {{tensor}}",
            way_out="lower {tensor.flag}",
        )
        for name in ("num_attention_heads", "moe_shared_expert_intermediate_size")
    ),
    Rule(
        when=_groups_are_torn,
        why="{num_query_groups} must be a multiple of {tensor}",
        way_out="lower {tensor.flag}",
    ),
    Rule(
        when=_torn_mlp,
        why="{ffn_hidden_size.flag} {width}{origin} must be a multiple of {tensor}",
        way_out="lower {tensor.flag}",
    ),
    Rule(
        when=lambda options, layout: layout.experts > 1 and options.num_experts is None,
        why="{experts} needs a model of experts",
        way_out="pass {num_experts.flag}, or leave out {experts.flag}",
    ),
    Rule(
        when=_unsummed_experts,
        why="{num_experts.flag} with {tensor} needs {experts.flag} above 1{also}: megatron-core "
        "would not sum the gradients of whole experts over tensor-parallel ranks",
        way_out="pass it, or lower {tensor.flag}",
    ),
    Rule(
        when=lambda options, layout: (
            options.num_experts and layout.tensor > 1 and not layout.sequence_parallel
        ),
        why="{num_experts.flag} with {tensor} needs --sequence-parallel",
        way_out="pass it",
    ),
    Rule(
        when=lambda options, layout: (options.num_experts or 0) % layout.experts,
        why="{num_experts} must be a multiple of {experts}",
        way_out="lower {experts.flag}",
    ),
)
"""Rules of any model in any layout. Those of a part stand in its own file."""


def check_layout(options: ModelShape, layout: Layout, origin: str = "") -> None:
    """Raises ValueError where a model, or a part that some layer has, cannot be divided so.

    origin: where the shape is from but from flags, as in " (the default model's)".
    """
    check_rules(LAYOUT_RULES, options=options, layout=layout, origin=origin)
    check_parts(options, layout=layout)
