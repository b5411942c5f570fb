"""Packed attention without Transformer Engine: exactly causal attention of each sequence, in any
layout.
"""

from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.packing.model.attention import blocks as attention_blocks
from megatron.packing.model.attention import core_attention as attention_module
from megatron.packing.model.attention.blocks import Scores, Segments
from megatron.packing.model.attention.core_attention import (
    PackedDotProductAttention,
    causal_attention,
)
from megatron.packing.model.attention.zigzag import shard_index
from tests.unit_tests.packing.stubs import Ranks

HEADS, WIDTH = 4, 8
assert_exact = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


def attention(
    cp: Ranks | None = None,
    *,
    mask=AttnMaskType.causal,
    kind="self",
    dropout=None,
    scale=None,
    layer_number=1,
    softcap=None,
    tp=None,
    **config,
):
    groups = ProcessGroupCollection()
    groups.cp, groups.tp = cp or Ranks(), tp or Ranks()
    options = {
        "num_layers": 1,
        "hidden_size": HEADS * WIDTH,
        "num_attention_heads": HEADS,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "params_dtype": torch.float64,
    }
    return PackedDotProductAttention(
        TransformerConfig(**(options | config)),
        layer_number=layer_number,
        attn_mask_type=mask,
        attention_type=kind,
        attention_dropout=dropout,
        softmax_scale=scale,
        pg_collection=groups,
        softcap=softcap,
    )


