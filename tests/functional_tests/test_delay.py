"""Outliers that wait for later steps, over real processes and in whole runs: none is lost, none is
seen twice.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    initialize_rerun_state_machine,
)

from megatron.packing.data_schedule import wrap_dataloader
from megatron.packing.step.delay import DelayQueue
from megatron.packing.step.global_batch import GROUPS, schedule_global_batch
from megatron.packing.step.groups import data_groups, is_data_rank
from tests.functional_tests.forked_runs import ForkedRun, train_forked
from tests.functional_tests.ranks import run_ranks
from tests.functional_tests.test_global_batch import (
    CAPACITY,
    MAX_COLLECTIVES,
    Layout,
    count_calls,
    sample,
    start,
)
from tests.functional_tests.test_run import steps_of, wait_for_step
from tests.unit_tests.packing.batch.test_reading import TREE

MAX_STEPS = 2
DRAWS = 4
NUM_STEPS = 6
LAYOUTS = [
    Layout(2),
    Layout(3),
    Layout(2, tensor=2),
    Layout(4, pipeline=2, virtual=2),
    Layout(4, context=2),
]


def lengths_of(rank: int) -> list[int]:
    """Of what a data-parallel rank draws: short ones, now and then one as long as a pack, and at
    the end more outliers than may leave a step without company.
    """
    early = range(DRAWS * (NUM_STEPS - 1))
    lengths = [CAPACITY if (7 * i + 3 * rank) % 11 == 0 else 1 + (i + rank) % 3 for i in early]
    return [*lengths, *((CAPACITY, 24, 10, 1) if rank == 0 else (1, 1, 1, 1))]


def data(rank: int) -> Iterator[dict[str, Any]]:
    for i, length in enumerate(lengths_of(rank)):
        yield sample(1 + 100 * rank + i, length)


def numbers_in(microbatches: Any) -> list[int]:
    """Whose the sequences are; of a context-parallel rank all, as packs are cut later."""
    found = []
    for microbatch in microbatches:
        starts = microbatch["cu_seqlens_padded"][:-1].tolist()
        tokens = microbatch["tokens" if microbatch.get("tokens") is not None else "labels"]
        found += [int(tokens[start]) // 1000 for start in starts]
    return [number for number in found if number]


def played(layout: Layout, max_steps: int | None) -> Any:
    """All steps of finite data: whose sequences each had here, its account; and what the steps
    called.
    """
    config = start(layout)
    groups = ProcessGroupCollection.use_mpu_process_groups(GROUPS)
    queue = None if max_steps is None else DelayQueue(max_steps)
    iterator: Any = data(groups.dp.rank()) if is_data_rank(groups) else None
    data_groups(groups)  # made once per run
    calls: list[str] = []
    count_calls(calls)
    steps = []
    while True:
        try:
            batch = schedule_global_batch(
                [iterator] * (layout.virtual or 1) if layout.virtual else iterator,
                config,
                DRAWS,
                groups,
                queue=queue,
            )
        except StopIteration:
            break
        stats = batch.stats
        told = replace(stats, delays=[]), stats.delays, stats.waiting
        steps.append((numbers_in(batch.microbatches), *told, len(calls)))
        calls.clear()
    place = (groups.dp.rank(), groups.tp.rank() == groups.cp.rank() == 0 and groups.pp.rank() == 0)
    return place, steps, 0 if queue is None else len(queue)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_sequence_once_and_all_at_the_end_of_the_data(layout: Layout) -> None:
    """What waits when the data ends, or on a rank that forgets it, would never be trained on."""
    data_parallel = layout.world // (layout.tensor * layout.pipeline * layout.context)
    ranks = run_ranks(played, layout.world, layout, MAX_STEPS)
    assert len({len(steps) for _, steps, _ in ranks}) == 1
    firsts = [steps for (_, is_first), steps, _ in ranks if is_first]
    assert len(firsts) == data_parallel
    by_step = [
        sorted(number for steps in firsts for number in steps[i][0]) for i in range(len(firsts[0]))
    ]
    assert len(by_step) == NUM_STEPS + (data_parallel > 1), "what still waits leaves in one step"
    loaded_at = {
        1 + 100 * rank + i: i // DRAWS
        for rank in range(data_parallel)
        for i in range(DRAWS * NUM_STEPS)
    }
    assert sorted(number for numbers in by_step for number in numbers) == sorted(loaded_at)
    delays = [
        [step - loaded_at[number] for number in numbers] for step, numbers in enumerate(by_step)
    ]
    assert max(map(max, delays)) == (MAX_STEPS if data_parallel > 1 else 0)
    for i, found in enumerate(delays):
        assert min(found) >= 0
        for _, steps, left in ranks:
            _, stats, histogram, waiting, calls = steps[i]
            assert stats == firsts[0][i][1]
            assert histogram == [found.count(delay) for delay in range(max(found) + 1)]
            assert waiting == sum(map(len, by_step[i + 1 :])) - sum(
                at > i for at in loaded_at.values()
            )
            assert calls <= MAX_COLLECTIVES
            assert left == 0


def test_a_queue_in_which_none_may_wait_changes_nothing() -> None:
    """Runs that leave the option off must train as they did before there was one."""
    layout = Layout(2)
    without, with_queue = (
        run_ranks(played, layout.world, layout, max_steps) for max_steps in (None, 0)
    )
    for one, other in zip(without, with_queue, strict=True):
        assert [(step[0], step[1], step[4]) for step in one[1]] == [
            (step[0], step[1], step[4]) for step in other[1]
        ]
        assert all(step[2] == [] for step in one[1])


def repeated(layout: Layout) -> Any:
    """Steps of which each is run twice on a rewound iterator, and once by a queue whose steps are
    not.
    """
    config = start(layout)
    initialize_rerun_state_machine(
        mode=RerunMode.VALIDATE_RESULTS
    )  # the iterator keeps nothing without it
    groups = ProcessGroupCollection.use_mpu_process_groups(GROUPS)
    source, plain = RerunDataIterator(data(groups.dp.rank())), data(groups.dp.rank())
    queue, plain_queue = DelayQueue(MAX_STEPS), DelayQueue(MAX_STEPS)

    def step(iterator: Any, own_queue: DelayQueue) -> list[list[int]]:
        loader = wrap_dataloader(
            iterator if is_data_rank(groups) else None, config, DRAWS, queue=own_queue
        )
        assert not isinstance(loader.data_iterator, list)
        return [microbatch["tokens"].tolist() for microbatch in loader.data_iterator]

    steps = []
    for _ in range(NUM_STEPS):
        first = step(source, queue)
        source.rewind()
        steps.append((first, step(source, queue), step(plain, plain_queue), len(plain_queue)))
        source.advance()
    return steps


@pytest.mark.parametrize("layout", [Layout(2), Layout(4, tensor=2)], ids=str)
def test_a_step_run_again_packs_the_same(layout: Layout) -> None:
    """Megatron reruns a step whose result it doubts: with what waits advanced twice it would see
    other packs.
    """
    ranks = run_ranks(repeated, layout.world, layout)
    for steps in ranks:
        for first, second, plain, _ in steps:
            assert first == second == plain
    assert any(num_waiting for steps in ranks for *_, num_waiting in steps)


def failing(layout: Layout, fault: str) -> Any:
    """A step that fails after one in which some wait: what waits before and after."""
    config = start(layout, mtp_num_layers=1)
    groups = ProcessGroupCollection.use_mpu_process_groups(GROUPS)
    queue = DelayQueue(MAX_STEPS)

    def draws() -> Iterator[Any]:
        for number, given in enumerate(data(groups.dp.rank())):
            if number == DRAWS + 1 and groups.dp.rank() == 1 and fault == "disk gone":
                raise OSError(fault)
            yield given if number != DRAWS + 1 or fault == "disk gone" else TREE

    iterator = draws()
    schedule_global_batch(iterator, config, DRAWS, groups, queue=queue)
    before = queue.state_dict()
    with pytest.raises(RuntimeError, match=fault):
        schedule_global_batch(iterator, config, DRAWS, groups, queue=queue)
    found = (
        [state["columns"]["tokens"].tolist(), state["steps"].tolist()]
        for state in (before, queue.state_dict())
    )
    return *found, len(queue)


@pytest.mark.parametrize("fault", ["disk gone", "trees of sequences cannot be trained with"])
def test_an_error_leaves_the_queue_as_it_was(fault: str) -> None:
    """The run is saved at the step before: the sequences that the failed one took would be missing
    there.
    """
    ranks = run_ranks(failing, 2, Layout(2), fault)
    assert all(before == after for before, after, _ in ranks)
    assert any(num_waiting for *_, num_waiting in ranks)


LAST = 12
GLOBAL_BATCH = 8
FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 512 "
    "--position-embedding-type rope --lr 1e-2 --sequence-packing --eval-iters 0 --mock-data "
    f"--train-iters {LAST} --global-batch-size {GLOBAL_BATCH} --log-interval 1 --save-interval 2"
).split()


def arguments_of(folder: Path, lengths: Path, flags: Sequence[str]) -> list[str]:
    """To train in `folder`, from its last checkpoint on."""
    config = f'{{"mode": "file", "path": "{lengths}"}}'
    checkpoints = str(folder / "checkpoints")
    paths = ("--run-dir", str(folder), "--save", checkpoints, "--load", checkpoints)
    return [*FLAGS, "--sft-mock-dataset-config-json", config, *paths, *flags]


def train(num_processes: int, folder: Path, lengths: Path, *flags: str) -> str:
    status, output = train_forked(num_processes, arguments_of(folder, lengths, flags))
    assert status == 0, output
    return output


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long tail: one sequence that no company is enough for, a few that find some."""
    path = tmp_path_factory.mktemp("lengths") / "lengths.csv"
    rest = (130 if i % 23 == 0 else 1 + i % 9 for i in range(1, LAST * GLOBAL_BATCH))
    path.write_text("\n".join(map(str, [512, *rest])) + "\n")
    return path


