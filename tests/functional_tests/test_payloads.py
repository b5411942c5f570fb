"""Payloads over real processes: each is where its sequence is trained, whether it came as a key or
as tensors, and all ranks agree where one cannot be made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.packing.data_schedule import wrap_dataloader
from megatron.packing.model.get_batch import get_batch_on_this_rank_for_sequence_packing
from megatron.packing.scheduling.payload_cost import PayloadCost
from megatron.packing.step.decide import GlobalBatchError
from megatron.packing.step.delay import DelayQueue
from megatron.packing.step.global_batch import schedule_global_batch
from megatron.packing.step.payloads import PayloadStore
from megatron.packing.step.settings import PackingOptions
from tests.functional_tests.ranks import run_ranks
from tests.functional_tests.test_global_batch import GROUPS, Layout, iterators, start

IMAGE = 7
LAYOUTS = [
    Layout(3),
    Layout(2, tensor=2),
    Layout(4, pipeline=2),
    Layout(4, pipeline=2, virtual=2),
    Layout(4, context=2),
]
LENGTHS = [[30, 5, 17, 9], [12, 40, 3, 8], [22, 6, 31, 2]]


def images_of(number: int) -> list[torch.Tensor]:
    """Of any shape, each filled with whose it is; a third of the sequences has none."""
    return [torch.full((1 + i, 1 + number % 4), float(number)) for i in range(number % 3)]


def image_sample(number: int, length: int, way: str) -> dict[str, Any]:
    """Tokens say whose they are; as many placeholders as images, anywhere."""
    tokens = 1000 * number + torch.arange(length)
    images = images_of(number)
    tokens[torch.randperm(length)[: len(images)]] = IMAGE
    sample: dict[str, Any] = {"tokens": tokens}
    if images:
        sample["costs"] = {"vision": [200 * (1 + i) for i in range(len(images))]}
        if way != "lazy":
            sample["payloads"] = {"pixels": images}
        if way != "tensors":
            sample["payload_key"] = ("number", number)
    return sample


class Source(Iterator[list[Any]]):
    """A rank's samples. Those of `missing` data-parallel ranks find no files by a key."""

    def __init__(self, rank: int, way: str, missing: tuple[int, ...]) -> None:
        before = sum(len(its) for its in LENGTHS[:rank])
        self.samples = [
            image_sample(1 + before + i, length, way) for i, length in enumerate(LENGTHS[rank])
        ]
        self.restored: list[int] = []
        self._rank, self._missing = rank, missing

    def __next__(self) -> list[Any]:
        if not self.samples:
            raise StopIteration
        given, self.samples = self.samples[:4], self.samples[4:]
        return given

    def restore_sample(self, key: tuple[str, int]) -> dict[str, Any]:
        if self._rank in self._missing:
            raise FileNotFoundError(f"no tar of sample {key[1]}")
        self.restored.append(key[1])
        return {"tokens": None, "payloads": {"pixels": images_of(key[1])}}


def options(**store: Any) -> PackingOptions:
    costs = {"vision": PayloadCost(linear=1e9, quadratic=1e6)}
    return PackingOptions(payloads=PayloadStore(costs=costs, **store))


def groups() -> ProcessGroupCollection:
    return ProcessGroupCollection.use_mpu_process_groups(GROUPS)


def received(layout: Layout, way: str, missing: tuple[int, ...] = ()) -> Any:
    """On each rank: what its microbatches have, the sums of the step, and what was said."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron.packing.step.payloads").addHandler(handler)
    config = start(layout, sequence_packing_options=options(min_bytes_by_key=0))
    sources: list[Source] = []

    def make(rank: int) -> Iterator[Any]:
        sources.append(Source(rank, way, missing))
        return sources[0]

    try:
        batch = schedule_global_batch(iterators(layout, make), config, 1, groups())
    except GlobalBatchError as failure:
        return str(failure)
    chunks = batch.iterators(layout.virtual)
    found = []
    for number, iterator in enumerate(chunks if isinstance(chunks, list) else [chunks]):
        for _ in range(batch.stats.microbatches):
            one = get_batch_on_this_rank_for_sequence_packing(
                iterator, vpp_size=layout.virtual, vp_stage=number if layout.virtual else None
            )
            if one.payloads is None:
                continue
            ends = one.packed_seq_params.cu_seqlens_q.tolist()
            segments = [one.payloads.tokens[a:b].tolist() for a, b in pairwise(ends)]
            whose = [max(tokens) // 1000 for tokens in segments]  # 0 for padding alone
            pixels = one.payloads.tensors.get("pixels", [])
            numbers = one.payloads.segments.get("pixels", torch.empty(0)).tolist()
            wanted = [(n, image) for n, number in enumerate(whose) for image in images_of(number)]
            assert numbers == [n for n, _ in wanted]
            for (_, image), given in zip(wanted, pixels, strict=True):
                assert torch.equal(image, given)
            found += [whose[n] for n in numbers]
            places = one.payloads.placeholders(IMAGE)
            assert places.number == len(pixels)
            assert places.rows.numel() == one.padding_mask.numel()
    restored = sources[0].restored if sources else None
    place = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    return place, sorted(found), batch.stats, restored, lines


def expected(num_ranks: int) -> list[int]:
    """The number of each image's sequence."""
    numbers = range(1, 1 + sum(len(its) for its in LENGTHS[:num_ranks]))
    return [number for number in numbers for _ in images_of(number)]


