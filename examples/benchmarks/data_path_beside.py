"""mcore. CPU of the data path beside Megatron-LM's own: same samples, same processes, step by step
in turns.

    python examples/benchmarks/data_path_beside.py MEGATRON_LM [LAYOUT SEQUENCES]

MEGATRON_LM is a checkout of its repository from 2026-04 on. What is measured is what a step calls:
the wrapper of the iterator, then `get_batch_on_this_rank_for_sequence_packing` for each microbatch.
Their two files run as they are, but for the device, which is the CPU here: so what they copy to a
GPU, and wait for, costs them nothing; but what they would send by NCCL goes over gloo, whose CPU
counts. Each has its samples ready: ours as numpy arrays (--tensors: as theirs), theirs as tensors.
With --without-transport what collectives take is left out on both sides, with what they pickle.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from data_path import CAPACITY, STAGE_CASES, STEPS, Layout, on_ranks, prepared, print_row, samples

from megatron.packing.data_schedule import wrap_dataloader
from megatron.packing.model.get_batch import get_batch_on_this_rank_for_sequence_packing
from megatron.packing.step.groups import is_data_rank

THEIRS = "megatron.core.datasets.data_schedule"


def on_cpu(checkout: Path) -> ModuleType:
    """Return their module, loaded from the checkout under its own name, with the CPU for the
    device.
    """
    for name in (THEIRS + "_utils", THEIRS):
        path = checkout / (name.replace(".", "/") + ".py")
        code = (
            path.read_text().replace("torch.cuda.current_device()", '"cpu"').replace(".cuda()", "")
        )
        module = types.ModuleType(name)
        sys.modules[name] = module
        exec(compile(code, str(path), "exec"), module.__dict__)
    return module


def their_samples(number: int, rank: int) -> list[dict[str, torch.Tensor]]:
    """The same samples with the columns that theirs asks for."""
    made = []
    for sample in samples(number, rank):
        length = torch.tensor([len(sample["tokens"])])
        made.append(
            {
                **{name: torch.from_numpy(values) for name, values in sample.items()},
                "position_ids": torch.arange(len(sample["tokens"])),
                "original_seq_len": length,
                "padded_seq_len": length,
            }
        )
    return made


class Clock:
    """CPU seconds of this process; without transport those of this thread outside of collectives,
    since gloo works in others.
    """

    def __init__(self, has_transport: bool) -> None:
        self._has_transport, self._in_collectives = has_transport, 0.0
        library: Any = torch.distributed
        for name in COLLECTIVES * (not has_transport):
            setattr(library, name, self._timed(getattr(library, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            start, before = time.thread_time(), self._in_collectives
            try:
                return function(*arguments, **options)
            finally:  # one calls another: only the outer one counts
                self._in_collectives = before + time.thread_time() - start

        return timed

    def now(self) -> float:
        """Seconds."""
        if self._has_transport:
            return time.process_time()
        return time.thread_time() - self._in_collectives


COLLECTIVES = (
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "isend",
    "recv",
    "send",
)


def beside(
    layout: Layout, number: int, checkout: Path, tensors: bool, has_transport: bool
) -> dict[str, float]:
    """Milliseconds of CPU of this process per step, the median: ours and theirs."""
    clock = Clock(has_transport)
    config, groups = prepared(layout)
    theirs = on_cpu(checkout)
    their_config = SimpleNamespace(
        max_seqlen_per_dp_cp_rank=CAPACITY // layout.cp,
        sequence_packing_scheduler="dp_balanced",
        virtual_pipeline_model_parallel_size=None,
        microbatch_group_size_per_vp_stage=None,
    )
    fetches_each = number // layout.dp
    own = samples(fetches_each, groups.dp.rank()) if is_data_rank(groups) else []
    if tensors:
        own = [
            {name: torch.from_numpy(values) for name, values in sample.items()} for sample in own
        ]
    reads = groups.tp.rank() == 0 and groups.pp.rank() in (0, groups.pp.size() - 1)
    their_own = their_samples(fetches_each, groups.dp.rank()) if reads else []

    def our_step() -> None:
        iterator: Any
        iterator, num_microbatches, *_ = wrap_dataloader(
            iter(own), config, fetches_each, pg_collection=groups
        )
        for _ in range(num_microbatches):
            get_batch_on_this_rank_for_sequence_packing(iterator, pg_collection=groups)

    def their_step() -> None:
        iterator, num_microbatches, *_ = theirs.wrap_data_iterator(
            iter([dict(sample) for sample in their_own]) if reads else None,
            their_config,
            fetches_each,
        )
        for _ in range(num_microbatches):
            theirs.get_batch_on_this_rank_for_sequence_packing(iterator)

    steps: dict[str, Callable[[], None]] = {"ours": our_step, "theirs": their_step}
    spent: dict[str, list[float]] = {"ours": [], "theirs": []}
    for number_of_step in range(STEPS + 1):
        for name, step in steps.items():
            torch.distributed.barrier()
            start = clock.now()
            step()
            if number_of_step > 0:  # the first makes connections
                spent[name].append(1000 * (clock.now() - start))
    return {name: statistics.median(each) for name, each in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("layout", nargs="?")
    parser.add_argument("sequences", nargs="?", type=int)
    parser.add_argument("--tensors", action="store_true", help="ours have tensors, too")
    parser.add_argument("--without-transport", action="store_true")
    asked = parser.parse_args()
    print_row("layout", "sequences", "ours, ms of CPU", "theirs", "ours / theirs")
    print_row(*["---"] * 5)
    for text, number in (
        STAGE_CASES if asked.layout is None else [(asked.layout, asked.sequences or 512)]
    ):
        ranks: list[dict[str, Any]] = on_ranks(
            partial(
                beside,
                checkout=asked.checkout,
                tensors=asked.tensors,
                has_transport=not asked.without_transport,
            ),
            Layout.of(text),
            number,
        )
        ours, theirs = (sum(rank[name] for rank in ranks) for name in ("ours", "theirs"))
        print_row(text, number, f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}")


if __name__ == "__main__":
    main()
