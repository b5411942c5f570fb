"""What the plug-in refuses, at install or when it first sees the model."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron.packing import plugin
from megatron.packing.data_schedule import PackedIterator
from megatron.packing.model.layers.experts import mend_expert_biases
from megatron.packing.plugin_checks import check_modules
from tests.unit_tests.packing.plugged import (
    Model,
    forward_step,
    make_config,
    state_of_megatron_core,
)

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
    (
        {"num_moe_experts": 2, "moe_token_dispatcher_type": "allgather"},
        'moe_token_dispatcher_type="alltoall"',
    ),
    ({"num_moe_experts": 2, "moe_token_dispatcher_type": "flex"}, '"flex" was not checked'),
    ({"num_moe_experts": 2, "moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor=None"),
    (
        {"num_moe_experts": 2, "moe_router_load_balancing_type": "seq_aux_loss"},
        '"aux_loss" or "none"',
    ),
    (
        {"num_moe_experts": 2, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
        '"aux_loss" or "none"',
    ),
    (
        {"apply_rope_fusion": True, "yarn_rotary_scaling_factor": 4.0},
        "apply_rope_fusion=False with YaRN",
    ),
    (
        {"apply_rope_fusion": True, "mrope_section": [1, 2, 1]},
        "apply_rope_fusion=False with mrope_section",
    ),
    ({"fp8": "hybrid"}, "fp8=None without Transformer Engine"),
    ({"fp4": "e2m1"}, "fp4=None"),
    ({"cuda_graph_impl": "local"}, 'cuda_graph_impl="none"'),
    ({"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm=False"),
    (
        {"num_moe_experts": 2, "moe_router_load_balancing_type": "global_aux_loss"},
        "count tokens of earlier packs",
    ),
    (
        {
            "num_moe_experts": 2,
            "tensor_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
            "sequence_parallel": True,
        },
        "not sum the gradients of whole experts",
    ),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_refuses_configs_that_cannot_work(
    calls: list[dict[str, Any]], settings: dict[str, Any], words: str
) -> None:
    """Each of these trains wrongly or hangs without another word, also where the config changes
    after install.
    """
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
            data_iterator=None,
            model=Model(config),
            forward_step_func=forward_step,
            num_microbatches=1,
        )
    assert calls == []


def test_refuses_attention_that_takes_no_packs(calls: list[dict[str, Any]]) -> None:
    """It would end in an assertion inside the first layer, which names a module that the user
    cannot install.
    """
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
    """megatron-core takes a mean per microbatch too, and would weight tokens by the pack they are
    in.
    """
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
    """megatron-core asks for fewer groups; the missing one would be an AttributeError somewhere
    inside.
    """
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


def test_refuses_to_train_without_a_way_to_finish_gradients(calls: list[dict[str, Any]]) -> None:
    """megatron-core passes over it, and each rank steps by its own tokens' gradients. Evaluation
    needs none.
    """
    config = make_config(finalize_model_grads_func=None)
    plugin.install(config)
    arguments: dict[str, Any] = {
        "data_iterator": PackedIterator([{}]),
        "model": Model(config),
        "forward_step_func": forward_step,
        "num_microbatches": 1,
    }
    with pytest.raises(
        ValueError, match=r"set it to megatron\.core\.distributed\.finalize_model_grads"
    ):
        get_forward_backward_func()(**arguments)
    assert calls == []
    get_forward_backward_func()(**arguments, forward_only=True)
    assert len(calls) == 1


class Taking(Attention):
    """As much of an attention as is called."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)

    def forward(self, packed_seq_params: object = None) -> object:
        return packed_seq_params

    def get_query_key_value_tensors(self, *arguments: object) -> None: ...


def test_refuses_a_step_that_forgets_where_sequences_end(calls: list[dict[str, Any]]) -> None:
    """All sequences of a pack would be one: its loss falls, too. A call outside of training is the
    script's own.
    """
    config = make_config()
    plugin.install(config)
    model = Model(config)
    model.attention = Taking()
    given: list[object] = [None]

    def step(data_iterator: Any, model: Any) -> Any:
        model.attention(packed_seq_params=given[0])
        return forward_step(data_iterator, model)

    def run() -> None:
        get_forward_backward_func()(
            data_iterator=PackedIterator([{}]),
            model=model,
            forward_step_func=step,
            num_microbatches=1,
        )

    with pytest.raises(ValueError, match=r"pass packed_seq_params=batch\.packed_seq_params"):
        run()
    model.attention()
    given[0] = "where they end"
    run()
    assert len(calls) == 2


class Experts(BaseMoELayer):
    """As much of a layer of experts as is called."""

    def __init__(self, **settings: Any) -> None:
        torch.nn.Module.__init__(self)
        self.config = make_config(**settings)

    def forward(
        self, hidden_states: Any, intermediate_tensors: Any = None, padding_mask: Any = None
    ) -> None: ...


