"""Packing: each token where the layout says, and nothing in between."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.microbatches import (
    FIELDS,
    layout_microbatches,
    layouts_of,
    layouts_of_samples,
    pack,
)
from megatron.packing.batch.reading import read_samples
from megatron.packing.batch.samples import Samples
from tests.unit_tests.packing.batch.test_samples import samples_of


def sequence(length: int, first: int) -> tuple[list[int], list[int], list[float], list[int]]:
    """Tokens first, first + 1, ...; no field holds a zero, so that padding can be told from
    content.
    """
    tokens = list(range(first, first + length))
    counted = list(range(1, length + 1))
    return tokens, [token + 1 for token in tokens], [number / 8 for number in counted], counted


def packed(samples: Samples, counts: list[int], alignment: Alignment) -> list[dict]:
    num_sequences = np.array(counts, np.int64)
    return pack(samples, num_sequences, layouts_of(samples.lengths, num_sequences, alignment))


def test_literal_packs() -> None:
    """A field written at another place than its tokens trains on wrong labels, with a loss that
    still falls.
    """
    samples = samples_of([sequence(3, 10), sequence(2, 20), sequence(1, 30)], sources=[4, 1, 5])
    first, empty, last = packed(samples, [2, 0, 1], Alignment(sequence=2, pack=8))
    assert {
        name: getattr(value, "tolist", lambda value=value: value)() for name, value in first.items()
    } == {
        "cu_seqlens": [0, 3, 5, 5],
        "cu_seqlens_padded": [0, 4, 6, 8],
        "max_seqlen": 4,
        "sources": [4, 1, 0],
        "tokens": [10, 11, 12, 0, 20, 21, 0, 0],
        "labels": [11, 12, 13, 0, 21, 22, 0, 0],
        "loss_mask": [0.125, 0.25, 0.375, 0, 0.125, 0.25, 0, 0],
        "position_ids": [1, 2, 3, 0, 1, 2, 0, 0],
        "padding_mask": [False, False, False, True, False, False, True, True],
    }
    assert last["tokens"].tolist() == [30, 0, 0, 0, 0, 0, 0, 0]
    assert last["sources"].tolist() == [5, 0]
    dtypes = [first[name].dtype for name in FIELDS]
    assert dtypes == [torch.int64, torch.int64, torch.float32, torch.int64, torch.bool]
    # A dummy pack that adds anything to loss or token count makes the loss depend on the layout.
    assert empty["tokens"].tolist() == empty["loss_mask"].tolist() == [0] * 8
    assert empty["cu_seqlens"].tolist() == [0, 0]


def test_a_field_of_a_tree_is_that_of_each_of_its_nodes() -> None:
    """A segment is a node: the rows of a tree's second node would be those of the next sample."""
    tree = {
        "tokens": [1, 2, 3, 4],
        "labels": [2, 3, 4, 5],
        "cu_seqlens": [0, 2, 3, 4],
        "parents": [-1, 0, 0],
        "sample_id": 7,
    }
    samples = read_samples([{"tokens": [5], "sample_id": 6}, tree, {"tokens": [8], "sample_id": 9}])
    counts, alignment = np.array([2, 1], np.int64), Alignment(sequence=2, pack=8)
    packs = pack(samples, counts, layouts_of_samples(samples, counts, alignment))
    assert [each["extra_per_sequence"]["sample_id"].tolist() for each in packs] == [
        [6, 7, 7, 7],
        [9, 0],
    ]


@given(
    lengths=st.lists(st.lists(st.integers(1, 20), max_size=5), min_size=1, max_size=4),
    sequence_unit=st.integers(1, 6),
    scatter=st.integers(1, 4),
)
def test_content_in_place_and_padding_masked(
    lengths: list[list[int]], sequence_unit: int, scatter: int
) -> None:
    """Padding with a weight, or a sample over its neighbour's end, changes the loss by a little
    that nobody sees.
    """
    flat = [length for pack_lengths in lengths for length in pack_lengths]
    parts = [sequence(length, first=1000 * (i + 1)) for i, length in enumerate(flat)]
    alignment = Alignment(sequence=sequence_unit, pack=sequence_unit * scatter)
    remaining = iter(parts)
    for microbatch, inside in zip(
        packed(samples_of(parts), list(map(len, lengths)), alignment), lengths, strict=True
    ):
        is_padding = np.ones(len(microbatch["tokens"]), np.bool_)
        assert microbatch["cu_seqlens_padded"][-1] == len(microbatch["tokens"])
        for start, length in zip(microbatch["cu_seqlens_padded"].tolist(), inside):
            is_padding[start : start + length] = False
            wanted = next(remaining)
            assert (
                tuple(microbatch[name][start : start + length].tolist() for name in FIELDS[:4])
                == wanted
            )
        assert microbatch["padding_mask"].tolist() == is_padding.tolist()
        assert is_padding.sum() == len(is_padding) - sum(inside)
        for name in FIELDS[:4]:  # their memory is not cleared, and has values of packs before
            assert not microbatch[name][torch.from_numpy(is_padding)].any()


def test_layout_microbatches_have_no_tokens() -> None:
    """Stages in the middle must not receive tokens that they don't need, and have the same layout
    as the others.
    """
    samples = samples_of([sequence(3, 1)])
    (layout,) = layouts_of(samples.lengths, np.array([1]), Alignment(sequence=4, pack=4))
    (microbatch,) = layout_microbatches([layout])
    assert sorted(microbatch) == ["cu_seqlens", "cu_seqlens_padded", "max_seqlen", "padding_mask"]
    (whole,) = pack(samples, np.array([1]), [layout])
    assert all(
        torch.equal(torch.as_tensor(whole[name]), torch.as_tensor(microbatch[name]))
        for name in microbatch
    )
    assert type(microbatch["max_seqlen"]) is int
