"""mcore. Where trees are trained as trees, where as separate sequences, and what samples a model
cannot be trained on.
"""

from __future__ import annotations

from typing import Any

from megatron.packing.batch.columns import AXIS_POSITIONS, NUM_PATHS, PARENTS, Form
from megatron.packing.step.transformer_engine import transformer_engine_installed


def shares_prefixes(config: Any) -> bool:
    """Returns whether prefixes are computed once: where each layer is attention of ours.

    Transformer Engine's attention takes no list of keys, and a recurrent layer would have to begin
    a node with its parent's state. There each path becomes a sequence, exact and without savings.
    """
    kinds = getattr(config, "layer_kinds", None) or ()
    is_recurrent = any(kind.mixer != "attention" for kind in kinds)
    return not (is_recurrent or transformer_engine_installed())


def reason_against(config: Any, form: Form, megatron_lm_calls: bool) -> str | None:
    """Returns why samples of this form cannot be trained under `config`; None where they can."""
    if AXIS_POSITIONS in form and getattr(config, "mtp_num_layers", None):
        return (
            "positions along axes cannot be trained with multi-token prediction, which moves "
            "positions within a pack; give one position per token, or leave out --mtp-num-layers"
        )
    if not {PARENTS, NUM_PATHS} & set(form):
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
