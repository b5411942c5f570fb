"""pure. Options of the optimizer's state: its precision, and where it is kept."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from megatron.packing.flags import check_range, flag_of


@dataclass(frozen=True, kw_only=True)
class OptimizerStateConfig:
    """Optimizer state. Of it only the state on the host has run on CUDA so far."""

    use_precision_aware_optimizer: bool = False
    """Keep gradients, main parameters and Adam's state in the precisions below; needs Transformer
    Engine 2.9 on a GPU, and --use-distributed-optimizer.
    """
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients are summed over microbatches and ranks."""
    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    """Precision of the main parameters."""
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    """Precision of the mean of gradients."""
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    """Precision of the mean of squared gradients."""
    optimizer_cpu_offload: bool = False
    """Keep the optimizer's state in the host's memory, and update the weights there; needs
    --use-precision-aware-optimizer.
    """
    optimizer_offload_fraction: float = 1.0
    """Share of the weights of which --optimizer-cpu-offload takes the state to the host."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Copy gradients and weights of --optimizer-cpu-offload while other weights are updated."""

    def __post_init__(self) -> None:
        check_range(self, 0, 1, "optimizer_offload_fraction")
        for field in fields(self):
            needed = _NEEDED.get(field.name)
            if (
                needed is not None
                and getattr(self, field.name) != field.default
                and not getattr(self, needed)
            ):
                raise ValueError(f"{flag_of(field.name)} needs {flag_of(needed)}; pass it")
        kept = {self.main_params_dtype, self.exp_avg_dtype, self.exp_avg_sq_dtype}
        if self.optimizer_cpu_offload and kept != {"fp32"}:
            raise ValueError(
                "--optimizer-cpu-offload keeps --main-params-dtype, --exp-avg-dtype and "
                "--exp-avg-sq-dtype in fp32; drop them"
            )


_NEEDED = {
    "main_grads_dtype": "use_precision_aware_optimizer",
    "main_params_dtype": "use_precision_aware_optimizer",
    "exp_avg_dtype": "use_precision_aware_optimizer",
    "exp_avg_sq_dtype": "use_precision_aware_optimizer",
    "optimizer_cpu_offload": "use_precision_aware_optimizer",
    "optimizer_offload_fraction": "optimizer_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d": "optimizer_cpu_offload",
}
"""Option -> the one without which it has no effect."""
