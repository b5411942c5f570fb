"""Rotary frequencies that are kept once, beside megatron-core's own."""

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron.packing.model.attention.frequencies import keep_frequencies
from megatron.sft.model import cpu_support


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_they_are_the_first_of_one_tensor(is_interleaved, monkeypatch):
    """Frequencies of each pack's longest sequence would be kept, for 32 lengths; and a layer that
    is given another tensor for the same microbatch would take cosines and sines again.
    """
    cpu_support.install()
    embedding, plain = (
        RotaryEmbedding(8, 1.0, is_interleaved, use_cpu_initialization=True) for _ in range(2)
    )
    made = []
    get = embedding.get_emb

    def counted(length, *rest):
        made.append(length)
        return get(length, *rest)

    monkeypatch.setattr(embedding, "get_emb", counted)
    keep_frequencies(torch.nn.Sequential(embedding))
    keep_frequencies(torch.nn.Sequential(embedding))
    for length in (5, 900, 5, 5, 1024, 1500, 7):
        found = embedding(length, packed_seq=True, cp_group=None)
        assert torch.equal(found, plain(length, packed_seq=True))
        assert embedding(length, packed_seq=True) is found
    assert made == [1024, 2048]
    for arguments in ((6,), (6, 3), (6, 3, True)):
        assert torch.equal(embedding(*arguments), plain(*arguments))
