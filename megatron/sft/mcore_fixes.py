"""mcore. Two faults of megatron-core 0.16.1 without Transformer Engine, on CUDA as much as on CPU, mended from
outside.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Mend what is broken; what a later megatron-core has mended is left alone. Idempotent."""
    _define_te_general_gemm()
    _load_fully_reshardable_adam()


def _define_te_general_gemm() -> None:
    """The router of experts asks whether `te_general_gemm` is None; the name exists only with Transformer Engine."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


def _load_fully_reshardable_adam() -> None:
    """torch's Adam keeps a `step` per parameter; `fully_reshardable` checkpoints leave it out, then look for it
    (KeyError).

    It was restored before, from the parameter groups, so the value that is there is the right one.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states
    if hasattr(original, "keeps_step"):
        return

    def keep_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        if not self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            group_index, group_order = self.model_param_group_index_map[model_param]
            main_param = self.optimizer.param_groups[group_index]["params"][group_order]
            state = self.optimizer.state[main_param]
            if "step" in state:
                tensors = {"step": state["step"], **tensors}
        original(self, model_param, tensors)

    keep_step.keeps_step = True  # type: ignore[attr-defined]
    DistributedOptimizer._set_main_param_and_optimizer_states = keep_step