def dense_attention(
    query,
    key,
    value,
    query_lengths,
    key_lengths,
    scale,
    *,
    window=None,
    softcap=None,
    sinks=None,
) -> Tensor:
    """The definition: all scores, and a mask of whole packs. transformers' windows count a token
    itself."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
    mask = torch.zeros(len(query), len(key), dtype=torch.bool)
    first_query = first_key = 0
    for num_queries, num_keys in zip(query_lengths, key_lengths):
        for i in range(num_queries):
            own = num_keys - num_queries + i
            low = 0 if window is None else max(0, own - window + 1)
            mask[first_query + i, first_key + low : first_key + own + 1] = True
        first_query, first_key = first_query + num_queries, first_key + num_keys
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((sinks[:, None, None].expand(-1, len(query), 1), scores), dim=-1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., 1:], value)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


def tensors(*shapes) -> list[Tensor]:
    """fp64 leaves, always the same."""
    generator = torch.Generator().manual_seed(1234)
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in shapes
    ]


def assert_same_gradients(out: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    """Of a sum that weighs each output element differently."""
    (weights,) = tensors(tuple(out.shape))
    found = torch.autograd.grad((out * weights.detach()).sum(), leaves)
    wanted = torch.autograd.grad((expected * weights.detach()).sum(), leaves)
    for one, other in zip(found, wanted):
        assert other.abs().max() > 0.1
        assert_exact(one, other)


def packed(*padded_lengths, real=None) -> PackedSeqParams:
    padded = torch.tensor([0, *padded_lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    real = (
        padded
        if real is None
        else torch.tensor([0, *real], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    )
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=max(padded_lengths),
        max_seqlen_kv=max(padded_lengths),
    )


@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize(
    ("query_lengths", "key_lengths"),
    [
        ((9,), (9,)),
        ((1, 5, 1, 7), (1, 5, 1, 7)),
        ((2, 3), (7, 3)),  # bottom-right: the first sequence's two queries are its last
        ((1, 4, 2), (6, 5, 8)),
    ],
)
def test_causal_attention_is_the_dense_one(groups, query_lengths, key_lengths):
    """Attention over a sequence's end, into the future, or of a head to another's keys lowers the
    loss and is wrong.
    """
    leaves = tensors(
        (sum(query_lengths), HEADS, WIDTH),
        (sum(key_lengths), groups, WIDTH),
        (sum(key_lengths), groups, WIDTH),
    )
    query, key, value = leaves
    segments = Segments(query_lengths, key_lengths)
    out = causal_attention(query, key, value, segments, Scores(scale=0.3))
    expected = dense_attention(query, key, value, query_lengths, key_lengths, 0.3)
    assert_exact(out, expected)
    assert_same_gradients(out, expected, leaves)


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(2, None, False), (3, 1.5, True), (None, 1.5, False), (100, None, True), (None, None, True)],
)
@pytest.mark.parametrize(
    ("query_lengths", "key_lengths"),
    [((9, 40, 1, 23),) * 2, ((300,),) * 2, ((1, 4, 20), (6, 5, 81))],
)
def test_windows_caps_and_sinks_are_the_dense_ones(
    query_lengths, key_lengths, window, softcap, sinks
):
    """A window off by one, or one that reaches into the sequence before, lowers the loss and is
    another model. 300 queries are two blocks.
    """
    leaves = (
        tensors(
            (sum(query_lengths), HEADS, WIDTH),
            (sum(key_lengths), 2, WIDTH),
            (sum(key_lengths), 2, WIDTH),
        )
        + tensors((HEADS,)) * sinks
    )
    segments = Segments(query_lengths, key_lengths)
    scores = Scores(scale=0.3, window=window, softcap=softcap)
    query, key, value = leaves[:3]
    given = leaves[3] if sinks else None
    out = causal_attention(query, key, value, segments, scores, given)
    expected = dense_attention(
        query,
        key,
        value,
        query_lengths,
        key_lengths,
        0.3,
        window=window,
        softcap=softcap,
        sinks=given,
    )
    assert_exact(out, expected)
    assert_same_gradients(out, expected, leaves)


def test_blocks_hold_no_scores_of_whole_packs(monkeypatch):
    """Of a context-parallel piece the CPU once made masks of all its queries and keys."""
    monkeypatch.setattr(attention_blocks, "_BLOCK_SCORES", 1 << 17)
    query, key, value = tensors((512, HEADS, WIDTH), (1024, 2, WIDTH), (1024, 2, WIDTH))
    with Largest() as largest:
        out = causal_attention(query, key, value, Segments((512,), (1024,)), Scores(scale=0.3))
        out.sum().backward()
    assert largest.numel <= 1 << 17


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, out.numel() if isinstance(out, Tensor) else 0)
        return out


def test_layers_take_window_and_sinks_of_the_config():
    """megatron-core's fields, as Transformer Engine reads them: (tokens before, 0), and 1 for
    layers with a window.
    """
    options: Any = {
        "window_size": (2, 0),
        "window_attn_skip_freq": [1, 0],
        "softmax_type": "learnable",
    }
    query, key, value = tensors(*[(12, HEADS, WIDTH)] * 3)
    for layer_number, window in ((1, 3), (2, None)):
        module = attention(layer_number=layer_number, softcap=1.5, num_layers=2, **options)
        (sinks,) = module.parameters()
        with torch.no_grad():
            sinks.copy_(torch.arange(HEADS))
        assert sinks.tensor_model_parallel
        out = module(query, key, value, None, packed_seq_params=packed(4, 8))
        expected = dense_attention(
            query,
            key,
            value,
            (4, 8),
            (4, 8),
            WIDTH**-0.5,
            window=window,
            softcap=1.5,
            sinks=sinks,
        )
        assert_exact(out, expected.flatten(1))
        assert_same_gradients(out, expected.flatten(1), [query, key, value, sinks])
    assert [len(attention(**options, tp=Ranks(2, 1)).softmax_offset)] == [HEADS // 2]
    assert not list(attention().parameters())


@pytest.mark.parametrize("scale", [None, 0.3])
def test_module_on_a_pack(scale):
    """Segments must be cut where they stand in the pack, at padded lengths; the default scale is 1
    / sqrt(d).
    """
    lengths = (4, 8, 4)
    query, key, value = tensors((16, HEADS, WIDTH), (16, 2, WIDTH), (16, 2, WIDTH))
    out = attention(scale=scale)(
        query, key, value, None, packed_seq_params=packed(*lengths, real=(3, 5, 0))
    )
    expected = dense_attention(query, key, value, lengths, lengths, scale or WIDTH**-0.5)
    assert_exact(out, expected.flatten(1))


def test_pack_without_padded_lengths():
    """megatron-core leaves the padded `cu_seqlens` out where nothing is padded."""
    params = packed(4, 8)
    params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = None
    query, key, value = tensors(*[(12, HEADS, WIDTH)] * 3)
    expected = dense_attention(query, key, value, (4, 8), (4, 8), WIDTH**-0.5)
    assert_exact(
        attention()(query, key, value, None, packed_seq_params=params), expected.flatten(1)
    )


def test_rows_of_a_batch_are_attended_to_apart():
    """[s, b] read as [b, s] mixes the rows of a batch, and evaluation without packing compares with
    the wrong loss.
    """
    query, key, value = tensors((5, 3, HEADS, WIDTH), (5, 3, 2, WIDTH), (5, 3, 2, WIDTH))
    out = attention()(query, key, value, None)
    assert out.shape == (5, 3, HEADS * WIDTH)
    for row in range(3):
        expected = dense_attention(
            query[:, row], key[:, row], value[:, row], (5,), (5,), WIDTH**-0.5
        )
        assert_exact(out[:, row], expected.flatten(1))


def shards_of(padded_lengths: tuple[int, ...], size: int) -> list[Tensor]:
    found = [shard_index(padded_lengths, size, rank) for rank in range(size)]
    return [index for index in found if index is not None]


@pytest.fixture
def gather(monkeypatch):
    """Lets the gather over context parallel return what all ranks would have sent; autograd sums
    over the ranks.
    """

    def stub(shards: list[Tensor]) -> None:
        def gathered(mine: Tensor, *, tensor_parallel_output_grad: bool, group: Ranks) -> Tensor:
            assert tensor_parallel_output_grad, "gradients of other ranks' queries would be lost"
            assert torch.equal(mine, shards[group.rank()])
            return torch.cat(shards)

        monkeypatch.setattr(attention_module, "gather_from_sequence_parallel_region", gathered)

    return stub


@pytest.mark.parametrize("window", [None, 2, 5])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("pieces", [(3,), (1, 4, 2)])
def test_context_parallel_is_the_whole(size, pieces, window, gather):
    """Each rank's two halves, put together, are attention of the whole pack, forward and backward.
    A wrong half trains without an error, on less or other context.
    """
    lengths = tuple(2 * size * piece for piece in pieces)
    total = sum(lengths)
    leaves = tensors((total, HEADS, WIDTH), (total, 2, WIDTH), (total, 2, WIDTH))
    query, key, value = leaves
    shards = shards_of(lengths, size)
    gather([torch.cat((key[shard], value[shard]), dim=-1) for shard in shards])
    options: Any = {} if window is None else {"window_size": (window - 1, 0)}
    outputs = [
        attention(Ranks(size, rank), softcap=2.0, **options)(
            query[shard], key[shard], value[shard], None, packed_seq_params=packed(*lengths)
        )
        for rank, shard in enumerate(shards)
    ]
    out = torch.cat(outputs)[torch.cat(shards).argsort()]
    expected = dense_attention(
        query, key, value, lengths, lengths, WIDTH**-0.5, window=window, softcap=2.0
    ).flatten(1)
    assert_exact(out, expected)
    assert_same_gradients(out, expected, leaves)


@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_rows_are_the_whole(size, gather):
    """The same without packs, where each row is one sequence and ranks hold its zigzag shards."""
    length, batch = 4 * size, 3
    leaves = tensors(
        (length, batch, HEADS, WIDTH), (length, batch, 2, WIDTH), (length, batch, 2, WIDTH)
    )
    query, key, value = leaves
    shards = shards_of((length,), size)
    kv = torch.cat((key, value), dim=-1)
    gather([kv[shard].transpose(0, 1).flatten(0, 1) for shard in shards])
    outputs = [
        attention(Ranks(size, rank))(query[shard], key[shard], value[shard], None)
        for rank, shard in enumerate(shards)
    ]
    out = torch.cat(outputs)[torch.cat(shards).argsort()]
    rows = [
        dense_attention(
            query[:, row], key[:, row], value[:, row], (length,), (length,), WIDTH**-0.5
        ).flatten(1)
        for row in range(batch)
    ]
    expected = torch.stack(rows, dim=1)
    assert_exact(out, expected)
    assert_same_gradients(out, expected, leaves)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"attention_dropout": 0.1}, "attention-dropout 0.1"),
        ({"dropout": 0.2}, "attention-dropout 0.2"),
        ({"window_size": (-1, 0)}, "window_size (-1, 0)"),
        ({"window_size": (4, 1)}, "window_size (4, 1)"),
        ({"mask": AttnMaskType.padding}, "AttnMaskType.padding"),
        ({"mask": AttnMaskType.no_mask}, "AttnMaskType.no_mask"),
        ({"mask": AttnMaskType.arbitrary}, "AttnMaskType.arbitrary"),
        ({"kind": "cross"}, "attention_type 'cross'"),
        ({"softmax_type": "off-by-one"}, "softmax_type 'off-by-one'"),
    ],
)
def test_refuses_what_it_does_not_do(options, name):
    """An option that is accepted and not applied trains another model than was asked for."""
    with pytest.raises(ValueError, match="does not support") as error:
        attention(**options)
    assert name in str(error.value)


@pytest.mark.parametrize("mask", [AttnMaskType.causal, AttnMaskType.padding_causal])
def test_accepts_causal_masks(mask):
    """A refusal of what megatron-core's layer specs ask for would make the tests above pass for the
    wrong reason.
    """
    attention(mask=mask)
    attention(mask=mask, attention_dropout=0.1, dropout=0.0)


def test_query_key_layer_scaling_changes_no_result():
    """megatron-core divides scores by the layer's number and multiplies back; half of it is another
    model.
    """
    query, key, value = tensors(*[(5, HEADS, WIDTH)] * 3)
    module = attention(layer_number=3, apply_query_key_layer_scaling=True)
    out = module(query, key, value, None, packed_seq_params=packed(5))
    assert_exact(out, dense_attention(query, key, value, (5,), (5,), WIDTH**-0.5).flatten(1))
