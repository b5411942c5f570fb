"""pure. Maps the parameters of adapters to the tensors of a PEFT folder, by the table of the base
model.

    ...linear_qkv.adapter.lora_A  <->  base_model.model....q_proj.lora_A.weight, k_proj, v_proj
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from megatron.packing.layers import Sharding
from megatron.packing.model.names import ADAPTER, EMBEDDING, OUTPUT, is_of_adapter, logical_name
from megatron.sft.model.huggingface.families.family import Prefix
from megatron.sft.model.huggingface.tensors import Part, View, Weight
from megatron.sft.model.huggingface.weights import Weights
from megatron.sft.model.lora.layers import adapted_layers
from megatron.sft.options.lora import LINEARS, LoraConfig

PREFIX = "base_model.model."
"""Prefix of all names in a PEFT folder."""
STACKED = ("experts.gate_up_proj", "experts.down_proj")
"""Ends of names in PEFT of the stacked parameters of a layer's experts, in order."""
_WHOLE = {"embed_tokens": EMBEDDING, "lm_head": OUTPUT, "score": OUTPUT}


class AdapterWeights:
    """Table of the tensors of an adapter with the options `lora`, for the model of `weights`."""

    def __init__(self, weights: Weights, lora: LoraConfig) -> None:
        self._weights = weights
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
        return self._of_layer(self._weights.of_parameter(f"{layer}.weight"), which)

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
        names = {
            part.name.split(".lora_A.")[0]
            for weight in self.all()
            for part in weight.parts
            if "lora_A" in part.name and part.view.expert is None
        }
        return sorted({name.rsplit(".", 1)[1] for name in names})

    def excluded_modules(self) -> str | None:
        """Returns PEFT's `exclude_modules`, a pattern: a tower beside the language model, whose
        modules have the same names, and would be given adapters of their own.
        """
        body = self._weights.prefix.in_memory(self._weights.prefix.body)
        return None if body == Prefix().body else rf"(?!{re.escape(body)}).*"

    def target_parameters(self) -> list[str]:
        """Returns PEFT's `target_parameters`: stacked experts with adapters."""
        stacked = {
            linear: re.sub(r".*\.layers\.\d+\.", "", weight.parts[0].name)
            for weight in self._weights.all()
            if weight.parts[0].view.expert is not None
            and self._lora.covers(weight.part)
            and self._lora.targets_in(linear := _linear(weight))
        }
        return [stacked[linear] for linear in ("fc1", "fc2") if linear in stacked]

    def _of_layer(self, weight: Weight, which: str) -> Weight:
        """Returns the weight of A or of B (`which`) of a layer's modules with adapters."""
        linear, rank = _linear(weight), self._lora.lora_rank
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
                parts.append(self._of_stack(part, which))
                continue
            name = self._name(f"{part.name.removesuffix('weight')}{which}.weight")
            if which == "lora_A":
                parts.append(Part(name, (rank, part.shape[1])))
            else:
                stored = (part.stored[0], rank) if part.stored else ()
                parts.append(Part(name, (part.shape[0], rank), part.view, stored))
        num_groups = weight.num_groups if sharding == "heads" else 1
        if any(part.view.expert is not None for part in parts) and self._lora.lora_dropout:
            raise ValueError(
                "--lora-dropout must be 0 with adapters of experts that are one tensor, since PEFT "
                "adds them to it; drop it, or leave "
                f"{' '.join(LINEARS[linear])} out of --lora-target-modules"
            )
        return Weight(sharding, tuple(parts), weight.is_expert, num_groups, weight.part)

    def _of_stack(self, part: Part, which: str) -> Part:
        """Returns A or B of one expert in a stack. PEFT's file has all experts in one tensor: A
        [experts * rank, in], B [out, rank * experts].
        """
        rank, experts = self._lora.lora_rank, part.stored[0]
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


def _linear(weight: Weight) -> str:
    """Returns the kind of a linear layer, else "": `attention.qkv.weight -> qkv`."""
    return weight.part.rsplit(".", 2)[-2] if weight.part.endswith(".weight") else ""


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
