"""Rotary embeddings of whole packs: megatron-core's own, without a loop over sequences."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.packing.batch.layout import Alignment, PackLayout
from megatron.packing.batch.microbatches import layout_microbatches, layouts_of_samples, pack
from megatron.packing.batch.reading import read_samples
from megatron.packing.device import Device
from megatron.packing.model.attention import core_attention as attention
from megatron.packing.model.attention.rotary import (
    LayerRotary,
    Places,
    _Turn,
    frequencies_of_tokens,
    give_whole_packs,
    turns_of,
)
from megatron.packing.model.attention.self_attention import QueryScale
from megatron.packing.model.attention.zigzag import shard_index
from megatron.packing.model.get_batch import packed_seq_params
from megatron.packing.model.layer_spec import packed_block_spec
from megatron.planner.calibrate import one_process
from tests.unit_tests.packing.stubs import Ranks

CPU = torch.device("cpu")
WIDTH, HEADS = 16, 3


def frequencies(positions: int, rotated: int, is_interleaved: bool) -> torch.Tensor:
    """As megatron-core's RotaryEmbedding gives them."""
    plain = torch.outer(
        torch.arange(positions).double(), 100.0 ** -torch.linspace(0, 1, rotated // 2).double()
    )
    both = plain.repeat_interleave(2, -1) if is_interleaved else torch.cat((plain, plain), -1)
    return both[:, None, None]


@pytest.mark.parametrize("rotated", [WIDTH, 12])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1.3])
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("by_pack", [False, True])
def test_is_megatron_cores_own(rotated, is_interleaved, scale, size, rank, by_pack):
    """Of part of a head's channels, in both kinds of pairs, under YaRN's scale, for a rank's two
    pieces of each sequence, for positions of sequences and (as multimodal ones are) of the pack;
    and its gradient.
    """
    lengths = tuple(2 * size * pieces for pieces in (3, 1, 4))
    own = frequencies(sum(lengths) if by_pack else max(lengths), rotated, is_interleaved)
    x = torch.randn(sum(lengths) // size, HEADS, WIDTH, dtype=torch.float64, requires_grad=True)
    config = SimpleNamespace(
        apply_rope_fusion=False,
        rotary_interleaved=is_interleaved,
        multi_latent_attention=False,
        mrope_section=None,
    )
    cu_seqlens = torch.tensor((0, *lengths)).cumsum(0)
    expected = apply_rotary_pos_emb(x, own, config, cu_seqlens, scale, Ranks(size, rank))
    of_tokens = frequencies_of_tokens(own, lengths, size, rank)
    turns = turns_of(of_tokens, WIDTH, is_interleaved, scale, x.dtype)
    # Keys have fewer heads.
    turned, fewer = (out.squeeze(1) for out in _Turn.apply(x[:, None], x[:, None, :1], *turns))
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(fewer, expected[:, :1], rtol=0, atol=1e-14)
    weights = torch.randn_like(x)
    both = ((turned, fewer), (expected, expected[:, :1]))
    gradients = [
        torch.autograd.grad((query * weights).sum() + (key * weights[:, 1:2]).sum(), x)[0]
        for query, key in both
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-14)


class Operations(TorchDispatchMode):
    """Counts what is launched."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def model_of(**options) -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        **options,
    )
    return GPTModel(config, packed_block_spec(config), 32, 64, position_embedding_type="rope")


def run(model: GPTModel, *lengths: int) -> torch.Tensor:
    layout = PackLayout.of(lengths, Alignment())
    params = packed_seq_params(layout_microbatches([layout])[0], CPU)
    tokens = torch.arange(sum(lengths))[None] % 32
    loss = model(tokens, tokens, None, labels=tokens, packed_seq_params=params)
    loss.sum().backward()
    return loss


@pytest.fixture
def single_process():
    with one_process(Device.at(CPU)):
        yield


@pytest.mark.usefixtures("single_process")
def test_no_operation_is_per_sequence(monkeypatch):
    """64 sequences and 32 layers would be thousands of launches more per microbatch. Attention
    itself is one kernel on a GPU, for which here stands one operation.
    """
    monkeypatch.setattr(
        attention, "causal_attention", lambda query, key, value, *_: query + key + value
    )
    model = model_of()
    counts = []
    for lengths in ((12, 12), (2,) * 12):
        model.rotary_pos_emb(
            max(lengths), packed_seq=True
        )  # which megatron-core keeps for each longest sequence
        model.zero_grad()
        with Operations() as operations:
            run(model, *lengths)
        counts.append(operations.counts)
    assert counts[0] == counts[1]
    assert (
        counts[0]["aten.addcmul_.default"] == 2 * 2 * 2 * 2
    )  # layers, query and key, halves, forward and backward
    assert counts[0]["aten.cos.default"] == 1


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("options", [{}, {"rotary_interleaved": True}, {"no_rope_freq": [1, 0]}])
def test_model_is_the_one_with_megatron_cores_attention(options):
    """Layers may also leave RoPE out, and norms of queries and keys come before it."""
    losses = []
    for turns in (True, False):
        torch.manual_seed(1)
        model = model_of(qk_layernorm=True, normalization="RMSNorm", **options)
        if not turns:
            for layer in model.decoder.layers:
                layer.self_attention.__class__ = layer.self_attention.__class__.__mro__[1]
        model.double()
        losses.append(run(model, 5, 9, 1))
    torch.testing.assert_close(*losses, rtol=0, atol=1e-12)
    assert losses[0].isfinite().all()


def turned_alone(x, inv_freq, is_interleaved, scale) -> torch.Tensor:
    """The definition, of one whole sequence [t, heads, d]: pairs of channels as complex numbers."""
    pairs = len(inv_freq)
    turning, staying = x[..., : 2 * pairs], x[..., 2 * pairs :]
    parts = turning.unflatten(-1, (pairs, 2) if is_interleaved else (2, pairs))
    first, second = parts.unbind(-1 if is_interleaved else -2)
    angles = torch.arange(len(x)).double()[:, None, None] * inv_freq
    out = torch.complex(first, second) * torch.polar(torch.full_like(angles, scale), angles)
    turned = torch.stack((out.real, out.imag), -1 if is_interleaved else -2).flatten(-2)
    return torch.cat((turned, staying), -1)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("pairs", [WIDTH // 2, 3])
def test_rotary_of_a_layer_is_that_of_each_sequence(is_interleaved, size, rank, pairs):
    """A second base, for the tokens of a context-parallel rank, of a part of the channels."""
    lengths = tuple(2 * size * pieces for pieces in (3, 1, 4))
    inv_freq = 10.0 ** -torch.linspace(0, 2, pairs).double()
    rotary = LayerRotary(inv_freq, is_interleaved=is_interleaved, scale=1.3)
    x = torch.randn(sum(lengths), HEADS, WIDTH, dtype=torch.float64)
    index = shard_index(lengths, size, rank)
    mine = x if index is None else x[index]
    turns = rotary.turns(Places(lengths, size, rank), mine)
    assert rotary.turns(Places(lengths, size, rank), mine) is turns, "made once per microbatch"
    alone = [turned_alone(part, inv_freq, is_interleaved, 1.3) for part in x.split(lengths)]
    expected = torch.cat(alone) if index is None else torch.cat(alone)[index]
    turned = _Turn.apply(mine.unsqueeze(1), mine.unsqueeze(1), *turns)[1].squeeze(1)
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-13)
    assert rotary.turns(Places(lengths[::-1], size, rank), mine) is not turns


def test_what_is_kept_is_of_nodes_of_the_same_depths():
    """The next microbatch may have a tree of nodes of the same lengths, and another trunk."""
    query = torch.zeros(10, 1, HEADS, WIDTH, dtype=torch.float64)
    places = [Places((6, 2, 2), 1, 0, depths) for depths in ((0, 6, 6), (0, 6, 8), ())]
    rotary = LayerRotary(torch.ones(WIDTH // 2).double())
    cosines = [rotary.turns(each, query).cos[:, 0, 0, 0] for each in places]
    scale = QueryScale(0.1, 2)
    factors = [scale.factors(each, query).flatten() for each in places]
    for last, each, its_factors in zip(([6, 7], [8, 9], [0, 1]), cosines, factors):
        positions = torch.tensor(last).double()
        torch.testing.assert_close(each[-2:], positions.cos())
        torch.testing.assert_close(its_factors[-2:], 1 + 0.1 * (1 + positions // 2).log())


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("is_pack", [False, True])
@pytest.mark.parametrize("options", [{}, {"rotary_interleaved": True}, {"no_rope_freq": [1, 0]}])
def test_layers_with_the_models_rotary_embedding_are_the_models_layers(options, is_pack):
    """Also in rows of a batch, which megatron-core turns itself; a factor of 1 changes nothing."""
    losses = []
    for is_own in (False, True):
        torch.manual_seed(1)
        model = model_of(qk_layernorm=True, normalization="RMSNorm", **options).double()
        model.rotary_pos_emb.inv_freq = model.rotary_pos_emb.inv_freq.double()
        rotary = LayerRotary(
            model.rotary_pos_emb.inv_freq,
            is_interleaved=options.get("rotary_interleaved", False),
        )
        for layer in model.decoder.layers:
            attention = layer.self_attention
            attention.query_scale = QueryScale(1.0, 1000) if is_own else None
            skipped = options.get("no_rope_freq", [0, 0])[layer.layer_number - 1]
            attention.rotary = rotary if is_own and not skipped else None
        if is_pack:
            losses.append(run(model, 5, 9, 1))
        else:
            tokens = torch.arange(24).view(2, 12)
            losses.append(model(tokens, tokens, None, labels=tokens))
    torch.testing.assert_close(*losses, rtol=0, atol=1e-12)
    assert losses[0].isfinite().all()


def multimodal() -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        init_method_std=0.3,
        mrope_section=[1, 2, 1],
    )
    model = GPTModel(config, packed_block_spec(config), 32, 64, position_embedding_type="mrope")
    give_whole_packs(model)
    return model.double()


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("lengths", [(7, 3, 11), (8, 8), (6,)])
def test_positions_along_axes_restart_in_each_sequence(lengths):
    """A sequence that takes positions of the pack's first one, or of its own number, trains on
    pixels that stand elsewhere.
    """
    torch.manual_seed(1)
    model = multimodal()
    rng = np.random.default_rng(len(lengths))
    samples = [
        {
            "tokens": rng.integers(0, 32, length),
            "position_ids": rng.integers(0, 40, (3, length)),
        }
        for length in lengths
    ]

    def logits_of(given):
        read = read_samples(given)
        number = np.array([read.lengths.size])
        (one,) = pack(read, number, layouts_of_samples(read, number, Alignment()))
        params = packed_seq_params(one, CPU)
        positions = one["axis_positions"].T[:, None]
        return model(one["tokens"][None], positions, None, packed_seq_params=params)[0]

    alone = torch.cat([logits_of([sample]) for sample in samples])
    together = logits_of(samples)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
    swapped = [{**one, "position_ids": one["position_ids"][[1, 0, 2]]} for one in samples]
    assert (logits_of(swapped) - together).abs().max() > 1e-3, "axes make no difference"


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
def test_frequencies_by_place_in_the_pack(size, rank):
    """Also where the longest path of a tree has as many tokens as the pack, and under any cut."""
    lengths = tuple(2 * size * pieces for pieces in (1, 3))
    own = frequencies(sum(lengths), WIDTH, False)
    index = shard_index(lengths, size, rank)
    expected = own if index is None else own[index]
    depths = (0, lengths[0])
    given = frequencies_of_tokens(own, lengths, size, rank, depths, is_of_pack=True)
    torch.testing.assert_close(given, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("single_process")
def test_a_rotary_embedding_that_cut_the_pack_is_refused():
    """Without the plug-in megatron-core's own would cut the pack in two, not its sequences."""
    model = multimodal()
    layout = PackLayout.of((4, 4), Alignment())
    params = packed_seq_params(layout_microbatches([layout])[0], CPU)
    params.has_axes = True
    tokens = torch.arange(8)[None]
    positions = torch.arange(4).expand(3, 1, 4)
    with pytest.raises(ValueError, match=r"pack of 8 tokens .* has 4; call plugin.install"):
        model(tokens, positions, None, labels=tokens, packed_seq_params=params)
