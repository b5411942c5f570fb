"""What each node gives, and what it refuses."""

import itertools
import pickle
from collections import Counter
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
    RepeatDataset,
    ShuffleBufferDataset,
)
from megatron.blending.energon._loading.loader import get_loader
from megatron.blending.order.weights import WeightSchedule
from megatron.blending.streams.failures import FatalSampleError
from tests.unit_tests.blending.number_streams import (
    Numbers,
    config,
    endless,
    listed,
    loaders,
    source_of,
)
from tests.unit_tests.blending.trees import (
    ENDLESS,
    FINITE,
    first_fit,
    halves,
    is_odd,
    parity,
    several,
)

NOTHING: Any = None


def in_order(name="a", count=50, **options):
    return source_of(name, count, shuffle=False, **options)


def numbers(outputs):
    return [index for _, index in outputs]


def test_blend_gives_full_batches_of_one_source_each():
    tree = BlendDataset((BatchDataset(endless("a"), 4), 0.6), (BatchDataset(endless("b"), 4), 0.4))
    batches = listed(tree, 50)
    assert all(len(batch) == 4 and len({name for name, _ in batch}) == 1 for batch in batches)
    assert Counter(batch[0][0] for batch in batches) == {"a": 30, "b": 20}


def test_weights_are_relative_and_pairs_may_be_one_tuple():
    expected = listed(BlendDataset((endless("a"), 0.6), (endless("b"), 0.4)), 50)
    assert listed(BlendDataset(((endless("a"), 6), (endless("b"), 4))), 50) == expected
    assert listed(BlendDataset([(endless("a"), 60.0), (endless("b"), 40)]), 50) == expected


def test_zero_weight_is_never_read():
    assert {
        name for name, _ in listed(BlendDataset((endless("a"), 1), (endless("b"), 0)), 100)
    } == {"a"}


def test_finite_sources_blend_until_each_is_read():
    tree = BlendDataset((source_of("a", 30), 1), (source_of("b", 10), 1))
    samples = listed(tree)
    assert len(tree) == tree.size == 40
    assert len(set(samples)) == 40
    assert [sum(name == "b" for name, _ in samples[:count]) for count in (10, 20)] == [5, 10]


def test_exact_repetitions():
    """blend_epochized: a source twice, another one and a half times, in each pass."""
    a, b = RepeatDataset(source_of("a", 10), 2), RepeatDataset(source_of("b", 20), 1.5)
    samples = listed(BlendDataset((a, len(a)), (b, len(b))))
    counts = Counter(samples)
    assert {counts[("a", index)] for index in range(10)} == {2}
    assert Counter(counts[("b", index)] for index in range(20)) == {1: 10, 2: 10}


def test_schedule():
    schedule = WeightSchedule(((0, (1, 0)), (10, (0, 1))), outputs_per_step=2)
    samples = listed(BlendDataset((endless("a"), 1), (endless("b"), 1), schedule=schedule), 40)
    assert [name for name, _ in samples] == ["a"] * 20 + ["b"] * 20


def test_concat_reads_one_after_the_other():
    tree = ConcatDataset(in_order("a", 3), (in_order("b", 2), 0.9))
    assert listed(tree) == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]
    assert listed(RepeatDataset(tree), 8)[5:] == [("a", 0), ("a", 1), ("a", 2)]
    assert len(tree) == 5


def test_batches():
    assert [numbers(batch) for batch in listed(BatchDataset(in_order("a", 5), 2))] == [
        [0, 1],
        [2, 3],
        [4],
    ]
    assert [
        numbers(batch) for batch in listed(BatchDataset(in_order("a", 5), 2, drop_last=True))
    ] == [[0, 1], [2, 3]]
    assert listed(BatchDataset(in_order("a", 5), 2, lambda batch: sum(numbers(batch)))) == [1, 5, 4]
    assert [len(BatchDataset(source_of("a", 5), 2, drop_last=drop)) for drop in (False, True)] == [
        3,
        2,
    ]


def test_mixed_batches():
    tree = MixBatchDataset((endless("a"), 6), (endless("b"), 4), batch_size=10)
    assert {Counter(name for name, _ in batch)["a"] for batch in listed(tree, 30)} <= {5, 6, 7}
    assert sum(Counter(name for name, _ in batch)["a"] for batch in listed(tree, 30)) == 180


