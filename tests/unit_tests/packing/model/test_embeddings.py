"""Embeddings of images stand at their placeholders, whatever part of the pack a rank holds."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packing.batch.payload_bytes import PackPayloads
from megatron.packing.device import Device
from megatron.packing.model.attention.zigzag import shard_index
from megatron.packing.model.embeddings import BatchPayloads, merged_embeddings
from megatron.packing.model.layer_spec import packed_block_spec
from megatron.planner.calibrate import one_process

CPU, IMAGE = torch.device("cpu"), -200


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1), (4, 3)])
def test_placeholders_are_counted_in_the_whole_pack(size: int, rank: int) -> None:
    """Counted in a rank's shard, the second half of an image would take its first rows: the fault
    of merging after the context-parallel cut.
    """
    rng = np.random.default_rng(size + rank)
    lengths = tuple(2 * size * pieces for pieces in (1, 3, 2))
    tokens = torch.from_numpy(np.where(rng.random(sum(lengths)) < 0.5, IMAGE, 5))
    index = shard_index(lengths, size, rank)
    microbatch = {"payloads": PackPayloads({}, {}), "tokens": tokens}
    places = BatchPayloads.of(microbatch, index, CPU).placeholders(IMAGE)
    number, expected = 0, []
    for token in tokens.tolist():
        expected.append(number if token == IMAGE else -1)
        number += token == IMAGE
    mine = range(len(expected)) if index is None else index.tolist()
    assert places.rows.tolist() == [expected[i] for i in mine]
    assert places.number == number


def model_of(**options: Any) -> GPTModel:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        **options,
    )
    return GPTModel(config, packed_block_spec(config), 32, 64, position_embedding_type="rope")


def batch_of(tokens: torch.Tensor, payloads: bool = True) -> Any:
    its = BatchPayloads({}, {}, tokens) if payloads else None
    return SimpleNamespace(tokens=tokens[None], position_ids=None, payloads=its)


def test_images_take_the_place_of_their_tokens_and_get_its_gradient() -> None:
    """Also where the placeholder is no word of the vocabulary, as LLaVA's -200."""
    with one_process(Device.at(CPU)):
        gpt = model_of().double()
        tokens = torch.tensor([3, IMAGE, IMAGE, 4, 0, IMAGE])
        images = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
        merged = merged_embeddings(gpt, batch_of(tokens), images, IMAGE)
        words = gpt.embedding.word_embeddings.weight
        expected = torch.stack([words[3], *images[:2], words[4], words[0], images[2]])[:, None]
        assert torch.equal(merged, expected)
        weights = torch.randn_like(merged)
        mine, its = (
            torch.autograd.grad((out * weights).sum(), [images, words])
            for out in (merged, expected)
        )
        assert all(map(torch.equal, mine, its))


@pytest.mark.parametrize("payloads", [False, True])
def test_a_pack_of_text_gives_the_tower_a_gradient_of_zero(payloads: bool) -> None:
    """Without one, overlapped gradient reduction waits for ever for the tower's parameters."""
    with one_process(Device.at(CPU)):
        gpt = model_of()
        images = torch.randn(2, 8, requires_grad=True)
        tokens = torch.tensor([3, 4])
        merged = merged_embeddings(gpt, batch_of(tokens, payloads), images, IMAGE)
        assert torch.equal(merged, gpt.embedding.word_embeddings.weight[[3, 4]][:, None])
        merged.sum().backward()
        assert images.grad is not None
        assert not images.grad.any()


def test_what_would_be_merged_wrongly_is_refused() -> None:
    """Rows that are left over, or words that are cut already, would be off by some."""
    with one_process(Device.at(CPU)):
        gpt = model_of()
        tokens = torch.tensor([3, IMAGE, IMAGE])
        with pytest.raises(ValueError, match="a pack has 2 tokens -200, but there are 3 embed"):
            merged_embeddings(gpt, batch_of(tokens), torch.zeros(3, 8), IMAGE)
        gpt.config.sequence_parallel = True
        with pytest.raises(ValueError, match="scatter_embedding_sequence_parallel=False"):
            merged_embeddings(gpt, batch_of(tokens), torch.zeros(2, 8), IMAGE)
