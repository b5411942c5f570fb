"""pure. Maps the parameters of adapters to the tensors of a PEFT folder, by the table of the base
model.

    ...linear_qkv.adapter.lora_A  <->  base_model.model....q_proj.lora_A.weight, k_proj, v_proj
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from megatron.packing.layers import Sharding
from megatron.packing.model.names import ADAPTER, EMBEDDING, OUTPUT, is_of_adapter, logical_name
from megatron.sft.model.huggingface.families.family import Prefix
from megatron.sft.model.huggingface.names import naming
from megatron.sft.model.huggingface.tensors import Part, View, Weight
from megatron.sft.model.huggingface.weights import Weights
from megatron.sft.model.lora.layers import adapted_layers
from megatron.sft.options.lora import LINEARS, LoraConfig

PREFIX = "base_model.model."
"""Prefix of all names in a PEFT folder."""
STACKED = ("experts.gate_up_proj", "experts.down_proj")
"""Ends of names in PEFT of the stacked parameters of a layer's experts, in order."""
CONVERTED = frozenset(
    (
        *("mixtral", "minimax_m2", "qwen3_moe", "qwen3_next"),
        *("glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3"),
    )
)
"""Families whose experts peft 0.21 adapts as one tensor, whatever the names of modules in an
adapter: gate_proj, up_proj and down_proj are then no MLP's but theirs.
"""
_ROUTERS = frozenset(("gate", "router"))
"""Modules of transformers that choose experts and have a weight, but are no `nn.Linear`."""
_WHOLE = {"embed_tokens": EMBEDDING, "lm_head": OUTPUT, "score": OUTPUT}


