"""mcore. Options that need a GPU, or a package that is not always there: refused before anything is
built.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch

from megatron.packing.flags import flag_of
from megatron.packing.model.get_batch import transformer_engine_installed
from megatron.sft.model import kernels
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.optimizer import ADAM_STATE

_OF_FUSED_ADAM = {
    "master_weight_dtype",
    "use_decoupled_grad",
    *(f"{name}_dtype" for name in ADAM_STATE),
}


def check_needs(config: SFTConfig, device: torch.device) -> None:
    """Raises ValueError for an option that needs what is not here, with the way out."""
    if config.optimizer.use_precision_aware_optimizer:
        _check_optimizer(config, device)
    if config.model.attention_dropout and not transformer_engine_installed():
        raise ValueError(
            f"--attention-dropout {config.model.attention_dropout} needs a GPU with Transformer "
            "Engine; pass 0, and for dropout after attention --hidden-dropout"
        )
    if config.kernels.cross_entropy_loss_fusion and device.type != "cuda":
        raise ValueError("--cross-entropy-loss-fusion needs a GPU; drop it")
    of_triton = ("cross_entropy_loss_fusion", "bias_swiglu_fusion")
    asked = [name for name in of_triton if getattr(config.kernels, name)]
    if asked and device.type == "cuda" and (fault := kernels.triton_fault()) is not None:
        raise ValueError(f"{flag_of(asked[0])}: {kernels.NEEDS_OF_TRITON} ({fault}); drop it")


def _check_optimizer(config: SFTConfig, device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError("--use-precision-aware-optimizer needs a GPU; drop it")
    if config.optimizer.optimizer_cpu_offload:
        return
    adam = _fused_adam()
    if adam is None or _OF_FUSED_ADAM - set(inspect.signature(adam).parameters):
        raise ValueError(
            "--use-precision-aware-optimizer needs Transformer Engine's FusedAdam; pip install "
            "'transformer-engine[pytorch]>=2.9', or pass --optimizer-cpu-offload"
        )


def _fused_adam() -> Any:
    """Returns Transformer Engine's Adam; None where it is not installed."""
    try:
        return import_module("transformer_engine.pytorch.optimizers").FusedAdam
    except ImportError:
        return None