def test_map_filter_and_generators():
    assert listed(MapDataset(in_order("a", 3), map_fn=lambda sample: sample[1] * 2)) == [0, 2, 4]
    assert sorted(numbers(listed(FilterDataset(in_order("a", 6), is_odd)))) == [1, 3, 5]
    assert sorted(listed(MapDataset(in_order("a", 6), several))) == [
        ("a", 0), ("a", 1, 0), ("a", 2), ("a", 4), ("a", 5, 0), ("a", 5, 1),
    ]  # fmt: skip
    assert sorted(listed(BatchDataset(in_order("a", 6), 3, halves))) == [
        [("a", 0)], [("a", 1), ("a", 2)], [("a", 3)], [("a", 4), ("a", 5)],
    ]  # fmt: skip


def test_repeats():
    assert numbers(listed(RepeatDataset(in_order("a", 4), 2.5))) == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert len(RepeatDataset(source_of("a", 4))) == 4


def test_limit_counts_what_comes_out():
    """A limit behind a filter: that many that pass, as long as there are; behind a generator no
    more than that.
    """
    assert numbers(listed(LimitDataset(in_order("a", 9), 4))) == [0, 1, 2, 3]
    filtered = LimitDataset(FilterDataset(source_of("a", 200), is_odd), 20)
    assert len(set(listed(filtered))) == 20
    many = LimitDataset(MapDataset(source_of("a", 200), several), 20)
    assert len(listed(many)) == 20
    packs = LimitDataset(PackingDataset(source_of("a", 200), 30, first_fit, list), 20)
    assert [len(list(loader)) for loader in loaders(packs, 2)] == [20, 20]
    assert len(LimitDataset(source_of("a", 3), 5)) == 3


def passes(tree, count, **options):
    loader = get_loader(tree, **options)
    return [list(loader) for _ in range(count)]


def test_limit_begins_again_if_told_to():
    """Of an endless data set every pass would go on behind the one before, and each validation read
    other records.
    """
    told: dict[str, Any] = {"reset_after_epoch": True}
    limited = LimitDataset(RepeatDataset(in_order("a", 9)), 4)
    assert [numbers(found) for found in passes(limited, 2)] == [
        [0, 1, 2, 3], [4, 5, 6, 7],
    ]  # fmt: skip
    trees = {
        "endless": lambda: LimitDataset(RepeatDataset(source_of("a", 9)), 4, **told),
        "epochs": lambda: LimitDataset(EpochizeDataset(source_of("a", 9), 6), 4, **told),
        "filtered": lambda: LimitDataset(
            FilterDataset(RepeatDataset(source_of("a", 9)), is_odd), 4, **told
        ),
        "filtered epochs": lambda: LimitDataset(
            FilterDataset(EpochizeDataset(source_of("a"), 9000), is_odd), 4, **told
        ),
    }
    for name, tree in trees.items():
        first, second, third = passes(tree(), 3)
        assert first == second == third, name
        assert len(first) == 4, name
    finite = LimitDataset(source_of("a", 9), 9, **told)
    first, second = passes(finite, 2)
    assert sorted(first) == sorted(second) == sorted(listed(in_order("a", 9)))
    assert first != second  # as without the limit


def test_limit_that_begins_again_is_resumed():
    """A state of one that goes on means other records."""

    def tree(**options):
        return LimitDataset(FilterDataset(RepeatDataset(source_of("a", 90)), is_odd), 6, **options)

    for before in range(6):
        loader = get_loader(tree(reset_after_epoch=True))
        whole = list(loader)
        iterator = iter(loader)
        taken = [next(iterator) for _ in range(before)]
        again = get_loader(tree(reset_after_epoch=True))
        again.restore_state_rank(loader.save_state_rank())
        assert len(whole) == 6
        assert taken + list(again) == whole
    with pytest.raises(ValueError, match="saved of another stream"):
        get_loader(tree()).restore_state_rank(loader.save_state_rank())


def test_shuffle_buffer_mixes_within_windows():
    found = numbers(listed(ShuffleBufferDataset(in_order("a", 25), 10)))
    assert sorted(found) == list(range(25))
    assert found != sorted(found)
    for start in (0, 10, 20):
        assert sorted(found[start : start + 10]) == list(range(start, min(start + 10, 25)))


def test_packing_offers_what_was_not_chosen_again():
    """energon drops it. Here it is offered with the rest of its block, until nothing is chosen."""

    def two_smallest(samples):
        return [sorted(samples, key=lambda sample: sample[1])[:2]] if len(samples) > 1 else []

    packs = listed(PackingDataset(in_order("a", 13), 5, two_smallest, list))
    assert [numbers(pack) for pack in packs] == [
        [0, 1], [2, 3], [4], [5, 6], [7, 8], [9], [10, 11], [12],
    ]  # fmt: skip


