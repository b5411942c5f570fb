"""pure. Which layouts cannot exist for a model: the planner refuses what training would, before it reckons with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.packing.flags import flag_of
from megatron.packing.model.widths import ffn_hidden_size
from megatron.planner.plan_options import LayoutOptions, ModelOptions, read_pack_cost


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a layout must divide of a model, defaults resolved."""

    num_layers: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    num_experts: int | None = None
    is_known: bool = True
    """Whether None means that there is none; else that nobody has said."""
    origin: str = ""
    """Where it comes from but from flags."""

    def name_of(self, field_name: str) -> str:
        """A field and its value, for messages."""
        origin = f" ({self.origin})" if self.origin and field_name != "num_experts" else ""
        return f"{flag_of(field_name)} {getattr(self, field_name)}{origin}"


def shape_of(model: ModelOptions) -> Shape:
    """Of the measured model with --pack-cost, as far as its file says."""
    if model.pack_cost is not None:
        return _measured_shape(model.pack_cost, model.num_experts)
    if model.num_layers is None:
        default = Shape(num_layers=32, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=14336)
        return replace(default, num_experts=model.num_experts, origin="the default model's")
    assert model.hidden_size is not None, "checked by ModelOptions"
    return Shape(
        num_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        ffn_hidden_size=model.ffn_hidden_size or ffn_hidden_size(model.hidden_size, model.swiglu),
        num_experts=model.num_experts,
    )


def check_layout(model: ModelOptions, layout: LayoutOptions) -> None:
    """ValueError for a model that cannot be shared so, in one line that names the flags and the way out."""
    shape = shape_of(model)
    _check_layers(shape, layout)
    if layout.tp > 1:
        _check_tensor_parallel(shape, layout)
    if layout.ep > 1 and shape.is_known:
        _check_experts(shape, layout)


def _check_layers(shape: Shape, layout: LayoutOptions) -> None:
    layers = shape.num_layers
    if layers is None or layers % (layout.pp * layout.vpp) == 0:
        return
    name = f"{shape.name_of('num_layers')} must be a multiple of --pp {layout.pp}"
    if layers % layout.pp:
        raise ValueError(f"{name}: stages hold as many layers each; give a --pp that divides {layers}")
    per_rank = layers // layout.pp
    raise ValueError(f"{name} times --vpp {layout.vpp}; give a --vpp that divides the {per_rank} layers of each stage")


def _check_tensor_parallel(shape: Shape, layout: LayoutOptions) -> None:
    names = ["num_attention_heads", "num_query_groups", *["ffn_hidden_size"] * (shape.num_experts is None)]
    for name in names:
        value = getattr(shape, name)
        if value is not None and value % layout.tp:
            raise ValueError(f"{shape.name_of(name)} must be a multiple of --tp {layout.tp}; lower --tp")
    if shape.num_experts is not None and not layout.sequence_parallel:
        raise ValueError(f"{shape.name_of('num_experts')} with --tp {layout.tp} needs --sequence-parallel; pass it")


def _check_experts(shape: Shape, layout: LayoutOptions) -> None:
    if shape.num_experts is None:
        raise ValueError(f"--ep {layout.ep} needs a model of experts; pass --num-experts, or leave out --ep")
    if shape.num_experts % layout.ep:
        raise ValueError(f"{shape.name_of('num_experts')} must be a multiple of --ep {layout.ep}; lower --ep")


def _measured_shape(path: str, num_experts: int | None) -> Shape:
    model = read_pack_cost(path)[1]
    names = ("num_layers", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "num_experts")
    said = {name: value for name in names if type(value := model.get(name)) is int and value > 0}
    if num_experts is not None:
        said["num_experts"] = num_experts
    return Shape(**said, is_known="num_experts" in model or num_experts is not None, origin=f"of --pack-cost {path}")
