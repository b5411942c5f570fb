"""What is added to a GPTModel from outside is added where it belongs."""

from types import SimpleNamespace
from typing import Any

import torch

from megatron.sft.model.gpt_additions import add_to_gpt


class Embedding(torch.nn.Module):
    """megatron-core's: words and learned positions are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = torch.nn.Embedding(8, 4)
        self.position_embeddings = torch.nn.Embedding(8, 4)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings(ids) + self.position_embeddings(positions)


def test_only_word_embeddings_are_scaled():
    """Learned positions that grow with the width drown the words; also where a later stage embeds
    further tokens.
    """
    options: Any = SimpleNamespace(
        rope_scaling=None,
        scale_embeddings=True,
        hidden_size=4,
        embedding_multiplier=1.0,
        logits_scaling=1.0,
        final_logit_softcapping=None,
        mask_vocab_padding=False,
    )
    gpt: Any = SimpleNamespace(embedding=Embedding(), pre_process=False, post_process=True)
    add_to_gpt(gpt, options, 8)
    ids, positions = torch.tensor([1, 5]), torch.tensor([0, 1])
    words, places = (
        gpt.embedding.word_embeddings.weight[ids],
        gpt.embedding.position_embeddings.weight[positions],
    )
    assert torch.equal(gpt.embedding(ids, positions), 2 * words + places)
