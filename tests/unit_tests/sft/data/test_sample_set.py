"""Which record stands where: one source after the other, or in a blend's proportions."""

import copy
from collections import Counter

import numpy as np
import pytest

from megatron.blending import RepeatDataset
from megatron.blending.loading.sources import LoadedDataset
from megatron.blending.metadatasets.tree import SourceEntry
from megatron.blending.streams.source import SourceDataset
from megatron.sft.data.sample_set import blend_changes, blended, match_saved_form
from megatron.sft.data.stream import SampleStream, Share
from tests.unit_tests.sft.data.test_stream import Numbered, one_after_the_other

LEAF = SourceEntry(path="some", split_part="train")


def blend_of(weights, sizes=(10, 7, 4), seed=1, mode="exact", names="abc"):
    sources = [
        Numbered(size, name, number=number) for number, (size, name) in enumerate(zip(sizes, names))
    ]
    loaded = [
        LoadedDataset(
            RepeatDataset(SourceDataset(source, load=source.load, name=source.name)), weight, LEAF
        )  # type: ignore[arg-type]
        for source, weight in zip(sources, weights)
    ]
    return blended(list(names), loaded, weights, seed, mode)


def places(samples, start, end):
    """(source, record) at these positions."""
    stream = SampleStream(samples, Share(0, 1, end - start, end - start), consumed_samples=start)
    return [(sample["source"], int(sample["tokens"][0])) for sample in next(stream)]


def test_concatenation_at_the_borders():
    """At the border of files an index off by one reads a record twice and another never."""
    sources = [Numbered(2), Numbered(3)]
    expected = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert places(one_after_the_other(*sources), 0, 5) == expected
    shuffled = one_after_the_other(*sources, seed=3)
    orders = [places(shuffled, 5 * epoch, 5 * epoch + 5) for epoch in range(20)]
    assert all(sorted(order) == expected for order in orders)
    assert len(set(map(tuple, orders))) > 1


def test_blend_has_its_proportions_at_every_prefix():
    """A small source that is drawn more or less often than its weight says is what blends are for
    to prevent.
    """
    found = places(blend_of((5, 3, 2)), 0, 300)
    counts = np.cumsum([[place[0] == source for source in range(3)] for place in found], axis=0)
    prefixes = np.arange(1, 301)[:, None]
    assert (abs(counts - prefixes * np.array([0.5, 0.3, 0.2])) < 1 + 1e-9).all()
    for source, size in enumerate((10, 7, 4)):
        records = [record for number, record in found if number == source]
        for epoch in range(len(records) // size):
            assert sorted(records[epoch * size : (epoch + 1) * size]) == list(range(size))


@pytest.mark.parametrize("mode", ["exact", "random"])
def test_blend_is_a_function_of_the_position(mode):
    """A run that goes on, or on other ranks, must read what the first one would have."""
    whole = places(blend_of((5, 3, 2), mode=mode), 0, 200)
    again = blend_of((5, 3, 2), mode=mode)
    for start in (150, 0, 50, 100):
        assert places(again, start, start + 50) == whole[start : start + 50]
    assert places(blend_of((5, 3, 2), mode=mode, seed=2), 0, 200) != whole


def test_random_blend_draws():
    """Users who compare with energon want its statistics, not exact proportions."""
    counts = Counter(source for source, _ in places(blend_of((5, 3, 2), mode="random"), 0, 1000))
    assert all(
        abs(counts[source] / 1000 - share) < 0.06 for source, share in enumerate((0.5, 0.3, 0.2))
    )


def test_changes_are_named():
    """A position in another blend means other records: some would be trained on twice, others
    never.
    """
    saved = blend_of((5, 3, 2)).identity
    assert blend_changes(saved, blend_of((5, 3, 2)).identity) == []
    cases = {
        ("the weight of a was 5, is 4",): blend_of((4, 3, 2)),
        ("source b has other records",): blend_of((5, 3, 2), sizes=(10, 8, 4)),
        ("source b is missing", "source x is new"): blend_of((5, 3, 2), names="axc"),
        ("source c is missing",): blend_of((5, 3), names="ab"),
        ("--blend-mode was exact, is random",): blend_of((5, 3, 2), mode="random"),
    }
    for expected, now in cases.items():
        assert blend_changes(saved, now.identity)[: len(expected)] == list(expected)
    swapped = blend_of((5, 2, 3), sizes=(10, 4, 7), names="acb").identity
    assert blend_changes(saved, swapped) == ["the order of the sources was a, b, c, is a, c, b"]


def test_files_are_no_blend():
    """A file to which records were added must not stop the run that goes on with it."""
    saved, now = (one_after_the_other(Numbered(size), seed=1).identity for size in (5, 6))
    assert saved != now
    assert blend_changes(saved, now) == []
    blend = blend_of((1, 1)).identity
    assert blend_changes(saved, blend) == ["the data was not a blend, and is a blend now"]
    assert blend_changes(blend, saved) == ["the data was a blend, and is not a blend now"]


def test_order_of_the_sources_alone_is_told():
    """What is read in another order, such as by another multiplier, has no name of its own in the
    identity.
    """
    saved = blend_of((1, 1)).identity
    now = copy.deepcopy(saved)
    now["blend"]["order"] = "other"
    assert blend_changes(saved, now) == [
        "the sources are read in another order, or in other proportions over steps"
    ]


def test_checkpoints_of_earlier_versions_are_of_the_same_data():
    """Their fingerprints are the first half of today's: each would be told as other data, or be
    refused as another blend.
    """
    first, second, other = "0a" * 16, "b1" * 16, "c2" * 16
    template = first + second  # a hash that is no fingerprint

    def identity(*fingerprints):
        sources = [{"name": "a", "fingerprint": text, "weight": "1"} for text in fingerprints]
        blend = {"mode": "exact", "sources": sources, "order": "[]"}
        return {
            "fingerprint": " ".join(fingerprints),
            "chat_template": template,
            "seed": 1,
            "blend": blend,
        }

    now = identity(first + other, f"0-10 of {second}{other}")
    former = identity(first, f"0-10 of {second}")
    assert match_saved_form(former, now) == former
    assert match_saved_form(now, now) == now
    assert match_saved_form(identity(first + second), now) == now  # other data, of this version
    assert match_saved_form({}, {"seed": 1, "fingerprint": "mock"}) == {
        "seed": 1,
        "fingerprint": "mock",
    }
