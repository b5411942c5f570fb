"""pure. Global attention with heads of its own: layers without a window have other head widths and
groups than those with one, and their keys are their values, too (Gemma 4).

`global_attention_module` computes it. Values are the keys before their norm and rotation; with
`value_layernorm` they have a norm of their own, as values of all layers then have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

from megatron.packing.flags import flag_of
from megatron.packing.layers import Parameter, Part, Work
from megatron.packing.model.parts.attention import K_NORM, PROJ, Q_NORM
from megatron.packing.rules import Rule, at_least, needs

_OWN = {"idle_without": "global_kv_channels"}


@dataclass(frozen=True, kw_only=True)
class GlobalAttentionOptions:
    """Options of a model's global attention."""

    global_kv_channels: int | None = None
    """Width of a head in layers without a window, whose keys are the values, too (default: all
    layers have --kv-channels, and values of their own).
    """
    global_num_query_groups: int | None = field(default=None, metadata=_OWN)
    """Groups of heads that share keys there (default: --num-query-groups)."""


QK = Parameter(
    "global_attn.qk.weight",
    "self_attention.linear_qk.weight",
    "heads",
    ("query,key", "hidden"),
    takes_adapter=True,
)


def _unsupported_beside(options: Any) -> dict[str, str]:
    """Returns the flag of something that attention may have and global attention has no place for;
    {} where there is none such.
    """
    if getattr(options, "global_kv_channels", None) is None:
        return {}
    has = {
        "no_rope_freq": bool(getattr(options, "no_rope_freq", None)),
        "linear_attention_freq": bool(getattr(options, "linear_attention_freq", None)),
        "mtp_num_layers": options.mtp_num_layers is not None,
        "softmax_type": getattr(options, "softmax_type", "vanilla") != "vanilla",
        **{
            name: bool(getattr(options, name, None))
            for name in (
                *("attn_logit_softcapping", "query_scale_beta", "qk_layernorm_over_heads"),
                *("attention_output_gate", "add_qkv_bias"),
            )
        },
    }
    return next(({"other": flag_of(name)} for name, is_on in has.items() if is_on), {})


def _lacks(options: Any) -> dict[str, str]:
    """Returns the flag that a model with global attention must have and lacks."""
    if getattr(options, "global_kv_channels", None) is None:
        return {}
    needed = {
        "--qk-layernorm": not getattr(options, "qk_layernorm", True),
        "--disable-bias-linear": not getattr(options, "disable_bias_linear", True),
        "--position-embedding-type rope": (
            getattr(options, "position_embedding_type", "rope") != "rope"
        ),
    }
    return next(({"needed": flag} for flag, is_missing in needed.items() if is_missing), {})


def _heads_do_not_divide(options: Any) -> bool:
    groups, heads = options.global_num_query_groups, options.num_attention_heads
    return None not in (groups, heads) and heads % groups != 0


@dataclass(frozen=True, kw_only=True)
class GlobalAttention(Part):
    """The attention of a layer without a window."""

    num_attention_heads: int
    num_query_groups: int | None
    global_kv_channels: int
    global_num_query_groups: int | None

    name: ClassVar[str] = "global_attn"
    title: ClassVar[str] = "global attention"
    layers_option: ClassVar[str] = "global_kv_channels"
    attention_arguments: ClassVar[tuple[str, ...]] = ("rotary", "has_value_norm")
    parameters: ClassVar[tuple[Parameter, ...]] = (QK, Q_NORM, K_NORM, PROJ)
    rules: ClassVar[tuple[Rule, ...]] = (
        *at_least(1, "global_kv_channels", "global_num_query_groups"),
        *needs("global_num_query_groups", "global_kv_channels"),
        Rule(
            when=lambda options: (options.global_kv_channels or 0) % 2,
            why="{global_kv_channels} must be a multiple of 2, as channels are rotated in pairs",
        ),
        Rule(
            when=_heads_do_not_divide,
            why="{num_attention_heads} must be a multiple of {global_num_query_groups}",
        ),
        Rule(
            when=_unsupported_beside,
            why="{global_kv_channels.flag} is not supported with {other}",
            way_out="drop one",
        ),
        Rule(when=_lacks, why="{global_kv_channels.flag} needs {needed}", way_out="pass it"),
        Rule(
            when=lambda options, layout: (
                options.global_kv_channels is not None
                # More ranks than groups may share them, if each group has equally many ranks.
                and GlobalAttention.of(options).num_groups % layout.tensor
                and layout.tensor % GlobalAttention.of(options).num_groups
            ),
            why="the groups of heads of global attention ({global_num_query_groups.flag}) must be "
            "a multiple of {tensor}, or divide it",
            way_out="lower {tensor.flag}",
        ),
    )

    @classmethod
    def is_in(cls, options: Any, layer: int) -> bool:
        """See `Part`; it is in all layers without a window."""
        if getattr(options, "global_kv_channels", None) is None:
            return False
        has_window: Any = getattr(options, "window_attn_skip_freq", None)
        return not options.window_size or bool(has_window and not has_window[layer])

    @property
    def num_groups(self) -> int:
        """See `Part`."""
        return self.global_num_query_groups or self.num_query_groups or self.num_attention_heads

    def rotary_channels(self) -> int:
        """See `Part`."""
        return self.global_kv_channels

    def sizes(self) -> dict[str, int]:
        """See `Part`."""
        width = self.global_kv_channels
        return {
            "query": self.num_attention_heads * width,
            "key": self.num_groups * width,
            "q_norm": width,
            "k_norm": width,
        }

    def work(self, hidden_size: int) -> Work:
        """Projections of queries, keys and the output; and over half of the L^2 pairs scores and
        sums of values, both of a head's width.
        """
        sizes = self.sizes()
        weights = hidden_size * (2 * sizes["query"] + sizes["key"])
        return Work(weights, weights, sizes["query"])

    def key_value_size(self) -> int:
        """See `Part`."""
        return 2 * self.sizes()["key"]

    @staticmethod
    def module() -> type:
        """See `Part`."""
        module = import_module(f"{__package__}.global_attention_module")
        return module.GlobalSelfAttention  # type: ignore[no-any-return]

    @classmethod
    def module_arguments(cls, options: Any, arguments: Any) -> dict[str, Any]:
        """See `Part`."""
        return super().module_arguments(options, arguments) | {"part": cls.of(options)}
