"""Layouts: every shard has as many tokens as the others, and the padding is where nothing looks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.packing.batch.layout import Alignment, PackLayout


@pytest.mark.parametrize(
    ("cp", "tp", "sequence_parallel", "sequence", "pack"),
    [
        (1, 1, False, 1, 1),
        (1, 2, False, 1, 1),
        (1, 2, True, 1, 2),
        (2, 1, False, 4, 4),
        (2, 2, True, 4, 4),
        (2, 8, False, 4, 4),
        (2, 8, True, 4, 16),
        (3, 4, True, 6, 12),
    ],
)
def test_alignment_of_layouts(cp, tp, sequence_parallel, sequence, pack):
    """Too small a unit gives ranks unequal shards, which hang or crash far away; too large a one
    only wastes.
    """
    alignment = Alignment.for_layout(
        context_parallel_size=cp, tensor_parallel_size=tp, sequence_parallel=sequence_parallel
    )
    assert alignment == Alignment(sequence=sequence, pack=pack)


@pytest.mark.parametrize(("cp", "tp", "pack"), [(1, 1, 16), (2, 1, 32), (3, 2, 96)])
def test_ranks_hold_a_multiple(cp, tp, pack):
    """GEMMs in fp8 end the run where a rank's number of tokens is no multiple of theirs; sequences
    need no padding.
    """
    alignment = Alignment.for_layout(
        context_parallel_size=cp,
        tensor_parallel_size=tp,
        sequence_parallel=tp > 1,
        rank_multiple=16,
    )
    assert alignment == Alignment(sequence=2 * cp if cp > 1 else 1, pack=pack)
    assert PackLayout.of([5, 7], alignment).num_tokens % (cp * tp * 16) == 0


def test_padded_length():
    """A length that is a multiple already must not grow: it would overflow a pack scheduled to the
    brim.
    """
    lengths = np.array([1, 3, 4, 5, 8], dtype=np.int64)
    assert Alignment(sequence=4, pack=4).padded_length(lengths).tolist() == [4, 4, 4, 8, 8]
    assert Alignment().padded_length(lengths).tolist() == lengths.tolist()


CP2 = Alignment.for_layout(context_parallel_size=2, tensor_parallel_size=1, sequence_parallel=False)
TP2 = Alignment.for_layout(context_parallel_size=1, tensor_parallel_size=2, sequence_parallel=True)
CP2_TP2 = Alignment.for_layout(
    context_parallel_size=2, tensor_parallel_size=2, sequence_parallel=True
)
CP2_TP4 = Alignment.for_layout(
    context_parallel_size=2, tensor_parallel_size=4, sequence_parallel=True
)


@pytest.mark.parametrize(
    ("lengths", "alignment", "cu_seqlens", "cu_seqlens_padded"),
    [
        ([3, 5], Alignment(), [0, 3, 8], [0, 3, 8]),
        ([3, 5], CP2, [0, 3, 8], [0, 4, 12]),
        ([4, 3], TP2, [0, 4, 7, 7], [0, 4, 7, 8]),  # a tail of one token, with no real one
        ([4, 4], TP2, [0, 4, 8], [0, 4, 8]),
        ([3, 5], CP2_TP2, [0, 3, 8], [0, 4, 12]),
        ([3, 5], CP2_TP4, [0, 3, 8, 8], [0, 4, 12, 16]),
        ([], Alignment(), [0, 0], [0, 1]),  # dummy packs: one unit of padding
        ([], CP2, [0, 0], [0, 4]),
        ([], TP2, [0, 0], [0, 2]),
        ([], CP2_TP4, [0, 0], [0, 8]),
    ],
)
def test_pack_layout(lengths, alignment, cu_seqlens, cu_seqlens_padded):
    """Where sequences start decides who attends to whom; an error shows as a slightly worse loss,
    or not at all.
    """
    layout = PackLayout.of(lengths, alignment)
    assert layout.cu_seqlens.tolist() == cu_seqlens
    assert layout.cu_seqlens_padded.tolist() == cu_seqlens_padded
    assert layout.cu_seqlens.dtype == layout.cu_seqlens_padded.dtype == np.int32
    assert layout.num_tokens == cu_seqlens_padded[-1]
    assert layout.max_seqlen == max(np.diff(cu_seqlens_padded))
    assert all(type(n) is int for n in (layout.num_tokens, layout.max_seqlen))


@given(
    lengths=st.lists(st.integers(1, 60), max_size=12),
    cp=st.integers(1, 5),
    tp=st.integers(1, 6),
    sequence_parallel=st.booleans(),
)
def test_pack_layout_invariants(lengths, cp, tp, sequence_parallel):
    """Every segment must split evenly over context parallel and every pack over both, with the
    least padding.
    """
    alignment = Alignment.for_layout(
        context_parallel_size=cp, tensor_parallel_size=tp, sequence_parallel=sequence_parallel
    )
    layout = PackLayout.of(lengths, alignment)
    assert layout.cu_seqlens_padded[-1] == layout.num_tokens > 0
    assert layout.num_tokens % (cp * (tp if sequence_parallel else 1)) == 0
    assert all(
        padded > 0 and (cp == 1 or padded % (2 * cp) == 0) for padded in layout.padded_lengths
    )
    assert list(layout.lengths[: len(lengths)]) == lengths
    padding = [padded - real for real, padded in zip(layout.lengths, layout.padded_lengths)]
    assert all(0 <= p < alignment.sequence for p in padding[: len(lengths)])
    tail = layout.padded_lengths[len(lengths) :]
    assert list(layout.lengths[len(lengths) :]) == [0] * len(tail)
    assert sum(tail) < alignment.pack if lengths else tail == (alignment.pack,)
