"""What the plug-in refuses, at install or when it first sees the model."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron.packing import plugin
from megatron.packing.data_schedule import PackedIterator
from tests.unit_tests.packing.plugged import Model, forward_step, make_config, state_of_megatron_core

pytestmark = pytest.mark.usefixtures("taken_back")

REFUSED = [
    ({"max_seqlen_per_dp_cp_rank": None}, "pass --max-seqlen-per-dp-cp-rank N"),
    ({"sequence_packing_scheduler": "dp_balance"}, "did you mean dp_balanced"),
    ({"calculate_per_token_loss": False}, "calculate_per_token_loss=True"),
    ({"hybrid_context_parallel": True}, "hybrid_context_parallel=False"),
    ({"pipeline_model_parallel_size": 2}, "variable_seq_lengths=True"),
    (
        {
            "pipeline_model_parallel_size": 2,
            "variable_seq_lengths": True,
            "virtual_pipeline_model_parallel_size": 2,
            "overlap_p2p_comm": False,
        },
        "overlap_p2p_comm=True and batch_p2p_comm=False",
    ),
    ({"num_moe_experts": 2, "moe_token_dispatcher_type": "allgather"}, 'moe_token_dispatcher_type="alltoall"'),
    ({"cuda_graph_impl": "local"}, 'cuda_graph_impl="none"'),
    ({"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm=False"),
    ({"num_moe_experts": 2, "mtp_num_layers": 1, "moe_aux_loss_coeff": 0.01}, "moe_aux_loss_coeff=0"),
    ({"num_moe_experts": 2, "mtp_num_layers": 1, "moe_z_loss_coeff": 0.01}, "moe_z_loss_coeff=None"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_refuses_configs_that_cannot_work(calls: list[dict[str, Any]], settings: dict[str, Any], words: str) -> None:
    """Each of these trains wrongly or hangs without another word, also where the config changes after install."""
    before = state_of_megatron_core()
    with pytest.raises(ValueError, match=words):
        plugin.install(make_config(**settings))
    assert state_of_megatron_core() == before
    config = make_config()
    plugin.install(config)
    for name, value in settings.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=words):
        get_forward_backward_func()(
            data_iterator=None, model=Model(config), forward_step_func=forward_step, num_microbatches=1
        )
    assert calls == []


def test_refuses_attention_that_takes_no_packs(calls: list[dict[str, Any]]) -> None:
    """It would end in an assertion inside the first layer, which names a module that the user cannot install."""
    config = make_config()
    plugin.install(config)
    model = Model(config)
    attention = DotProductAttention.__new__(DotProductAttention)
    torch.nn.Module.__init__(attention)
    model.attention = attention
    with pytest.raises(ValueError, match=r"transformer_layer_spec=packed_block_spec"):
        get_forward_backward_func()(
            data_iterator=None, model=[model], forward_step_func=forward_step, num_microbatches=1
        )
    assert calls == []


def test_refuses_a_loss_that_is_a_mean(calls: list[dict[str, Any]]) -> None:
    """megatron-core takes a mean per microbatch too, and would weight tokens by the pack they are in."""
    config = make_config()
    plugin.install(config)

    def mean_step(data_iterator: Any, model: Any) -> Any:
        return None, lambda output: (1.0, {"lm loss": 1.0})

    with pytest.raises(ValueError, match="sum of losses, integer number of tokens"):
        get_forward_backward_func()(
            data_iterator=PackedIterator([{}]),
            model=Model(config),
            forward_step_func=mean_step,
            num_microbatches=1,
        )
    assert len(calls) == 1


def test_refuses_a_collection_without_the_groups_it_needs(calls: list[dict[str, Any]]) -> None:
    """megatron-core asks for fewer groups; the missing one would be an AttributeError somewhere inside."""
    config = make_config()
    plugin.install(config)
    groups = argparse.Namespace(tp=1, cp=1, pp=1, dp_cp=1, mp=None)
    with pytest.raises(ValueError, match="but dp, mp is missing"):
        get_forward_backward_func()(
            data_iterator=None,
            model=Model(config),
            forward_step_func=forward_step,
            num_microbatches=1,
            pg_collection=groups,
        )
