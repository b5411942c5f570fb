"""mcore. Parts of a layer that megatron-core's layers have no place for, and where they are put.

The assembler (`layer_spec`) puts them into the specification of each layer. What megatron-core's
config has a field for (windows, sinks, layers without rotary embedding, output gate) is read from
there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packing.model.attention.core_attention import PackedDotProductAttention
from megatron.packing.model.attention.rotary import LayerRotary, QueryScale
from megatron.packing.model.layers.norms import WholeWidthNorm
from megatron.packing.model.layers.residual import ResidualAdd

NormPosition = Literal["before", "behind", "both"]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parts of a model's layers."""

    norm_position: NormPosition = "before"
    """Places of norms: before attention and MLP, behind them, or both."""
    residual_multiplier: float = 1.0
    """Factor of what attention and MLP add."""
    softcap: float | None = None
    """Cap of attention scores."""
    has_whole_width_qk_norms: bool = False
    """True if norms of queries and keys take all heads together."""
    rotary_of_layers: tuple[LayerRotary | None, ...] = ()
    """Rotary embedding of each layer; None for the model's. Empty: all have the model's."""
    query_scale: QueryScale | None = None
    """Factors of queries by position."""
    has_proj_bias: bool = False
    """True if attention's output projection has a bias where the config's other layers have none.
    """

    @property
    def need_local_layers(self) -> bool:
        """Returns whether Transformer Engine's layers have no place for one of them."""
        return (
            self.norm_position != "before"
            or self.residual_multiplier != 1.0
            or self.softcap is not None
            or self.has_whole_width_qk_norms
        )

    def in_layer(self, layer: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
        """Returns the specification of one of our local layers with these parts in it."""
        changes: dict[str, Any] = {}
        if self.norm_position == "behind":
            changes |= {"input_layernorm": IdentityOp, "pre_mlp_layernorm": IdentityOp}
        if self.norm_position != "before" or self.residual_multiplier != 1.0:
            added = ModuleSpec(
                module=ResidualAdd,
                params={
                    "config": config,
                    "has_norm": self.norm_position != "before",
                    "factor": self.residual_multiplier,
                },
            )
            changes |= {"self_attn_bda": added, "mlp_bda": added}
        attention = layer.submodules.self_attention
        inner: dict[str, Any] = {}
        if self.softcap is not None:
            inner["core_attention"] = ModuleSpec(
                module=PackedDotProductAttention, params={"softcap": self.softcap}
            )
        if self.has_whole_width_qk_norms:
            heads = {"q": config.num_attention_heads, "k": config.num_query_groups}
            inner |= {
                f"{name}_layernorm": ModuleSpec(
                    module=WholeWidthNorm, params={"num_heads": num_heads}
                )
                for name, num_heads in heads.items()
            }
        attention = replace(attention, submodules=replace(attention.submodules, **inner))
        return replace(
            layer, submodules=replace(layer.submodules, self_attention=attention, **changes)
        )

    def of_attention(self, layer: int) -> dict[str, Any]:
        """Returns arguments of `PackedSelfAttention` in a layer, numbered over the whole model."""
        found: dict[str, Any] = {}
        if self.rotary_of_layers and self.rotary_of_layers[layer] is not None:
            found["rotary"] = self.rotary_of_layers[layer]
        if self.query_scale is not None:
            found["query_scale"] = self.query_scale
        if self.has_proj_bias:
            found["has_proj_bias"] = True
        return found


PLAIN = Parts()
