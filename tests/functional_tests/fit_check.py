"""Bytes of a step on fake tensors against those of the same step on real ones, phase by phase.

    make fit-check       every configuration below, and the table of results

Each configuration runs for real in forked ranks over gloo, counted by `SettledCounter`; then each
rank runs again in a fake world in this process. Start, end and peak of every phase must be equal to
the byte, and so must the sequence of storages that operations made.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch.utils._python_dispatch import _disable_current_modes

from megatron.sft.arguments.parse import parse_config
from megatron.sft.distributed import make_groups
from megatron.sft.fit.counter import ByteCounter, Made, Phase, SettledCounter
from megatron.sft.fit.fake.experts import recorded
from megatron.sft.fit.fake.host_reads import Dispatch, HostReads
from megatron.sft.fit.fake.world import fake_world
from megatron.sft.fit.step import StepData, run_step
from megatron.sft.images.source import ImageSize
from megatron.sft.model import build, cpu_support, mcore_fixes
from megatron.sft.options.config import SFTConfig
from tests.functional_tests.ranks import run_ranks

VOCAB_SIZE = 96
VISION_VOCAB_SIZE = 250
RUN = "--mock-data --seq-length 64 --train-iters 1 --global-batch-size 24 --lr 1e-3 --eval-iters 0"
COMMON = (
    "--hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 "
    f"--vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 8 {RUN}"
)
PACKED = "--sequence-packing"
ROPE = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --disable-bias-linear"
)
GROUPED = f"{ROPE} --group-query-attention --num-query-groups 2 --qk-layernorm"
EXPERTS = f"{ROPE} --num-experts 4 --moe-router-topk 2"
WINDOWS = "--window-size 15 0 --window-attn-skip-freq 1 0"
DELTA_NET = (
    "--linear-attention-freq 1 0 --linear-num-key-heads 2 --linear-num-value-heads 4 "
    "--linear-key-head-dim 8 --linear-value-head-dim 8 --linear-conv-kernel-dim 4"
)
TP2 = "--tensor-model-parallel-size 2"
SP2 = f"{TP2} --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"
SHARDED = "--use-distributed-optimizer"
OVERLAPPED = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
LATENT = "--kv-lora-rank 8 --q-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 8"
GLOBAL = (
    "--group-query-attention --num-query-groups 2 --qk-layernorm --value-layernorm "
    "--global-kv-channels 16 --global-num-query-groups 1 --window-size 15 0 "
    "--window-attn-skip-freq 1 0"
)
GEMMA_4 = (
    f"{ROPE.replace('--swiglu', '--geglu')} {GLOBAL} --num-experts 4 --moe-router-topk 2 "
    "--moe-shared-expert-intermediate-size 32 --moe-branch-norms --norm-position both "
    "--layer-scalar --scale-embeddings --final-logit-softcapping 3"
)
FULL = "--recompute-granularity full"
SELECTIVE = "--recompute-granularity selective"
LORA = "--lora --lora-rank 4"
DATA = StepData(lengths=((40, 24), (64,)), loss_share=0.7)
IMAGES = replace(DATA, images=((ImageSize(24, 32), ImageSize(8, 8), ImageSize(40, 16)), ()))
BOTH = "--tower-lr 1e-3 --projector-lr 1e-3"
TREES = StepData(lengths=((16, 24, 8, 16), (20, 4, 32, 8)), parents=(-1, 0, 1, 0))
FOUR = StepData(lengths=((40, 24), (64,), (30, 34), (16, 48)), loss_share=0.7)


class Case(NamedTuple):
    """A model in a layout."""

    world_size: int
    flags: str
    data: StepData = DATA
    num_layers: int = 2
    folder: str = ""
    """Model of `functional_tests.vision`, made once; empty for one of the sizes of `COMMON`."""

    @property
    def vocab_size(self) -> int:
        return VISION_VOCAB_SIZE if self.folder else VOCAB_SIZE

    def config(self) -> SFTConfig:
        """Returns the run's options."""
        flags = f"--num-layers {self.num_layers} {COMMON} {self.flags}"
        if self.folder:
            flags = (
                f"--pretrained-checkpoint {vision_folder(self.folder)} --images {RUN} {self.flags}"
            )
        return parse_config(flags.split(), self.world_size)

    def __str__(self) -> str:
        names = [flag.removeprefix("--") for flag in self.flags.split() if flag.startswith("--")]
        return f"{self.world_size}: {' '.join(names) or 'plain'}"


