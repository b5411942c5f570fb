"""mcore. What a global batch costs from the iterator to packed microbatches, and how much of it a
step waits for.

    python examples/benchmarks/data_path.py stages [LAYOUT SEQUENCES]    CPU of each stage, summed
        over ranks
    python examples/benchmarks/data_path.py exposed [LAYOUT SEQUENCES]   a step with batches made
        ahead, and ready-made
    python examples/benchmarks/data_path.py scale                        gather, decide and
        broadcast on synthetic tables

A LAYOUT is written `dp2tp2`; without one, all are measured. Samples are ready in memory: reading
and tokenizing are the workers' (see blending.py). The step of `exposed` is a stand-in: matrix
products for most of its time, small tensor operations for the rest, so that it competes with the
thread for the interpreter as launching kernels does.
"""

from __future__ import annotations

import argparse
import pickle
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packing.batch.layout import Alignment
from megatron.packing.scheduling.cost import gpt_pack_cost
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.step import exchange, global_batch
from megatron.packing.step.decide import RankReport, decide
from megatron.packing.step.groups import data_groups, is_data_rank
from megatron.packing.step.prefetch import Prefetcher
from megatron.packing.step.settings import PackingSettings

CAPACITY = 8192
STAGES = {
    "load": (global_batch, "load_samples"),
    "gather": (exchange, "gather"),
    "decide": (exchange, "decide"),
    "move": (global_batch, "move"),
    "broadcast": (global_batch, "broadcast_part"),
    "pack": (global_batch, "pack"),
}
STAGE_CASES = [("dp4", 512), ("dp4", 2048), ("dp2tp2", 2048), ("dp2pp2", 2048)]
EXPOSED_CASES = [
    (layout, number)
    for layout in ("dp1", "dp2", "dp4", "dp2tp2", "dp2pp2", "dp2cp2")
    for number in (64, 512, 2048)
]
SCALE_CASES = [(64, 16), (1024, 16), (4096, 16), (16384, 16), (16384, 61)]
STEPS = 7


class Layout(NamedTuple):
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1

    @classmethod
    def of(cls, text: str) -> Layout:
        return cls(**{name: int(size) for name, size in re.findall(r"(dp|tp|pp|cp)(\d+)", text)})

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


def lengths_of(number: int, seed: int) -> np.ndarray:
    """Chats: lognormal, a median of 400 tokens and a mean of about 800, up to a pack."""
    drawn = np.random.default_rng(seed).lognormal(np.log(400), 1.2, number)
    return np.clip(drawn, 16, CAPACITY).astype(np.int64)


def samples(number: int, rank: int) -> list[dict[str, np.ndarray]]:
    made = []
    for length in lengths_of(number, rank).tolist():
        stream = np.arange(length + 1) % 30000
        made.append(
            {
                "tokens": stream[:-1],
                "labels": stream[1:],
                "loss_mask": (stream[1:] % 3 > 0).astype(np.float32),
            }
        )
    return made


