"""mcore. Rules for trees: trained as trees or as separate sequences, and the samples that a model
cannot be trained on.
"""

from __future__ import annotations

import warnings
from typing import Any

from megatron.packing.batch.columns import AXIS_POSITIONS, NUM_PATHS, PARENTS, PAYLOADS, Schema
from megatron.packing.batch.samples import Samples
from megatron.packing.batch.tree_shapes import ShapedSamples
from megatron.packing.step.transformer_engine import transformer_engine_installed


def why_paths_stay_apart(config: Any) -> str:
    """Returns why each path of a tree becomes a sequence, which is exact and saves nothing; ""
    where prefixes are computed once: where each layer is attention of ours.
    """
    for kind in getattr(config, "layer_kinds", None) or ():
        if kind.mixer is not None and kind.mixer.why_paths_apart:
            return kind.mixer.why_paths_apart
    if transformer_engine_installed():
        return "attention is transformer-engine's, which takes no list of keys"
    return ""


def warn_of_trees(samples: Samples, shaped_samples: ShapedSamples, paths_apart: str) -> None:
    """Warns of trees that are trained path by path, or in parts; Python shows each once.

    Args:
        samples: those that `shaped_samples` were shaped from.
        paths_apart: why each path becomes a sequence; "" where trees are trained as such.
    """
    if paths_apart and PARENTS in samples.columns:
        warnings.warn(
            "trees of sequences are trained path by path, shared prefixes each time: "
            f"{paths_apart}",
            stacklevel=2,
        )
    parts = shaped_samples.parts()
    if not paths_apart and parts is not None:
        warnings.warn(
            "some trees of sequences are trained in parts, each of which computes the prefix that "
            "it shares with others: they do not fit into a pack (--max-seqlen-per-dp-cp-rank), or "
            "their attention would gather too many keys",
            stacklevel=2,
        )


def reason_against(config: Any, schema: Schema, megatron_lm_calls: bool) -> str | None:
    """Returns why samples of this schema cannot be trained under `config`; None if they can."""
    if AXIS_POSITIONS in schema and getattr(config, "mtp_num_layers", None):
        return (
            "positions along axes cannot be trained with multi-token prediction, which moves "
            "positions within a pack; give one position per token, or leave out --mtp-num-layers"
        )
    if PAYLOADS in schema and (PARENTS in schema or megatron_lm_calls):
        return (
            "samples with payloads cannot be trained beside trees, nor through Megatron-LM's own "
            "calls; give each path as a sequence, and call as docs/howto/plugin.md says"
        )
    if not {PARENTS, NUM_PATHS} & set(schema):
        return None
    if getattr(config, "mtp_num_layers", None):
        return (
            "trees of sequences cannot be trained with multi-token prediction, as the last tokens "
            "of a node have several tokens further on; give each path as a sequence, or leave out "
            "--mtp-num-layers"
        )
    if megatron_lm_calls:
        return (
            "trees of sequences cannot be trained through Megatron-LM's own calls, which know no "
            "nodes; give each path as a sequence, or call as docs/howto/plugin.md says"
        )
    return None