def _cases() -> dict[str, Case]:
    found = {
        "tp2-sp": Case(2, f"{PACKED} {GROUPED} {SP2}"),
        "pp2": Case(2, f"{PACKED} {ROPE} {PP2} --bf16"),
        "cp2": Case(2, f"{PACKED} {GROUPED} {CP2} --bf16"),
        "dp2-sharded": Case(2, f"{PACKED} {ROPE} {SHARDED} --bf16"),
        "ep2": Case(2, f"{PACKED} {EXPERTS} {EP2} --bf16 {SHARDED}"),
        "lora-full": Case(1, f"{PACKED} {ROPE} {LORA} {FULL} --bf16"),
        "lora": Case(1, f"{PACKED} {ROPE} {LORA} --bf16"),
        "full": Case(1, f"{PACKED} {ROPE} {FULL} --bf16"),
        "learned": Case(1, f"{PACKED}"),
        "tied": Case(1, f"{PACKED} --position-embedding-type rope --bf16"),
        "whole-head": Case(1, f"{PACKED} {ROPE} --logits-of-masked-tokens --bf16"),
        "padded": Case(1, f"{ROPE} --bf16 --micro-batch-size 2", _padded()),
        "selective": Case(1, f"{PACKED} {GROUPED} {SELECTIVE} --bf16"),
        "parts": Case(
            1, f"{PACKED} {GROUPED} {SELECTIVE} --recompute-modules core_attn layernorm mlp --bf16"
        ),
        "block": Case(
            1, f"{PACKED} {ROPE} {FULL} --recompute-method block --recompute-num-layers 1"
        ),
        "zero-centered": Case(
            1, f"{PACKED} {ROPE} --apply-layernorm-1p --geglu --bf16".replace("--swiglu ", "")
        ),
        "windows-sinks": Case(1, f"{PACKED} {GROUPED} {WINDOWS} --softmax-type learnable --bf16"),
        "cp2-windows": Case(2, f"{PACKED} {GROUPED} {CP2} {WINDOWS} --bf16"),
        "cp2-by-groups": Case(
            2,
            f"{PACKED} {GROUPED} {CP2} {WINDOWS} --softmax-type learnable --bf16 "
            "--query-groups-per-gather 1",
        ),
        "cp2-by-ranks": Case(
            2,
            f"{PACKED} {GROUPED} {CP2} --num-query-groups 1 --softmax-type learnable --bf16 "
            "--query-groups-per-gather 1",
        ),
        "cp2-trees-by-groups": Case(
            2,
            f"{PACKED} {GROUPED} {CP2} {WINDOWS} {FULL} --bf16 --query-groups-per-gather 1",
            TREES,
        ),
        "by-groups": Case(1, f"{PACKED} {GROUPED} --bf16 --query-groups-per-gather 1"),
        "tiled": Case(1, f"{PACKED} {GROUPED} {FULL} --bf16 --mlp-chunks-for-training 3"),
        "inputs-on-host": Case(
            1,
            f"{PACKED} {GROUPED} {FULL} --bf16 --fine-grained-activation-offloading",
            FOUR,
            num_layers=4,
        ),
        "attention-on-host": Case(
            1,
            f"{PACKED} {GROUPED} {FULL} --bf16 --fine-grained-activation-offloading "
            "--offload-modules layer_input core_attn_output",
            FOUR,
            num_layers=4,
        ),
        "together": Case(
            4,
            f"{PACKED} {GROUPED} {FULL} {SP2} {CP2} {SHARDED} --bf16 --query-groups-per-gather 1 "
            "--mlp-chunks-for-training 3 --attention-chunks-for-training 2 "
            "--fine-grained-activation-offloading",
            num_layers=3,
        ),
        "tp2-tiled": Case(
            2,
            f"{PACKED} {GROUPED} {SP2} {SHARDED} --bf16 --mlp-chunks-for-training 3 "
            "--attention-chunks-for-training 2",
        ),
        "delta-net": Case(1, f"{PACKED} {GROUPED} {DELTA_NET} --bf16"),
        "latent": Case(1, f"{PACKED} {ROPE} {LATENT} --bf16"),
        "latent-selective": Case(1, f"{PACKED} {ROPE} {LATENT} {SELECTIVE} --bf16"),
        "tp2-latent": Case(2, f"{PACKED} {ROPE} {LATENT} {SP2} {LORA} --bf16"),
        "cp2-latent": Case(2, f"{PACKED} {ROPE} {LATENT} {CP2} --bf16 {SHARDED}"),
        "cp2-latent-by-heads": Case(
            2,
            f"{PACKED} {ROPE} {LATENT} {CP2} {LORA} --bf16 --query-groups-per-gather 1 {FULL} "
            "--fine-grained-activation-offloading --offload-modules layer_input core_attn_output",
        ),
        "global": Case(1, f"{PACKED} {ROPE} {GLOBAL} --bf16"),
        "global-selective": Case(1, f"{PACKED} {ROPE} {GLOBAL} {SELECTIVE} --bf16"),
        "tp2-global": Case(2, f"{PACKED} {ROPE} {GLOBAL} {SP2} {LORA} --bf16"),
        "cp2-global": Case(2, f"{PACKED} {ROPE} {GLOBAL} {CP2} --bf16 {SHARDED}"),
        "global-experts": Case(1, f"{PACKED} {GEMMA_4} --bf16"),
        "tp2-global-experts": Case(2, f"{PACKED} {GEMMA_4} {SP2} {EP2} --bf16 {SHARDED}"),
        "dropout": Case(1, f"{PACKED} --hidden-dropout 0.1 --bf16"),
        "experts": Case(1, f"{PACKED} {EXPERTS} --bf16"),
        "grouped-experts": Case(1, f"{PACKED} {EXPERTS} --moe-grouped-gemm --bf16"),
        "grouped-lora": Case(
            2, f"{PACKED} {EXPERTS} {EP2} --moe-grouped-gemm --moe-permute-fusion {LORA} --bf16"
        ),
        "tiled-experts": Case(
            2,
            f"{PACKED} {EXPERTS} {EP2} {FULL} --moe-grouped-gemm --bf16 "
            "--moe-shared-expert-intermediate-size 32 --mlp-chunks-for-training 3",
        ),
        "shared-expert": Case(
            1,
            f"{PACKED} {EXPERTS} --moe-shared-expert-intermediate-size 32 "
            "--moe-shared-expert-gate --moe-aux-loss-coeff 0.01",
        ),
        "dense-first": Case(1, f"{PACKED} {EXPERTS} --moe-layer-freq 0 1 --bf16"),
        "tp2": Case(2, f"{PACKED} {ROPE} {TP2} --bf16"),
        "tp2-lora": Case(2, f"{PACKED} {GROUPED} {SP2} {LORA} --bf16"),
        "tp2-full": Case(2, f"{PACKED} {GROUPED} {SP2} {FULL} --bf16 {SHARDED}"),
        "tp2-whole-head": Case(2, f"{PACKED} {ROPE} {SP2} --logits-of-masked-tokens --bf16"),
        "vpp2": Case(
            2, f"{PACKED} {ROPE} {PP2} --num-layers-per-virtual-pipeline-stage 1 --bf16", FOUR, 4
        ),
        "pp2-uneven": Case(
            2,
            f"{PACKED} {ROPE} {PP2} --num-virtual-stages-per-pipeline-rank 2 "
            "--account-for-loss-in-pipeline-split --bf16",
            FOUR,
            3,
        ),
        "pp2-further": Case(2, f"{PACKED} {ROPE} {PP2} --mtp-num-layers 1 --bf16"),
        "pp2-tied": Case(2, f"{PACKED} --position-embedding-type rope {PP2} --bf16"),
        "pp2-padded": Case(2, f"{ROPE} {PP2} --micro-batch-size 2", _padded()),
        "cp2-selective": Case(2, f"{PACKED} {GROUPED} {CP2} {SELECTIVE} --bf16 {SHARDED}"),
        "dp2-overlapped": Case(2, f"{PACKED} {ROPE} {OVERLAPPED} --bf16"),
        "ep2-full": Case(2, f"{PACKED} {EXPERTS} {EP2} {FULL} --bf16"),
        "tp2-pp2": Case(4, f"{PACKED} {GROUPED} {SP2} {PP2} --bf16"),
        "tp2-cp2": Case(4, f"{PACKED} {GROUPED} {SP2} {CP2} --bf16 {SHARDED}"),
        "tp2-ep2": Case(4, f"{PACKED} {EXPERTS} {SP2} {EP2} --bf16 {SHARDED}"),
        "pp4": Case(4, f"{PACKED} {ROPE} --pipeline-model-parallel-size 4 --bf16", FOUR, 4),
        **{
            f"images-{name}": Case(size, f"{PACKED} {flags} --bf16", IMAGES, folder=model)
            for name, size, flags, model in (
                ("frozen", 1, "", "qwen3-vl"),
                ("frozen-full", 1, FULL, "qwen3-vl"),
                ("projector", 1, "--projector-lr 1e-3", "qwen3-vl"),
                ("trained", 1, BOTH, "qwen3-vl"),
                ("trained-full", 1, f"{BOTH} {FULL}", "qwen3-vl"),
                ("lora-full", 1, f"{LORA} {FULL}", "qwen3-vl"),
                ("language-frozen", 1, f"{BOTH} --freeze-language-model", "qwen3-vl"),
                ("tp2-sp", 2, f"{BOTH} {SP2}", "qwen3-vl"),
                ("cp2", 2, f"{BOTH} {CP2} {SHARDED}", "qwen3-vl"),
                ("pp2", 2, f"{BOTH} {PP2}", "qwen3-vl"),
                ("dp2-sharded", 2, f"{BOTH} {SHARDED}", "qwen3-vl"),
                ("qwen3.5", 1, BOTH, "qwen3.5"),
                ("qwen3.5-cp2-lora", 2, f"{LORA} {CP2}", "qwen3.5"),
                ("qwen2.5", 1, BOTH, "qwen2.5-vl"),
            )
        },
        "pp2-dp2": Case(4, f"{PACKED} {ROPE} {PP2} --bf16 {OVERLAPPED}"),
    }
    return found


