"""The data path of one global batch over real processes: every token arrives once; whatever goes
wrong, all ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    initialize_rerun_state_machine,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packing.data_schedule import wrap_dataloader
from megatron.packing.model.get_batch import get_batch_on_this_rank_for_sequence_packing
from megatron.packing.step import decide
from megatron.packing.step.decide import GlobalBatchError
from megatron.packing.step.delay import LocalSamples
from megatron.packing.step.global_batch import GROUPS, schedule_global_batch
from megatron.packing.step.groups import data_groups, is_data_rank
from megatron.packing.step.settings import PackingOptions
from tests.functional_tests.ranks import run_ranks

CAPACITY = 64


class Layout(NamedTuple):
    """Parallel sizes; what is left of the world is data parallel."""

    world: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    virtual: int | None = None


LAYOUTS = [
    Layout(1),
    Layout(2),
    Layout(3),
    Layout(2, tensor=2),
    Layout(4, pipeline=4),
    Layout(4, pipeline=2, virtual=2),
    Layout(4, context=2),
    Layout(3, context=3),
    Layout(8, tensor=2, pipeline=2),
    Layout(4, tensor=2, context=2),
]


def sample(number: int, length: int) -> dict[str, torch.Tensor]:
    """A sequence whose tokens say whose they are: 1000 number + position."""
    tokens = 1000 * number + torch.arange(length)
    return {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": (tokens % 3 > 0).float() * (1 + number % 2),
    }


def with_extra(number: int, length: int) -> dict[str, torch.Tensor]:
    """`sample` with two extra columns."""
    usual = sample(number, length)
    return {**usual, "advantages": usual["tokens"] / 8, "sample_id": torch.tensor(number)}


def start(layout: Layout, scheduler: str = "default", **settings: Any) -> TransformerConfig:
    parallel_state.initialize_model_parallel(
        layout.tensor, layout.pipeline, layout.virtual, context_parallel_size=layout.context
    )
    # Where packs are cut, some tokens more than whole alignment units: a pack still holds no more
    # than CAPACITY.
    per_rank = -(-CAPACITY // layout.context) + (layout.tensor * layout.context > 1)
    config = TransformerConfig(
        num_layers=8,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual,
        context_parallel_size=layout.context,
        pipeline_dtype=torch.float32,
        sequence_parallel=layout.tensor > 1,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        max_seqlen_per_dp_cp_rank=per_rank,
    )
    config.sequence_packing_scheduler = scheduler  # type: ignore[attr-defined]
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def iterators(layout: Layout, make: Callable[[int], Iterator[Any]]) -> Any:
    """What this rank hands over: `make(data-parallel rank)` where it draws, one per virtual stage;
    None elsewhere.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "cp", "dp"])
    own = make(groups.dp.rank()) if is_data_rank(groups) else None
    return own if layout.virtual is None else [own] * layout.virtual


def received(layout: Layout, scheduler: str, lengths_of_ranks: list[list[int]]) -> Any:
    """On each rank: the two sums, number of microbatches, and what `get_batch` gives for each, with
    its coordinates.
    """
    config = start(layout, scheduler)
    drawn = 0

    def draws(rank: int) -> Iterator[Any]:
        nonlocal drawn
        before = sum(len(lengths) for lengths in lengths_of_ranks[:rank])
        for i, length in enumerate(lengths_of_ranks[rank]):
            drawn += 1
            yield with_extra(1 + before + i, length)

    num_fetches = max(len(lengths) for lengths in lengths_of_ranks)
    loader = wrap_dataloader(iterators(layout, draws), config, num_fetches)
    chunks = (
        loader.data_iterator if isinstance(loader.data_iterator, list) else [loader.data_iterator]
    )
    batches = []
    for number, iterator in enumerate(chunks):
        for _ in range(loader.num_microbatches):
            batch = get_batch_on_this_rank_for_sequence_packing(
                iterator, vpp_size=layout.virtual, vp_stage=number if layout.virtual else None
            )
            batches.append(
                {
                    "cu_seqlens": batch.packed_seq_params.cu_seqlens_q.tolist(),
                    **{
                        name: None if value is None else value[0].tolist()
                        for name, value in batch._asdict().items()
                        if isinstance(value, torch.Tensor) or value is None
                    },
                    "advantages": batch.extra["advantages"][0].tolist() if batch.extra else None,
                    "sample_id": batch.extra["sample_id"].tolist() if batch.extra else None,
                }
            )
        assert next(iterator, None) is None
    place = {
        "dp": parallel_state.get_data_parallel_rank(),
        "cp": parallel_state.get_context_parallel_rank(),
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
    }
    return (*loader[1:], place, batches)


