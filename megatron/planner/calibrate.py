"""mcore. Measures the time of a model's packs on this device, and fits the pack cost in seconds to
it:

    megatron-sft calibrate --pretrained-checkpoint Qwen3-8B/ --output pack_cost.json
    torchrun ... -m megatron.sft --config run.yaml --pack-cost pack_cost.json

One process, the whole width of the model, forward and backward passes: of GPTModel with one layer
(embedding, output layer and loss besides) and of one layer alone, which counts for all layers but
one. Packs of one long sequence and of several short ones, at several total lengths, determine
linear, quadratic and fixed cost. Each time is the median of several, taken in turns, so that what
else the machine does touches all packs alike. Gradients are added up as in training, but in the
parameters' own precision. The optimizer's step and communication between ranks are not in it.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packing.batch.layout import Alignment, PackLayout
from megatron.packing.batch.microbatches import layout_microbatches
from megatron.packing.device import Device
from megatron.packing.flag_help import Command
from megatron.packing.flags import flag_of, parse_flags
from megatron.packing.layers import options_of_each_layer
from megatron.packing.model.architecture import architecture
from megatron.packing.model.get_batch import packed_seq_params
from megatron.packing.model.grouped_experts import group_experts
from megatron.packing.model.layer_spec import packed_block_spec, packed_mtp_block_spec
from megatron.packing.model.loss.head import skip_masked_tokens
from megatron.packing.model.options import Architecture
from megatron.packing.rules import Rule, at_least, check_rules
from megatron.packing.scheduling.fitted_cost import Point, fit_pack_cost, write_fitted_cost
from megatron.packing.step.settings import model_of
from megatron.packing.versions import UNKNOWN, package_version

_WARM_UPS = 2
_SEQUENCES_PER_PACK = (1, 4, 16)
_HALVINGS = 6
_SHORTEST = 8

Pass = Callable[[], None]


def _layers_differ(options: Any) -> dict[str, str]:
    flags = " ".join(map(flag_of, options_of_each_layer(options)))
    return {"flags": flags} if len(set(options.layer_kinds())) > 1 else {}


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(Architecture):
    """Model, as in the training run, and the packs to measure."""

    pretrained_checkpoint: str | None = None
    """Folder of a HuggingFace model: its config.json gives the model's options."""
    vocab_size: int
    """Vocabulary size."""
    seq_length: int
    """Tokens of the longest sequence."""
    max_seqlen_per_dp_cp_rank: int | None = None
    """Tokens of the largest pack to measure (default: --seq-length)."""
    repeats: int = 9
    """Measurements of each pack."""
    output: str = "pack_cost.json"
    """File to write."""
    bf16: bool | None = None
    """Compute in bfloat16 (default: as --config, else on GPUs)."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *at_least(1, "vocab_size", "seq_length", "max_seqlen_per_dp_cp_rank", "repeats"),
        Rule(
            when=lambda world_size: world_size > 1,
            why="calibrate measures the whole model in one process",
            way_out="start it with python -m, without torchrun: training divides by its tensor and "
            "context parallel sizes",
        ),
        Rule(
            when=_layers_differ,
            why="{flags} must be alike for all layers, as one stands for all",
            way_out="leave --pack-cost out",
        ),
        Rule(
            when=lambda options, device: (
                not device.is_gpu
                and (options.num_experts or options.recompute_granularity) is not None
            ),
            why="experts and recomputation are measured on a GPU only",
            way_out="leave --pack-cost out on a CPU",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        path = Path(self.output)  # needs the folder
        if path.is_dir() or not os.access(
            path if path.exists() else path.resolve().parent, os.W_OK
        ):
            raise ValueError(
                f"--output {path} must be a file that can be written to; give another place"
            )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, as training pads them."""
        unit = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // unit) * unit


