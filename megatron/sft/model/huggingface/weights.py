"""pure. Maps parameters of the model to tensors of a HuggingFace folder, by one table that reading
and writing share: `rows`, changed by the model's family.

    decoder.layers.3.self_attention.linear_qkv.weight <-> model.layers.3.self_attn.q_proj.weight
                                                          model.layers.3.self_attn.k_proj.weight
                                                          model.layers.3.self_attn.v_proj.weight
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Literal, NamedTuple

from megatron.packing.layers import LayerKind
from megatron.packing.model.names import OUTPUT, LogicalName, is_of_adapter, logical_name
from megatron.packing.model.parts import attention
from megatron.sft.images.vision import PARAMETERS
from megatron.sft.model.huggingface.families.family import Family, Prefix
from megatron.sft.model.huggingface.names import is_of_language_model, stacked_family
from megatron.sft.model.huggingface.rows import LAYER_ROWS, MODEL_ROWS, Row, Source
from megatron.sft.model.huggingface.tensors import Part, Weight
from megatron.sft.options.model import ModelConfig

Head = Literal["words", "score", "none"]


class Tower(NamedTuple):
    """Tensors of a vision tower, whose parameters are these: nothing is cut or joined."""

    prefix: str
    """Prefix of their names in files."""
    shapes: Mapping[str, tuple[int, ...]]
    is_trained: Callable[[str], bool]
    """Function from a name without prefix to whether the run changes the tensor."""
    is_alone: bool = False
    """True if the language model is frozen."""


class Weights:
    """The tensors of one model of a family."""

    def __init__(
        self,
        model: ModelConfig,
        vocab_size: int,
        family: Family,
        prefix: Prefix | None = None,
        head: Head = "words",
        tower: Tower | None = None,
    ) -> None:
        """head: output layer of the model, score of a reward model, or neither in this table.
        tower: the vision tower beside the language model, if the run has one.
        """
        self.head = head
        self._tower = tower
        self._model = model
        self._vocab_size = vocab_size
        self._family = family
        self.model_type = family.model_type
        self.prefix = prefix or Prefix()
        self._kinds = model.layer_kinds()
        replaced = {row.part: row for row in family.rows}
        known = {row.part for row in LAYER_ROWS}
        added = tuple(row for row in family.rows if row.part not in known)
        self._rows = tuple(replaced.get(row.part, row) for row in LAYER_ROWS) + added
        # MODEL_ROWS begins with the embedding and the output layer.
        embedding, output = (self._weight(row, LogicalName(row.part)) for row in MODEL_ROWS[:2])
        is_tied = head == "words" and not model.untie_embeddings_and_output_weights
        self.tied = (output.parts[0].name, embedding.parts[0].name) if is_tied else None

    def with_stacked_experts(self) -> Weights:
        """Returns the table with the experts of a layer as one tensor."""
        family = stacked_family(self._family)
        return Weights(self._model, self._vocab_size, family, self.prefix, self.head)

    def of_parameter(self, name: str) -> Weight:
        """Returns the weight of a parameter. Layers and experts in its name are numbered over the
        whole model. Raises KeyError if no HuggingFace tensor belongs to it.
        """
        if self._tower is not None and name.startswith(PARAMETERS):
            tensor = self._tower.prefix + name.removeprefix(PARAMETERS)
            return Weight("whole", (Part(tensor, self._tower.shapes[tensor]),), part=name)
        place = logical_name(name)
        rows = MODEL_ROWS if place.layer is None else self._rows
        conditions = self._conditions(place.layer)
        for row in rows:
            if row.part == place.part and row.when in conditions:
                return self._weight(row, place)
        raise KeyError(name)

    def concerns(self, name: str) -> bool:
        """Returns whether a parameter belongs to the model itself, and not to an adapter; see
        `Tensors.concerns`.
        """
        if self.head == "none" and name == "output_layer.weight":
            return False
        return not is_of_adapter(name)

    def is_carried(self, name: str) -> bool:
        """Returns whether a tensor is outside the trained model, and copied by an export: one of a
        vision tower, of a language model that is frozen beside it, or of layers that predict
        further tokens.
        """
        if self._tower is not None and name.startswith(self._tower.prefix):
            return not self._tower.is_trained(name.removeprefix(self._tower.prefix))
        if self._tower is not None and self._tower.is_alone:
            return True
        if name.startswith(self._family.carried):
            return True
        if not name.startswith((self.prefix.body, self.prefix.head)):
            return self.prefix != Prefix() and not is_of_language_model(name)
        layer = name.removeprefix(f"{self.prefix.body}layers.").split(".")[0]
        is_beyond = layer.isdecimal() and int(layer) >= self._model.num_layers
        return is_beyond and self._family.carries_further_layers

    def all(self) -> Iterator[Weight]:
        """Yields every weight that an export writes."""
        if self._tower is not None:
            for tensor in self._tower.shapes:
                name = tensor.removeprefix(self._tower.prefix)
                if self._tower.is_trained(name):
                    yield self.of_parameter(PARAMETERS + name)
        conditions = self._conditions(None)
        for row in MODEL_ROWS:
            if row.when in conditions:
                yield self._weight(row, LogicalName(row.part))
        for layer, kind in enumerate(self._kinds):
            conditions = self._conditions(layer)
            rows = [row for row in self._rows if row.when in conditions]
            yield from (
                self._weight(row, LogicalName(row.part, layer))
                for row in rows
                if not row.part.startswith("experts.")
            )
            for expert in range(0 if kind.experts is None else kind.experts.num_experts):
                yield from (
                    self._weight(row, LogicalName(row.part, layer, expert))
                    for row in rows
                    if row.part.startswith("experts.")
                )

    def _conditions(self, layer: int | None) -> frozenset[str]:
        """Returns the conditions of `Row.when` that hold for a layer, or for the model."""
        if layer is None:
            if self.head != "words":
                return frozenset(("always", self.head))
            return frozenset(("always", *(["untied"] if self.tied is None else [])))
        return self._conditions_of_kinds[self._kinds[layer]]

    @cached_property
    def _conditions_of_kinds(self) -> dict[LayerKind, frozenset[str]]:
        return {kind: conditions_of(self._model, kind) for kind in set(self._kinds)}

    @cached_property
    def _sizes_of_kinds(self) -> dict[LayerKind, Mapping[str, int]]:
        return {kind: sizes_of(self._model, kind) for kind in set(self._kinds)}

    def _weight(self, row: Row, place: LogicalName) -> Weight:
        """Returns a row of the table with numbers in place of its names of sizes."""
        if place.layer is None:
            sizes: Mapping[str, int] = {
                "vocab": self._vocab_size,
                "hidden": self._model.hidden_size,
                "one": 1,
            }
            # A prefix of the head includes "lm_head.", as the tensor's name in the row does: keep
            # only the text before it. "language_model.lm_head." -> "language_model."
            is_head = row.part == OUTPUT
            prefix = self.prefix.head.removesuffix("lm_head.") if is_head else self.prefix.body
            groups = 1
        else:
            kind = self._kinds[place.layer]
            sizes, mixer = self._sizes_of_kinds[kind], kind.mixer
            groups = kind.num_query_groups if mixer is None else mixer.num_groups or 1
            prefix = f"{self.prefix.body}layers.{place.layer}."
        sources = row.sources(sizes) if row.sources else (Source(),) * len(row.tensors)
        parts = []
        for number, (tensor, source) in enumerate(zip(row.tensors, sources, strict=True)):
            shape = tuple(sizes[_of_part(size, number)] for size in row.shape)
            view = source.view
            # A name without a number for the expert is that of a stack of all experts.
            if place.expert is not None and "{e}" not in tensor:
                view = view._replace(expert=place.expert)
            name = prefix + self._family.renamed(tensor.replace("{e}", str(place.expert)))
            parts.append(Part(name, shape, view, source.stored))
        return Weight(
            row.sharding,
            tuple(parts),
            place.expert is not None,
            groups if row.sharding == "heads" else 1,
            row.part,
        )


def _of_part(sizes: str, number: int) -> str:
    """`query,key,key` -> `query` for part 0."""
    return sizes.split(",")[number] if "," in sizes else sizes


def conditions_of(model: ModelConfig, kind: LayerKind) -> frozenset[str]:
    """Returns the conditions of `Row.when` that hold for a layer."""
    has_experts = kind.experts is not None
    biases = not model.disable_bias_linear
    holds = {
        "always": True,
        "norms_before": model.norm_position != "behind",
        "norm_before_mlp": model.norm_position != "behind" and not model.moe_branch_norms,
        "branch_norms": has_experts and model.moe_branch_norms,
        "layer_scalar": model.layer_scalar,
        "norms_behind": model.norm_position != "before",
        "dense": not has_experts,
        "dense_bias": biases and not has_experts,
        "experts": has_experts,
        "router_bias": biases and has_experts,
        "experts_linear_bias": biases and has_experts,
        "router_correction_bias": has_experts and model.moe_router_enable_expert_bias,
        "shared": kind.experts is not None and kind.experts.shared_width > 0,
        "shared_gate": has_experts and model.moe_shared_expert_gate,
    }
    of_mixer = attention.parameters(model) if kind.mixer is None else kind.mixer.layer_parameters()
    return frozenset(
        [parameter.name for parameter in of_mixer]
        + [name for name, is_true in holds.items() if is_true]
    )


def sizes_of(model: ModelConfig, kind: LayerKind) -> Mapping[str, int]:
    """Returns the sizes of a layer, by their names in `Row.shape`."""
    sizes = {
        "one": 1,
        "hidden": model.hidden_size,
        "ffn": kind.ffn_hidden_size,
        **(attention.sizes(kind, model) if kind.mixer is None else kind.mixer.sizes()),
    }
    if kind.experts is not None:
        sizes |= {
            "experts": kind.experts.num_experts,
            "expert_ffn": kind.experts.width,
            "shared_ffn": kind.experts.shared_width,
        }
    return sizes