def _padded() -> StepData:
    return StepData(lengths=((40, 64), (64, 1)), loss_share=0.7)


@cache
def vision_folder(name: str) -> Path:
    """Returns the folder of a tiny vision model, which stays as long as this process."""
    # imports transformers, which no other case needs
    from tests.functional_tests.vision import write_vision_model

    folder = Path(_FOLDERS.name) / name
    run_ranks(write_vision_model, 1, name, folder)
    return folder


_FOLDERS = tempfile.TemporaryDirectory()
CASES = _cases()
FEW = ("tp2-sp", "pp2", "dp2-sharded", "ep2", "lora-full")
"""The cases of every test run."""


def run_real(case: Case) -> tuple[list[Phase], list[Dispatch]]:
    """Returns the phases of this rank on real tensors, and the numbers that its experts read."""
    config = case.config()
    mcore_fixes.install()
    cpu_support.install()
    make_groups(config)
    tensor_parallel.model_parallel_cuda_manual_seed(config.training.seed)
    counter = SettledCounter(keeps_storages=True)
    gather = dist.all_gather_object

    def gather_unseen(*arguments: object, **options: object) -> None:
        with _disable_current_modes():  # bytes of pickled objects, on the host
            gather(*arguments, **options)  # type: ignore[arg-type]

    build_model = build.build_model

    def build_filled(*arguments: Any) -> list[Any]:
        chunks = build_model(*arguments)
        with _disable_current_modes(), torch.no_grad():
            for parameter in (p for chunk in chunks for p in chunk.parameters()):
                parameter.fill_(0.01)
        return list(chunks)

    with ExitStack() as stack:
        numbers = stack.enter_context(recorded())
        stack.enter_context(mock.patch.object(dist, "all_gather_object", gather_unseen))
        if case.folder:  # whose weights are not read, so that they could be NaN
            stack.enter_context(mock.patch.object(build, "build_model", build_filled))
        run_step(config, case.vocab_size, case.data, counter)
    return counter.phases, numbers