@pytest.mark.parametrize("scheduler", ["default", "empty", "dp_balanced"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_token_arrives_once(layout: Layout, scheduler: str) -> None:
    """A sample sent to the wrong rank, cut wrongly over context parallel, or packed twice still
    trains.
    """
    data_parallel = layout.world // (layout.tensor * layout.pipeline * layout.context)
    by_rank = [[5, 64, 1, 17, 30], [33, 2, 8, 64, 9], [7, 7, 50, 12, 21]][:data_parallel]
    ranks = run_ranks(received, layout.world, layout, scheduler, by_rank)
    lengths = [length for lengths in by_rank for length in lengths]
    for data_rank in range(data_parallel):
        layouts = [
            [batch["cu_seqlens"] for batch in rank[4]]
            for rank in ranks
            if rank[3]["dp"] == data_rank
        ]
        assert all(known == layouts[0] for known in layouts), "stages or shards see different packs"
    assert {rank[:2] for rank in ranks} == {(ranks[0][0], sum(lengths))}
    assert {rank[2] for rank in ranks} == {sum(length**2 for length in lengths)}
    assert ranks[0][0] % (layout.pipeline if layout.virtual else 1) == 0
    expected = {1 + i: with_extra(1 + i, length) for i, length in enumerate(lengths)}
    first = {
        name: seen(ranks, name, stage=0, context=layout.context)
        for name in ("tokens", "position_ids")
    }
    last = {
        name: seen(ranks, name, stage=layout.pipeline - 1, context=layout.context)
        for name in ("labels", "loss_mask", "advantages")
    }
    for *_, batches in ranks:
        for batch in batches:  # a segment's number, 0 for padding alone
            ends = batch["cu_seqlens"]
            if batch["sample_id"] is not None and layout.context == 1:
                firsts = [batch["labels"][begin] for begin in ends[:-1]]
                assert batch["sample_id"] == [label // 1000 for label in firsts]
    found = sorted(int(tokens[0]) // 1000 for tokens in first["tokens"] if tokens[0] >= 1000)
    assert found == sorted(expected)
    for i, tokens in enumerate(first["tokens"]):
        if tokens[0] < 1000:
            assert not any(tokens)  # padding only
            assert not any(last["loss_mask"][i])
            continue
        wanted = expected[int(tokens[0]) // 1000]
        length = len(wanted["tokens"])
        assert tokens[:length] == wanted["tokens"].tolist()
        assert first["position_ids"][i][:length] == list(range(length))
        assert last["labels"][i][:length] == wanted["labels"].tolist()
        assert last["loss_mask"][i][:length] == wanted["loss_mask"].tolist()
        assert last["advantages"][i][:length] == wanted["advantages"].tolist()
        assert not any(last["loss_mask"][i][length:])


STEPS: list[list[list[dict[str, Any]]]] = [
    [
        [{"tokens": [1, 2, 3], "gains": [1, 2, 3], "id": [4]}],
        [{"tokens": [5], "gains": [0.5], "id": 6}],
    ],
    [[{"tokens": [7], "gains": [1], "id": [8]}], [{"tokens": [9], "gains": [1], "id": [0.5]}]],
    [[{"tokens": list(range(99)), "gains": [1] * 99, "id": 1}], []],
    [[{"tokens": [1, 2, 3], "gains": 3, "id": 4}], []],
]
"""Samples of two ranks: of one token beside others, of one token alone, none (the only one is too
long), and of another scope.
"""


def fields_of_steps() -> list[list[Any]]:
    """On each rank, by scheduler and step: the users' fields with their types, and the part of the
    batch that each has rows of.
    """
    layout = Layout(2)
    options = PackingOptions(over_length_policy="drop")
    config = start(layout, sequence_packing_options=options)
    return [
        fields_of_run(layout, copy(config), name) for name in ("default", "empty", "dp_balanced")
    ]


def fields_of_run(layout: Layout, config: TransformerConfig, scheduler: str) -> list[Any]:
    config.sequence_packing_scheduler = scheduler  # type: ignore[attr-defined]
    found: list[Any] = []
    own = iterators(layout, lambda rank: iter([step[rank] for step in STEPS]))
    for _ in STEPS:
        try:
            loader = wrap_dataloader(own, config, 1)
        except GlobalBatchError as error:
            found.append(str(error))
            continue
        assert not isinstance(loader.data_iterator, list)
        for _ in range(loader.num_microbatches):
            batch = get_batch_on_this_rank_for_sequence_packing(loader.data_iterator)
            assert batch.labels is not None
            scopes = {tuple(batch.labels.shape): "token"}
            scopes |= {(batch.packed_seq_params.cu_seqlens_q.numel() - 1,): "sequence"}
            found.append(
                {n: (scopes[tuple(each.shape)], str(each.dtype)) for n, each in batch.extra.items()}
            )
    return found


def test_fields_of_users_are_those_of_the_run() -> None:
    """A loss would find a field in one step and not in another, or of another shape, by what other
    ranks happened to load.
    """
    for found in (run for rank in run_ranks(fields_of_steps, 2) for run in rank):
        assert "'gains' must have one scope and shape in all samples of a run" in found.pop()
        ids = [fields.pop("id") for fields in found]
        assert ids == [("sequence", "torch.int64")] + [("sequence", "torch.float64")] * 2
        assert found == [{"gains": ("token", "torch.float64")}] * 3


def seen(ranks: list[Any], name: str, stage: int, context: int) -> list[list[Any]]:
    """`name` of every segment of every pack, context-parallel shards put together; equal on
    tensor-parallel ranks.
    """
    segments: list[list[Any]] = []
    shards: dict[tuple[int, int], dict[int, Any]] = {}
    for *_, place, batches in ranks:
        if place["pp"] != stage:
            assert all(
                batch[field] is None
                for batch in batches
                for field in ("tokens", "labels")
                if field.startswith(name)
            )
            continue
        for number, batch in enumerate(batch for batch in batches if batch[name] is not None):
            known = shards.setdefault((place["dp"], number), {}).setdefault(place["cp"], batch)
            assert known[name] == batch[name]
            assert known["cu_seqlens"] == batch["cu_seqlens"]
    for _, by_context in sorted(shards.items()):
        ends = by_context[0]["cu_seqlens"]
        offset = 0
        for begin, end in pairwise(ends):
            size = end - begin
            whole = [None] * size
            for rank in range(context):
                mine = by_context[rank][name][offset : offset + size // context]
                if context == 1:
                    whole = mine
                    continue
                piece = size // (2 * context)
                whole[rank * piece : (rank + 1) * piece] = mine[:piece]
                whole[size - (rank + 1) * piece : size - rank * piece] = mine[piece:]
            segments.append(whole)
            offset += size // context
    return segments


def outcome(layout: Layout, case: str) -> str:
    """What this rank gets to hear in a case that cannot work."""
    policy: Any = {"truncate": "truncate", "drop": "drop"}.get(case, "error")
    scheduler = {"over capacity": "empty", "scheduler exits": "sys:exit"}.get(case, "default")
    config = start(
        layout, scheduler, sequence_packing_options=PackingOptions(over_length_policy=policy)
    )
    groups = ProcessGroupCollection.use_mpu_process_groups(GROUPS)
    last_data = groups.dp.size() - 1

    def draws(rank: int) -> Iterator[Any]:
        guilty = rank == last_data
        if case == "end":
            return
        yield sample(1 + rank, 10)
        if case == "fails" and guilty:
            raise OSError("disk gone")
        if case == "bad sample" and guilty:
            yield {"tokens": [1, 2], "labels": [1]}
        if case == "too long" and guilty:
            yield sample(7, CAPACITY + 1)
        if case in ("truncate", "drop"):
            yield [sample(7, CAPACITY + 1)] * (1 + rank)
        if case == "over capacity":
            yield [sample(8, 40), sample(9, 40)]
        if case == "some end" and rank == 0:
            return
        yield sample(3, 20)

    data = iterators(layout, draws)
    if case == "no iterator" and dist.get_rank() == 0:
        data = None
    if case in FAULTS:
        owner, name, guilty = FAULTS[case]
        if groups.dp.rank() == guilty:
            setattr(owner, name, mock.Mock(side_effect=MemoryError("injected")))
    try:
        stats = schedule_global_batch(data, config, 2, groups).stats
    except GlobalBatchError as failure:
        return str(failure)
    except StopIteration:
        return "end"
    return f"{stats.tokens} tokens, {stats.dropped_samples} dropped, {stats.truncated_samples} cut"


FAULTS: dict[str, tuple[Any, str, int]] = {
    "no memory to join": (LocalSamples, "of", 1),
    "no memory to decide": (decide, "packing_stats", 0),
}
"""A function that raises what nobody expects of it, on one data-parallel rank."""
PIPELINED, SPLIT, CONTEXT = Layout(4, pipeline=2), Layout(4, tensor=2), Layout(4, context=2)
CASES = [
    (Layout(2), "fails", "data-parallel rank 1 (rank 1), fetch 1: OSError: disk gone"),
    (PIPELINED, "fails", "fetch 1: OSError: disk gone"),
    (CONTEXT, "fails", "fetch 1: OSError: disk gone"),
    (PIPELINED, "bad sample", "fetch 1: ValueError: 'labels' must be as long as 'tokens'"),
    (Layout(2), "too long", f"a sample of {CAPACITY + 1} tokens does not fit a pack of {CAPACITY}"),
    (Layout(2), "truncate", f"{10 + 10 + 3 * CAPACITY} tokens, 0 dropped, 3 cut"),
    (Layout(2), "drop", "20 tokens, 3 dropped, 0 cut"),
    (SPLIT, "too long", f"a sample of {CAPACITY + 1} tokens does not fit a pack of {CAPACITY}"),
    (PIPELINED, "truncate", f"{10 + 10 + 3 * CAPACITY} tokens, 0 dropped, 3 cut"),
    (CONTEXT, "drop", "20 tokens, 3 dropped, 0 cut"),
    (SPLIT, "over capacity", "scheduler 'empty'"),
    (PIPELINED, "scheduler exits", "scheduler 'sys:exit': SystemExit: ScheduleRequest("),
    (SPLIT, "no iterator", "must have a data iterator, but has none"),
    (PIPELINED, "end", "end"),
    (Layout(3), "end", "end"),
    (SPLIT, "no memory to join", "data-parallel rank 1 (rank 2): MemoryError: injected"),
    (PIPELINED, "no memory to decide", "rank 0 cannot schedule the step: MemoryError: injected"),
    (Layout(2), "some end", f"{10 + 10 + 20} tokens, 0 dropped, 0 cut"),
]


@pytest.mark.parametrize(("layout", "case", "words"), CASES, ids=lambda value: str(value)[:40])
def test_all_ranks_agree(layout: Layout, case: str, words: str) -> None:
    """If one rank raises and the others wait in a collective, the job hangs until its timeout."""
    heard = run_ranks(outcome, layout.world, layout, case, timeout_seconds=30)
    assert len(set(heard)) == 1, heard
    assert words in heard[0]


def with_iterators_everywhere(layout: Layout) -> tuple[int, int, bool]:
    """Every rank hands an iterator over: the batch's tokens, how often this rank's was drawn from,
    whether it draws.
    """
    config = start(layout)
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "cp", "dp"])
    drawn = 0

    def draws() -> Iterator[Any]:
        nonlocal drawn
        for number in range(1, 10):
            drawn += 1
            yield sample(10 * groups.dp.rank() + number, number)

    loader = wrap_dataloader(draws(), config, 3)
    return loader.num_total_tokens_this_global_batch, drawn, is_data_rank(groups)


def test_iterators_of_ranks_that_do_not_draw_are_left_alone() -> None:
    """Scripts give every rank a loader: drawing from all of them would encode each sample many
    times over.
    """
    for tokens, drawn, draws in run_ranks(
        with_iterators_everywhere, 8, Layout(8, tensor=2, pipeline=2)
    ):
        assert tokens == 2 * (1 + 2 + 3)
        assert drawn == (3 if draws else 0)


COLLECTIVES = (
    *(
        "all_gather",
        "all_gather_into_tensor",
        "all_reduce",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "gather",
    ),
    *("reduce", "reduce_scatter_tensor", "scatter", "send", "recv"),
)
MAX_COLLECTIVES = 8
"""Of a step, where torch's collectives of objects make two: their size and their bytes."""


def count_calls(calls: list[str]) -> None:
    """From now on note this process's collectives, those that torch's collectives of objects make
    among them.
    """
    for module in (dist, dist.distributed_c10d):
        for name in COLLECTIVES:
            setattr(module, name, _noted(getattr(module, name), name, calls))


def _noted(original: Callable[..., Any], name: str, calls: list[str]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        return original(*arguments, **options)

    return call


def count_collectives(layout: Layout, lengths: list[int]) -> dict[str, Any]:
    """How often this rank calls which collective, and the bytes of samples that it sends, for one
    global batch.
    """
    config = start(layout)
    data_groups(ProcessGroupCollection.use_mpu_process_groups(GROUPS))  # made once per run
    calls: list[str] = []
    payload = 0
    plain_all_to_all = dist.all_to_all_single

    def all_to_all_single(*arguments: Any, **options: Any) -> Any:
        nonlocal payload
        payload += arguments[1].numel() * arguments[1].element_size()
        return plain_all_to_all(*arguments, **options)

    setattr(dist, "all_to_all_single", all_to_all_single)  # noqa: B010  mypy knows better
    count_calls(calls)
    share = [sample(1 + number, length) for number, length in enumerate(lengths)]
    loader = wrap_dataloader(iterators(layout, lambda rank: iter([share])), config, 1)
    per_step = len(calls)
    assert not isinstance(loader.data_iterator, list)
    for _ in range(loader.num_microbatches):
        get_batch_on_this_rank_for_sequence_packing(loader.data_iterator)
    return {
        "microbatches": loader.num_microbatches,
        "per step": calls[:per_step],
        "in microbatches": calls[per_step:],
        "bytes per token": payload / sum(lengths),
    }


@pytest.mark.parametrize(
    "layout", [Layout(2), Layout(8, tensor=2, pipeline=2), Layout(4, context=2)], ids=str
)
def test_collectives_do_not_grow_with_microbatches(layout: Layout) -> None:
    """A broadcast per field and microbatch is what makes packing slow elsewhere; here all travels
    once per step.
    """
    few = run_ranks(count_collectives, layout.world, layout, [50, 40])
    many = run_ranks(count_collectives, layout.world, layout, [50, 40] * 20)
    assert many[0]["microbatches"] >= 10 * few[0]["microbatches"]
    for one, other in zip(few, many, strict=True):
        assert one["per step"] == other["per step"]
        assert len(one["per step"]) <= MAX_COLLECTIVES
        assert one["in microbatches"] == other["in microbatches"] == []
        assert other["bytes per token"] < 5.5
    assert any(rank["bytes per token"] > 5 for rank in many)


def repeated(layout: Layout) -> Any:
    """One step run twice on a rewound iterator, and what the next step draws."""
    config = start(layout)
    initialize_rerun_state_machine(
        mode=RerunMode.VALIDATE_RESULTS
    )  # the iterator keeps nothing without it
    source = RerunDataIterator(iter([sample(number, 5 * number) for number in range(1, 9)]))
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp"])

    def step() -> list[list[int]]:
        loader = wrap_dataloader(source if is_data_rank(groups) else None, config, 4)
        assert not isinstance(loader.data_iterator, list)
        return [microbatch["tokens"].tolist() for microbatch in loader.data_iterator]

    first = step()
    source.rewind()
    second = step()
    source.advance()
    return first, second, step()


@pytest.mark.parametrize("layout", [Layout(1), Layout(2, tensor=2), Layout(2)], ids=str)
def test_a_step_run_again_packs_the_same_and_draws_nothing_more(layout: Layout) -> None:
    """Megatron reruns a step whose result it doubts: it must see the same packs, and the step after
    it the next samples.
    """
    for first, second, following in run_ranks(repeated, layout.world, layout):
        assert first == second
        numbers = {token // 1000 for pack in following for token in pack}
        assert numbers & {5, 6, 7, 8}
        assert not numbers & {1, 2, 3, 4}


def with_own_groups(layout: Layout) -> Any:
    """The same batch through global groups, and through a collection where there are no global
    ones.
    """
    config = start(layout)
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "cp", "dp", "mp"])
    data = [sample(1 + groups.dp.rank(), 20), sample(5 + groups.dp.rank(), 31)]

    def step(**arguments: Any) -> list[Any]:
        loader = wrap_dataloader(
            iter(data) if is_data_rank(groups) else None, config, 2, **arguments
        )
        assert not isinstance(loader.data_iterator, list)
        batches = [
            get_batch_on_this_rank_for_sequence_packing(loader.data_iterator, **arguments)
            for _ in range(loader.num_microbatches)
        ]
        return [None if batch.tokens is None else batch.tokens.tolist() for batch in batches]

    expected = step()
    parallel_state.destroy_model_parallel()
    return expected, step(pg_collection=groups)


@pytest.mark.parametrize(
    "layout", [Layout(4, tensor=2), Layout(4, context=2), Layout(4, pipeline=2)], ids=str
)
def test_groups_need_not_be_global(layout: Layout) -> None:
    """Callers that hand their own groups over would silently get the global ones."""
    for expected, found in run_ranks(with_own_groups, layout.world, layout):
        assert expected == found
