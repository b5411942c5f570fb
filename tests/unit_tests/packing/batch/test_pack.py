"""Packing: each token where the layout says, and nothing in between."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.packing.batch.layout import Alignment, PackLayout
from megatron.packing.batch.pack import layout_microbatch, pack
from megatron.packing.batch.sample import Sample

CPU = torch.device("cpu")


def sample(length: int, first: int, source: int = 0) -> Sample:
    """Tokens first, first + 1, ...; no field holds a zero, so that padding can be told from content."""
    tokens = torch.arange(first, first + length)
    return Sample(tokens, tokens + 1, torch.arange(1, length + 1) / 8, torch.arange(1, length + 1), source)


def test_literal_pack():
    """A field written at another place than its tokens trains on wrong labels, with a loss that still falls."""
    layout = PackLayout.of([3, 2], Alignment(sequence=2, pack=8))
    microbatch = pack([sample(3, first=10, source=4), sample(2, first=20, source=1)], layout, CPU)
    assert {name: getattr(value, "tolist", lambda value=value: value)() for name, value in microbatch.items()} == {
        "cu_seqlens": [0, 3, 5, 5],
        "cu_seqlens_padded": [0, 4, 6, 8],
        "max_seqlen": 4,
        "sources": [4, 1, 0],
        "tokens": [10, 11, 12, 0, 20, 21, 0, 0],
        "labels": [11, 12, 13, 0, 21, 22, 0, 0],
        "loss_mask": [0.125, 0.25, 0.375, 0, 0.125, 0.25, 0, 0],
        "position_ids": [1, 2, 3, 0, 1, 2, 0, 0],
    }
    assert {name: microbatch[name].dtype for name in ("tokens", "labels", "loss_mask", "position_ids")} == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.float32,
        "position_ids": torch.int64,
    }


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), max_size=6),
    sequence=st.integers(1, 6),
    scatter=st.integers(1, 4),
)
def test_content_in_place_and_padding_masked(lengths, sequence, scatter):
    """Padding with a weight, or a sample over its neighbour's end, changes the loss by a little that nobody sees."""
    samples = [sample(length, first=1000 * (i + 1)) for i, length in enumerate(lengths)]
    layout = PackLayout.of(lengths, Alignment(sequence=sequence, pack=sequence * scatter))
    microbatch = pack(samples, layout, CPU)
    is_padding = torch.ones(layout.num_tokens, dtype=torch.bool)
    for one, start in zip(samples, layout.cu_seqlens_padded.tolist()):
        here = slice(start, start + len(one))
        is_padding[here] = False
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert torch.equal(microbatch[name][here], getattr(one, name))
    assert is_padding.sum() == layout.num_tokens - sum(lengths)
    assert not microbatch["loss_mask"][is_padding].any()
    assert not microbatch["tokens"][is_padding].any()


def test_dummy_pack_is_masked_altogether():
    """A dummy pack that adds anything to loss or token count makes the loss depend on the layout."""
    microbatch = pack([], PackLayout.of([], Alignment(sequence=4, pack=8)), CPU)
    assert microbatch["tokens"].tolist() == [0] * 8
    assert microbatch["loss_mask"].tolist() == [0] * 8


def test_layout_microbatch_has_no_tokens():
    """Stages in the middle must not receive tokens that they don't need, and have the same layout as the others."""
    layout = PackLayout.of([3], Alignment(sequence=4, pack=4))
    microbatch = layout_microbatch(layout)
    assert sorted(microbatch) == ["cu_seqlens", "cu_seqlens_padded", "max_seqlen"]
    whole = pack([sample(3, first=1)], layout, CPU)
    assert all(torch.equal(torch.as_tensor(whole[name]), torch.as_tensor(microbatch[name])) for name in microbatch)
    assert type(microbatch["max_seqlen"]) is int
