"""pure. A model's layers as data: one `LayerKind` per layer says what is computed there and how
wide it is; a mechanism with a file in `model.parts` is a `Part` of it.

The assembler builds layers from it, the cost model counts their FLOPs from it, and the table of
weights asks it which tensors a layer has. Example: four layers, of which the last sees all tokens
and the others a window of 512:

    kinds = [replace(full, window=512)] * 3 + [full]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from megatron.packing.rules import Rule

Sharding = Literal["whole", "columns", "rows", "sections", "heads", "vocabulary"]
"""Ways in which tensor-parallel ranks share a parameter.

whole: each rank has all of it.
columns, rows: each rank has consecutive columns or rows.
sections: each rank has consecutive rows of each section, [gate rows; up rows].
heads: each rank has consecutive groups of heads, [queries; key; value] for each group.
vocabulary: consecutive rows; the last rank may have padding.
"""


class Parameter(NamedTuple):
    """A parameter of a layer, as a single rank would have it."""

    name: str
    """Logical name, such as attention.qkv.weight; see `model.names`."""
    path: str
    """megatron-core's name below the layer, such as self_attention.linear_qkv.weight."""
    sharding: Sharding
    shape: tuple[str, ...]
    """Shape in named sizes (`Part.sizes`). If a size differs between sections it is listed for
    each, separated by commas: `query,key,key`.
    """
    takes_adapter: bool = False
    """True for the weight of a linear layer that LoRA may have an adapter beside."""

    @property
    def linear(self) -> str:
        """Name of the linear layer that it is the weight of: attention.qkv.weight -> qkv."""
        return self.name.split(".")[-2]


class Work(NamedTuple):
    """Forward work of a layer's mechanism."""

    per_token: int
    """Multiply-adds of each token."""
    num_weights: int
    per_square: int = 0
    """Multiply-adds of each squared token of a sequence within the window: scores and their product
    with the values, over half of the L^2 pairs.
    """


