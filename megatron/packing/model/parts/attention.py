"""pure. Self-attention: its parameters, and what it may have besides its products, each declared
once.

An option turns on an `AttentionModule`, which says what parameters come with it and where
Transformer Engine's attention has no place for it. `attention.self_attention` computes what is done
to queries and keys, `attention.core_attention` what is done to scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.packing.layers import LayerKind, Parameter, Sharding


def _parameter(name: str, path: str, sharding: Sharding, *shape: str) -> Parameter:
    takes_adapter = len(shape) == 2
    return Parameter(f"attention.{name}", f"self_attention.{path}", sharding, shape, takes_adapter)


QKV = _parameter("qkv.weight", "linear_qkv.weight", "heads", "query,key,key", "hidden")
GATED_QKV = QKV._replace(shape=("query,query,key,key", "hidden"))
"""Each head's query is followed by its gate."""
QKV_BIAS = _parameter("qkv.bias", "linear_qkv.bias", "heads", "query,key,key")
PROJ = _parameter("proj.weight", "linear_proj.weight", "columns", "hidden", "query")
PROJ_BIAS = _parameter("proj.bias", "linear_proj.bias", "whole", "hidden")
Q_NORM = _parameter("q_norm.weight", "q_layernorm.weight", "whole", "q_norm")
K_NORM = _parameter("k_norm.weight", "k_layernorm.weight", "whole", "k_norm")
SINKS = _parameter("softmax_offset", "core_attention.softmax_offset", "rows", "query_heads")


class Engine(NamedTuple):
    """Circumstances under which Transformer Engine's attention would compute."""

    context_parallel: int
    is_min_version: Callable[[str], bool]
    """Function from a release to whether Transformer Engine is that or later."""


class AttentionModule(NamedTuple):
    """Something that attention may have."""

    is_on: Callable[[Any], object]
    """Function from a model's options to whether its layers with attention have it. What may be
    missing in Transformer Engine is asked of megatron-core's config, too, which has the same names.
    """
    parameters: tuple[Parameter, ...] = ()
    is_in_engine: Callable[[Engine], bool] = lambda engine: True
    """Function to whether Transformer Engine's attention has a place for it."""


def _on(option: str) -> Callable[[Any], object]:
    return lambda options: getattr(options, option, None)


def _never(engine: Engine) -> bool:
    return False


MODULES = (
    AttentionModule(lambda options: True, (QKV, PROJ)),
    AttentionModule(lambda o: o.add_qkv_bias or not o.disable_bias_linear, (QKV_BIAS,)),
    AttentionModule(lambda o: o.add_proj_bias or not o.disable_bias_linear, (PROJ_BIAS,)),
    AttentionModule(_on("qk_layernorm"), (Q_NORM, K_NORM)),
    AttentionModule(_on("qk_layernorm_over_heads"), is_in_engine=_never),
    AttentionModule(_on("attn_logit_softcapping"), is_in_engine=_never),
    AttentionModule(_on("window_size"), is_in_engine=lambda engine: engine.context_parallel == 1),
    AttentionModule(
        lambda options: options.softmax_type == "learnable",
        (SINKS,),
        lambda engine: engine.context_parallel == 1 and engine.is_min_version("2.8.0"),
    ),
)
"""Those with parameters, or without a place in Transformer Engine. A gate (part of `GATED_QKV`), a
scale of queries and a layer's own rotary embedding have neither.
"""
PARAMETERS = tuple(parameter for module in MODULES for parameter in module.parameters)


def parameters(options: Any) -> tuple[Parameter, ...]:
    """Returns the parameters of a model's layers with attention."""
    with_parameters = (module for module in MODULES if module.parameters)
    return tuple(
        one for module in with_parameters if module.is_on(options) for one in module.parameters
    )


def is_in_engine(options: Any, engine: Engine) -> bool:
    """Returns whether Transformer Engine's attention has a place for all that `options` turn on."""
    return all(module.is_in_engine(engine) or not module.is_on(options) for module in MODULES)


def sizes(kind: LayerKind, options: Any) -> dict[str, int]:
    """Returns the sizes that the parameters' shapes name, beside `one` and `hidden`."""
    query, key = (
        heads * kind.kv_channels for heads in (kind.num_attention_heads, kind.num_query_groups)
    )
    is_wide = options.qk_layernorm_over_heads
    return {
        "head": kind.kv_channels,
        "query": query,
        "key": key,
        "q_norm": query if is_wide else kind.kv_channels,
        "k_norm": key if is_wide else kind.kv_channels,
        "query_heads": kind.num_attention_heads,
    }
