"""tensor. Options that need a GPU, or a package that is not always there: refused before anything
is built.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megatron.packing.device import Device
from megatron.packing.flags import flag_of
from megatron.packing.rules import Rule, check_rules
from megatron.packing.step.transformer_engine import transformer_engine_installed
from megatron.sft.memory_estimate import gib
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.model import ModelConfig
from megatron.sft.options.optimizer import ADAM_STATE

NEEDS_OF_TRITON = "Triton needs a C compiler (gcc) and Python's headers (Python.h)"
_KERNELS_IN_TRITON = ("cross_entropy_loss_fusion", "bias_swiglu_fusion")
_OF_FUSED_ADAM = {
    "master_weight_dtype",
    "use_decoupled_grad",
    *(f"{name}_dtype" for name in ADAM_STATE),
}


def _adam_is_missing(run: SFTConfig, device: Device) -> bool:
    optimizer = run.optimizer
    is_asked = optimizer.use_precision_aware_optimizer and not optimizer.optimizer_cpu_offload
    if not is_asked or not device.is_gpu:
        return False
    try:
        adam = device.kernels("transformer_engine.pytorch.optimizers").FusedAdam
    except ImportError:
        return True
    return bool(_OF_FUSED_ADAM - set(inspect.signature(adam).parameters))


def _triton_fails(run: SFTConfig, device: Device) -> dict[str, str]:
    asked = [flag_of(name) for name in _KERNELS_IN_TRITON if getattr(run.kernels, name)]
    fault = device.triton_fault if asked and device.is_gpu else None
    return {} if fault is None else {"asked": asked[0], "fault": fault}


def _host_is_short(run: SFTConfig) -> dict[str, str]:
    """Returns what layers keep on a node's host, and what it has, in GiB; {} where that is enough,
    or no launcher says how many ranks share a host.
    """
    if not run.activations.keeps_inputs_on_host or "LOCAL_WORLD_SIZE" not in os.environ:
        return {}
    parallel, per_run = run.parallel, run.model.recompute_num_layers or 1
    tokens = (
        run.capacity_per_rank
        if run.packing.sequence_packing
        else (
            run.training.micro_batch_size * run.model.seq_length // parallel.context_parallel_size
        )
    )
    # The first stage has most microbatches in flight.
    passes = parallel.pipeline_model_parallel_size * (run.num_virtual_stages or 1)
    num_layers, item = max(run.layers_of_parts), 2 if run.training.bf16 else 4
    model, size = run.model, parallel.tensor_model_parallel_size
    of_rank = tokens // size if parallel.sequence_parallel else tokens
    needed = (num_layers // per_run - 1) * of_rank * item * model.hidden_size
    if run.activations.keeps_attention_on_host:  # with a float32 number for each head
        of_all = sum(item * width + 4 * model.num_attention_heads for width in _widths(model))
        needed += num_layers * tokens * of_all // (model.num_layers * size)
    needed *= passes * int(os.environ["LOCAL_WORLD_SIZE"])
    available = host_available()
    if available is None or needed <= available:
        return {}
    return {"needed": gib(needed), "available": gib(available)}


def _widths(model: ModelConfig) -> Iterator[int]:
    """Yields the channels of attention's output in each layer that has attention."""
    for kind in model.layer_kinds():
        if kind.mixer is None:
            yield kind.num_attention_heads * kind.kv_channels
        elif kind.mixer.key_value_size():
            yield kind.mixer.sizes()["query"]


def host_available() -> int | None:
    """Returns bytes of the host's memory that are free; None where the system does not say."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


DEVICE_RULES = (
    Rule(
        when=_host_is_short,
        why="--fine-grained-activation-offloading keeps up to {needed} GiB of layers on this host, "
        "which has {available} GiB free",
        way_out="drop it, or take more nodes or --context-parallel-size",
    ),
    Rule(
        when=lambda run, device: run.optimizer.use_precision_aware_optimizer and not device.is_gpu,
        why="--use-precision-aware-optimizer needs a GPU",
        way_out="drop it",
    ),
    Rule(
        when=_adam_is_missing,
        why="--use-precision-aware-optimizer needs Transformer Engine's FusedAdam",
        way_out="pip install 'transformer-engine[pytorch]>=2.9', or pass --optimizer-cpu-offload",
    ),
    Rule(
        when=lambda run, transformer_engine: (
            {"dropout": run.model.attention_dropout}
            if run.model.attention_dropout and not transformer_engine
            else None
        ),
        why="--attention-dropout {dropout} needs a GPU with Transformer Engine",
        way_out="pass 0, and for dropout after attention --hidden-dropout",
    ),
    Rule(
        when=lambda run, device: run.kernels.cross_entropy_loss_fusion and not device.is_gpu,
        why="--cross-entropy-loss-fusion needs a GPU",
        way_out="drop it",
    ),
    Rule(when=_triton_fails, why=f"{{asked}}: {NEEDS_OF_TRITON} ({{fault}})", way_out="drop it"),
)
"""Of a `run` on a `device`; `transformer_engine` says whether the package computes attention."""


def check_needs(config: SFTConfig, device: Device) -> None:
    """Raises ValueError for an option that needs what is not here, with the way out."""
    here = transformer_engine_installed()
    check_rules(DEVICE_RULES, run=config, device=device, transformer_engine=here)