@pytest.fixture(scope="module")
def delayed(lengths: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks in which sequences wait up to all of its steps, never stopped."""
    folder = tmp_path_factory.mktemp("delayed")
    output = train(2, folder, lengths, "--outlier-delay-steps", str(LAST))
    assert "sequences by steps delayed: 0:" in output
    return folder


def test_a_run_with_delay_loses_nothing(lengths: Path, delayed: Path, tmp_path: Path) -> None:
    """All that is drawn must be trained on, at the last step at the latest; off means that nothing
    is told of it.
    """
    train(2, tmp_path, lengths)
    assert trained_on(tmp_path) == trained_on(delayed)
    plain, found = steps_of(tmp_path), steps_of(delayed)
    assert not any("delays" in step or "waiting" in step for step in plain.values())
    assert [step["consumed_samples"] for step in plain.values()] == [
        step["consumed_samples"] for step in found.values()
    ]
    assert found[LAST]["waiting"] == 0
    assert sum(sum(step["delays"]) for step in found.values()) == LAST * GLOBAL_BATCH
    assert sum(sum(step["delays"][1:]) for step in found.values()) > 2


def trained_on(folder: Path) -> Counter[int]:
    """How many sequences of each length all steps together had."""
    lines = [json.loads(line) for line in (folder / "packs.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(1, LAST + 1))
    return Counter(
        length for line in lines for rank in line["packs"] for pack in rank for length in pack
    )


def untimed(step: dict[str, Any]) -> dict[str, Any]:
    timed = (
        "step_seconds",
        "data_seconds",
        "passes_seconds",
        "tokens_per_second",
        "tflops_per_device",
    )
    return {name: value for name, value in step.items() if name not in timed}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_run_continues_as_if_never_stopped(
    lengths: Path, delayed: Path, tmp_path: Path, number: int
) -> None:
    """Sequences that wait are in no model and no position of the data: a checkpoint without them
    loses them.
    """
    flags = ("--outlier-delay-steps", str(LAST))
    started = ForkedRun(2, arguments_of(tmp_path, lengths, flags))
    wait_for_step(started, tmp_path, 5)
    started.signal_all(number)
    started.finish()
    saved = int((tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    expected = steps_of(delayed)
    assert 4 <= saved < LAST
    assert expected[saved]["waiting"] > 0
    train(2, tmp_path, lengths, *flags)
    found = steps_of(tmp_path)
    assert list(map(untimed, found.values())) == list(map(untimed, expected.values()))


@pytest.mark.parametrize("ahead", ["0", "1"])
def test_continues_to_the_bit_however_far_ahead_batches_are_prepared(
    lengths: Path, delayed: Path, tmp_path: Path, ahead: str
) -> None:
    """A checkpoint of what was drawn, not of what was trained, would lose the batches between the
    two.
    """
    folder = tmp_path / "run"
    shutil.copytree(delayed, folder)
    (folder / "checkpoints/latest_checkpointed_iteration.txt").write_text("6")
    train(
        2, folder, lengths, "--outlier-delay-steps", str(LAST), "--prefetch-global-batches", ahead
    )
    assert list(map(untimed, steps_of(folder).values())) == list(
        map(untimed, steps_of(delayed).values())
    )


OTHERS = {
    "four ranks": (4, ("--outlier-delay-steps", str(LAST))),
    "pipeline": (2, ("--outlier-delay-steps", str(LAST), "--pipeline-model-parallel-size", "2")),
    "no delay": (2, ()),
}


@pytest.mark.parametrize("other", OTHERS)
def test_continues_in_another_layout_with_what_waits(
    lengths: Path, delayed: Path, tmp_path: Path, other: str
) -> None:
    """A rank that is no more, or is new, must not take sequences with it, or load those of
    others."""
    num_processes, flags = OTHERS[other]
    folder = tmp_path / "run"
    shutil.copytree(delayed, folder)
    (folder / "checkpoints/latest_checkpointed_iteration.txt").write_text("6")
    assert steps_of(delayed)[6]["waiting"] > 0
    train(num_processes, folder, lengths, *flags)
    assert trained_on(folder) == trained_on(delayed)
    if other == "no delay":
        assert steps_of(folder)[7]["waiting"] == 0
