"""Where adapters are put, what they start from, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.sft.options.lora import LoraConfig

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def gpt_of(linear: torch.nn.Module, **changes: Any) -> Any:
    """What `add_adapters` looks at of a model with one linear layer."""
    layer = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"linear_fc2": linear})})
    gpt = torch.nn.ModuleDict(
        {"decoder": torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})}
    )
    config = {
        "mtp_num_layers": None,
        "tensor_model_parallel_size": 1,
        "num_query_groups": 2,
        "gated_linear_unit": True,
    }
    attributes: Any = gpt
    attributes.config = SimpleNamespace(**config | changes)
    attributes.pre_process = attributes.post_process = (
        attributes.share_embeddings_and_output_weights
    ) = False
    return gpt


@pytest.mark.parametrize(
    ("gpt", "modules", "message"),
    [
        (
            gpt_of(torch.nn.Linear(4, 4)),
            (),
            "decoder.layers.0.mlp.linear_fc2 is a Linear, as Transformer Engine's are",
        ),
        (gpt_of(torch.nn.Linear(4, 4)), ("q_proj",), "--lora-target-modules q_proj are in none"),
        (gpt_of(torch.nn.Linear(4, 4), mtp_num_layers=1), (), "--mtp-num-layers"),
        (
            gpt_of(torch.nn.Linear(4, 4), tensor_model_parallel_size=4),
            ("q_proj",),
            "above the 2 groups",
        ),
    ],
    ids=["Transformer Engine", "nothing", "further tokens", "uneven"],
)
def test_models_that_adapters_cannot_stand_in_are_refused(
    gpt: Any, modules: tuple[str, ...], message: str
) -> None:
    """Transformer Engine's layers have norms inside: an adapter would see what the layer does
    not."""
    from megatron.sft.model.lora.adapters import add_adapters

    with pytest.raises(ValueError, match=message):
        add_adapters(gpt, LoraConfig(lora=True, lora_target_modules=modules))


def test_start_is_kaimings_and_a_function_of_name_and_seed() -> None:
    """Within 1 / sqrt(inputs), as peft's; two layers or seeds that began alike would learn
    alike."""
    from megatron.sft.model.lora.adapter import kaiming

    first = kaiming("decoder.layers.0.mlp.linear_fc2.down_proj", 8, 64, seed=1)
    assert first.shape == (8, 64)
    assert 0.12 < first.abs().max() <= 1 / 8
    assert abs(first.std().item() - 1 / 8 / 3**0.5) < 0.005
    assert torch.equal(first, kaiming("decoder.layers.0.mlp.linear_fc2.down_proj", 8, 64, seed=1))
    assert not torch.equal(
        first, kaiming("decoder.layers.1.mlp.linear_fc2.down_proj", 8, 64, seed=1)
    )
    assert not torch.equal(
        first, kaiming("decoder.layers.0.mlp.linear_fc2.down_proj", 8, 64, seed=2)
    )
