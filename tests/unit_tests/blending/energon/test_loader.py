"""The stream of a run: equal for any number of ranks and workers, and continued exactly from
anywhere.
"""

import itertools
import json
from functools import cache
from typing import Any

import pytest

from megatron.blending import (
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    EpochizeDataset,
    FilterDataset,
    GroupBatchDataset,
    LimitDataset,
    MapDataset,
    MixBatchDataset,
    PackingDataset,
)
from megatron.blending.energon._loading.loader import WorkerConfig, get_loader, get_savable_loader
from megatron.blending.energon._loading.state import expanded
from megatron.blending.order.proportions import _exchanged
from megatron.blending.order.reading import records_at
from megatron.blending.order.weights import WeightSchedule
from tests.unit_tests.blending.number_streams import (
    WorkerHere,
    config,
    drawn,
    endless,
    listed,
    loaders,
    source_of,
)
from tests.unit_tests.blending.trees import (
    ENDLESS,
    FINITE,
    PLAIN,
    SAME_OUTPUTS,
    first_fit,
    flat,
    is_odd,
    parity,
    skip_thirds,
)

LENGTH = 100
LAYOUTS = [(1, 0), (2, 0), (3, 2), (5, 0), (4, 2), (1, 7)]
# (Ranks, workers of each), and how many outputs of all ranks before the next: at a position that
# both divide.
MOVES = [
    ((2, 0), 10),
    ((1, 3), 10),
    ((5, 0), 20),
    ((4, 2), 20),
    ((1, 0), 10),
    ((5, 0), 10),
    ((2, 2), 20),
]


@pytest.fixture(autouse=True)
def _workers_here(monkeypatch):
    """Processes are started by the tests of the worker pool."""
    monkeypatch.setattr("megatron.blending.loading.worker_pool.WorkerProcess", WorkerHere)


@pytest.fixture(autouse=True)
def _small_plans(monkeypatch):
    """What is planned at once ends within a test, as it does many times within a run."""
    monkeypatch.setattr("megatron.blending.energon._loading.server._FIRST_PLANNED", 30)
    monkeypatch.setattr("megatron.blending.energon._loading.server._MAX_PLANNED", 90)
    monkeypatch.setattr("megatron.blending.order.proportions._MAX_AT_ONCE", 60)
    monkeypatch.setattr("megatron.blending.order.proportions._exchanged", _order_of)
    monkeypatch.setattr("megatron.blending.streams.node.records_at", _records_at)


# What is a function of its arguments is found once for all loaders: thousands are made here of a
# few trees.
_FOUND: dict[Any, Any] = {}


def _order_of(shares, *arguments):
    key = shares.unit, shares._slopes.tobytes(), shares._at_starts.tobytes(), arguments
    if key not in _FOUND:
        _FOUND[key] = _exchanged(shares, *arguments)
    return _FOUND[key]


def _records_at(orders, positions):
    key = tuple(orders), tuple(asked.tobytes() for asked in positions)
    if key not in _FOUND:
        _FOUND[key] = records_at(orders, positions)
    return _FOUND[key]


@cache
def stream_of(name):
    """The first outputs of an endless tree, on one rank: what every layout is held against."""
    return listed(ENDLESS[name](), LENGTH)


