"""Runs of this trainer under the doctor: none that is sound is blamed, whatever its layout.

    python -m tests.functional_tests.doctor_runs --write examples/benchmarks/results/doctor_runs.md

Runs are those of `layouts`, made small as `megatron-sft doctor --config` makes them. A mutant of
packing code (`doctor_mutants`) is patched into the ranks, and has to be named.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import megatron.core
import torch
import torch.distributed as dist

from megatron.packing.device import CPU
from megatron.packing.doctor.examine import examine
from megatron.sft.arguments.parse import parse_config
from megatron.sft.distributed import make_groups
from megatron.sft.doctor.shrink import small_run
from megatron.sft.doctor.subject import subject_of_run
from megatron.sft.model import build, cpu_support, mcore_fixes
from tests.functional_tests.doctor_kills import killer
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
_TP, _SP = "--tensor-model-parallel-size", "--sequence-parallel"
_PP, _CP = "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
_VIRTUAL = "--num-layers-per-virtual-pipeline-stage 1"
_EP = "--expert-model-parallel-size 2"
_SHARDED = "--use-distributed-optimizer"
LAYOUTS = {
    "": (1, ""),
    "tp2": (2, f"{_TP} 2"),
    "tp2-sp": (2, f"{_TP} 2 {_SP}"),
    "tp2-sp-ep2": (2, f"{_TP} 2 {_SP} {_EP}"),
    "tp2-sp-sharded": (2, f"{_TP} 2 {_SP} {_SHARDED}"),
    "pp2": (2, _PP),
    "pp2-sharded": (2, f"{_PP} {_SHARDED}"),
    "pp2-interleaved": (2, f"{_PP} {_VIRTUAL}"),
    "pp2-interleaved-sharded": (2, f"{_PP} {_VIRTUAL} {_SHARDED}"),
    "cp2": (2, _CP),
    "cp2-sharded": (2, f"{_CP} {_SHARDED}"),
    "cp2-ep2": (2, f"{_CP} {_EP}"),
    "dp2": (2, ""),
    "dp2-overlapped": (2, "--overlap-grad-reduce"),
    "dp2-sharded": (2, _SHARDED),
    "dp2-sharded-overlapped": (2, f"{_SHARDED} --overlap-grad-reduce --overlap-param-gather"),
    "ep2": (2, _EP),
    "ep2-sharded": (2, f"{_EP} {_SHARDED}"),
    "cp3": (3, "--context-parallel-size 3"),
    "dp3": (3, ""),
    "dp3-sharded": (3, _SHARDED),
    "tp4-sp": (4, f"{_TP} 4 {_SP}"),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "cp4": (4, "--context-parallel-size 4"),
    "tp2-sp-pp2": (4, f"{_TP} 2 {_SP} {_PP}"),
    "tp2-sp-cp2": (4, f"{_TP} 2 {_SP} {_CP}"),
    "tp2-sp-dp2": (4, f"{_TP} 2 {_SP}"),
    "pp2-cp2": (4, f"{_PP} {_CP}"),
    "pp2-dp2": (4, _PP),
    "cp2-dp2": (4, _CP),
    "pp2-ep2": (4, f"{_PP} {_EP}"),
    "pp2-interleaved-cp2": (4, f"{_PP} {_VIRTUAL} {_CP}"),
}
"""Name -> ranks, and flags."""
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
    *(
        ("grouped", layout, "float32", "")
        for layout in ("tp2", "tp2-sp", "pp2", "pp2-interleaved", "cp2", "dp2", "dp2-sharded")
    ),
    *(("gemma", layout, "float32", "") for layout in ("tp2-sp", "pp2", "cp2")),
    *(("qwen3.5", layout, "float32", "") for layout in ("pp2", "cp2", "ep2")),
    *(("experts", layout, "float32", "") for layout in ("cp2", "dp2-sharded", "ep2")),
    *((model, "tp2-sp-ep2", "float32", "") for model in ("experts", "qwen3.5")),
    *(("gpt-oss", layout, "float32", "") for layout in ("pp2", "cp2", "ep2")),
    *(("olmo", layout, "float32", "") for layout in ("tp2-sp", "cp2")),
    *(("minimax", layout, "float32", "") for layout in ("pp2", "ep2")),
    *(("further", layout, "float32", "") for layout in ("tp2-sp", "pp2")),
    *(("tied", layout, "float32", "") for layout in ("tp2", "pp2", "dp2")),
    *(("learned", layout, "float32", "") for layout in ("tp2-sp", "pp2-interleaved", "cp2")),
    *(
        (model, layout, "float32", "")
        for model, layout in (
            ("tied", "tp2-sp-sharded"),
            ("tied", "pp2-sharded"),
            ("grouped", "pp2-interleaved-sharded"),
            ("olmo", "cp2-sharded"),
            ("experts", "cp2-ep2"),
            ("further", "dp2-overlapped"),
            ("gemma", "dp2-sharded-overlapped"),
            ("qwen3.5", "ep2-sharded"),
            ("grouped", "cp3"),
            ("tied", "dp3"),
            ("learned", "dp3-sharded"),
            ("learned", "tp4-sp"),
            ("grouped", "pp4"),
            ("grouped", "cp4"),
            ("further-tied", "tp2-sp-pp2"),
            ("gemma", "tp2-sp-cp2"),
            ("olmo", "tp2-sp-dp2"),
            ("minimax", "pp2-cp2"),
            ("deepseek", "pp2-dp2"),
            ("gemma", "cp2-dp2"),
            ("gpt-oss", "pp2-ep2"),
            ("grouped", "pp2-interleaved-cp2"),
        )
    ),
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
    """Examines sound runs and mutants, and writes the page of results.

    What is done is kept beside the page, and a run that was stopped goes on behind it.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="", help="part of the names of cases")
    parser.add_argument("--mutants", action="store_true", help="mutants alone")
    parser.add_argument("--repeat", type=int, default=2, help="examinations of each sound run")
    parser.add_argument("--every", type=int, default=1, help="every Nth of runs and mutants")
    parser.add_argument(
        "--as-other-release", action="store_true", help="write one row, of this megatron-core"
    )
    options = parser.parse_args(arguments)
    release = f".{_release()}" if options.as_other_release else ""
    kept = None if options.write is None else options.write.with_suffix(f"{release}.part.json")
    done: dict[str, list[Any]] = {}
    if kept is not None and kept.exists():
        done = json.loads(kept.read_text())
    for key, work in _work(options):
        if key not in done:
            done[key] = work()
            print(f"{key}: {done[key][0] or 'none'} {done[key][1]}", flush=True)
            if kept is not None:
                kept.write_text(json.dumps(done))
    lines, num_wrong = _page(done, options.repeat)
    print(f"{len(done)} cases, {num_wrong} wrong")
    if options.write is not None:
        before = options.write.read_text().splitlines() if options.write.exists() else []
        if options.as_other_release:
            lines = _with_release(before, done)
        else:
            lines += _rows_of_releases(before)
        options.write.write_text("\n".join(lines) + "\n")
        assert kept is not None
        kept.unlink(missing_ok=True)
    sys.exit(bool(num_wrong))


