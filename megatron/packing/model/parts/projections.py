"""mcore. What the modules of parts are made of: linear layers without biases, cut over tensor
parallel.
"""

from __future__ import annotations

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed as dist


def column_linear(
    config: TransformerConfig, width: int, rows: int, group: dist.ProcessGroup
) -> ColumnParallelLinear:
    """Returns a layer from [.., width] to this rank's part of [.., rows]."""
    return ColumnParallelLinear(
        width,
        rows,
        config=config,
        init_method=config.init_method,
        bias=False,
        gather_output=False,
        tp_group=group,
    )


def output_linear(
    config: TransformerConfig, width: int, group: dist.ProcessGroup
) -> RowParallelLinear:
    """Returns a layer from this rank's part of [.., width] to [.., hidden], summed over ranks."""
    return RowParallelLinear(
        width,
        config.hidden_size,
        config=config,
        init_method=config.output_layer_init_method,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
        tp_group=group,
    )


def recomputes_core_attention(config: TransformerConfig) -> bool:
    """Returns whether core attention is computed again in the backward pass."""
    return config.recompute_granularity == "selective" and "core_attn" in (
        config.recompute_modules or ()
    )
