"""pure. Latent attention: keys and values are made from one narrow vector per token, and so may
queries be (DeepSeek-V2 and V3, Kimi K2, GLM-4.7-Flash, Mistral Small 4; arXiv 2405.04434).

`latent_attention_module` computes it. Options have megatron-core's names; `latent_norm_epsilon`,
which it has none for, is what transformers' classes of these models fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

from megatron.packing.flags import flag_of
from megatron.packing.layers import Parameter, Part, Sharding, Work
from megatron.packing.model.parts.attention import PROJ, Q_NORM
from megatron.packing.rules import Rule, at_least, needs

_OWN = {"idle_without": "kv_lora_rank"}
_WIDTHS = ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""Options without which there is no latent attention."""


@dataclass(frozen=True, kw_only=True)
class LatentAttentionOptions:
    """Options of a model's latent attention."""

    kv_lora_rank: int | None = None
    """Width of the latent that keys and values are made from (default: plain attention)."""
    q_lora_rank: int | None = field(default=None, metadata=_OWN)
    """Width of the latent that queries are made from (default: of hidden states)."""
    qk_head_dim: int | None = field(default=None, metadata=_OWN)
    """Channels of a head's queries and keys that are not rotated."""
    qk_pos_emb_head_dim: int | None = field(default=None, metadata=_OWN)
    """Channels that are rotated, in which a token's keys of all heads are one."""
    v_head_dim: int | None = field(default=None, metadata=_OWN)
    """Channels of a head's values."""
    latent_norm_epsilon: float = field(default=1e-6, metadata=_OWN)
    """Added to the variance in norms of latents."""


def _parameter(
    name: str, path: str, sharding: Sharding, *shape: str, takes_adapter: bool = True
) -> Parameter:
    return Parameter(
        f"latent_attn.{name}", f"self_attention.{path}", sharding, shape, takes_adapter
    )


Q_DOWN = _parameter("q_down.weight", "linear_q_down_proj.weight", "rows", "q_rank", "hidden")
Q_UP = _parameter("q_up.weight", "linear_q_up_proj.weight", "rows", "queries", "q_rank")
Q = _parameter("q.weight", "linear_q_proj.weight", "rows", "queries", "hidden")
KV_DOWN = _parameter("kv_down.weight", "linear_kv_down_proj.weight", "rows", "shared", "hidden")
KV_NORM = _parameter(
    "kv_norm.weight", "kv_layernorm.weight", "whole", "kv_rank", takes_adapter=False
)
KV_UP = _parameter("kv_up.weight", "linear_kv_up_proj.weight", "rows", "keys_values", "kv_rank")


def _unsupported_beside(options: Any) -> dict[str, str]:
    """Returns the flag of something that attention may have and latent attention has no place for;
    {} where there is none such.
    """
    if getattr(options, "kv_lora_rank", None) is None:
        return {}
    groups = options.num_query_groups
    has = {
        "num_query_groups": groups is not None and groups != options.num_attention_heads,
        "window_size": bool(options.window_size),
        "linear_attention_freq": bool(getattr(options, "linear_attention_freq", None)),
        "no_rope_freq": bool(getattr(options, "no_rope_freq", None)),
        "mtp_num_layers": options.mtp_num_layers is not None,
        # megatron-core's config says by this name whether latents have norms
        "qk_layernorm": getattr(options, "qk_layernorm", False) and not _is_of_core(options),
        "apply_layernorm_1p": getattr(options, "apply_layernorm_1p", False),
        "softmax_type": getattr(options, "softmax_type", "vanilla") != "vanilla",
        "attn_logit_softcapping": getattr(options, "attn_logit_softcapping", None) is not None,
        **{
            name: bool(getattr(options, name, False))
            for name in (
                *("attention_output_gate", "add_qkv_bias"),
                *("value_layernorm", "global_kv_channels"),
            )
        },
    }
    return next(({"other": flag_of(name)} for name, is_on in has.items() if is_on), {})