COMMON = {
    "Model": ("config", "pretrained_checkpoint", "vocab_size", "seq_length"),
    "Measurement": ("max_seqlen_per_dp_cp_rank", "repeats", "bf16", "output"),
}
"""Options that --help shows."""
Imply = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def parse_arguments(
    arguments: Sequence[str], program: str = "megatron-sft calibrate", imply: Imply | None = None
) -> CalibrateOptions:
    """Returns the options; those of the model may also stand in the YAML of a training run, whose
    others are passed over. Raises FlagError for anything wrong in them.

    imply: see `parse_flags`.
    """
    command = Command(
        program=program,
        about="Measure the model on this device and write what a pack costs, for --pack-cost.",
        usage="--pretrained-checkpoint FOLDER | --config run.yaml [--output pack_cost.json]",
        common=COMMON,
    )
    (options,) = parse_flags(
        (CalibrateOptions,), arguments, command, passes_over_unknown=True, imply=imply
    )
    return options


def packs_to_measure(largest: int) -> list[tuple[int, ...]]:
    """Returns the lengths in each pack: `largest` tokens and down by halves, in one sequence and in
    several.

        256    ->    (256,), (64, 64, 64, 64), (16,) * 16, (128,), (32, 32, 32, 32), ...
    """
    packs = dict.fromkeys(
        (total // num_sequences,) * num_sequences
        for total in (largest >> halving for halving in range(_HALVINGS))
        for num_sequences in _SEQUENCES_PER_PACK
        if total // num_sequences >= _SHORTEST
    )
    if len(packs) < 2 * len(_SEQUENCES_PER_PACK):
        raise ValueError(
            f"packs must hold at least 256 tokens to be measured, but hold {largest}; raise "
            "--seq-length"
        )
    return list(packs)


def transformer_config(
    options: CalibrateOptions, num_layers: int, device: Device
) -> TransformerConfig:
    """Returns megatron-core's config of the model as training builds it, on one rank."""
    is_bf16 = device.is_gpu if options.bf16 is None else options.bf16
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    described = {
        **architecture(options),
        "num_layers": num_layers,
        "bf16": is_bf16,
        "bias_activation_fusion": _takes("bias_swiglu_fusion", options, device),
        "moe_grouped_gemm": is_bf16 and _takes("moe_grouped_gemm", options, device),
    }
    return TransformerConfig(
        **described,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        moe_router_load_balancing_type="none",
        params_dtype=dtype,
        use_cpu_initialization=not device.is_gpu,
        variable_seq_lengths=True,
    )


def _takes(kernel: str, options: CalibrateOptions, device: Device) -> bool:
    """Returns whether training on `device` takes that fused kernel by itself."""
    runs = kernel == "moe_grouped_gemm" or device.triton_fault is None
    return device.is_gpu and runs and kernel not in options.refused_kernels()


def measure(options: CalibrateOptions, device: Device) -> list[Point]:
    """Measures the time of each pack through the whole model. Groups exist (see `one_process`)."""
    packs = [*packs_to_measure(options.max_seqlen_per_dp_cp_rank or options.seq_length), (1,)]
    config = transformer_config(options, 1, device)
    spec = packed_block_spec(config, options=options)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=packed_mtp_block_spec(config, spec),
        vocab_size=options.padded_vocab_size,
        max_sequence_length=max(map(max, packs)),
        share_embeddings_and_output_weights=True,
        position_embedding_type=options.position_embedding_type,
    ).to(device.place)
    layer = TransformerBlock(config=config, spec=spec, post_layer_norm=False).to(device.place)
    if config.moe_grouped_gemm:
        group_experts(model)
        group_experts(layer)
    skip_masked_tokens(model, is_fused=_takes("cross_entropy_loss_fusion", options, device))
    passes = [_passes(model, layer, lengths, device.place) for lengths in packs]
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in passes]
    for repeat in range(_WARM_UPS + options.repeats):
        for (whole, alone), (whole_times, alone_times) in zip(passes, times):
            seconds = _seconds(whole, device), _seconds(alone, device)
            if repeat >= _WARM_UPS:
                whole_times.append(seconds[0])
                alone_times.append(seconds[1])
    return [
        Point(
            num_sequences=len(lengths),
            sequence_length=lengths[0],
            seconds=statistics.median(whole) + (options.num_layers - 1) * statistics.median(alone),
        )
        for lengths, (whole, alone) in zip(packs, times)
    ]