@pytest.mark.parametrize("name", ENDLESS)
def test_any_number_of_workers_gives_one_stream(name):
    """Otherwise another machine means other data, and no run can be compared or continued."""
    tree = ENDLESS[name]()
    for num_ranks in (1, 3):
        expected = drawn(loaders(tree, num_ranks), 60 // num_ranks)[0]
        assert len(expected) == 60
        for num_workers in (1, 2, 7):
            assert drawn(loaders(tree, num_ranks, num_workers), 60 // num_ranks)[0] == expected


@pytest.mark.parametrize("name", PLAIN)
def test_any_ranks_give_one_stream_where_nothing_is_left_out(name):
    """Runs on clusters of other sizes would train on other batches."""
    tree = ENDLESS[name]()
    stream = stream_of(name)
    assert len(stream) == LENGTH
    for num_ranks, num_workers in LAYOUTS:
        found, _ = drawn(loaders(tree, num_ranks, num_workers), 60 // num_ranks)
        assert found == stream[:60]


@pytest.mark.parametrize("name", FINITE)
def test_a_pass_over_finite_data_gives_the_same_samples(name):
    """Validation would otherwise depend on the number of ranks, or leave samples out."""
    tree = FINITE[name]()
    stream = listed(tree)
    assert stream
    for num_ranks, num_workers in LAYOUTS:
        made = loaders(tree, num_ranks, num_workers)
        found = [output for loader in made for output in loader]
        if name in SAME_OUTPUTS:
            assert sorted(map(str, found)) == sorted(map(str, stream))
        assert sorted(flat(found)) == sorted(flat(stream))


@pytest.mark.parametrize("name", ENDLESS)
def test_restored_at_every_batch(name):
    """A resumed run that repeats or loses a batch shows nothing of it but in what it learns."""
    tree = ENDLESS[name]()
    stream = stream_of(name)
    made = loaders(tree)
    for at in range(30):
        state = json.loads(json.dumps(made[0].state_dict()))
        num_ranks = 1 + at % 3 if name in PLAIN else 1
        found, _ = drawn(loaders(tree, num_ranks, at % 4, states=[state]), 2)
        assert found == stream[at : at + 2 * num_ranks]
        assert next(made[0]) == stream[at]


@pytest.mark.parametrize("name", PLAIN)
def test_restored_on_other_ranks_and_workers(name):
    """... and once more right after it, where energon repeats batches."""
    tree, stream = ENDLESS[name](), stream_of(name)
    found: list[Any] = []
    states = None
    for layout, count in MOVES:
        part, states = drawn(loaders(tree, *layout, states), count // layout[0])
        found += part
        assert found == stream[: len(found)], layout
        nothing, states = drawn(loaders(tree, *layout, states), 0)
        assert nothing == []
    assert found == stream


@pytest.mark.parametrize("name", PLAIN)
def test_restored_where_no_number_of_ranks_divides_the_position(name):
    """Positions 3, 5, 13, 28, 30, 42: ranks that drew as many are at one point, wherever the
    restore before was.
    """
    tree = ENDLESS[name]()
    stream = stream_of(name)
    found: list[Any] = []
    states = None
    for num_ranks, num_workers, count in (
        (3, 0, 1),
        (2, 2, 1),
        (4, 0, 2),
        (5, 2, 3),
        (2, 0, 1),
        (4, 2, 3),
    ):
        part, states = drawn(loaders(tree, num_ranks, num_workers, states), count)
        found += part
        # Each rank by itself, too.
        made = loaders(tree, num_ranks, num_workers)
        for loader, state in zip(made, states):
            loader.load_state_dict(state)
        more, _ = drawn(made, 2)
        assert more == stream[len(found) : len(found) + 2 * num_ranks]
    assert found == stream[:42]


@pytest.mark.parametrize("name", ENDLESS)
def test_each_rank_from_its_own_state(name):
    """Ranks that save and restore for themselves, without a gather, on other numbers of workers."""
    tree = ENDLESS[name]()
    for num_ranks, before, after in ((3, 2, 0), (5, 0, 3)):
        expected, _ = drawn(loaders(tree, num_ranks), 8)
        head, states = drawn(loaders(tree, num_ranks, before), 4)
        made = loaders(tree, num_ranks, after)
        for loader, state in zip(made, states):
            loader.load_state_dict(state)
        assert head + drawn(made, 4)[0] == expected


@pytest.mark.parametrize("name", FINITE)
def test_restored_within_a_pass(name):
    """energon cannot resume a ConcatDataset at all."""
    tree = FINITE[name]()
    loader = get_savable_loader(tree, config())
    stream, later = list(loader), list(loader)
    for at in range(0, len(stream) + 1, max(1, len(stream) // 6)):
        loader = get_savable_loader(tree, config())
        head = list(itertools.islice(loader, at))
        again = get_savable_loader(tree, config())
        again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert head + list(again) == stream
        assert list(again) == later


@pytest.mark.slow
@pytest.mark.parametrize("name", FINITE)
def test_restored_on_other_ranks_within_a_pass(name):
    """Ranks whose samples are left out read ahead of others, and stand at different places."""
    tree = FINITE[name]()
    stream = sorted(flat(listed(tree)))
    for layout in ((3, 2), (5, 0)):
        for at in (0, 1, 3, 9):
            found, states = drawn(loaders(tree, *layout), at)
            # Again and again, the second time soon after the first.
            for num_ranks, num_workers, count in ((4, 0, 1), (5, 2, 0), (1, 2, 1)):
                part, states = drawn(loaders(tree, num_ranks, num_workers, states), count)
                found += part
            found += drawn(loaders(tree, 3, 0, states), len(stream))[0]
            assert sorted(flat(found)) == stream


def test_every_pass_has_an_order_of_its_own():
    loader = get_loader(BatchDataset(source_of(), 10), config())
    passes = [[sample for batch in loader for sample in batch] for _ in range(3)]
    assert [sorted(samples) for samples in passes] == [sorted(passes[0])] * 3
    assert passes[0] != passes[1] != passes[2]


def test_validation_is_the_same_each_time_also_after_a_break():
    """A `break` in validation must not shift the next one."""
    loader = get_loader(
        ConcatDataset(source_of("a", 5, shuffle=False), source_of("b", 3, shuffle=False)),
        config(num_workers=2),
    )
    expected = [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("a", 4), ("b", 0), ("b", 1), ("b", 2)]
    assert list(loader) == expected
    for _ in loader:
        break
    assert list(loader) == expected


def test_a_savable_loader_goes_on_after_a_break():
    loader = get_savable_loader(source_of("a", 5, shuffle=False), config())
    assert next(iter(loader)) == ("a", 0)
    assert list(loader) == [("a", 1), ("a", 2), ("a", 3), ("a", 4)]
    assert list(loader) == [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("a", 4)]


def test_endless_data_goes_on():
    loader = get_loader(endless("a", 6, shuffle=False), config())
    assert [index for _, index in itertools.islice(loader, 4)] == [0, 1, 2, 3]
    assert [index for _, index in itertools.islice(loader, 4)] == [4, 5, 0, 1]


def test_virtual_epochs_are_per_rank_and_go_on():
    """`length` counts a rank's own batches, as energon's; finite data does not dry up, as it does
    there.
    """
    tree = EpochizeDataset(source_of("a", 7, shuffle=False), length=3)
    for num_workers in (0, 2):
        made = loaders(tree, 2, num_workers)
        assert [len(loader) for loader in made] == [3, 3]
        passes = [[list(loader) for loader in made] for _ in range(4)]
        found = [index for a, b in passes for pair in zip(a, b) for _, index in pair]
        assert found == [position % 7 for position in range(24)]


def test_num_epochs_is_so_many_passes_of_all_ranks():
    loader = get_loader(EpochizeDataset(BatchDataset(endless("a", 8), 2), num_epochs=3), config())
    assert len(list(loader)) == len(loader) == 12


def test_epochs_survive_a_restore():
    tree = EpochizeDataset(endless("a", 7, shuffle=False), length=5)
    loader = get_savable_loader(tree, config())
    for _ in range(2):
        assert len(list(loader)) == 5
    head = list(itertools.islice(loader, 2))
    again = get_savable_loader(tree, config())
    again.load_state_dict(loader.state_dict())
    assert [index for _, index in head + list(again)] == [3, 4, 5, 6, 0]
    assert [index for _, index in again] == [1, 2, 3, 4, 5]


def test_epochs_are_even_after_a_restore_on_other_ranks():
    """A rank with one batch more than the others waits in a collective for ever."""
    tree = EpochizeDataset(endless("a", 70), length=12)
    _, states = drawn(loaders(tree, 3), 1)
    for num_ranks in (2, 4, 5):
        made = loaders(tree, num_ranks, 0, states)
        assert [[len(list(loader)) for loader in made] for _ in range(2)] == [
            [11] * num_ranks,
            [12] * num_ranks,
        ]
        made = loaders(tree, num_ranks, 2, states)
        _, again = drawn(made, 4)
        assert [len(list(loader)) for loader in loaders(tree, 3, 0, again)] == [7] * 3
    # 24 outputs of the whole stream: 13 are drawn, 2 ranks get 5 more each, and the last comes
    # first in the next epoch.
    tree = EpochizeDataset(BatchDataset(endless("a", 24), 2), num_epochs=2)
    head, states = drawn(loaders(tree, 3), 3)
    middle, states = drawn(loaders(tree, 4, 0, states), 1)
    made = loaders(tree, 2, 0, states)
    assert [[len(list(loader)) for loader in made] for _ in range(2)] == [[5, 5], [12, 12]]
    assert head + middle == listed(tree, 13)


def test_restored_at_the_end_of_an_epoch_that_not_all_ranks_noticed():
    tree = EpochizeDataset(endless("a", 70), length=4)
    made = loaders(tree, 2)
    assert [len(list(made[0])), len(list(itertools.islice(made[1], 4)))] == [4, 4]
    states = [loader.state_dict() for loader in made]
    assert [len(list(loader)) for loader in loaders(tree, 3, 0, states)] == [4] * 3


def test_restored_twice_without_a_batch_in_between():
    """energon's second save soon after a restore replays batches."""
    tree = ENDLESS["packs"]()
    stream = listed(tree, 20)
    _, states = drawn(loaders(tree), 10)
    for _ in range(3):
        nothing, states = drawn(loaders(tree, states=states), 0)
        assert nothing == []
    assert drawn(loaders(tree, states=states), 10)[0] == stream[10:]


def test_restore_in_the_middle_of_a_running_loader():
    """energon refuses while workers run."""
    loader = get_savable_loader(ENDLESS["skips"](), config(num_workers=2))
    head = [next(loader) for _ in range(5)]
    state = loader.state_dict()
    tail = [next(loader) for _ in range(5)]
    loader.load_state_dict(state)
    assert [next(loader) for _ in range(5)] == tail != head
    loader.close()


def test_energons_names():
    loader = get_savable_loader(endless(), config())
    next(loader)
    state = loader.save_state_rank()
    loader.restore_state_rank(None)
    following = next(loader)
    loader.restore_state_rank(state)
    assert next(loader) == following


def test_a_state_is_small():
    """1,000 sources of a billion samples: under 100 kB, in milliseconds."""
    tree = BatchDataset(
        BlendDataset(*((endless(f"data/source_{n}.jsonl", 10**9), 1 + n % 7) for n in range(1000))),
        32,
    )
    loader = get_savable_loader(tree, WorkerConfig(rank=0, world_size=1))
    batch = [next(loader) for _ in range(3)]
    state = loader.state_dict()
    assert len(json.dumps(state)) < 100_000
    again = get_savable_loader(tree, WorkerConfig(rank=0, world_size=1))
    again.load_state_dict(state)
    assert next(again) == next(loader) != batch[-1]


def test_small_sources_keep_their_weight_on_many_ranks():
    """In energon a 20-sample set of weight 0.5 falls to 0.155 on 64 workers."""
    tree = BlendDataset((endless("small", 20), 0.5), (endless("large", 5000), 0.5))
    found, _ = drawn(loaders(tree, 64), 10)
    counts = [name for name, _ in found].count("small")
    assert counts == 320
    assert {index for name, index in found if name == "small"} == set(range(20))


def test_every_rank_sees_every_sample():
    """In energon a range of samples belongs to one worker for ever."""
    made = loaders(endless("a", 12), 2)
    first = [{next(made[rank])[1] for _ in range(120)} for rank in range(2)]
    assert first == [set(range(12))] * 2


def test_sources_of_equal_size_are_read_in_different_orders():
    """In energon all generators of a worker share one seed: equal sizes, equal permutations."""
    tree = BatchDataset(BlendDataset((endless("a", 1000), 1), (endless("b", 1000), 1)), 200)
    batch = next(get_loader(tree, config()))
    orders = [[index for name, index in batch if name == wanted] for wanted in "ab"]
    assert sum(a == b for a, b in zip(*orders)) < 10


def test_swapped_sources_are_refused():
    """energon accepts a swap in silence, and reads each at the other's place."""
    state = get_savable_loader(_pair("a", "b"), config()).state_dict()
    with pytest.raises(ValueError, match="same in another order: number 0 was 'a' and is 'b'"):
        get_savable_loader(_pair("b", "a"), config()).load_state_dict(state)


def _pair(first, second, weight=0.5):
    return BatchDataset(BlendDataset((endless(first), weight), (endless(second), 0.5)), 4)


@pytest.mark.parametrize(
    ("tree", "fault"),
    [
        (lambda: _pair("a", "c"), "source 'b' is missing"),
        (
            lambda: BatchDataset(
                BlendDataset((endless("a"), 1), (endless("b"), 1), (endless("c"), 1)), 4
            ),
            "'c' was added",
        ),
        (lambda: _pair("a", "b", 0.7), "weights, batch sizes or the like changed"),
        (
            lambda: BatchDataset(BlendDataset((endless("a"), 1), (endless("b", 60), 1)), 4),
            "it had 50 records and has 60",
        ),
    ],
)
def test_changed_streams_are_refused(tree, fault):
    state = get_savable_loader(_pair("a", "b"), config()).state_dict()
    with pytest.raises(ValueError, match=fault):
        get_savable_loader(tree(), config()).load_state_dict(state)
    with pytest.raises(ValueError, match="seed must be 1 as in the saved state, but is 2"):
        get_savable_loader(_pair("a", "b"), config(seed=2)).load_state_dict(state)


def test_moved_data_is_the_same_data():
    state = get_savable_loader(source_of("a"), config()).state_dict()
    moved = source_of("a")
    moved.name = "elsewhere/a"
    get_savable_loader(moved, config()).load_state_dict(state)


def test_states_of_too_few_ranks_are_refused():
    _, states = drawn(loaders(endless(), 4), 3)
    with pytest.raises(
        ValueError, match=r"rank 1 of 4, but this is rank 0 of 2; .*\(missing: 0, 2, 3\)"
    ):
        loaders(endless(), 2, states=states[1])


def test_states_of_different_steps_are_refused():
    made = loaders(endless(), 2)
    next(made[0])
    with pytest.raises(
        ValueError, match="rank 0 was saved after 1 outputs of pass 0, rank 1 after 0"
    ):
        loaders(endless(), 3, states=[loader.state_dict() for loader in made])


def test_counts_of_what_was_left_out():
    for num_workers in (0, 2):
        tree = MapDataset(FilterDataset(source_of("a", 100, bad=[1, 2]), is_odd), skip_thirds)
        loader = get_loader(tree, config(num_workers=num_workers))
        assert sorted(index for _, index in loader) == [
            i for i in range(100) if i % 2 and i % 3 and i != 1
        ]
        assert (loader.num_failed, loader.num_skipped) == (2, 100 - 2 - 33 + 1)


def test_a_shard_that_leaves_out_fills_its_batches():
    """Batches are full as long as there is data."""
    tree = BatchDataset(FilterDataset(endless("a", 1000), is_odd), 8)
    assert {len(batch) for batch in drawn(loaders(tree, 3), 20)[0]} == {8}


def test_limits_are_per_rank_where_they_are_outermost():
    tree = LimitDataset(BatchDataset(source_of("a", 100), 5), 3)
    assert [len(list(loader)) for loader in loaders(tree, 2)] == [3, 3]
    assert len(list(get_loader(ConcatDataset(tree, source_of("b", 1)), config()))) == 4


def test_uses_of_energon():
    """`worker_config` on any of the data sets; iterating over a data set itself."""
    tree = MixBatchDataset(
        ((endless("a"), 6), (endless("b"), 4)), batch_size=5, worker_config=config(1, 2)
    )
    loader = get_loader(tree, watchdog_timeout_seconds=60)
    assert (loader.config.rank, loader.config.world_size) == (1, 2)
    assert next(iter(tree)) == next(loader)
    with pytest.raises(TypeError, match="has no argument 'prefetch'"):
        get_loader(tree, prefetch=3)
    with pytest.raises(ValueError, match=r"takes a data set of megatron\.blending, but got list"):
        get_loader([])  # type: ignore[arg-type]


def test_memory_does_not_grow_with_what_was_left_out():
    """Sources that leave out different shares drift apart for ever; nothing may pile up between
    them.
    """
    a, b = FilterDataset(endless("a", 1000), is_odd), endless("b", 1000)
    loader = get_loader(BatchDataset(BlendDataset((a, 1), (b, 1)), 16), config())
    for _ in range(50):
        next(loader)
    early = len(json.dumps(loader.state_dict()))
    for _ in range(1000):
        next(loader)
    assert len(json.dumps(loader.state_dict())) < early + 200


def test_packs_are_of_what_fits_and_lose_nothing():
    tree = FINITE["packs"]()
    packs = listed(tree)
    assert sorted(sample for pack in packs for sample in pack) == sorted(
        [("a", index) for index in range(400)] + [("b", index) for index in range(300)]
    )
    assert all(sum(size for _, size in pack) <= 60 for pack in packs if len(pack) > 1)
    assert first_fit([("a", 1)]) == [[("a", 1)]]


def remap(before, after, count):
    """What a changed stream gives, after `count` outputs of what it was before."""
    head, states = drawn(loaders(before), count)
    made = loaders(after)[0]
    made.load_state_dict(states, on_change="remap")
    return head, made


def test_remap_goes_on_in_every_source():
    """Sources in another order, one gone, one new, other weights: nothing is read again before its
    epoch is over.
    """
    before = BlendDataset((endless("a"), 2), (endless("b"), 1), (endless("c"), 1))
    after = BlendDataset((endless("new"), 1), (endless("b"), 3), (endless("a"), 1))
    head, loader = remap(before, after, 80)
    tail = [next(loader) for _ in range(50)]
    for name in "ab":
        seen = [index for source, index in head + tail if source == name]
        assert len(set(seen[:50])) == min(50, len(seen))
    assert {name for name, _ in tail} == {"a", "b", "new"}
    # ... and a state of this stream is like any other.
    state = json.loads(json.dumps(loader.state_dict()))
    again = loaders(after, states=[state])[0]
    assert [next(again) for _ in range(50)] == [next(loader) for _ in range(50)]


def test_remap_of_equal_names_by_their_order():
    before = BlendDataset((endless("a", 30), 1), (endless("a", 30), 1))
    head, loader = remap(
        before, BlendDataset((endless("a", 30), 1), (endless("a", 30), 1), (endless("b"), 1)), 30
    )
    tail = [next(loader) for _ in range(45)]
    counts = [index for name, index in head + tail if name == "a"]
    assert sorted(counts) == sorted(2 * list(range(30)))


def test_remap_with_packs():
    """Sources go on behind the last block that was begun."""
    before, after = ENDLESS["packs"](), PackingDataset(endless("a", 50), 10, first_fit, list)
    _, states = drawn(loaders(before), 100)
    (loader,) = loaders(after)
    loader.load_state_dict(states, on_change="remap")
    positions = [row[5] for row in expanded(loader.state_dict()["stream"])["sources"]]
    num_blocks = states[0]["cells"][0][0]
    assert num_blocks > 5
    assert abs(positions[0] - 0.7 * 10 * num_blocks) < 1
    next(loader)


def test_remap_is_refused_for_finite_data():
    state = loaders(source_of("a"))[0].state_dict()
    with pytest.raises(ValueError, match="is for endless data"):
        loaders(source_of("b"))[0].load_state_dict(state, on_change="remap")
    with pytest.raises(ValueError, match="on_change must be one of error, remap, but is 'remaps'"):
        loaders(source_of("a"))[0].load_state_dict(state, on_change="remaps")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_restored_within_a_linear_schedule(num_workers):
    schedule = WeightSchedule(
        ((0, (5, 3, 0)), (7, (0.1, 0.2, 0.7))), outputs_per_step=11, kind="linear"
    )
    tree = BlendDataset(*((endless(name), 1) for name in "abc"), schedule=schedule)
    stream = listed(tree, 120)
    made = loaders(tree, 2, num_workers)
    for at in range(0, 96, 12):
        states = [json.loads(json.dumps(loader.state_dict())) for loader in made]
        found, _ = drawn(loaders(tree, 3, num_workers, states=states), 6)
        first = min(stream.index(sample, at - at % 3) for sample in found)
        assert sorted(found) == sorted(stream[first : first + 18])
        assert [next(loader) for _ in range(6) for loader in made] == stream[at : at + 12]


def test_finite_batches_are_full_where_samples_are_left_out():
    """All but the last of each rank; of 4,750 samples each of 3 ranks may drop seven."""
    tree = BatchDataset(
        FilterDataset(source_of("a", 5000), lambda sample: sample[1] % 20 > 0), 8, drop_last=True
    )
    batches = [batch for loader in loaders(tree, 3) for batch in loader]
    assert {len(batch) for batch in batches} == {8}
    assert len(batches) >= (4750 - 3 * 7) // 8


@pytest.mark.parametrize("num_workers", [2, 3, 5])
def test_what_is_left_out_counts_once(num_workers):
    """Each sample is tried by one worker."""
    tree = FilterDataset(source_of("a", 50), is_odd)
    (alone,) = loaders(tree)
    (shared,) = loaders(tree, num_workers=num_workers)
    assert list(shared) == list(alone)
    assert shared.num_skipped == alone.num_skipped == 25
    shared.close()


def test_batches_are_full_where_a_rare_child_leaves_samples_out():
    """Blocks in which it had no turn were taken for the end of its data: 200 in a row, and the
    batch went out short.
    """
    rare = BatchDataset(FilterDataset(endless("rare", 40), is_odd), 4)
    loader = get_loader(BlendDataset((rare, 1e-3), (endless("b"), 1)), config())
    sizes = [len(output) for output in itertools.islice(loader, 8_000) if isinstance(output, list)]
    # Of each eight of its samples it keeps four.
    assert len(sizes) in (3, 4, 5)
    assert set(sizes) == {4}


def test_finite_packs_are_full():
    tree = PackingDataset(
        MapDataset(source_of("a", 1000), lambda sample: ("a", 10)), 60, first_fit_all, list
    )
    packs = [pack for loader in loaders(tree, 4) for pack in loader]
    assert len(packs) < 1.05 * 1000 / 6


def first_fit_all(samples):
    packs: list[list[tuple[str, int]]] = [[]]
    for sample in samples:
        if sum(size for _, size in packs[-1]) + sample[1] > 60:
            packs.append([])
        packs[-1].append(sample)
    return packs


def in_fours(samples):
    return [samples[at : at + 4] for at in range(0, len(samples) - 3, 4)]


def longest_first(samples):
    """Packs of at most 300, of samples by length: short ones stay for long."""
    packs: list[list[tuple[str, int]]] = []
    for sample in sorted(samples, key=lambda sample: -(sample[1] % 150)):
        room = next(
            (pack for pack in packs if sum(size % 150 for _, size in [*pack, sample]) <= 300), None
        )
        packs.append([sample]) if room is None else room.append(sample)
    return packs


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_packs_read_each_sample_once_per_epoch(num_ranks):
    """Buffers of many shards were epochs apart: one sample 48 times before another once."""
    for select in (in_fours, longest_first):
        tree = PackingDataset(endless("a", 800), 40, select, list)
        samples = flat(drawn(loaders(tree, num_ranks), 600 // num_ranks)[0])
        counts = [samples.count(("a", index)) for index in range(800)]
        # A block of each rank is under way.
        assert max(counts) - min(counts) <= 2
        assert sum(counts) > 800


def test_groups_read_each_sample_once_per_epoch():
    samples = flat(listed(GroupBatchDataset(endless("a", 800), 8, parity), 98))
    assert len(set(samples)) > 0.98 * len(samples) == 0.98 * 784


def test_replacements_come_from_the_same_epoch():
    """Where samples are left out, those of an epoch are read before the ones of the next."""
    tree = BatchDataset(FilterDataset(endless("a", 5000), lambda sample: sample[1] % 10 > 0), 8)
    samples = flat(listed(tree, 562))
    assert len(set(samples)) > 0.99 * len(samples)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"prefetch_factor": "x"}, "prefetch_factor must be a whole number, but is 'x'"),
        ({"prefetch_factor": 0}, "prefetch_factor must be at least 1, but is 0"),
        ({"prefetch_factor": 1.5}, "prefetch_factor must be a whole number, but is 1.5"),
        ({"pin_memory": "yes"}, "pin_memory must be True or False, but is 'yes'"),
    ],
)
def test_options_of_other_types_are_refused(options, fault):
    """A text is true, whatever it says."""
    with pytest.raises(ValueError, match=fault):
        get_loader(endless(), config(), **options)


def test_a_batch_fetched_after_an_error_is_the_next_one():
    """A fatal sample ends the workers, not the loader."""

    def fail_on_4(sample):
        if sample[1] == 4:
            raise NameError("four")
        return sample

    loader = get_loader(
        MapDataset(endless("a", 10, shuffle=False), fail_on_4), config(num_workers=2)
    )
    assert [next(loader)[1] for _ in range(4)] == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="NameError: four"):
            next(loader)


@pytest.mark.parametrize("name", ["/data/corpus/part_{:04d}.jsonl", "{:060d}/part.jsonl"])
def test_state_of_a_thousand_sources_is_small(name):
    """Every rank writes one with every checkpoint: of a billion samples per source, too, far below
    100 kB.
    """
    weights = range(1, 1001)
    blend = BlendDataset(*((endless(name.format(weight**5), 10**9), weight) for weight in weights))
    loader = get_savable_loader(BatchDataset(blend, 32), WorkerConfig(rank=0, world_size=1))
    for _ in range(20):
        next(loader)
    state = json.dumps(loader.state_dict())
    again = get_savable_loader(BatchDataset(blend, 32), WorkerConfig(rank=0, world_size=1))
    again.load_state_dict(json.loads(state))
    assert next(again) == next(loader)
    assert len(state) < 60_000


def test_state_of_open_buffers_is_small():
    """A block that is under way is two numbers, however many samples it has."""
    packs = PackingDataset(endless("a", 10**9), 1000, lambda found: [found[:8]], list)
    loader = get_savable_loader(packs, WorkerConfig(rank=0, world_size=1))
    next(loader)
    before = len(json.dumps(loader.state_dict()))
    for _ in range(320):
        next(loader)
    state = loader.state_dict()
    assert state["cells"] == [[3, [[2, 71]], []]]
    assert len(json.dumps(state)) < before + 20
