"""Nothing that a microbatch does reads a device tensor on the host: tensors on "meta" have no
values, so that reading one is an error. On a GPU it would be a wait for all work queued so far, at
each microbatch or even each layer.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.microbatches import FIELDS
from megatron.packing.model import get_batch as get_batch_module
from megatron.packing.model.attention.core_attention import PackedDotProductAttention
from megatron.packing.model.dispatcher import GatheringDispatcher, gather_tokens
from megatron.packing.model.get_batch import Batch, get_batch_on_this_rank_for_sequence_packing
from megatron.packing.model.grouped_experts import Groups, grouped_linear
from megatron.packing.model.loss import cross_entropy
from megatron.packing.model.multipliers import PLAIN
from megatron.sft.model.forward import loss_sum
from tests.unit_tests.packing.batch.test_samples import samples_of
from tests.unit_tests.packing.model.test_get_batch import packed
from tests.unit_tests.packing.stubs import Ranks

DEVICE = torch.device("meta")
LENGTHS = (3, 5, 1)


@pytest.fixture(autouse=True)
def on_a_device_without_values(monkeypatch):
    monkeypatch.setattr(get_batch_module, "device_of", lambda group: DEVICE)
    monkeypatch.setattr(get_batch_module, "transformer_engine_installed", lambda: False)


def batch_on_device(context_parallel_size: int, **options: Any) -> Batch:
    parts = [([*range(n)], [*range(n)], [1.0] * n, [*range(n)]) for n in LENGTHS]
    unit = 2 * context_parallel_size if context_parallel_size > 1 else 1
    microbatch = packed(samples_of(parts), Alignment(sequence=unit, pack=unit))
    microbatch["host_loss_mask"] = microbatch["loss_mask"]
    microbatch |= {name: microbatch[name].to(DEVICE) for name in FIELDS}
    groups = ProcessGroupCollection()
    groups.tp, groups.cp, groups.pp = Ranks(), Ranks(context_parallel_size, 0), Ranks()
    return get_batch_on_this_rank_for_sequence_packing(
        iter([microbatch]), pg_collection=groups, **options
    )


def test_reading_a_value_is_an_error():
    """What the tests below rest on."""
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.ones(2, device=DEVICE).sum().item()
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.ones(2, device=DEVICE).nonzero()


@pytest.mark.parametrize("context_parallel_size", [1, 2])
@pytest.mark.parametrize("mtp_on_this_rank", [False, True])
def test_batch_and_loss_read_nothing(context_parallel_size, mtp_on_this_rank):
    batch = batch_on_device(context_parallel_size, mtp_on_this_rank=mtp_on_this_rank)
    for field in (
        batch.tokens,
        batch.labels,
        batch.loss_mask,
        batch.position_ids,
        batch.padding_mask,
    ):
        assert field is not None
        assert field.device == DEVICE
    assert batch.loss_mask is not None
    total, num_tokens, logged = loss_sum(
        batch.loss_mask, torch.empty_like(batch.loss_mask, dtype=torch.bfloat16)
    )
    assert total.device == num_tokens.device == logged["lm loss"][0].device == DEVICE


def test_attention_reads_nothing():
    """Once per layer, and again in its backward."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_query_groups=1,
        attention_dropout=0.0,
    )
    groups = ProcessGroupCollection()
    groups.cp = Ranks()
    attention = PackedDotProductAttention(
        config, 1, AttnMaskType.causal, "self", pg_collection=groups
    )
    batch = batch_on_device(1)
    query = torch.empty(sum(LENGTHS), 2, 4, device=DEVICE, requires_grad=True)
    key, value = (
        torch.empty(sum(LENGTHS), 1, 4, device=DEVICE, requires_grad=True) for _ in range(2)
    )
    out = attention(query, key, value, None, packed_seq_params=batch.packed_seq_params)
    assert out.shape == (sum(LENGTHS), 8)
    out.sum().backward()
    assert query.grad is not None


def test_experts_read_nothing(monkeypatch):
    """Where this rank has all of them: numbers of their tokens are the device's."""
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", object())
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
    )
    groups = ProcessGroupCollection()
    groups.ep = groups.expt_tp = groups.tp_ep = Ranks()
    dispatcher = MoEAlltoAllTokenDispatcher(4, [0, 1, 2, 3], config, groups)
    router = TopKRouter.__new__(TopKRouter)
    layer = SimpleNamespace(token_dispatcher=dispatcher, config=config, router=router)
    gather_tokens(SimpleNamespace(modules=lambda: [layer]))  # type: ignore[arg-type]
    assert isinstance(dispatcher, GatheringDispatcher)
    numbers: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE, "requires_grad": True}
    x, probs = torch.empty(3, 1, 16, **numbers), torch.empty(3, 4, **numbers)
    weights = [torch.empty(16, 16, **numbers) for _ in range(4)]
    routing_map = torch.empty(3, 4, dtype=torch.bool, device=DEVICE)
    sent = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, routing_map, probs))
    rows, sizes, scales = dispatcher.dispatch_postprocess(*sent)
    out = grouped_linear(rows, weights, Groups(sizes, DEVICE)) * scales.unsqueeze(1)
    out = dispatcher.token_combine(dispatcher.combine_preprocess(out))
    dispatcher.combine_postprocess(out).sum().backward()
    assert all(each.grad is not None for each in (x, probs, *weights))


@pytest.mark.parametrize("context_parallel_size", [1, 2])
def test_the_output_layer_reads_nothing(context_parallel_size, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_CHUNK_LOGITS", 2 * 16)
    rows = batch_on_device(context_parallel_size).packed_seq_params.loss_rows
    assert rows.device == DEVICE
    states = torch.empty(len(rows), 4, device=DEVICE, requires_grad=True)
    weight = torch.empty(16, 4, device=DEVICE, requires_grad=True)
    labels = torch.empty(len(rows), dtype=torch.int64, device=DEVICE)
    losses, _ = cross_entropy.CrossEntropy.apply(
        states, weight, labels, cross_entropy.Words(15, PLAIN), Ranks()
    )
    losses.sum().backward()
    assert weight.grad is not None
