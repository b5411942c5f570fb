"""pure. What a pack of trees keeps beside what one of sequences does. Described: packs are traced
as sequences.

Attention of a tree's node takes the keys and values of its whole path
(`packing.model.attention.tree_keys`), copied for each node: of its own tokens, and of those that it
continues. Under context parallel each rank does so for two pieces of a node, and copies those of
sequences, too.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron.packing.layers import LayerKind
from megatron.packing.model.parts import parts_in
from megatron.sft.fit.stages import Stage, layers_of
from megatron.sft.options.config import SFTConfig


class TreeBytes(NamedTuple):
    """Bytes of the stage that keeps most."""

    of_own: int
    """Keys and values of a pack's own tokens."""
    of_continued: int
    """Those of 1,000 tokens that a branch continues."""


def tree_bytes(config: SFTConfig, stages: list[Stage]) -> TreeBytes | None:
    """Returns them; None where no sample is a tree, or may be one."""
    data, model, parallel = config.data, config.model, config.parallel
    has_none = data.mock_data or data.train_turns in ("all", "last")
    has_none &= not config.preference.is_on  # pairs are trees
    has_none |= any(part.why_paths_apart for part in parts_in(model))  # each is a sequence
    if has_none or not config.packing.sequence_packing or model.mtp_num_layers is not None:
        return None
    per_gather, num_ranks = parallel.query_groups_per_gather, parallel.tensor_model_parallel_size
    row = max(_row(kind, num_ranks, per_gather) for kind in model.layer_kinds())
    row *= 2 if config.training.bf16 else 4
    kept = max(_num_kept(config, stage) for stage in stages)
    pieces = 1 if parallel.context_parallel_size == 1 else 2
    own = config.capacity_per_rank if parallel.context_parallel_size == 1 else 0
    return TreeBytes(row * kept * own, row * kept * pieces * 1000)


def _row(kind: LayerKind, num_ranks: int, per_gather: int | None) -> int:
    """Returns the channels of a token's keys and values on one of so many ranks, of all groups or
    of those of a step.
    """
    groups, size = kind.num_query_groups, 2 * kind.num_query_groups * kind.kv_channels
    if kind.mixer is not None:  # without groups each head has keys of its own
        groups = kind.mixer.num_groups or kind.num_attention_heads
        size = kind.mixer.key_value_size()
    here = max(groups // num_ranks, 1)
    return size // groups * min(here, per_gather or here)


def _num_kept(config: SFTConfig, stage: Stage) -> int:
    """Layers whose keys are kept until the backward pass, times microbatches in flight."""
    model = config.model
    if config.parallel.query_groups_per_gather is not None:
        return 1  # of the step that is computed
    again = model.recompute_granularity == "selective" and "core_attn" in (
        model.recompute_modules or ("core_attn",)
    )
    if again or model.recompute_granularity == "full":
        return 1  # of the layer that is computed again
    return stage.in_flight * sum(len(part) for part in layers_of(config, stage))
