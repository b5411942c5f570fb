"""mcore. One case of throughput.py in this process; what it measured goes to a file."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron.packing.device import Device
from megatron.packing.model import architecture, get_batch, layer_spec
from megatron.packing.model.attention import blocks as attention_blocks
from megatron.packing.model.attention import core_attention as attention
from megatron.packing.model.attention import kernels as attention_kernels
from megatron.packing.model.get_batch import transformer_engine_installed
from megatron.sft.arguments.parse import parse_config
from megatron.sft.data.datasets import build_datasets
from megatron.sft.data.stream import Share
from megatron.sft.distributed import process_groups
from megatron.sft.model.build import build_transformer_config, padded_vocab_size
from megatron.sft.model.checkpoints.content import Progress, Wanted, load_checkpoint
from megatron.sft.model.checkpoints.folder import checkpoint_path
from megatron.sft.model.checkpoints.save import CheckpointSave
from megatron.sft.model.huggingface.config import config_of
from megatron.sft.options.config import SFTConfig
from megatron.sft.training import saved_run
from megatron.sft.training.step_batches import StepBatches
from megatron.sft.training.stop import StopSignals
from megatron.sft.training.train import Trainer

WARM_UPS, PROFILED = 2, 2


def main() -> None:
    """Run what the command line says."""
    asked = json.loads(sys.argv[1])
    case, folder = SimpleNamespace(**asked["case"]), Path(asked["folder"])
    if case.way == "transformers":
        import_module("transformers.models.auto.modeling_auto")
    sys.stdin.readline()  # until the case before is over
    num_steps = WARM_UPS + case.num_steps + PROFILED * case.is_profiled
    config = parse_config(
        [*asked["flags"].split(), "--train-iters", str(num_steps), "--run-dir", str(folder)], 1
    )
    with attention_by(case.kernel) as kernel, process_groups(config) as here:
        ways: dict[str, Any] = {
            "transformers": by_transformers,
            "matrix products": by_matrix_products,
        }
        if case.data == "answers":
            ways = import_module("examples.benchmarks.throughput_trees").WAYS
        measure = ways.get(case.way, by_trainer)
        device = here.place
        result = measure(config, device, case, folder)
        if device.type == "cuda":
            result["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
            result["held_gib"] = torch.cuda.max_memory_reserved(device) / 2**30
    if case.way != "matrix products":
        result["kernel"] = kernel
    (folder / "result.json").write_text(json.dumps(result | {"machine": machine()}))


@contextmanager
def attention_by(kernel: str) -> Iterator[str]:
    """Let attention be by `kernel`, if one is named, instead of what the product takes; yields its
    name.
    """
    if not kernel:
        installed = "flash-attn-4" if find_spec("flash_attn") is not None else "varlen_attn"
        other = installed if torch.cuda.is_available() else "scaled_dot_product"
        yield "Transformer Engine" if transformer_engine_installed() else other
        return
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(attention, "causal_attention", KERNELS[kernel]()))
        for module in (architecture, get_batch, layer_spec):
            patches.enter_context(
                mock.patch.object(module, "transformer_engine_installed", return_value=False)
            )
        yield kernel


KERNELS: dict[str, Callable[[], attention_kernels.Kernel]] = {
    "flash-attn-4": attention_kernels._flash_4,
    "varlen_attn": attention_kernels._varlen,
    "scaled_dot_product": lambda: attention_kernels._by_sequence,
}


def machine() -> str:
    """Device and versions."""
    versions = []
    for name in ("torch", "megatron-core", "transformers", "transformer-engine", "flash-attn-4"):
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    )
    return ", ".join([device, *versions])


def by_trainer(config: SFTConfig, device: torch.device, case: Any, folder: Path) -> dict[str, Any]:
    """The product's own loop, by its own metrics."""
    with mock.patch.object(
        saved_run, "model_options", return_value={}
    ):  # no folder to stand beside
        trainer = Trainer(config, build_datasets(config), Device.at(device), folder)
    take_step: Any = trainer._step
    profiler = Profiler(device)

    def step(*arguments: Any) -> Any:
        if case.is_profiled and trainer.progress.iteration == WARM_UPS + case.num_steps:
            profiler.start()
        return take_step(*arguments)

    trainer._step = step  # type: ignore[method-assign, assignment]
    trainer.train(StopSignals())
    result: dict[str, Any] = {}
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["kind"] == "train"][
        WARM_UPS : WARM_UPS + case.num_steps
    ]
    total = {
        name: sum(step[name] for step in steps)
        for name in ("tokens", "padded_tokens", "step_seconds", "data_seconds")
    }
    if case.is_profiled:
        kernels = profiler.costliest(PROFILED)
        # Profiled steps are slower than others on the host, but not on the device.
        milliseconds = 1000 * total["step_seconds"] / case.num_steps
        result["profile"] = kernels
        result["launches"] = profiler.num_calls / PROFILED
        result["busy"] = kernels[0][2] / kernels[0][1] / milliseconds
    if case.saves:
        result["checkpoint"] = save_and_load(trainer, folder)
    if case.way == "packed":
        flops = sum(step["tflops_per_device"] * step["step_seconds"] for step in steps) * 1e12
        result["flops_per_token"] = flops / total["tokens"]
    return result | {
        "tokens_per_second": total["tokens"] / total["step_seconds"],
        "data_wait": total["data_seconds"] / total["step_seconds"],
        "padding": 1 - total["tokens"] / total["padded_tokens"],
    }