class AdapterWeights:
    """Table of the tensors of an adapter with the options `lora`, for the model of `weights`."""

    def __init__(self, weights: Weights, lora: LoraConfig) -> None:
        self._weights = weights = adapted_tensors(weights, lora)
        self._lora = lora
        self._whole = {_WHOLE[module] for module in lora.lora_modules_to_save}
        self.tied = None
        # PEFT needs both names of tied embeddings, or it leaves one of them as in the base model.
        if weights.tied is not None and self._whole:
            self._whole = {EMBEDDING, OUTPUT}
            self.tied = (self._name(weights.tied[0]), self._name(weights.tied[1]))

    def concerns(self, name: str) -> bool:
        """Returns whether a parameter belongs to an adapter, or is in `lora_modules_to_save`."""
        return is_of_adapter(name) or self._is_whole(name)

    def of_parameter(self, name: str) -> Weight:
        """Returns the weight of a parameter; raises KeyError if the folder has no tensor for it."""
        if self._is_whole(name):
            return self._renamed(self._weights.of_parameter(name))
        if not is_of_adapter(name):
            raise KeyError(name)  # a parameter of the frozen base model
        layer, which = name.split(ADAPTER)
        weight = "gate_weight" if layer.endswith("shared_experts") else "weight"
        return self._of_layer(self._weights.of_parameter(f"{layer}.{weight}"), which)

    def all(self) -> Iterator[Weight]:
        """Yields every weight of the adapter."""
        for weight in self._weights.all():
            if weight.part in self._whole:
                renamed = self._renamed(weight)
                yield renamed._replace(
                    parts=tuple(one for part in renamed.parts for one in self.written_as(part))
                )
            elif self._lora.covers(weight.part) and self._lora.targets_in(_linear(weight)):
                yield self._of_layer(weight, "lora_A")
                yield self._of_layer(weight, "lora_B")

    def is_carried(self, name: str) -> bool:
        """Returns False: an adapter has no tensors that an export copies."""
        return False

    def _name(self, name: str) -> str:
        """Returns PEFT's name of a tensor of the base model."""
        return PREFIX + self._weights.prefix.in_memory(name)

    def _renamed(self, weight: Weight) -> Weight:
        parts = tuple(part._replace(name=self._name(part.name)) for part in weight.parts)
        return weight._replace(parts=parts)

    def _is_whole(self, name: str) -> bool:
        if is_of_adapter(name):
            return False
        try:
            return logical_name(name).part in self._whole
        except KeyError:
            return False

    def written_as(self, part: Part) -> tuple[Part, ...]:
        """Returns the tensors to write for a part: two, with both names, for tied embeddings."""
        if self.tied is None or part.name != self.tied[1]:
            return (part,)
        return (part, part._replace(name=self.tied[0]))

    def modules_to_save(self) -> list[str]:
        """Returns PEFT's `modules_to_save`: embeddings that are trained without adapters."""
        of_head = {"lm_head": "words", "score": "score"}
        return sorted(
            module
            for module, name in _WHOLE.items()
            if name in self._whole and of_head.get(module, self._weights.head) == self._weights.head
        )

    def target_modules(self) -> list[str]:
        """Returns PEFT's `target_modules`: modules with adapters, by their names in this family."""
        return sorted(self._adapted_modules() - _ROUTERS)

    def excluded_modules(self) -> str | None:
        """Returns PEFT's `exclude_modules`, a pattern: a tower beside the language model, whose
        modules have the same names, and would be given adapters of their own.
        """
        body = self._weights.prefix.in_memory(self._weights.prefix.body)
        return None if body == Prefix().body else rf"(?!{re.escape(body)}).*"

    def target_parameters(self) -> list[str]:
        """Returns PEFT's `target_parameters`: routers and stacked experts with adapters."""
        stacked = {
            linear: re.sub(r".*\.layers\.\d+\.", "", weight.parts[0].name)
            for weight in self._weights.all()
            if weight.parts[0].view.expert is not None
            and self._lora.covers(weight.part)
            and self._lora.targets_in(linear := _linear(weight))
        }
        routers = [f"{name}.weight" for name in sorted(self._adapted_modules() & _ROUTERS)]
        found = [stacked[linear] for linear in ("fc1", "fc2") if linear in stacked]
        if self._lora.lora_gate_up == "doubled":  # as peft's all-linear names them
            found = [name.rpartition(".")[2] for name in found]
        return found + routers

    def patterns(self) -> dict[str, dict[str, float]]:
        """Returns PEFT's `rank_pattern` and `alpha_pattern`; {} if all adapters are alike."""
        fc1 = "experts.fc1.weight"
        if self._lora.lora_gate_up != "doubled" or not any(w.part == fc1 for w in self.all()):
            return {}
        return doubled_patterns(self._lora.lora_rank, self._lora.lora_alpha)

    def _adapted_modules(self) -> set[str]:
        """Returns the last names of modules that are no stacked experts."""
        names = {
            part.name.split(".lora_A.")[0]
            for weight in self.all()
            for part in weight.parts
            if "lora_A" in part.name and part.view.expert is None
        }
        return {name.rsplit(".", 1)[1] for name in names}

    def _of_layer(self, weight: Weight, which: str) -> Weight:
        """Returns the weight of A or of B (`which`) of a layer's modules with adapters."""
        linear, rank = _linear(weight), self._lora.rank_beside(weight.part)
        is_cut_by_columns = weight.sharding == "columns"
        sharding: Sharding
        if which == "lora_A":
            sharding = "columns" if is_cut_by_columns else "whole"
        else:
            sharding = "whole" if is_cut_by_columns else weight.sharding
        parts = []
        layers = adapted_layers(linear, weight, self._lora)
        for number in sorted(
            number
            for layer in layers
            for number in (layer.parts[:1] if which == "lora_A" else layer.parts)
        ):
            part = weight.parts[number]
            if part.view.expert is not None:
                parts.append(self._of_stack(part, which, rank))
                continue
            name = self._name(f"{part.name.removesuffix('weight')}{which}.weight")
            if which == "lora_A":
                parts.append(Part(name, (rank, part.shape[1])))
            else:
                stored = (part.stored[0], rank) if part.stored else ()
                parts.append(Part(name, (part.shape[0], rank), part.view, stored))
        num_groups = weight.num_groups if sharding == "heads" else 1
        is_stack = any(part.view.expert is not None for part in parts)
        if self._lora.lora_dropout and (is_stack or _is_router(weight)):
            what = "experts that are one tensor" if is_stack else "a router"
            raise ValueError(
                f"--lora-dropout must be 0 with adapters of {what}, since PEFT adds them to the "
                f"weights; drop it, or leave {' '.join(LINEARS[linear])} out of "
                "--lora-target-modules"
            )
        return Weight(sharding, tuple(parts), weight.is_expert, num_groups, weight.part)

    def _of_stack(self, part: Part, which: str, rank: int) -> Part:
        """Returns A or B of one expert in a stack. PEFT's file has all experts in one tensor: A
        [experts * rank, in], B [out, rank * experts].
        """
        experts = part.stored[0]
        module = part.name.rpartition(".")[0]
        if part.view.is_transposed:
            rows, columns = part.stored[2], part.stored[1]
        else:
            rows, columns = part.stored[1], part.stored[2]
        # PEFT wraps the module once for each target parameter. With two of them, the first has
        # "base_layer" in its name, being the inner one.
        is_inner = part.name.endswith(STACKED[0]) and self._lora.targets_in("fc2")
        name = self._name(f"{module}{'.base_layer' if is_inner else ''}.{which}.weight")
        if which == "lora_A":
            view, stored = View(expert=part.view.expert, stack="rows"), (experts * rank, columns)
            return Part(name, (rank, columns), view, stored)
        view = part.view._replace(is_transposed=False, stack="columns")
        return Part(name, (part.shape[0], rank), view, (rows, rank * experts))