def run_fake(case: Case, rank: int, numbers: Sequence[Dispatch]) -> list[Phase]:
    """Returns the phases of `rank` in a fake world."""
    config, reads = case.config(), HostReads(recorded=numbers or None)
    counter = ByteCounter(keeps_storages=True)
    with fake_world(config, rank, case.world_size, reads) as mode:
        run_step(config, case.vocab_size, case.data, counter, (mode, reads))
    return counter.phases


def differences(real: Sequence[Phase], fake: Sequence[Phase]) -> list[str]:
    """Returns what is not equal, with the tensors that only one of both has."""
    found = []
    for a, b in zip(real, fake, strict=True):
        for name in ("start", "end", "peak", "host_start", "host_peak"):
            if getattr(a, name) != getattr(b, name):
                found.append(
                    f"{a.name}: {name} {getattr(a, name):,} bytes, fake {getattr(b, name):,}"
                )
        if a.at_peak != b.at_peak:
            found.append(f"{a.name}: at the peak {a.at_peak}, fake {b.at_peak}")
        # What was made meanwhile only explains a difference: gloo's copies show as views of
        # storages that no operation made.
        kinds = [("alive", a.alive, b.alive)]
        if (a.start, a.end, a.peak) != (b.start, b.end, b.peak):
            kinds.append(("made", a.made, b.made))
        for kind, x, y in kinds:
            for who, more, fewer in (("real", x, y), ("fake", y, x)):
                for made, number in _extra(more, fewer).items():
                    found.append(f"{a.name}: {kind} only as {who}: {number} x {made}")
    return found


