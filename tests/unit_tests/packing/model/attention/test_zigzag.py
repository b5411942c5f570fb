"""Context parallel index arithmetic, against brute force."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.packing.model.attention.zigzag import (
    padded_lengths,
    shard_index,
    starts_of_tokens,
    zigzag,
)

CPU = torch.device("cpu")


@st.composite
def cut_packs(draw):
    """(padded_lengths, size): sequences of 1..4 tokens per piece."""
    size = draw(st.integers(2, 5))
    pieces = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    return tuple(2 * size * piece for piece in pieces), size


def shards(padded_lengths, size) -> list[list[int]]:
    found = []
    for rank in range(size):
        index = shard_index(padded_lengths, size, rank)
        assert index is not None
        found.append(index.tolist())
    return found


def test_literal_shards():
    """Pieces are cut within each sequence: cut over the whole pack, ranks would be uneven and RoPE
    wrong.
    """
    assert shards((8, 4), 2) == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


def test_one_rank_holds_all():
    """None says that nothing is to be copied; an index would cost a copy of each field."""
    assert shard_index((8, 4), 1, 0) is None


@given(cut_packs())
def test_shards_partition_the_pack(cut):
    """A token on two ranks counts twice in the loss, a token on none is never trained on."""
    padded_lengths, size = cut
    found = shards(padded_lengths, size)
    assert sorted(position for shard in found for position in shard) == list(
        range(sum(padded_lengths))
    )
    assert {len(shard) for shard in found} == {sum(padded_lengths) // size}


def visible_keys(padded_lengths, size, rank) -> dict[int, list[int]]:
    """Pack position of each of the rank's queries -> pack positions of the keys that it sees,
    bottom-right causal.
    """
    found = shards(padded_lengths, size)
    gathered = [position for shard in found for position in shard]
    order = zigzag(padded_lengths, size, rank, CPU)
    queries, keys = (
        torch.tensor(found[rank]).split(order.query_lengths),
        order.key_index.split(order.key_lengths),
    )
    assert len(queries) == len(keys) == 2 * len(padded_lengths)
    seen = {}
    for q, k in zip(queries, keys):
        for i, query in enumerate(q.tolist()):
            seen[query] = [gathered[key] for key in k[: len(k) - len(q) + i + 1].tolist()]
    return seen


@given(cut_packs())
def test_each_query_sees_its_sequence_up_to_itself(cut):
    """A key too many looks into the future or into another sequence, one too few forgets: the loss
    still falls.
    """
    padded_lengths, size = cut
    seen: dict[int, list[int]] = {}
    for rank in range(size):
        seen |= visible_keys(padded_lengths, size, rank)
    expected: dict[int, list[int]] = {}
    start = 0
    for length in padded_lengths:
        expected |= {query: list(range(start, query + 1)) for query in range(start, start + length)}
        start += length
    assert seen == expected


def test_starts_of_tokens():
    """Positions of RoPE are counted from here; an empty segment has no token."""
    assert starts_of_tokens((2, 0, 1)).tolist() == [0, 0, 2]


def test_segments_without_a_token_hold_and_see_nothing():
    """megatron-core's own `cu_seqlens` may repeat their last entry."""
    assert shards((4, 0), 2) == [[0, 3], [1, 2]]
    order = zigzag((4, 0), 2, 1, CPU)
    assert (order.query_lengths, order.key_lengths) == ((1, 1), (2, 3))
    assert order.key_index.tolist() == [0, 2, 0, 2, 3]  # the docstring's example
    windowed = zigzag((4, 0), 2, 1, CPU, 2)
    assert (windowed.key_lengths, windowed.key_index.tolist()) == ((2, 2), [0, 2, 2, 3])


def test_lengths_are_read_once_per_microbatch():
    """Where `cu_seqlens` are on a device, each read waits for all work queued so far, in each
    layer.
    """
    params = PackedSeqParams(
        cu_seqlens_q=torch.tensor([0, 4, 6]), cu_seqlens_q_padded=torch.tensor([0, 4, 8])
    )
    assert padded_lengths(params) == (4, 4)
    params.cu_seqlens_q_padded = None
    assert padded_lengths(params) == (4, 4)
    assert padded_lengths(PackedSeqParams(cu_seqlens_q=torch.tensor([0, 4, 6]))) == (4, 2)


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_the_same_work(size):
    """The reason for the zigzag: plain contiguous shards would be as correct, and the last rank
    twice as slow.
    """
    padded_lengths = (2 * size, 6 * size)
    pairs = {
        sum(len(keys) for keys in visible_keys(padded_lengths, size, rank).values())
        for rank in range(size)
    }
    assert len(pairs) == 1