def prepared(layout: Layout) -> tuple[TransformerConfig, ProcessGroupCollection]:
    parallel_state.initialize_model_parallel(layout.tp, layout.pp, context_parallel_size=layout.cp)
    config = TransformerConfig(
        num_layers=8,
        hidden_size=1024,
        num_attention_heads=8,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        pipeline_dtype=torch.float32,
        sequence_parallel=layout.tp > 1,
        max_seqlen_per_dp_cp_rank=CAPACITY // layout.cp,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups(global_batch.GROUPS)
    data_groups(groups)
    return config, groups


def stages(layout: Layout, number: int) -> dict[str, float]:
    """Milliseconds of CPU of this process per step and stage, and of the whole data path."""
    config, groups = prepared(layout)
    spent = dict.fromkeys([*STAGES, "whole"], 0.0)
    inside: list[float] = []

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            inside.append(0.0)
            start = time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                taken, of_others = time.process_time() - start, inside.pop()
                spent[stage] += taken - of_others
                if inside:
                    inside[-1] += taken

        return run

    for stage, (module, name) in STAGES.items():
        setattr(module, name, timed(stage, getattr(module, name)))
    run = timed("whole", global_batch.schedule_global_batch)
    fetches_each = number // layout.dp
    own = samples(fetches_each, groups.dp.rank()) if is_data_rank(groups) else None
    for step in range(STEPS + 1):
        if step == 1:  # the first makes connections
            spent.update(dict.fromkeys(spent, 0.0))
        run(iter(own) if own is not None else None, config, fetches_each, groups)
    return {stage: 1000 * seconds / STEPS for stage, seconds in spent.items()}


def exposed(layout: Layout, number: int) -> dict[str, float]:
    """Median seconds of a stand-in step: on batches that are there, made two ahead, and made in the
    step.
    """
    config, groups = prepared(layout)
    fetches_each = number // layout.dp
    source: Iterator[Any] | None = None
    if is_data_rank(groups):
        source = cycle(samples(fetches_each, groups.dp.rank()))
    matrix, small = torch.rand(384, 384), torch.rand(16)

    def draw() -> global_batch.GlobalBatch:
        return global_batch.schedule_global_batch(source, config, fetches_each, groups)

    def compute() -> None:
        for _ in range(max(20, number // (2 * layout.dp))):
            for _ in range(2):
                matrix @ matrix
            for _ in range(60):
                small.add_(1)

    ready = draw()
    times: dict[str, list[float]] = {"ready": [], "ahead": [], "inline": []}
    ahead = Prefetcher(draw, 2)
    takes: dict[str, Callable[[], Any]] = {
        "ready": lambda: ready,
        "ahead": lambda: next(ahead),
        "inline": draw,
    }
    for kind in ("ahead", "ready", "inline") * 2:
        for step in range(STEPS + 2):
            dist.barrier()
            start = time.perf_counter()
            takes[kind]()
            compute()
            dist.barrier()
            if step > 1:
                times[kind].append(time.perf_counter() - start)
        ahead.settle()
    ahead.close()
    return {kind: statistics.median(taken) for kind, taken in times.items()}


def _rank_main(
    rank: int, layout: Layout, folder: str, measure: Callable[..., Any], number: int
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", layout.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world)
    found = measure(layout, number)
    dist.barrier()
    Path(f"{folder}/{rank}").write_bytes(pickle.dumps(found))


def on_ranks(measure: Callable[..., Any], layout: Layout, number: int) -> list[dict[str, float]]:
    """What `measure` returned on each rank of processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, (layout, folder, measure, number), nprocs=layout.world)  # type: ignore[attr-defined, no-untyped-call]
        return [pickle.loads(Path(f"{folder}/{rank}").read_bytes()) for rank in range(layout.world)]


def print_row(*columns: Any) -> None:
    print("| " + " | ".join(map(str, columns)) + " |", flush=True)


def scale() -> None:
    """One row per table of `ranks` data ranks with `each` sequences; in one process."""
    print_row(
        "ranks",
        "sequences",
        "gathered, MB",
        "unpickled, ms",
        "decide, s",
        "sent, MB",
        "sent, ms",
        "memory, MB",
    )
    print_row(*["---"] * 8)
    for num_ranks, each in SCALE_CASES:
        settings = PackingSettings(
            scheduler="default",
            alignment=Alignment(),
            capacity=CAPACITY,
            over_length_policy="error",
            microbatch_multiple=1,
            cost=gpt_pack_cost(
                num_layers=8,
                hidden_size=1024,
                num_attention_heads=8,
                num_query_groups=8,
                kv_channels=128,
                ffn_hidden_size=4096,
                swiglu=True,
                num_experts=None,
                moe_router_topk=0,
                moe_ffn_hidden_size=None,
                moe_shared_expert_intermediate_size=None,
                vocab_size=0,
            ),
            model=StepModel(),
        )
        reports = [
            RankReport(
                lengths=lengths_of(each, rank),
                fetch=np.arange(each),
                steps_delayed=np.zeros(each, np.int64),
                num_loss_tokens=lengths_of(each, rank),
                schema=(),
            )
            for rank in range(num_ranks)
        ]
        sent = [pickle.dumps(report) for report in reports]
        start = time.perf_counter()
        gathered = [pickle.loads(report) for report in sent]
        unpickled = time.perf_counter()
        decision = decide(gathered, each, settings, None)
        decided = time.perf_counter()
        answer = pickle.dumps(decision)
        pickle.loads(answer)
        end = time.perf_counter()
        assert decision is not None
        arrays = (decision.source_rank, decision.sizes.lengths, decision.rank, decision.microbatch)
        megabytes = [
            sum(map(len, sent)) / 1e6,
            len(answer) / 1e6,
            sum(array.nbytes for array in arrays) / 1e6,
        ]
        print_row(
            f"{num_ranks:,}",
            f"{num_ranks * each:,}",
            f"{megabytes[0]:.1f}",
            f"{1000 * (unpickled - start):.0f}",
            f"{decided - unpickled:.2f}",
            f"{megabytes[1]:.1f}",
            f"{1000 * (end - decided):.0f}",
            f"{megabytes[2]:.1f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["stages", "exposed", "scale"])
    parser.add_argument("layout", nargs="?")
    parser.add_argument("sequences", nargs="?", type=int)
    asked = parser.parse_args()
    if asked.what == "scale":
        scale()
        return
    cases: Sequence[tuple[str, int]] = STAGE_CASES if asked.what == "stages" else EXPOSED_CASES
    if asked.layout is not None:
        cases = [(asked.layout, asked.sequences or 512)]
    if asked.what == "stages":
        print_row("layout", "sequences", "tokens", *STAGES, "rest", "all, ms of CPU")
        print_row(*["---"] * (len(STAGES) + 5))
    else:
        print_row(
            "layout", "sequences", "ready, ms", "ahead, ms", "more", "in the step, ms", "more"
        )
        print_row(*["---"] * 7)
    for text, number in cases:
        layout = Layout.of(text)
        if asked.what == "stages":
            ranks = on_ranks(stages, layout, number)
            by_stage = {stage: sum(rank[stage] for rank in ranks) for stage in STAGES}
            rest = sum(rank["whole"] for rank in ranks)
            tokens = sum(
                int(lengths_of(number // layout.dp, rank).sum()) for rank in range(layout.dp)
            )
            whole = rest + sum(by_stage.values())
            print_row(
                text,
                number,
                f"{tokens:,}",
                *(f"{each:.1f}" for each in (*by_stage.values(), rest, whole)),
            )
            continue
        found = on_ranks(exposed, layout, number)[0]
        more = [f"{found[kind] / found['ready'] - 1:+.1%}" for kind in ("ahead", "inline")]
        times = [f"{1000 * found[kind]:.1f}" for kind in ("ready", "ahead", "inline")]
        print_row(text, number, times[0], times[1], more[0], times[2], more[1])


if __name__ == "__main__":
    main()
