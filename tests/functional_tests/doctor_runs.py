"""Runs of this trainer under the doctor: none that is sound is blamed, whatever its layout.

    python -m tests.functional_tests.doctor_runs --write examples/benchmarks/results/doctor_runs.md

Runs are those of `layouts`, made small as `megatron-sft doctor --config` makes them. A mutant of
packing code (`doctor_mutants`) is patched into the ranks, and has to be named.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from megatron.packing.device import CPU
from megatron.packing.doctor.examine import examine
from megatron.sft.arguments.parse import parse_config
from megatron.sft.distributed import make_groups
from megatron.sft.doctor.shrink import small_run
from megatron.sft.doctor.subject import subject_of_run
from megatron.sft.model import build, cpu_support, mcore_fixes
from tests.functional_tests.doctor_mutants import MUTANTS, Mutant, mutated
from tests.functional_tests.layouts import MECHANISMS, MODELS
from tests.functional_tests.oracle import _keep_double
from tests.functional_tests.ranks import run_ranks

ALL_MODELS = MODELS | MECHANISMS
COMMON = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --mock-data "
    "--seq-length 64 --vocab-size 96 --make-vocab-size-divisible-by 8 --add-qkv-bias "
    "--train-iters 1 --global-batch-size 720 --lr 1e-3 --eval-iters 0 --sequence-packing"
)
LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2-interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "cp2": (2, "--context-parallel-size 2"),
    "dp2": (2, ""),
    "dp2-sharded": (2, "--use-distributed-optimizer"),
    "ep2": (2, "--expert-model-parallel-size 2"),
}
EXPERTS = [name for name, flags in ALL_MODELS.items() if "--num-experts" in flags]
Case = tuple[str, str, str, str]
"""Model, layout, precision, further flags."""
SOUND: list[Case] = [
    *((model, "", dtype, "") for model in ALL_MODELS for dtype in ("float64", "float32", "bf16")),
    ("grouped", "", "float32", "--recompute-granularity full"),
    ("grouped", "", "float32", "--lora --lora-rank 4"),
    ("experts", "", "float32", "--moe-aux-loss-coeff 0.01"),
    ("experts", "", "float32", "--moe-grouped-gemm --moe-permute-fusion"),
    ("grouped", "", "float32", "--logits-of-masked-tokens"),
    *(("grouped", layout, "float32", "") for layout in LAYOUTS if layout != "ep2"),
    *(("gemma", layout, "float32", "") for layout in ("tp2-sp", "pp2", "cp2")),
    *(("qwen3.5", layout, "float32", "") for layout in ("pp2", "cp2", "ep2")),
    *(("experts", layout, "float32", "") for layout in ("cp2", "dp2-sharded", "ep2")),
    *(
        (model, "tp2-sp", "float32", "--expert-model-parallel-size 2")
        for model in ("experts", "qwen3.5")
    ),
    *(("gpt-oss", layout, "float32", "") for layout in ("pp2", "cp2", "ep2")),
    *(("olmo", layout, "float32", "") for layout in ("tp2-sp", "cp2")),
    *(("minimax", layout, "float32", "") for layout in ("pp2", "ep2")),
    *(("further", layout, "float32", "") for layout in ("tp2-sp", "pp2")),
    *(("tied", layout, "float32", "") for layout in ("tp2", "pp2", "dp2")),
    *(("learned", layout, "float32", "") for layout in ("tp2-sp", "pp2-interleaved", "cp2")),
    ("grouped", "tp2-sp", "bf16", ""),
    ("grouped", "cp2", "float64", ""),
    ("grouped", "pp2", "bf16", ""),
]


def examine_on_rank(case: Case, mutant: Mutant | None = None) -> tuple[list[str], list[str], str]:
    """Returns the faults, what is told besides, and the report; called by each rank."""
    model, layout, dtype, more = case
    flags = f"{COMMON} {ALL_MODELS[model]} {LAYOUTS.get(layout, (1, ''))[1]} {more}"
    flags += " --bf16" * (dtype == "bf16")
    size = dist.get_world_size()
    mcore_fixes.install()
    cpu_support.install()
    with ExitStack() as stack:
        if dtype == "float64":
            torch.set_default_dtype(torch.float64)
            _keep_double()
            build_config = partial(build.build_transformer_config, params_dtype=torch.float64)
            stack.enter_context(mock.patch.object(build, "build_transformer_config", build_config))
        if mutant is not None:
            stack.enter_context(mutated(mutant))
        config = small_run(parse_config(flags.split(), size), world_size=size, on_gpu=True)
        make_groups(config)
        diagnosis = examine(subject_of_run(config, CPU, name=" ".join(filter(None, case))))
    told = [each.name for each in diagnosis.findings if not each.is_fault]
    return [each.name for each in diagnosis.faults], told, diagnosis.text()


def answer(case: Case, mutant: Mutant | None = None) -> tuple[list[str], list[str], str]:
    """Returns what all ranks say alike; raises AssertionError if they differ."""
    size = LAYOUTS.get(case[1], (1, ""))[0]
    of_ranks = run_ranks(examine_on_rank, size, case, mutant, timeout_seconds=120)
    assert all(each == of_ranks[0] for each in of_ranks), "ranks found different faults"
    return of_ranks[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Examines sound runs and mutants, and writes the page of results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="", help="part of the names of cases")
    parser.add_argument("--mutants", action="store_true", help="mutants alone")
    options = parser.parse_args(arguments)
    start = time.time()
    sound, mutants, wrong = [], [], 0
    for case in [] if options.mutants else SOUND:
        name = " ".join(filter(None, case))
        if options.only not in name:
            continue
        try:
            faults, told, text = answer(case)
        except AssertionError as failure:
            faults, told, text = ["raised"], [], str(failure)
        wrong += bool(faults)
        print(f"{name}: {faults or 'sound'} {told}", flush=True)
        if faults:
            print(text)
        sound.append(f"| {name} | {', '.join(faults) or 'sound'} | {', '.join(told)} |")
    for mutant in MUTANTS:
        if options.only not in mutant.name:
            continue
        try:
            faults, _, text = answer(mutant.case, mutant)
        except AssertionError as failure:
            faults, text = ["raises: " + str(failure).strip().splitlines()[-1][:80]], str(failure)
        wrong += not faults
        print(f"{mutant.name}: {faults or 'NOT FOUND'}", flush=True)
        if not faults:
            print(text)
        place = f"{mutant.module.removeprefix('megatron.')}"
        mutants.append(
            f"| {mutant.name} | `{place}` | {' '.join(filter(None, mutant.case))} | "
            f"{', '.join(faults) or 'NOT FOUND'} |"
        )
    print(f"{len(sound)} sound runs, {len(mutants)} mutants, {wrong} wrong")
    if options.write is not None:
        lines = _page(sound, mutants, wrong, time.time() - start)
        options.write.write_text("\n".join(lines) + "\n")
    sys.exit(bool(wrong))


def _page(sound: list[str], mutants: list[str], wrong: int, seconds: float) -> list[str]:
    return [
        "# The doctor on this trainer: sound runs, and mutants of packing code",
        "",
        f"torch {torch.__version__}, CPU, one thread a rank: {seconds:.0f} s. {len(sound)} sound "
        f"runs (model, layout, precision, further options), {len(mutants)} mutants, {wrong} wrong.",
        "",
        "```\nmake doctor-sound\n```",
        "",
        "| run | faults | told |",
        "|---|---|---|",
        *sound,
        "",
        "A mutant is one line of packing code, changed in all ranks.",
        "",
        "| mutant | file | run | found |",
        "|---|---|---|---|",
        *mutants,
    ]


if __name__ == "__main__":
    main()