def note_for_peft(weights: Weights, lora: LoraConfig) -> str:
    """Returns a line for the user where peft would leave out some of the adapters, in silence, of
    an adapter that is written; "" if it loads all.
    """
    kinds = {weight.part.split(".fc")[0] for weight in AdapterWeights(weights, lora).all()}
    files = {weight.part: weight.parts[0] for weight in weights.all()}
    experts = files.get("experts.fc1.weight")
    if weights.model_type in CONVERTED:
        what, way_out = "MLPs that are no routed experts", "--lora-experts routed-only"
        is_lost = bool(kinds & {"mlp", "shared"})
    else:
        what, way_out = "routed experts that its files have one by one", "--lora-experts shared"
        is_lost = "experts" in kinds and experts is not None and experts.view.expert is None
    return is_lost * (
        f"LoRA: of an adapter for {weights.model_type} peft 0.21 loads none beside {what}; pass "
        f"--lora-merge to write a whole model, or {way_out}"
    )


def _linear(weight: Weight) -> str:
    """Returns the kind of a linear layer or gate, else "": `attention.qkv.weight -> qkv`."""
    if weight.part == "shared.gate_weight":
        return "shared_gate"
    return weight.part.rsplit(".", 2)[-2] if weight.part.endswith(".weight") else ""


def _is_router(weight: Weight) -> bool:
    """Returns whether transformers has the weight as a parameter of a router, no linear layer."""
    module = weight.parts[0].name.removesuffix(".weight").rpartition(".")[2]
    return _linear(weight) == "router" and module in _ROUTERS


def adapted_tensors(weights: Weights, lora: LoraConfig) -> Weights:
    """Returns the table of a model's tensors that its adapters are beside: that of its files, or
    with the experts of a layer as one tensor, as transformers has them in memory.
    """
    return weights if lora.lora_gate_up == "files" else weights.with_stacked_experts()


def names_in_memory(
    config: Mapping[str, Any], tensors: Iterable[str], lora: LoraConfig
) -> Callable[[str], str]:
    """Returns the function from names in the base model, in any spelling, to those that its
    adapter has.

    config, tensors: config.json and names of the base model's folder.
    """
    is_stacked = lora.lora_gate_up != "files"
    return naming(config, [f".{STACKED[0]}"] if is_stacked else tensors).in_memory


def doubled_patterns(rank: int, alpha: float) -> dict[str, dict[str, float]]:
    """Returns the `rank_pattern` and `alpha_pattern` of peft's all-linear."""
    module = r".*\.gate_up_proj"
    return {
        "rank_pattern": {module: 2 * rank},
        "alpha_pattern": {module: whole(2 * alpha)},
    }


def whole(number: float) -> float:
    """Returns an integer where a number is one, as peft writes alpha."""
    return int(number) if number == int(number) else number


def summary_of_adapters(weights: Weights, lora: LoraConfig) -> str:
    """Returns a line for the user with the numbers of trained and of frozen weights."""
    trained, frozen = (
        sum(math.prod(part.shape) for weight in tensors.all() for part in weight.parts)
        for tensors in (AdapterWeights(weights, lora), weights)
    )
    return (
        f"LoRA: {trained:,} weights are trained, beside a model of {frozen:,} "
        f"({trained / frozen:.2%})"
    )
