"""pure. Options of the optimizer's state: its precision, and where it is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from megatron.packing.rules import Rule, check_rules, in_range

ADAM_STATE = ("exp_avg", "exp_avg_sq")
"""Tensors that the optimizer keeps of each weight, beside its main parameter: Adam's moments, under
the names that torch, megatron-core and checkpoints have for them. Their precisions are options.
"""


@dataclass(frozen=True, kw_only=True)
class OptimizerStateConfig:
    """Optimizer state. Of it only the state on the host has run on CUDA so far."""

    use_precision_aware_optimizer: bool = False
    """Keep gradients, main parameters and Adam's state in the precisions below; needs Transformer
    Engine 2.9 on a GPU, and --use-distributed-optimizer.
    """
    main_grads_dtype: Literal["fp32", "bf16"] = field(
        default="fp32",
        metadata={"only_with": "use_precision_aware_optimizer", "default_holds": True},
    )
    """Precision in which gradients are summed over microbatches and ranks."""
    main_params_dtype: Literal["fp32", "fp16"] = field(
        default="fp32",
        metadata={"only_with": "use_precision_aware_optimizer", "default_holds": True},
    )
    """Precision of the main parameters."""
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = field(
        default="fp32",
        metadata={"only_with": "use_precision_aware_optimizer", "default_holds": True},
    )
    """Precision of the mean of gradients."""
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = field(
        default="fp32",
        metadata={"only_with": "use_precision_aware_optimizer", "default_holds": True},
    )
    """Precision of the mean of squared gradients."""
    optimizer_cpu_offload: bool = field(
        default=False, metadata={"only_with": "use_precision_aware_optimizer"}
    )
    """Keep the optimizer's state in the host's memory, and update the weights there; needs
    --use-precision-aware-optimizer.
    """
    optimizer_offload_fraction: float = field(
        default=1.0, metadata={"only_with": "optimizer_cpu_offload"}
    )
    """Share of the weights of which --optimizer-cpu-offload takes the state to the host."""
    overlap_cpu_optimizer_d2h_h2d: bool = field(
        default=False, metadata={"only_with": "optimizer_cpu_offload"}
    )
    """Copy gradients and weights of --optimizer-cpu-offload while other weights are updated."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *in_range(0, 1, "optimizer_offload_fraction"),
        Rule(
            when=lambda options: (
                options.optimizer_cpu_offload
                and {getattr(options, f"{name}_dtype") for name in ("main_params", *ADAM_STATE)}
                != {"fp32"}
            ),
            why="{optimizer_cpu_offload.flag} keeps {main_params_dtype.flag}, {exp_avg_dtype.flag} "
            "and {exp_avg_sq_dtype.flag} in fp32",
            way_out="drop them",
        ),
    )

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)