def _passes(
    model: GPTModel, layer: TransformerBlock, lengths: Sequence[int], device: torch.device
) -> tuple[Pass, Pass]:
    """Returns forward and backward of one pack: through the model of one layer, and through one
    layer alone.
    """
    layout = PackLayout.of(lengths, Alignment())
    microbatch = layout_microbatches([layout])[0]
    # One for all layers: the first of them stores there what the others need as well.
    params = packed_seq_params(microbatch, device)
    tokens = torch.randint(model.vocab_size, (1, layout.num_tokens), device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    mask = torch.ones(1, layout.num_tokens, device=device)
    hidden = torch.randn(
        layout.num_tokens,
        1,
        model.config.hidden_size,
        device=device,
        dtype=model.config.params_dtype,
    )
    rotary = None
    if model.position_embedding_type == "rope":
        rotary = model.rotary_pos_emb(layout.max_seqlen, packed_seq=True)

    def whole() -> None:
        fresh = packed_seq_params(microbatch, device)
        losses = model(
            tokens, positions, None, labels=tokens, packed_seq_params=fresh, loss_mask=mask
        )
        (losses.float() * mask).sum().backward()

    def alone() -> None:
        inputs = hidden.detach().requires_grad_()
        outputs = layer(
            hidden_states=inputs,
            attention_mask=None,
            rotary_pos_emb=rotary,
            packed_seq_params=params,
        )
        outputs.backward(hidden)

    return whole, alone


def _seconds(run: Pass, device: Device) -> float:
    if not device.is_gpu:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started.record()
    run()
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended) / 1000


@contextmanager
def one_process(device: Device) -> Iterator[None]:
    """Makes groups of one rank. Without CUDA, dense layers receive the CPU as current device."""
    dist.init_process_group(
        "nccl" if device.is_gpu else "gloo", rank=0, world_size=1, store=dist.HashStore()
    )
    parallel_state.initialize_model_parallel()
    try:
        if device.is_gpu:
            tensor_parallel.model_parallel_cuda_manual_seed(1234)
            yield
        else:
            with mock.patch.object(torch.cuda, "current_device", return_value=device.place):
                yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def circumstances(device: Device) -> dict[str, Any]:
    """Returns device, versions and date, for the file."""
    packages = ("torch", "megatron-core", "transformer-engine")
    versions = {name: package_version(name) for name in packages}
    versions = {name: number for name, number in versions.items() if number != UNKNOWN}
    cpu = f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "device": device.name if device.is_gpu else cpu,
        "versions": {"python": platform.python_version(), **versions},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def calibrate(options: CalibrateOptions, device: Device) -> None:
    """Measures, fits, writes `options.output` and prints the fit.

    Raises ValueError for a model or device that cannot be measured.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    check_rules(options.rules, options=options, world_size=world_size, device=device)
    with one_process(device):
        *points, dummy = measure(options, device)
    fit = fit_pack_cost(points, dummy)
    model = model_of(
        transformer_config(options, options.num_layers, device), options.padded_vocab_size
    )
    write_fitted_cost(Path(options.output), fit, points, model, circumstances(device))
    print("sequences  tokens each   measured     fitted  (forward and backward, all layers)")
    for point in points:
        num_tokens = point.num_sequences * point.sequence_length
        fitted = fit.cost.of_batch(num_tokens, num_tokens * point.sequence_length) + fit.cost.fixed
        print(
            f"{point.num_sequences:>9}  {point.sequence_length:>11}  {point.seconds * 1e3:>8.2f} ms"
            f"  {fitted * 1e3:>6.2f} ms"
        )
    print(
        f"a pack takes {fit.cost.linear:.3g} s * L + {fit.cost.quadratic:.3g} s * L^2 + "
        f"{fit.cost.fixed:.3g} s"
    )
    print(
        f"relative error {fit.mean_error:.1%} mean, {fit.worst_error:.1%} worst; written to "
        f"{options.output}"
    )


def calibrate_here(options: CalibrateOptions) -> None:
    """Measures on this machine's GPU, else on its CPU; see `calibrate`."""
    try:
        calibrate(options, Device.here())
    except torch.OutOfMemoryError as failure:
        raise ValueError(str(failure)) from None
