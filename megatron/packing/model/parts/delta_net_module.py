"""mcore. Gated delta net: linear attention with a state per head, in place of self-attention
(Qwen3-Next, Qwen3.5).

    hidden -> in_proj -> query, key, value, z, beta, alpha         rows cut over tensor parallel,
    query, key, value -> causal convolution of 4 tokens, silu      section by section
    -> gated delta rule, decays of alpha -> RMS norm per head, times silu(z) -> out_proj

megatron-core's GatedDeltaNet needs flash-linear-attention to be built and refuses packs without it.
This one has the same parameters under the same names, and computes each sequence of a pack alone
(see `delta_rule`).

Context parallel: the rule needs all tokens before a token, so ranks exchange tokens for heads and
back, two all-to-alls forward and two backward: each rank computes whole sequences of a part of the
heads, in their order (the zigzag is undone). Tensor-parallel size times context-parallel size must
divide the key heads.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import silu, softplus

from megatron.packing.device import Device
from megatron.packing.model.attention.tree_keys import tree_of
from megatron.packing.model.attention.zigzag import Lengths, padded_lengths, sequence_order
from megatron.packing.model.layers.shared_inputs import shared_by_ranks
from megatron.packing.model.parts.delta_net import DeltaNet
from megatron.packing.model.parts.delta_rule import Inputs, causal_convolution, gated_delta_rule
from megatron.packing.model.parts.projections import column_linear, output_linear
from megatron.packing.model.sections import Offsets, by_section
from megatron.packing.rules import Layout, check_rules


class GatedDeltaNet(MegatronModule):
    """Takes the place of self-attention in a layer: hidden states [t, 1, h] of a pack with
    `packed_seq_params`, or rows [s, b, h] without.

    Shapes are the config's `linear_num_key_heads`, `linear_num_value_heads`, `linear_key_head_dim`,
    `linear_value_head_dim` and `linear_conv_kernel_dim`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        cp_comm_type: str | None = None,
        name: str | None = None,  # megatron-core 0.19 tells each module its own
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.tp_group, self.cp_group = groups.tp, groups.cp
        size = self.tp_group.size()
        layout = Layout(tensor=size, context=self.cp_group.size())
        check_rules(DeltaNet.rules, options=config, layout=layout)
        self.key_heads = config.linear_num_key_heads // size
        self.value_heads = config.linear_num_value_heads // size
        self.key_width, self.value_width = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = self.key_heads * self.key_width, self.value_heads * self.value_width
        self.sections = {
            "query": keys,
            "key": keys,
            "value": values,
            "z": values,
            "beta": self.value_heads,
            "alpha": self.value_heads,
        }
        rows = sum(self.sections.values()) * size
        self.in_proj = column_linear(config, config.hidden_size, rows, self.tp_group)
        self.conv1d = _Convolution(config, 2 * keys + values, self.tp_group)
        # Decays from exp(-1) to exp(-16) per unit of alpha, as megatron-core starts them.
        first = torch.empty(config.linear_num_value_heads).uniform_(1, 16).log()
        self.A_log = _cut_parameter(first, config, self.tp_group)
        self.dt_bias = _cut_parameter(torch.ones(len(first)), config, self.tp_group)
        self.out_norm = _GatedNorm(config, self.value_width, self.tp_group)
        self.out_proj = output_linear(config, values * size, self.tp_group)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns output and bias, as megatron-core's attention, which `others` are for.

        Raises ValueError for a pack of trees, whose nodes do not begin with an empty state.
        """
        if tree_of(packed_seq_params) is not None:
            raise ValueError(
                "a delta net takes no trees of sequences; give its config `layer_kinds`, by which "
                "paths are trained apart"
            )
        projected, _ = self.in_proj(hidden_states)
        rows, batch = projected.shape[:2]
        tokens = projected.transpose(0, 1).flatten(0, 1)  # a row of a batch is a sequence
        lengths = (
            (rows * self.cp_group.size(),) * batch
            if packed_seq_params is None
            else padded_lengths(packed_seq_params)
        )
        query, key, value, z, beta, alpha = tokens.split(tuple(self.sections.values()), dim=-1)
        mixed = self._mixed([query, key, value, beta, alpha], lengths)
        normed = self.out_norm(mixed, z.unflatten(-1, (self.value_heads, -1)))
        return self.out_proj(normed.view(batch, rows, -1).transpose(0, 1))

    def _mixed(self, parts: list[Tensor], lengths: Lengths) -> Tensor:
        """Returns [t, value heads, d_v] of this rank's tokens, from its parts [t, channels]."""
        size, rank = self.cp_group.size(), self.cp_group.rank()
        if size == 1:
            return self._of_heads(parts, lengths, slice(None))
        order, back = sequence_order(lengths, size, parts[0].device)
        # [t, size, channels of a rank's heads] -> whole sequences of this rank's heads
        cut = [part.unflatten(-1, (size, -1)) for part in parts]
        widths = [part.shape[-1] for part in cut]
        received = all_to_all(self.cp_group, torch.cat(cut, dim=-1).transpose(0, 1).contiguous())
        parts = list(received.flatten(0, 1).index_select(0, order).split(widths, dim=-1))
        mixed = self._of_heads(parts, lengths, slice(rank, rank + 1)).flatten(1)
        returned = all_to_all(
            self.cp_group, mixed.index_select(0, back).unflatten(0, (size, -1)).contiguous()
        )
        return returned.transpose(0, 1).reshape(returned.shape[1], self.value_heads, -1)

    def _of_heads(self, parts: list[Tensor], lengths: Lengths, share: slice) -> Tensor:
        """share: of the context-parallel ranks' shares of heads; all of them without ranks."""
        query, key, value, beta, alpha = parts
        shares = 1 if share == slice(None) else self.cp_group.size()
        channels = [self.sections[name] for name in ("query", "key", "value")]
        qkv = self.conv1d(torch.cat((query, key, value), dim=-1), channels, shares, share, lengths)
        sizes = (query.shape[-1], key.shape[-1], value.shape[-1])
        query, key, value = qkv.split(sizes, dim=-1)
        wide = torch.promote_types(alpha.dtype, torch.float32)
        rates, bias = (
            x.view(shares, -1)[share].flatten().to(wide) for x in (self.A_log, self.dt_bias)
        )
        inputs = Inputs(
            query.unflatten(-1, (-1, self.key_width)),
            key.unflatten(-1, (-1, self.key_width)),
            value.unflatten(-1, (-1, self.value_width)),
            -rates.exp() * softplus(alpha.to(wide) + bias),
            beta.sigmoid(),
        )
        return gated_delta_rule(inputs, lengths, Device.of(self.config, value))

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Offsets = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns the parameters under megatron-core's keys: each section of a projection apart, so
        that another tensor-parallel size can read them.
        """
        state: dict[str, Any] = {}
        for name in ("in_proj", "out_proj"):  # an adapter beside it comes with the layer's own
            own = getattr(self, name).sharded_state_dict(
                f"{prefix}{name}.", sharded_offsets, metadata
            )
            state |= {key: x for key, x in own.items() if not key.endswith("_extra_state")}
        for name, axes in (("conv1d", {"weight": 0}), ("out_norm", {})):
            tensors = getattr(self, name).state_dict(prefix="", keep_vars=True)
            state |= make_sharded_tensors_for_checkpoint(
                tensors, f"{prefix}{name}.", axes, sharded_offsets
            )
        rates = {"A_log": self.A_log, "dt_bias": self.dt_bias}
        axes = dict.fromkeys(rates, 0)
        state |= make_sharded_tensors_for_checkpoint(rates, prefix, axes, sharded_offsets)
        qkv = {name: self.sections[name] for name in ("query", "key", "value")}
        for name, sections in (("in_proj", self.sections), ("conv1d", qkv)):
            key = f"{prefix}{name}.weight"
            place = (self.tp_group.rank(), self.tp_group.size())
            state[key] = by_section(state[key], sections, place, sharded_offsets)
        return state


class _Convolution(torch.nn.Module):
    """Weight [channels, 1, width] of a causal convolution of each channel, without a bias."""

    def __init__(self, config: TransformerConfig, channels: int, tp_group: Any) -> None:
        super().__init__()
        width = config.linear_conv_kernel_dim
        first = torch.empty(channels * tp_group.size(), 1, width)
        # as torch.nn.Conv1d starts it
        self.weight = _cut_parameter(first.uniform_(-(width**-0.5), width**-0.5), config, tp_group)
        self.config = config

    def forward(
        self, x: Tensor, sections: list[int], shares: int, share: slice, lengths: Lengths
    ) -> Tensor:
        """x: the channels of this rank's share of each section's heads."""
        weight = self.weight.squeeze(1)
        if shares > 1:
            parts = [part.unflatten(0, (shares, -1)) for part in weight.split(sections)]
            weight = torch.cat([part[share].flatten(0, 1) for part in parts])
        return causal_convolution(x, weight, lengths, Device.of(self.config, x))


class _GatedNorm(torch.nn.Module):
    """RMS norm of each head times its weight, times silu(z); the weight is plain, also where the
    model's other norms are zero-centred.
    """

    def __init__(self, config: TransformerConfig, width: int, tp_group: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.ones(width, dtype=config.params_dtype, device=_device(config))
        )
        self.eps, self.tp_group = config.layernorm_epsilon, tp_group

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x, z: [t, heads, width]."""
        # each tensor-parallel rank has a part of the heads: backward, the parts are summed
        weight = shared_by_ranks(self.weight, self.tp_group)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = torch.nn.functional.rms_norm(wide, self.weight.shape, eps=self.eps)
        return (weight * normed.to(x.dtype) * silu(z.to(wide.dtype))).to(x.dtype)


def _cut_parameter(whole: Tensor, config: TransformerConfig, tp_group: Any) -> torch.nn.Parameter:
    """Returns the rows of this tensor-parallel rank; the same start in any layout."""
    part = whole.chunk(tp_group.size())[tp_group.rank()]
    parameter = torch.nn.Parameter(part.to(config.params_dtype).to(_device(config)))
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter


def _device(config: TransformerConfig) -> Any:
    return Device.of(config).initial_place(config)