class Further(torch.nn.Module):
    """As much of a GPTModel that predicts further tokens as is called."""

    mtp_process = True

    def forward(self, input_ids: Any, labels: Any = None, loss_mask: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        (Experts(moe_z_loss_coeff=0.1), {"hidden_states": 1}, "which tokens are padding"),
        (Experts(moe_router_enable_expert_bias=True), {"hidden_states": 1}, "hands them on"),
        (Experts(moe_aux_loss_coeff=0.1), {"hidden_states": 1, "padding_mask": 1}, None),
        (Experts(moe_aux_loss_coeff=0.0), {"hidden_states": 1}, None),
        (Further(), {"input_ids": None}, "pass mtp_on_this_rank=True"),
        (Further(), {"input_ids": 1, "labels": 1}, "pass loss_mask=batch.loss_mask"),
        (Further(), {"input_ids": 1, "labels": 1, "loss_mask": 1}, None),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refuses_a_step_that_leaves_something_out(
    calls: list[dict[str, Any]], module: Any, arguments: dict[str, Any], words: str | None
) -> None:
    """Padding would be counted, and further tokens predicted behind it: the loss that is shown is
    exact all the same.
    """
    config = make_config()
    plugin.install(config)
    model = Model(config)
    model.layer = module

    def step(data_iterator: Any, model: Any) -> Any:
        model.layer(**arguments)
        return forward_step(data_iterator, model)

    with pytest.raises(ValueError, match=words) if words else nullcontext():
        get_forward_backward_func()(
            data_iterator=PackedIterator([{}]),
            model=model,
            forward_step_func=step,
            num_microbatches=1,
        )
    assert len(calls) == 1


def experts_with_biases(is_mended: bool) -> SequentialMLP:
    """Two of them, as megatron-core builds them under sequence parallel."""
    experts, layer = (kind.__new__(kind) for kind in (SequentialMLP, RowParallelLinear))
    mlp = MLP.__new__(MLP)
    for module in (experts, layer, mlp):
        torch.nn.Module.__init__(module)
    layer.bias = torch.nn.Parameter(torch.zeros(2))
    layer.bias.sequence_parallel = True
    mlp.linear_fc1 = mlp.linear_fc2 = layer
    mlp.config = make_config()
    experts.local_experts = torch.nn.ModuleList([mlp])
    if is_mended:
        mend_expert_biases(experts)
    return experts


def test_refuses_experts_whose_biases_are_not_mended(calls: list[dict[str, Any]]) -> None:
    """Under sequence parallel their gradients would be summed over the ranks twice."""
    config = make_config()
    plugin.install(config)
    for is_mended in (True, False):
        model = Model(config)
        model.experts = experts_with_biases(is_mended)
        arguments: dict[str, Any] = {
            "data_iterator": PackedIterator([{}]),
            "model": model,
            "forward_step_func": forward_step,
            "num_microbatches": 1,
        }
        if is_mended:
            get_forward_backward_func()(**arguments)
        else:
            with pytest.raises(ValueError, match=r"call mend_expert_biases\(gpt\)"):
                get_forward_backward_func()(**arguments)
    assert len(calls) == 1


def test_refuses_latent_attention_of_megatron_core_with_context_parallel() -> None:
    """Its attention gives packs to Transformer Engine, and the two were never tried together."""
    attention = MLASelfAttention.__new__(MLASelfAttention)
    torch.nn.Module.__init__(attention)
    attention.config = make_config(context_parallel_size=1)
    check_modules(attention)
    attention.config.context_parallel_size = 2
    with pytest.raises(ValueError, match=r"MLASelfAttention .*packed_block_spec"):
        check_modules(attention)


def test_a_vision_tower_sees_no_packs(calls: list[dict[str, Any]]) -> None:
    """Its attention is within images: megatron-core's own may compute it, and stands first in many
    models.
    """
    config = make_config()
    plugin.install(config)
    tower = VisionModule.__new__(VisionModule)
    torch.nn.Module.__init__(tower)
    tower.attention = Taking()
    tower.core = DotProductAttention.__new__(DotProductAttention)
    torch.nn.Module.__init__(tower.core)
    model = Model(config)
    model.vision, model.attention = tower, Taking()

    def step(data_iterator: Any, model: Any) -> Any:
        model.vision.attention()
        model.attention(packed_seq_params=1)
        return forward_step(data_iterator, model)

    get_forward_backward_func()(
        data_iterator=PackedIterator([{}]),
        model=model,
        forward_step_func=step,
        num_microbatches=1,
    )
    assert len(calls) == 1