class Part(Protocol):
    """A mechanism of layers, declared in one file. A subclass is a frozen dataclass whose fields
    are options of the model; instances of layers that compute alike are equal.
    """

    name: ClassVar[str]
    """First word of its parameters' logical names."""
    title: ClassVar[str]
    """Plural noun for messages and estimates of memory."""
    layers_option: ClassVar[str]
    """Option with a 1 for each layer that has it, or that is set where all have it."""
    parameters: ClassVar[tuple[Parameter, ...]]
    """Those of any layer; see `layer_parameters`."""
    rules: ClassVar[tuple[Rule, ...]] = ()
    """Over options (those of a model, or megatron-core's config) and layout."""
    why_paths_apart: ClassVar[str] = ""
    """Why a tree's paths cannot share the tokens of a prefix."""
    attention_arguments: ClassVar[tuple[str, ...]] = ()
    """Arguments of `PackedSelfAttention` that its module takes, too."""
    described_kernels: ClassVar[str] = ""
    """Kernels that `fit` describes, as tracing cannot see their memory."""

    @classmethod
    def is_in(cls, options: Any, layer: int) -> bool:
        """Returns whether a layer, numbered over the whole model, has it."""
        flags = getattr(options, cls.layers_option, None)
        return bool(flags) and bool(flags[layer])  # type: ignore[index]

    @classmethod
    def of(cls, options: Any) -> Part:
        """Returns it as the options of a model, or megatron-core's config, describe it."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})  # type: ignore[arg-type]

    def layer_parameters(self) -> tuple[Parameter, ...]:
        """Returns the parameters of a layer with these options."""
        return self.parameters

    @property
    def num_groups(self) -> int | None:
        """Groups of heads of its parameters that are cut by heads; None without such."""
        return None

    def rotary_channels(self) -> int | None:
        """Returns the width of what its rotary embedding turns; None for the model's heads."""
        return None

    def key_value_size(self) -> int:
        """Returns the channels of a token's keys and values over all heads, which nodes of trees
        copy; 0 for a part without keys.
        """
        return 0

    def exchanged_channels(self, tensor: int, context: int) -> float:
        """Returns the channels of a token that reach a tensor-parallel rank in the forward pass,
        from the `context` ranks of context parallel: its heads' keys and values, unless a part
        exchanges something else.
        """
        return self.key_value_size() / min(tensor, self.num_groups or tensor)

    def sizes(self) -> Mapping[str, int]:
        """Returns the sizes that its parameters' shapes name, beside `one` and `hidden`."""

    def work(self, hidden_size: int) -> Work:
        """Returns the work of one layer."""

    @staticmethod
    def module() -> type:
        """Returns the module that takes the place of self-attention; imports megatron-core."""

    @classmethod
    def module_arguments(cls, options: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of its module beside those that megatron-core gives to each.

        options: of a model, or megatron-core's config. arguments: those that attention in this
            layer would have.
        """
        return {name: arguments[name] for name in cls.attention_arguments if name in arguments}

    @staticmethod
    def kernel_stand_ins() -> Mapping[str, Any]:
        """Returns what takes the place of the modules of `described_kernels`, by their names, for
        tensors without values.
        """
        return {}


@dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """A mixture of experts in place of the MLP."""

    num_experts: int
    topk: int
    """Experts that each token goes to."""
    width: int
    """FFN width of an expert."""
    shared_width: int = 0
    """FFN width of the shared expert; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """One transformer layer."""

    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    """Width of a head."""
    window: int | None = None
    """Tokens that a token attends to, itself included; None for all before it."""
    has_output_gate: bool = False
    """True if a gate multiplies the attention's output."""
    mixer: Part | None = None
    """Mixes tokens in place of attention."""
    ffn_hidden_size: int
    """Width of the MLP, in layers without experts."""
    experts: ExpertsShape | None = None

    def mixer_work(self, hidden_size: int) -> Work:
        """Returns the work of attention, or of what is in its place."""
        if self.mixer is not None:
            return self.mixer.work(hidden_size)
        query_size = self.num_attention_heads * self.kv_channels
        key_value_size = 2 * self.num_query_groups * self.kv_channels
        gate_size = query_size if self.has_output_gate else 0
        weights = hidden_size * (query_size + key_value_size + gate_size + query_size)
        return Work(weights, weights, query_size)

    def exchanged_channels(self, tensor: int, context: int) -> float:
        """Returns the channels of a token that reach a tensor-parallel rank in the forward pass,
        from the `context` ranks of context parallel.
        """
        if self.mixer is not None:
            return self.mixer.exchanged_channels(tensor, context)
        # Ranks that share a group of heads have its keys each.
        return 2 * self.num_query_groups * self.kv_channels / min(tensor, self.num_query_groups)

    def per_token(self, hidden_size: int, is_gated: bool) -> int:
        """Returns multiply-adds of each token, but for pairs of tokens."""
        used, _ = self.mlp_weights(hidden_size, is_gated)
        return self.mixer_work(hidden_size).per_token + used

    def mlp_weights(self, hidden_size: int, is_gated: bool) -> tuple[int, int]:
        """Returns (multiply-adds of each token, weights) of the MLP or the experts."""
        matrices = 3 if is_gated else 2
        if self.experts is None:
            size = matrices * hidden_size * self.ffn_hidden_size
            return size, size
        experts = self.experts
        used = experts.topk * experts.width + experts.shared_width
        per_token = matrices * hidden_size * used + hidden_size * experts.num_experts
        idle = (experts.num_experts - experts.topk) * experts.width
        return per_token, per_token + matrices * hidden_size * idle


EACH_LAYER = MappingProxyType({"layers": "each"})
"""Metadata of an option that has a value for each layer, or () where the layers are alike in it."""
NUMBERED_LAYERS = MappingProxyType({"layers": "numbered"})
"""Metadata of an option that has numbers of layers, from 0 over the whole model."""
NO_LAYERS = MappingProxyType({"layers": "none"})
"""Metadata of an option of several numbers that says nothing of single layers. All others must say
one of these, or smaller models that stand for a large one would have other layers than that.
"""


def options_of_each_layer(options: Any) -> list[str]:
    """Returns the names of the fields with a value for each layer."""
    return [field.name for field in fields(options) if field.metadata.get("layers") == "each"]


def options_by_layer(options: Any) -> list[tuple[Any, ...]]:
    """Returns for each layer what `options` say of it: equal entries are layers alike.

    3 layers, window_attn_skip_freq=(1, 0, 1)    ->    [(1,), (0,), (1,)]
    """
    layers = range(options.num_layers)
    values_of_options: list[Sequence[Any]] = []
    for field in fields(options):
        values = getattr(options, field.name)
        if field.metadata.get("layers") == "each" and values:
            values_of_options.append(values)
        elif field.metadata.get("layers") == "numbered" and values:
            values_of_options.append([layer in values for layer in layers])
    return list(zip(*values_of_options)) if values_of_options else [() for _ in layers]


def options_at_depth(options: Any, num_layers: int, first: int, period: int) -> dict[str, Any]:
    """Returns the changes of `options` for another number of layers: those before `first` are as
    they are, and behind them layers of a period come again and again.

        first 0, period 2, 5 layers, window_attn_skip_freq=(1, 0, 1, 0)    ->    (1, 0, 1, 0, 1)
        first 1, period 1, 4 layers, moe_layer_freq=(0, 1, 1)    ->    (0, 1, 1, 1)
    """
    changes: dict[str, Any] = {"num_layers": num_layers}
    layers = range(num_layers)
    alike = [n if n < first else first + (n - first) % period for n in layers]
    for field in fields(options):
        values = getattr(options, field.name)
        if field.metadata.get("layers") == "each" and values:
            changes[field.name] = tuple(values[layer] for layer in alike)
        elif field.metadata.get("layers") == "numbered":
            changes[field.name] = tuple(layer for layer in layers if alike[layer] in values)
    return changes


def flags_of_layers(flags: Sequence[int], num_layers: int, default: bool) -> list[bool]:
    """Returns one bool per layer: `flags` of 0 and 1, or `default` for all layers where there are
    none.
    """
    return [bool(flag) for flag in flags] or [default] * num_layers