def _extra(more: Sequence[Made], fewer: Sequence[Made]) -> Counter[Made]:
    """Returns the storages of sizes and types that `more` has more often.

    Operations may differ in name: for one product fake tensors take bmm where real ones take mm.
    """
    left = Counter((made.num_bytes, made.dtype) for made in fewer)
    found: Counter[Made] = Counter()
    for made in more:
        key = made.num_bytes, made.dtype
        if left[key]:
            left[key] -= 1
        else:
            found[made] += 1
    return found


def check(case: Case) -> tuple[list[list[Phase]], list[str]]:
    """Returns the phases of each rank on real tensors, and all differences.

    When gloo's threads give memory back is chance, so a real run that differs runs again: what is
    counted wrongly differs each time.
    """
    if case.folder:
        vision_folder(case.folder)  # before ranks are forked
    for _ in range(3):
        real = run_ranks(run_real, case.world_size, case)
        found = []
        for rank, (phases, numbers) in enumerate(real):
            fake = run_fake(case, rank, numbers)
            found += [f"rank {rank}: {line}" for line in differences(phases, fake)]
        if not found:
            break
    return [phases for phases, _ in real], found


def main() -> None:
    """Checks every case, and writes the table."""
    parser = argparse.ArgumentParser(description="Fake bytes against real bytes.")
    parser.add_argument("--write", type=Path)
    parser.add_argument("cases", nargs="*", help="names; all by default")
    options = parser.parse_args()
    lines, num_failed = [], 0
    for name in options.cases or CASES:
        start, case = time.monotonic(), CASES[name]
        ranks, found = check(case)
        num_failed += bool(found)
        peaks = " ".join(f"{max(phase.peak for phase in phases):,}" for phases in ranks)
        checked = sum(3 * len(phases) for phases in ranks)
        verdict = "equal" if not found else f"{len(found)} differences"
        lines.append(f"| {name} | {case.world_size} | {checked} | {peaks} | {verdict} |")
        print(f"{lines[-1]} {time.monotonic() - start:.1f} s", flush=True)
        for line in found[:20]:
            print(f"    {line}")
    if options.write is not None:
        options.write.write_text(_table(lines))
    sys.exit(num_failed > 0)


def _table(lines: Sequence[str]) -> str:
    return "\n".join(
        (
            "# Bytes of a step on fake tensors against real ones",
            "",
            f"`make fit-check`, torch {version('torch')}, megatron-core "
            f"{version('megatron-core')}, "
            "CPU. Each rank trains two steps for real over gloo and again in a fake world; start, "
            "end and peak of each phase (build, forward and backward, optimizer) are compared, "
            "and the storages made and alive.",
            "",
            "| case | ranks | figures compared | peak bytes of each rank | fake against real |",
            "| --- | --- | --- | --- | --- |",
            *lines,
            "",
        )
    )


if __name__ == "__main__":
    main()
