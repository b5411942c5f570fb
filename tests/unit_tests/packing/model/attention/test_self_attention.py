"""What is done to queries, keys and gates of a pack between projection and products."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.attention import SelfAttention

from megatron.packing.model.attention.rotary import Places
from megatron.packing.model.attention.self_attention import PackedSelfAttention, QueryScale

WIDTH, HEADS = 16, 3


def test_query_scale_is_that_of_transformers():
    """It starts at 1 and steps at each multiple of the original length, within each sequence."""
    from transformers.models.ministral3 import modeling_ministral3

    lengths, query = (5, 40, 1), torch.zeros(46, 1, HEADS, WIDTH, dtype=torch.float64)
    factors = QueryScale(0.1, 16).factors(Places(lengths, 1, 0), query)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    expected = modeling_ministral3.get_llama_4_attn_scale(positions, 0.1, 16)
    assert torch.equal(factors.flatten(), expected.flatten().double())
    assert len(factors.unique()) == 3


@pytest.mark.parametrize("num_gates", [2, 4], ids=["cut", "whole_group"])
def test_each_rank_has_the_gates_of_its_own_heads(monkeypatch, num_gates):
    """With fewer groups of queries than ranks 0.16.1 gives those of the whole group: it fails, and
    those of other heads would train without a word.
    """
    gates = torch.arange(4.0).view(1, 1, 4, 1)
    parts = (torch.zeros(1, 1, 2, 1), *torch.zeros(2, 1, 1, 1, 1), gates[:, :, -num_gates:])
    monkeypatch.setattr(SelfAttention, "get_query_key_value_tensors", lambda *_, **__: parts)
    layer = PackedSelfAttention.__new__(PackedSelfAttention)
    layer.__dict__ |= {"_turned_by": None, "has_value_norm": False}
    layer.__dict__["pg_collection"] = SimpleNamespace(tp=SimpleNamespace(rank=lambda: 1))
    *_, gate = layer.get_query_key_value_tensors(None)
    assert gate.flatten().tolist() == [2.0, 3.0]