def _work(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    """Yields a key for each examination, and a function that does it."""
    for number in range(options.repeat):
        for case in [] if options.mutants else SOUND[:: options.every]:
            name = " ".join(filter(None, case))
            if options.only in name:
                yield f"sound {number} {name}", partial(_examined, case, None)
    for mutant in MUTANTS[:: options.every]:
        if options.only in mutant.name:
            yield f"mutant {mutant.name}", partial(_examined, mutant.case, mutant)
            if not options.as_other_release:
                yield f"killer {mutant.name}", partial(_killed, mutant)


_OTHER_RELEASES = (
    "A part of the same with other releases (`make doctor-sound-core`):",
    "",
    "| megatron-core | torch | sound runs | blamed | mutants | found |",
    "|---|---|---|---|---|---|",
)


def _release() -> str:
    return str(megatron.core.__version__.partition("+")[0])  # without the commit it was built from


def _rows_of_releases(page: Sequence[str]) -> list[str]:
    """Returns the end of a page from its empty line on: what other releases were seen to do."""
    if _OTHER_RELEASES[0] not in page:
        return []
    return list(page[page.index(_OTHER_RELEASES[0]) - 1 :])


def _with_release(page: Sequence[str], done: dict[str, list[Any]]) -> list[str]:
    """Returns the page with a row of this release of megatron-core."""
    sound = [faults for key, (faults, _) in done.items() if key.startswith("sound ")]
    mutants = [faults for key, (faults, _) in done.items() if key.startswith("mutant ")]
    start = f"| {_release()} |"
    row = (
        f"{start} {torch.__version__} | {len(sound)} | {sum(map(bool, sound))} | {len(mutants)} | "
        f"{sum(map(bool, mutants))} |"
    )
    end = _rows_of_releases(page)
    kept = page[: len(page) - len(end)]
    end = end or ["", *_OTHER_RELEASES]
    return [*kept, *(line for line in end if not line.startswith(start)), row]


def _killed(mutant: Mutant) -> list[Any]:
    return [killer(mutant), ""]


def _examined(case: Case, mutant: Mutant | None) -> list[Any]:
    try:
        faults, told, text = answer(case, mutant)
    except AssertionError as failure:
        return [["raises: " + str(failure).strip().splitlines()[-1][:80]], []]
    if bool(faults) == (mutant is None):
        print(text)
    return [faults, told]


def _page(done: dict[str, list[Any]], repeat: int) -> tuple[list[str], int]:
    """Returns the page, and the number of cases that are wrong."""
    sound, mutants, num_wrong, num_sound = [], [], 0, 0
    layouts, models = set(), set()
    for case in SOUND:
        name = " ".join(filter(None, case))
        of_runs = [done[k] for n in range(repeat) if (k := f"sound {n} {name}") in done]
        if not of_runs:
            continue
        layouts.add(case[1])
        models.add(case[0])
        num_sound += len(of_runs)
        faults = sorted({fault for found, _ in of_runs for fault in found})
        num_wrong += bool(faults)
        told = ", ".join(sorted({one for _, of_run in of_runs for one in of_run}))
        sound.append(f"| {name} | {', '.join(faults) or 'sound'} | {told} |")
    for mutant in MUTANTS:
        if f"mutant {mutant.name}" not in done:
            continue
        faults, test = done[f"mutant {mutant.name}"][0], ""
        if f"killer {mutant.name}" in done:
            test = done[f"killer {mutant.name}"][0]
            num_wrong += not test
        num_wrong += not faults
        mutants.append(
            f"| {mutant.name} | `{mutant.module.removeprefix('megatron.')}` | "
            f"{' '.join(filter(None, mutant.case))} | {', '.join(faults) or 'NOT FOUND'} | "
            f"{_short(test)} |"
        )
    lines = [
        "# The doctor on this trainer: sound runs, and mutants of packing code",
        "",
        f"torch {torch.__version__}, megatron-core {megatron.core.__version__}, CPU, one thread a "
        f"rank. {num_sound} examinations of {len(sound)} sound runs (model, layout, precision, "
        f"further options) over {len(models)} families and {len(layouts)} layouts, {len(mutants)} "
        f"mutants, {num_wrong} wrong.",
        "",
        "```\nmake doctor-sound\n```",
        "",
        "| run | faults | told |",
        "|---|---|---|",
        *sound,
        "",
        "A mutant is one line of packing code, changed in all ranks. The test is the first of the "
        "suite's that was tried, fails under the mutant, and passes without it.",
        "",
        "| mutant | file | run | found | test that dies |",
        "|---|---|---|---|---|",
        *mutants,
    ]
    return lines, num_wrong


def _short(test: str) -> str:
    """Returns a test without the folder of all: `unit_tests/packing/test_x.py::test_y`."""
    return f"`{test.removeprefix('tests/')}`" if test else "SURVIVES"


if __name__ == "__main__":
    main()