@pytest.mark.parametrize("way", ["lazy", "tensors"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_image_is_where_its_sequence_is(layout: Layout, way: str) -> None:
    """A replica that trains another's images, or the right ones in another order, trains on."""
    ranks = run_ranks(received, layout.world, layout, way)
    num_data = layout.world // (layout.tensor * layout.pipeline * layout.context)
    firsts: dict[int, list[Any]] = {}
    for (data_rank, stage), found, stats, restored, _ in ranks:
        if stage:
            assert found == []
        else:
            assert found == firsts.setdefault(data_rank, found), "ranks of a stage differ"
        assert stats == ranks[0][2]
        assert stats.payloads == len(set(expected(num_data)))
        assert stats.payload_cost > 0
        assert stats.payload_bytes > 0
        assert (stats.moved_payload_bytes > 0) == (num_data > 1)
        if restored is not None:
            trained = sorted(set(found))
            assert sorted(restored) == (trained if way == "lazy" else [])
    merged = [one for its in firsts.values() for one in its]
    assert sorted(merged) == expected(num_data)
    said = [line for *_, lines in ranks for line in lines]
    assert len(said) == (way == "lazy" and num_data > 1)


def test_a_replica_without_the_files_receives_tensors() -> None:
    """Local copies of some shards are usual; the run must go on, and say so once."""
    ranks = run_ranks(received, 3, Layout(3), "both", (0, 1, 2))
    found = [one for _, its, *_ in ranks for one in its]
    assert sorted(found) == expected(3)
    assert [rank[3] for rank in ranks] == [[], [], []]
    lines = [line for *_, lines in ranks for line in lines]
    assert sum("cannot make payloads by their keys" in line for line in lines) == 1
    assert any("no tar of sample" in line for line in lines)


def test_a_payload_that_nobody_can_make_ends_the_step_on_all_ranks() -> None:
    """One rank that raises alone would leave the others in a collective."""
    answers = run_ranks(received, 3, Layout(3), "lazy", (0, 1, 2))
    assert len(set(answers)) == 1
    assert "cannot be made: FileNotFoundError: no tar of sample" in answers[0]
    answers = run_ranks(received, 2, Layout(2, tensor=2), "lazy", (0,))
    assert "cannot be made" in answers[0] == answers[1]


def delayed_payloads(way: str) -> Any:
    """A sequence of many images waits for others; then the run goes on from a checkpoint."""
    layout = Layout(2)
    queue = DelayQueue(2)
    config = start(layout, sequence_packing_options=options(min_bytes_by_key=0))
    rank = parallel_state.get_data_parallel_rank()
    large = image_sample(5, 20, way) | {"costs": {"vision": [5000]}}
    small = [{"tokens": torch.arange(9) + 1000 * (20 + rank + 2 * i)} for i in range(4)]

    class Fixed(Source):
        if way == "nothing restores":
            restore_sample = None  # type: ignore[assignment]

        def __next__(self) -> list[Any]:
            return [large, *small] if rank == 0 else small

    all_groups = groups()
    step = [schedule_global_batch(Fixed(rank, way, ()), config, 1, all_groups, queue=queue)]
    waiting = step[0].stats.waiting
    state = queue.state_dict()
    states: list[Any] = [None, None]
    torch.distributed.all_gather_object(states, state)
    resumed = DelayQueue(0)
    resumed.load_state_dict(states, rank, 2)
    large = {"tokens": torch.arange(9) + 50_000}
    step.append(schedule_global_batch(Fixed(rank, way, ()), config, 1, all_groups, queue=resumed))
    images = [
        [one.flatten().tolist() for one in microbatch["payloads"].tensors.get("pixels", [])]
        for microbatch in step[1].microbatches
        if "payloads" in microbatch
    ]
    return waiting, [one for its in images for one in its], state.get("payloads"), len(queue)


@pytest.mark.parametrize("way", ["both", "tensors", "nothing restores"])
def test_payloads_wait_with_their_sequences_and_in_checkpoints(way: str) -> None:
    """By key where there is one that something restores, so that nothing large waits; else as
    tensors.
    """
    ranks = run_ranks(delayed_payloads, 2, way)
    assert [rank[0] for rank in ranks] == [1, 1], "no sequence waited"
    found = [one for _, its, *_ in ranks for one in its]
    assert found == [one.flatten().tolist() for one in images_of(5)]
    (saved,) = ranks[0][2]
    assert saved == {"key": ("number", 5)} if way == "both" else set(saved) == {"tensors"}
    assert ranks[1][2] is None


def refused() -> list[str]:
    """Messages on both ranks of samples that no store takes, and that cannot be cut."""
    said: list[str] = []
    for config_options, sample in (
        (PackingOptions(), image_sample(4, 9, "tensors")),
        (
            PackingOptions(payloads=PayloadStore(), over_length_policy="truncate"),
            image_sample(4, 99, "tensors") | {"costs": None},
        ),
        (options(), image_sample(4, 9, "tensors") | {"costs": {"audio": [1]}}),
    ):
        if not said:
            config = start(Layout(2))
        config.sequence_packing_options = config_options  # type: ignore[attr-defined]
        rank = parallel_state.get_data_parallel_rank()
        given = iter([sample if rank else {"tokens": [1, 2]}])
        try:
            wrap_dataloader(given, config, 1)
        except GlobalBatchError as failure:
            said.append(str(failure))
    return said


def test_what_cannot_be_trained_is_refused_on_all_ranks() -> None:
    """With the way out, before a step is lost."""
    first, second = run_ranks(refused, 2)
    assert first == second
    assert "pass plugin.install(config, arguments, payloads=PayloadStore())" in first[0]
    assert "with payloads cannot be truncated to 64" in first[1]
    assert "there is no function for it" in first[2]
