"""Latent attention as a layer of megatron-core's own config, and what it costs."""

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from megatron.packing.batch.layout import Alignment, PackLayout
from megatron.packing.batch.microbatches import layout_microbatches
from megatron.packing.device import Device
from megatron.packing.layers import Work
from megatron.packing.model.attention import kernels
from megatron.packing.model.attention.blocks import Scores, Segments
from megatron.packing.model.attention.core_attention import PackedDotProductAttention
from megatron.packing.model.get_batch import packed_seq_params
from megatron.packing.model.layer_spec import packed_block_spec
from megatron.packing.model.parts.latent_attention import LatentAttention
from megatron.planner.calibrate import one_process
from megatron.sft.model import cpu_support

LENGTHS = (9, 6)


class CoreAttention(PackedDotProductAttention):
    """For megatron-core's layer, which names the widths."""

    def __init__(
        self, *arguments: Any, k_channels: int = 0, v_channels: int = 0, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)


class Norm(torch.nn.RMSNorm):
    """With megatron-core's arguments."""

    def __init__(self, config: MLATransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


def config_of(**changes: Any) -> MLATransformerConfig:
    return MLATransformerConfig(
        num_layers=1,
        hidden_size=24,
        num_attention_heads=4,
        q_lora_rank=10,
        kv_lora_rank=8,
        qk_head_dim=6,
        qk_pos_emb_head_dim=4,
        v_head_dim=5,
        qk_layernorm=True,
        layernorm_epsilon=1e-3,
        add_bias_linear=False,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        init_method=lambda x: torch.nn.init.normal_(x, 0.0, 0.3),
        output_layer_init_method=lambda x: torch.nn.init.normal_(x, 0.0, 0.3),
        original_max_position_embeddings=4,
        **changes,
    )


@pytest.mark.parametrize(
    "changes",
    [{"rope_type": "rope", "rotary_base": 100.0}, {"mscale_all_dim": 0.7}],
    ids=["rope", "yarn"],
)
def test_a_pack_is_what_megatron_core_computes_of_each_sequence(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Another scale, frequency or order of channels would go on training a checkpoint of
    megatron-core's layer as another model.
    """
    monkeypatch.setattr(multi_latent_attention, "TELinear", type("Absent", (), {}), raising=False)
    submodules = MLASelfAttentionSubmodules(
        **dict.fromkeys(
            ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"), ColumnParallelLinear
        ),
        linear_kv_down_proj=ColumnParallelLinear,
        linear_kv_up_proj=ColumnParallelLinear,
        linear_proj=RowParallelLinear,
        core_attention=CoreAttention,
        q_layernorm=Norm,
        kv_layernorm=Norm,
    )
    cpu_support.install()
    with one_process(Device.at(torch.device("cpu"))):
        config = config_of(**changes)
        theirs = MLASelfAttention(config, submodules, 1, AttnMaskType.causal)
        mixer = packed_block_spec(config).layer_specs[0].submodules.self_attention
        ours = mixer.module(config, 1, **mixer.params)
        for name, parameter in theirs.named_parameters():
            if "layernorm" in name:
                torch.nn.init.normal_(parameter)
        assert not ours.load_state_dict(theirs.state_dict(), strict=False).missing_keys
        hidden = torch.randn(sum(LENGTHS), 1, 24, dtype=torch.float64)
        expected = torch.cat([theirs(one, None)[0] for one in hidden.split(LENGTHS)])
        layout = PackLayout.of(LENGTHS, Alignment())
        params = packed_seq_params(layout_microbatches([layout])[0], torch.device("cpu"))
        found, _ = ours(hidden, None, packed_seq_params=params)
        rows, _ = ours(hidden[:6].repeat(1, 2, 1), None)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)  # angles there are float32
    torch.testing.assert_close(rows[:, 0], found[:6, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(rows[:, 1], found[:6, 0], rtol=0, atol=1e-12)


def test_its_work_is_that_of_its_products() -> None:
    """Counted as plain attention, DeepSeek-V3's layers would cost another multiple of a token."""
    part = LatentAttention(
        num_attention_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
    )
    # the weights of q_a, q_b, kv_a, kv_b and o of a release
    weights = 1536 * (7168 + 24576) + 7168 * 576 + 512 * 32768 + 16384 * 7168
    assert part.work(7168) == Work(weights, weights, 128 * (192 + 128) // 2)
    assert part.key_value_size() == 40960  # numbers that context parallel does not send
    assert part.sizes()["shared"] == 576  # which it sends


def test_kernels_of_one_width_take_narrower_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU values of DeepSeek's 128 channels beside keys of 192 would be refused."""
    seen = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        seen.append((q.shape[-1], k.shape[-1], v.shape[-1]))
        return kernels._by_sequence(q, k, v, *others)

    monkeypatch.setattr(kernels, "kernel_for", lambda *_: kernel)
    for width, of_value in ((6, 4), (4, 6)):
        query, key = (torch.randn(8, 2, width, dtype=torch.float64) for _ in range(2))
        value = torch.randn(8, 2, of_value, dtype=torch.float64)
        arguments = (query, key, value, Segments.square((5, 3)), Scores(scale=0.5))
        torch.testing.assert_close(
            kernels.causal_attention(*arguments), kernels._by_sequence(*arguments)
        )
    assert seen == [(6, 6, 6)] * 2