def save_and_load(trainer: Trainer, folder: Path) -> dict[str, float]:
    """Returns the size of a checkpoint in GB, and seconds of its save and of a load."""
    training, times = trainer._training, []
    works: tuple[Callable[[], object], ...] = (
        lambda: CheckpointSave(folder, training, Progress(1, 1, False), {}, {}).finish(),
        lambda: load_checkpoint(folder, training, {}, {}, Wanted()),
    )
    for work in works:
        start = time.monotonic()
        work()
        times.append(time.monotonic() - start)
    sizes = (path.stat().st_size for path in checkpoint_path(folder, 1).rglob("*"))
    return {"GB": sum(sizes) / 1e9, "save": times[0], "load": times[1]}


class Profiler:
    """Which kernels (on CPU: operators) the steps after `start` spent their time in."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self._is_cuda]
        )
        self._is_started = False
        self.num_calls = 0

    def start(self) -> None:
        """Begin, once."""
        if not self._is_started:
            self._is_started = True
            self._profile.start()

    def costliest(self, num_steps: int) -> list[tuple[str, float, float, float]]:
        """(name, share of the time of all, milliseconds per step, calls per step) of the first
        forty.
        """
        if self._is_cuda:
            torch.cuda.synchronize()
        self._profile.stop()
        times = [
            (
                event.key,
                event.self_device_time_total if self._is_cuda else event.self_cpu_time_total,
                event.count,
            )
            for event in self._profile.key_averages()
            if not self._is_cuda or event.device_type == torch.autograd.DeviceType.CUDA
        ]
        whole = sum(microseconds for _, microseconds, _ in times)
        self.num_calls = sum(count for *_, count in times)
        first = sorted(times, key=lambda event: -event[1])[:40]
        return [
            (name, spent / whole, spent / 1000 / num_steps, calls / num_steps)
            for name, spent, calls in first
        ]


class TransformersModel:
    """transformers' model of the shape, its attention by the product's kernel; with peft's adapters
    for LoRA.
    """

    def __init__(self, config: SFTConfig, device: torch.device) -> None:
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

        AttentionInterface.register("packs", attend)
        assert config.data.vocab_size is not None
        dtype = torch.bfloat16 if config.training.bf16 else torch.float32
        described = config_of(config.model, padded_vocab_size(config.data.vocab_size, config))
        with device:
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**described), dtype=dtype, attn_implementation="packs"
            )
        if config.lora.lora:
            from peft import LoraConfig, get_peft_model

            rank = config.lora.lora_rank
            model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
        self._model, self._device = model, device
        self._trained = [each for each in model.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=1e-5, fused=device.type == "cuda")

    def step(self, microbatches: Iterable[Any], num_items: int) -> None:
        """Takes one step on packs without padding, of which so many tokens count."""
        for microbatch in microbatches:
            loss = self._model(
                input_ids=microbatch["tokens"][None],
                position_ids=microbatch["position_ids"][None],
                labels=microbatch["labels"][None],
                shift_labels=microbatch["labels"][None],
                num_items_in_batch=num_items,
                lengths=tuple(microbatch["cu_seqlens_padded"].diff().tolist()),
                use_cache=False,
            ).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def by_transformers(config: SFTConfig, device: torch.device, case: Any, _: Path) -> dict[str, Any]:
    """transformers on the same packs, without padding."""
    datasets = build_datasets(config)
    model = TransformersModel(config, device)
    share = Share(
        rank=parallel_state.get_data_parallel_rank(),
        num_ranks=parallel_state.get_data_parallel_world_size(),
        global_batch_size=config.training.global_batch_size,
        micro_batch_size=config.training.micro_batch_size,
    )
    num_steps = WARM_UPS + case.num_steps
    batches = StepBatches(
        config,
        build_transformer_config(config, Device.at(device)),
        datasets.train,
        share,
        num_steps,
    )
    seconds, tokens = 0.0, 0
    for number in range(num_steps):
        start = time.perf_counter()
        batch = next(batches)
        assert batch.packed is not None
        # mock data has no masked tokens
        model.step(batch.iterators(None, Device.at(device)), batch.counts.num_tokens)
        if number >= WARM_UPS:
            seconds += time.perf_counter() - start
            tokens += batch.counts.num_tokens
    batches.close()
    return {"tokens_per_second": tokens / seconds}


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    lengths: tuple[int, ...],
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: query [1, heads, t, d], key and value [1, groups, t, d] -> [1, t,
    heads, d].
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    segments = attention_blocks.Segments.square(lengths)
    scores = attention_blocks.Scores(scale=scaling)
    return attention.causal_attention(q, k, v, segments, scores)[None], None


def by_matrix_products(
    config: SFTConfig, device: torch.device, case: Any, _: Path
) -> dict[str, Any]:
    """Those of a pack: of each layer and of the output layer, forward, and backward for inputs and
    for weights that are trained. Of experts: as if the tokens that they get stood in one matrix.
    """
    model, num_tokens = config.model, config.capacity_per_rank
    assert config.data.vocab_size is not None
    width, of_heads = model.hidden_size, model.num_attention_heads * model.resolved_kv_channels
    groups = model.num_query_groups or model.num_attention_heads
    layers = model.num_layers
    matrices = [
        (layers, width, of_heads + 2 * groups * model.resolved_kv_channels),
        (layers, of_heads, width),
        (1, width, padded_vocab_size(config.data.vocab_size, config)),
    ]
    of_mlp = model.resolved_ffn_hidden_size
    copies = 1
    if model.num_experts is not None:
        of_mlp, copies = model.moe_ffn_hidden_size or of_mlp, model.moe_router_topk
    of_experts = [(layers, width, 2 * of_mlp), (layers, of_mlp, width)]
    dtype = torch.bfloat16 if config.training.bf16 else torch.float32
    total = 0.0
    of_all = [(num_tokens, *matrix) for matrix in matrices]
    of_all += [(num_tokens * copies, *matrix) for matrix in of_experts]
    for rows, count, inputs, outputs in of_all:
        x = torch.randn(rows, inputs, device=device, dtype=dtype)
        weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
        gradient = torch.randn(rows, outputs, device=device, dtype=dtype)
        products: list[Callable[[], Tensor]] = [
            lambda x=x, w=weight: x @ w.T,  # type: ignore[misc]
            lambda g=gradient, w=weight: g @ w,  # type: ignore[misc]
        ]
        if not config.lora.lora:
            products.append(lambda g=gradient, x=x: g.T @ x)  # type: ignore[misc]
        total += count * sum(seconds_of(product, device) for product in products)
    return {"tokens_per_second": num_tokens / total}


def seconds_of(work: Callable[[], Tensor], device: torch.device, repeats: int = 10) -> float:
    """The median of several times, after warming up."""
    times = []
    for _ in range(3 + repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


if __name__ == "__main__":
    main()
