"""Streams of every kind of node, for what must hold of all of them."""

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
from megatron.blending.streams.failures import SkipSample
from tests.unit_tests.blending.number_streams import endless, source_of


def skip_thirds(sample):
    if sample[1] % 3 == 0:
        raise SkipSample
    return sample


def fail_fifths(sample):
    if sample[1] % 5 == 0:
        raise ValueError("fifth")
    return sample


def fail_sixths(sample):
    if sample[1] % 6 == 5:
        raise ValueError("sixth")
    return sample


def is_odd(sample):
    return sample[1] % 2 == 1


def is_not_fifth(batch):
    return batch[0][1] % 5 > 0


def several(sample):
    """0 to 2 outputs, as a generator, of odd samples; even ones as they are."""
    return ((*sample, part) for part in range(sample[1] % 3)) if sample[1] % 2 else sample


def halves(samples):
    """Two batches of one, as a generator."""
    return (part for part in (samples[: len(samples) // 2], samples[len(samples) // 2 :]) if part)


def first_fit(samples):
    """Packs of at most 60, in order of arrival; the last one is left for later."""
    packs: list[list[tuple[str, int]]] = []
    pack: list[tuple[str, int]] = []
    for sample in samples:
        if sum(size for _, size in pack) + sample[1] > 60:
            packs.append(pack)
            pack = []
        pack.append(sample)
    return packs or [pack]


def first_fit_of_two(samples):
    """As `first_fit`, of samples that may have more than two parts."""
    return first_fit(samples) if all(len(sample) == 2 for sample in samples) else [samples[:3]]


def parity(sample):
    return sample[1] % 2, None


def shares(a, b):
    return BlendDataset((a, 0.7), (b, 0.3))


ENDLESS = {
    "source": lambda: endless(),
    "batch": lambda: BatchDataset(endless(), 4),
    "blend of samples": lambda: BatchDataset(shares(endless("a"), endless("b", 30)), 5),
    "blend of batches": lambda: shares(
        BatchDataset(endless("a"), 3), BatchDataset(endless("b", 30), 4)
    ),
    "nested blends": lambda: BatchDataset(
        shares(shares(endless("a"), endless("b", 30)), endless("c", 7)), 3
    ),
    "random blend": lambda: BatchDataset(
        BlendDataset((endless("a"), 7), (endless("b"), 3), mode="random"), 4
    ),
    "mixed batches": lambda: MixBatchDataset(
        (endless("a"), 6), (endless("b", 30), 4), batch_size=8
    ),
    "shuffled batches": lambda: ShuffleBufferDataset(BatchDataset(endless(), 4), 7),
    "slices": lambda: BatchDataset(endless("a", 1000, slice_length=10, shuffle_window=20), 5),
    "epochs": lambda: EpochizeDataset(BatchDataset(source_of(), 4), num_epochs=1000),
    "bad records": lambda: BatchDataset(shares(endless("a", 50, [3, 7, 9]), endless("b", 30)), 5),
    "skips": lambda: BatchDataset(
        MapDataset(shares(endless("a"), endless("b", 30)), skip_thirds), 5
    ),
    "failures": lambda: BatchDataset(
        MapDataset(shares(endless("a"), endless("b", 30)), fail_fifths), 5
    ),
    "failures of samples": lambda: MapDataset(
        FilterDataset(
            MapDataset(
                shares(shares(endless("a"), endless("b", 30)), endless("c", 7)), fail_fifths
            ),
            is_odd,
        ),
        fail_sixths,
    ),
    "failures before packs": lambda: PackingDataset(
        MapDataset(MapDataset(shares(endless("a"), endless("b", 30)), several), fail_fifths),
        10,
        first_fit_of_two,
        list,
    ),
    "filters": lambda: FilterDataset(
        BatchDataset(
            MapDataset(shares(endless("a"), FilterDataset(endless("b"), is_odd)), skip_thirds), 5
        ),
        is_not_fifth,
    ),
    "several": lambda: BatchDataset(
        MapDataset(shares(MapDataset(endless("a"), several), endless("b", 30)), skip_thirds), 5
    ),
    "several batches": lambda: BatchDataset(MapDataset(endless(), skip_thirds), 6, halves),
    "packs": lambda: PackingDataset(
        MapDataset(shares(endless("a"), endless("b", 30)), skip_thirds),
        10,
        first_fit,
        list,
        sample_encoder=tuple,
    ),
    "batches of packs": lambda: BatchDataset(PackingDataset(endless(), 10, first_fit, halves), 2),
    "blend with packs": lambda: shares(
        PackingDataset(endless("a"), 10, first_fit, list), BatchDataset(endless("b"), 3)
    ),
    "groups": lambda: GroupBatchDataset(MapDataset(endless(), skip_thirds), 4, parity),
}

FINITE = {
    "source": lambda: source_of(),
    "turns": lambda: RepeatDataset(source_of("a", 20), 2.5),
    "concat": lambda: BatchDataset(
        ConcatDataset(source_of("a", shuffle=False), source_of("b", 30, shuffle=False)), 7
    ),
    "concat of batches": lambda: ConcatDataset(
        BatchDataset(source_of("a"), 7), BatchDataset(source_of("b", 30), 7)
    ),
    "blend": lambda: BatchDataset(shares(source_of("a"), source_of("b", 30)), 5),
    "limit": lambda: ConcatDataset(LimitDataset(BatchDataset(source_of("a", 200), 3), 25)),
    "shuffled": lambda: ShuffleBufferDataset(source_of("a", shuffle=False), 7),
    "skips": lambda: BatchDataset(
        MapDataset(ConcatDataset(source_of("a"), source_of("b", 30)), skip_thirds), 5
    ),
    "failures": lambda: BatchDataset(
        MapDataset(shares(source_of("a"), source_of("b", 30)), fail_fifths), 5
    ),
    "failures in concat": lambda: MapDataset(
        ConcatDataset(source_of("a"), source_of("b", 30)), fail_fifths
    ),
    "bad records": lambda: BatchDataset(
        ConcatDataset(source_of("a", bad=range(3, 40, 3)), source_of("b", 30)), 5
    ),
    "filtered children": lambda: shares(
        BatchDataset(FilterDataset(source_of("a", 90), is_odd), 2), source_of("b", 60, range(9))
    ),
    "several in children": lambda: ConcatDataset(
        MapDataset(source_of("a"), several), source_of("b", 30)
    ),
    "several": lambda: BatchDataset(
        MapDataset(ConcatDataset(source_of("a"), source_of("b", 30)), several), 5
    ),
    "limited filter": lambda: ConcatDataset(
        LimitDataset(FilterDataset(source_of("a", 200), is_odd), 30)
    ),
    "packs": lambda: PackingDataset(
        ConcatDataset(source_of("a", 400), source_of("b", 300)), 10, first_fit, list
    ),
    "groups": lambda: GroupBatchDataset(source_of("a", 200), 4, parity),
}

PLAIN = (
    "source", "batch", "blend of samples", "blend of batches", "nested blends", "random blend",
    "mixed batches", "shuffled batches", "slices", "epochs",
)  # fmt: skip
"""Endless trees in which nothing is left out or packed."""
SAME_OUTPUTS = (
    "source",
    "turns",
    "concat",
    "concat of batches",
    "blend",
    "limit",
    "shuffled",
    "packs",
)
"""Finite trees whose outputs, and not only the samples in them, are the same for any ranks."""


def flat(value):
    """The samples in outputs, however deep they are in lists."""
    if isinstance(value, list):
        return [sample for one in value for sample in flat(one)]
    return [value]