def _lacks(options: Any) -> dict[str, str]:
    """Returns the flag that a model with latent attention must have and lacks."""
    if getattr(options, "kv_lora_rank", None) is None:
        return {}
    needed = {
        "--disable-bias-linear": getattr(options, "add_bias_linear", False)
        or not getattr(options, "disable_bias_linear", True),
        "--normalization RMSNorm": getattr(options, "normalization", "RMSNorm") != "RMSNorm",
        "--position-embedding-type rope": (
            getattr(options, "position_embedding_type", "rope") != "rope"
        ),
    }
    return next(({"needed": flag} for flag, is_missing in needed.items() if is_missing), {})


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Part):
    """The latent attention of a layer."""

    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int

    name: ClassVar[str] = "latent_attn"
    title: ClassVar[str] = "latent attention"
    layers_option: ClassVar[str] = "kv_lora_rank"
    attention_arguments: ClassVar[tuple[str, ...]] = ("rotary", "query_scale")
    parameters: ClassVar[tuple[Parameter, ...]] = (
        *(Q_DOWN, Q_NORM, Q_UP, Q),
        *(KV_DOWN, KV_NORM, KV_UP, PROJ),
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        *at_least(1, "kv_lora_rank", "q_lora_rank", *_WIDTHS),
        *needs("kv_lora_rank", *_WIDTHS),
        Rule(
            when=lambda options: (options.qk_pos_emb_head_dim or 0) % 2,
            why="{qk_pos_emb_head_dim} must be a multiple of 2, as channels are rotated in pairs",
        ),
        Rule(
            when=_unsupported_beside,
            why="{kv_lora_rank.flag} is not supported with {other}",
            way_out="drop one",
        ),
        Rule(
            when=_lacks,
            why="{kv_lora_rank.flag} needs {needed}",
            way_out="pass it",
        ),
        Rule(
            when=lambda options, layout: (
                options.kv_lora_rank is not None
                and (
                    (options.q_lora_rank or 0) % layout.tensor
                    or (options.kv_lora_rank + options.qk_pos_emb_head_dim) % layout.tensor
                )
            ),
            why="{q_lora_rank}, and {kv_lora_rank} plus {qk_pos_emb_head_dim}, must be multiples "
            "of {tensor}, whose ranks share the latents' rows",
            way_out="lower it",
        ),
    )

    @classmethod
    def is_in(cls, options: Any, layer: int) -> bool:
        """See `Part`; it is in all layers or in none."""
        return getattr(options, "kv_lora_rank", None) is not None and getattr(
            options, "multi_latent_attention", True
        )

    @property
    def query_width(self) -> int:
        """Channels of a head's queries and keys."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    def layer_parameters(self) -> tuple[Parameter, ...]:
        """See `Part`."""
        left_out = (Q,) if self.q_lora_rank is not None else (Q_DOWN, Q_NORM, Q_UP)
        return tuple(one for one in self.parameters if one not in left_out)

    def sizes(self) -> dict[str, int]:
        """See `Part`."""
        return {
            "q_rank": self.q_lora_rank or 0,
            "q_norm": self.q_lora_rank or 0,
            "kv_rank": self.kv_lora_rank,
            "shared": self.kv_lora_rank + self.qk_pos_emb_head_dim,
            "queries": self.num_attention_heads * self.query_width,
            "keys_values": self.num_attention_heads * (self.qk_head_dim + self.v_head_dim),
            "query": self.num_attention_heads * self.v_head_dim,
        }

    def work(self, hidden_size: int) -> Work:
        """Projections through the latents; and over half of the L^2 pairs scores of the width of
        queries, and sums of the width of values.
        """
        sizes = self.sizes()
        queries = hidden_size * sizes["queries"]
        if self.q_lora_rank is not None:
            queries = self.q_lora_rank * (hidden_size + sizes["queries"])
        weights = (
            queries
            + hidden_size * sizes["shared"]
            + self.kv_lora_rank * sizes["keys_values"]
            + hidden_size * sizes["query"]
        )
        per_square = self.num_attention_heads * (self.query_width + self.v_head_dim) // 2
        return Work(weights, weights, per_square)

    def key_value_size(self) -> int:
        """See `Part`."""
        return self.num_attention_heads * (self.query_width + self.v_head_dim)

    def exchanged_channels(self, tensor: int, context: int) -> float:
        """See `Part`. Latents are of all heads, so that no rank of tensor parallel has fewer."""
        return self.sizes()["shared"]

    @staticmethod
    def module() -> type:
        """See `Part`."""
        module = import_module(f"{__package__}.latent_attention_module")
        return module.LatentSelfAttention  # type: ignore[no-any-return]

    @classmethod
    def module_arguments(cls, options: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """See `Part`."""
        if not _is_of_core(options):
            epsilon = options.latent_norm_epsilon
        else:
            epsilon = options.layernorm_epsilon if options.qk_layernorm else None
        part = {"part": cls.of(options), "norm_epsilon": epsilon}
        return super().module_arguments(options, arguments) | part


def _is_of_core(options: Any) -> bool:
    """Returns whether these are megatron-core's config, with one epsilon for all norms."""
    return hasattr(options, "layernorm_epsilon")