def test_over_long_samples():
    def up_to_40(samples):
        return [[sample] for sample in samples if sample[1] <= 40]

    def tree(**options):
        return PackingDataset(endless("a", 50), 4, up_to_40, list, **options)

    with pytest.raises(
        FatalSampleError, match=r"a:4\d: select_samples_to_pack does not choose this sample"
    ):
        listed(tree(over_long="error"), 1000)
    dropped = {pack[0][1] for pack in listed(tree(), 1000)}
    assert dropped == set(range(41))
    alone = {pack[0][1] for pack in listed(tree(over_long="alone"), 1000)}
    assert alone == set(range(50))


def packs_of_80(samples):
    """Longest first; the last pack waits for more, and what is over 80 is never chosen."""
    packs: list[list[tuple[str, int]]] = []
    pack: list[tuple[str, int]] = []
    for sample in sorted(samples, key=lambda sample: -sample[1]):
        if sample[1] > 80:
            continue
        if sum(size for _, size in pack) + sample[1] > 80:
            packs.append(pack)
            pack = []
        pack.append(sample)
    return packs


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_over_long_samples_of_finite_data(num_ranks):
    """They became packs over capacity, whatever was asked for: at the end of the data buffers are
    not full.
    """

    def tree(count, over_long="error"):
        longer = MapDataset(in_order("a", count), lambda sample: ("a", sample[1] + 1))
        return PackingDataset(longer, 30, packs_of_80, list, over_long=over_long)

    with pytest.raises(
        FatalSampleError, match=r"a:8\d: select_samples_to_pack does not choose this sample"
    ):
        listed(tree(90))
    for over_long, count, longest in (("drop", 90, 80), ("alone", 90, 90), ("error", 80, 80)):
        packs = [pack for made in loaders(tree(count, over_long), num_ranks) for pack in made]
        assert sorted(size for pack in packs for _, size in pack) == list(range(1, longest + 1))
        over = [pack for pack in packs if sum(size for _, size in pack) > 80]
        assert len(over) == (10 if over_long == "alone" else 0)
        assert all(len(pack) == 1 for pack in over)


def test_an_over_long_sample_is_found_while_others_are_chosen():
    """It stayed in the buffer for ever, one place the less: the rule asked for a buffer of which
    nothing is chosen.
    """

    def tree(**options):
        return PackingDataset(
            MapDataset(endless("a", 400), long_or_short), 10, packs_of_80, list, **options
        )

    with pytest.raises(
        FatalSampleError, match="a:7: select_samples_to_pack does not choose this sample"
    ):
        listed(tree(over_long="error"), 400)
    # Small ones wait for long, as the longest are packed first, but they do fit.
    assert listed(
        PackingDataset(MapDataset(endless("a", 400), smallish), 10, packs_of_80, list),
        400,
    )


def long_or_short(sample):
    return ("a", 100 if sample[1] == 7 else 30)


def smallish(sample):
    return ("a", 5 if sample[1] == 7 else 30)


@pytest.mark.parametrize("given", [None, [("a", 1), 3], 5])
def test_select_must_return_lists(given):
    """A function that forgets to return ended in a TypeError of a line in here."""

    def select(samples):
        return given

    with pytest.raises(
        FatalSampleError, match="select_samples_to_pack must return a list of lists"
    ):
        listed(PackingDataset(endless(), 4, select, list), 1)


def test_select_must_return_what_it_was_given():
    tree = PackingDataset(
        endless(), 4, lambda samples: [[(name, index) for name, index in samples]], list
    )
    with pytest.raises(
        FatalSampleError,
        match="must return lists of the samples that it was given, each at most once",
    ):
        listed(tree, 1)


def test_groups():
    batches = listed(GroupBatchDataset(source_of("a", 100), 4, parity))
    assert all(len({index % 2 for _, index in batch}) == 1 for batch in batches)
    assert sorted(index for batch in batches for _, index in batch) == list(range(100))

    def sized(sample):
        return sample[1] % 2, 2 + sample[1] % 2

    assert {len(batch) for batch in listed(GroupBatchDataset(endless(), None, sized), 30)} == {2, 3}


def test_one_data_set_may_stand_in_two_places():
    """Its orders differ there."""
    shared = endless("a", 1000)
    samples = listed(BlendDataset((shared, 1), (shared, 1)), 100)
    assert len(set(samples)) > 90


