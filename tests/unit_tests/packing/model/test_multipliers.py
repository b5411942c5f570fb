"""Embeddings that are multiplied, and logits that are scaled and capped, of a whole model."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron.packing.model.loss.head import skip_masked_tokens
from megatron.packing.model.multipliers import LogitRule, adjust_logits, multiply_embeddings
from megatron.sft.model import cpu_support

TOKENS = torch.arange(12)[None] % 10
MASK = torch.tensor([[1.0, 0.0, 0.5] * 4])
SCALE, CAP = 3.0, 0.1
RULE = LogitRule(scale=SCALE, softcap=CAP)


@pytest.fixture
def one_process() -> Iterator[None]:
    cpu_support.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def gpt() -> GPTModel:
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    spec = get_gpt_layer_local_spec()
    return GPTModel(config, spec, 12, 12, position_embedding_type="none")


def run(model: GPTModel, labels: Tensor | None) -> Tensor:
    hidden = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
    return model(TOKENS, TOKENS, hidden, labels=labels, loss_mask=MASK)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("skips_masked", [False, True])
def test_losses_are_those_of_adjusted_logits(skips_masked: bool) -> None:
    """A cap that only one of the two heads applies gives two different models."""
    plain, model = gpt().double(), gpt().double()
    adjust_logits(model, RULE)
    logits = run(plain, None)
    capped = CAP * torch.tanh(logits * SCALE / CAP)
    torch.testing.assert_close(run(model, None), capped, rtol=0, atol=1e-14)
    assert (logits * SCALE - capped).abs().max() > 0.1
    if not skips_masked:
        return
    assert skip_masked_tokens(model, 11, RULE)
    labels = TOKENS.roll(-1, 1)
    expected = cross_entropy(capped[0, :, :11], labels[0], reduction="none")[None] * (MASK != 0)
    losses = run(model, labels)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-13)
    found = torch.autograd.grad(losses.sum(), list(model.parameters()))
    wanted = torch.autograd.grad(expected.sum(), list(plain.parameters()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


@pytest.mark.usefixtures("one_process")
def test_embeddings_are_multiplied() -> None:
    """Gemma rounds the root of the width to the embeddings' type, Granite multiplies as it is."""
    model = gpt().bfloat16()
    before = model.embedding.word_embeddings(TOKENS)
    multiply_embeddings(model, 1.0)
    assert torch.equal(model.embedding.word_embeddings(TOKENS), before)
    multiply_embeddings(model, 55.4, is_rounded=True)
    rounded = before * torch.tensor(55.4, dtype=torch.bfloat16)
    assert torch.equal(model.embedding.word_embeddings(TOKENS), rounded)
    other = gpt().bfloat16()
    multiply_embeddings(other, 55.4)
    assert torch.equal(other.embedding.word_embeddings(TOKENS), before * 55.4)