@pytest.mark.parametrize("name", ["batch", "blend of batches"])
def test_descriptions_can_be_sent(name):
    tree = ENDLESS[name]()
    assert listed(pickle.loads(pickle.dumps(tree)), 20) == listed(tree, 20)


@pytest.mark.parametrize("name", FINITE)
def test_every_sample_of_a_pass_is_in_it(name):
    """... once, if nothing says otherwise."""
    tree = FINITE[name]()
    if name in ("concat", "concat of batches", "blend", "shuffled", "packs", "groups"):
        flat = []
        for output in listed(tree):
            flat += output if isinstance(output, list) else [output]
        assert len(flat) == len(set(flat)) == sum(len(child) for child in _sources(tree))


def _sources(tree):
    return (
        [tree]
        if not tree.children
        else list(itertools.chain.from_iterable(map(_sources, tree.children)))
    )


def test_lengths():
    """As energon's: of a blend the sum, weights ignored; of repeated data one pass."""
    assert len(BlendDataset((endless("a", 30), 1), (endless("b", 12), 9))) == 42
    assert len(BatchDataset(endless("a", 30), 8)) == 4
    assert len(EpochizeDataset(endless("a", 30), num_epochs=2)) == 60
    assert len(get_loader(BatchDataset(source_of("a", 30), 8), config(1, 3))) == 1


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: BlendDataset(), "BlendDataset needs at least one data set"),
        (
            lambda: BlendDataset(endless(), endless()),
            r"takes pairs \(data set, weight\), but argument 0 is",
        ),
        (lambda: BlendDataset((endless(), -1)), "weight 0 must be at least 0, but is -1"),
        (lambda: BlendDataset((endless(), 0)), "must not all be 0"),
        (
            lambda: BlendDataset(([1], 1), (source_of(), 1)),
            r"data set 0 must be a data set of megatron.blending, but is \[1\]",
        ),
        (
            lambda: BlendDataset((endless(), 1), mode="exakt"),
            "mode of a blend must be one of .*exact.*, but is 'exakt'; did you mean",
        ),
        (
            lambda: BlendDataset((source_of(), 1), schedule=WeightSchedule(((0, (1,)),))),
            "schedule of weights is for endless",
        ),
        (
            lambda: BlendDataset((endless(), 1), schedule=WeightSchedule(((0, (1, 1)),))),
            "2 weights for 1 data sets",
        ),
        (lambda: ConcatDataset(endless()), "data set 0 of a ConcatDataset is endless"),
        (lambda: MapDataset(source_of(), NOTHING), "map_fn must be a function, but is None"),
        (lambda: FilterDataset(source_of(), NOTHING), "filter_fn must be a function, but is None"),
        (lambda: BatchDataset(source_of(), 0), "batch_size must be at least 1, but is 0"),
        (lambda: LimitDataset(source_of(), 0), "length must be at least 1"),
        (lambda: EpochizeDataset(source_of()), "length or num_epochs must be given"),
        (lambda: EpochizeDataset(source_of(), length=0), "length must be at least 1"),
        (lambda: RepeatDataset(source_of(), 0), "repeats must be above 0"),
        (lambda: RepeatDataset(source_of("a", 3), 0.1), "0.1 times 3 outputs is none"),
        (lambda: ShuffleBufferDataset(source_of(), 0), "size must be at least 1"),
        (lambda: PackingDataset(source_of(), 0, first_fit, list), "buffer_size must be at least 1"),
        (
            lambda: PackingDataset(source_of(), 5, first_fit, list, over_long="cut"),
            "over_long must be one of error, alone, drop",
        ),
        (lambda: source_of("a", 0), "a: has no records"),
        (lambda: source_of("a", multiplier=0), "a: multiplier must be at least 1, or -1 or None"),
        (lambda: source_of("a", slice_length=0), "slice_length must be at least 1"),
    ],
)
def test_misuse_is_refused_at_construction(make, fault):
    """energon asserts at iteration, without a word."""
    with pytest.raises(ValueError, match=fault):
        make()


def test_sources_are_read_in_bulk():
    """One call per source and batch: what a remote or compressed source depends on."""

    class Counting(Numbers):
        calls = 0

        def read(self, indices):
            self.calls += 1
            return super().read(indices)

    tree = endless("a", 1000)
    source = tree.children[0].source = Counting("a", 1000)
    loader = get_loader(BatchDataset(tree, 32), config())
    for _ in range(10):
        next(loader)
    assert source.calls == 10
