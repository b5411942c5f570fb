"""pure. Options of LoRA: low-rank adapters that are trained beside frozen weights (Hu et al., arXiv
2106.09685).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from megatron.packing.layers import Part
from megatron.packing.model.parts import known_parts
from megatron.packing.quoting import cut
from megatron.packing.rules import (
    Layout,
    Rule,
    above_zero,
    at_least,
    check_rules,
    from_zero_to_below_one,
)

LINEARS: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "proj": ("o_proj",),
    "fc1": ("gate_proj", "up_proj"),
    "fc2": ("down_proj",),
    "in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "out_proj": ("out_proj",),
    "q_down": ("q_a_proj",),
    "q_up": ("q_b_proj",),
    "q": ("q_proj",),
    "qk": ("q_proj", "k_proj"),
    "kv_down": ("kv_a_proj_with_mqa",),
    "kv_up": ("kv_b_proj",),
    "router": ("gate",),
    "shared_gate": ("shared_expert_gate",),
}
"""Linear layers, as `packing.model.names.linear_of` calls them -> the layers of HuggingFace models
that each of them is made of, in order.
"""
_GATES = (*LINEARS["router"], *LINEARS["shared_gate"])
"""Modules that `all-linear` leaves out. They decide how experts share a token."""
FUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "qkv": {"qkv_proj": LINEARS["qkv"]},
    "fc1": {"gate_up_proj": LINEARS["fc1"]},
    "in_proj": {
        "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
        "in_proj_ba": ("in_proj_b", "in_proj_a"),
    },
}
"""Linear layer -> HuggingFace's names of several of these modules in one layer, where a family has
them so, in order.
"""
_EVERY = tuple(dict.fromkeys(module for modules in LINEARS.values() for module in modules))
_OF_ATTENTION = (*LINEARS["qkv"], *LINEARS["proj"])
_ALL = "all-linear"
_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "w1": ("gate_proj",),  # Mixtral's
    "w3": ("up_proj",),
    "w2": ("down_proj",),
    "proj": LINEARS["router"],  # of Gemma 4
    "router": LINEARS["router"],  # of gpt-oss
    **{name: modules for fused in FUSED.values() for name, modules in fused.items()},
}
MODULES = frozenset((*_EVERY, *_OTHER_NAMES))
"""Names of all layers that adapters stand beside."""
_WHOLE = ("embed_tokens", "lm_head", "score")


def _names(option: str, listed: tuple[str, ...], known: tuple[str, ...]) -> Rule:
    """Returns the rule of an option that is `known` names, of which the message has `listed`."""
    return Rule(
        when=lambda options: next(
            ({"name": cut(name, 100)} for name in getattr(options, option) if name not in known),
            None,
        ),
        why=f"{{{option}.flag}} must be of {', '.join(listed)}, but has {{name}}",
    )


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA."""

    lora: bool = False
    """Train low-rank adapters beside the frozen weights of --pretrained-checkpoint."""
    lora_adapter: str | None = field(default=None, metadata={"only_with": "lora"})
    """Folder of a PEFT adapter to start from, with its rank, alpha and target modules."""
    lora_rank: int = field(default=16, metadata={"only_with": "lora"})
    """Rank of each adapter."""
    lora_alpha: float = field(default=32.0, metadata={"only_with": "lora"})
    """Scale of adapters: their output is multiplied by alpha / rank."""
    lora_rslora: bool = field(default=False, metadata={"only_with": "lora"})
    """Scale by alpha / sqrt(rank) instead, so that larger ranks learn as fast. SGLang 0.5 does not
    read it from an adapter.
    """
    lora_dropout: float = field(default=0.0, metadata={"only_with": "lora"})
    """Dropout of the adapters' input."""
    lora_target_modules: tuple[str, ...] = field(default=(), metadata={"only_with": "lora"})
    """Layers with adapters, by PEFT's names. Any of q_proj k_proj v_proj o_proj gate_proj
    up_proj down_proj, also those of each expert, in_proj_qkv in_proj_z in_proj_b in_proj_a
    out_proj of gated delta nets, q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj of latent
    attention, and qkv_proj gate_up_proj in_proj_qkvz in_proj_ba of
    families that have them in one (default: all-linear, which is all of these). Also gate, the
    router of experts, and shared_expert_gate.
    """
    lora_experts: Literal["all", "shared", "routed", "routed-only"] = field(
        default="all", metadata={"only_with": "lora", "idle_without": "num_experts"}
    )
    """Experts whose layers are targets: all, those that every token goes through (shared), those
    that a router chooses (routed), or those and no MLP of layers without experts (routed-only).
    """
    lora_gate_up: Literal["files", "joined", "doubled"] = field(
        default="files", metadata={"only_with": "lora", "idle_without": "num_experts"}
    )
    """Adapters of gate and up of routed experts: as the model's files have them (files), one for
    both, as peft's target_parameters (joined), or one with twice the rank and alpha, as peft's
    all-linear (doubled).
    """
    lora_modules_to_save: tuple[str, ...] = field(default=(), metadata={"only_with": "lora"})
    """Layers that are trained as a whole: embed_tokens, lm_head, or both; of reward models score
    (default there), and embed_tokens.
    """
    lora_merge: bool = field(default=False, metadata={"only_with": ("lora", "save_hf")})
    """Let --save-hf write the whole model with the adapters merged in, instead of a PEFT
    adapter.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        *at_least(1, "lora_rank"),
        *above_zero("lora_alpha"),
        *from_zero_to_below_one("lora_dropout"),
        _names(
            "lora_target_modules",
            (*_EVERY, *(name for fused in FUSED.values() for name in fused), _ALL),
            (*_EVERY, *_OTHER_NAMES, _ALL),
        ),
        _names("lora_modules_to_save", _WHOLE, _WHOLE),
        Rule(
            when=lambda options, layout, num_query_groups: (
                layout.tensor > num_query_groups
                and len(options.targets_in("qkv")) in (1, 2)
                and {"targets": " ".join(options.targets)}
            ),
            why="{lora_target_modules.flag} must have q_proj, k_proj and v_proj, or none of them, "
            "with a {tensor} above the {num_query_groups} groups of queries, but has {targets}",
            way_out="add them, or lower it",
        ),
    )

    @property
    def writes_adapter(self) -> bool:
        """Returns whether --save-hf writes a PEFT folder."""
        return self.lora and not self.lora_merge

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)

    @property
    def targets(self) -> tuple[str, ...]:
        """The layers with adapters, by the names of `LINEARS`."""
        names = {
            module
            for name in self.lora_target_modules
            for module in _OTHER_NAMES.get(name, (name,))
        }
        is_all = not names or _ALL in names
        return tuple(
            module for module in _EVERY if module in names or (is_all and module not in _GATES)
        )

    def targets_in(self, linear: str) -> tuple[int, ...]:
        """Returns the numbers of those among the modules of `LINEARS[linear]`."""
        return tuple(
            number
            for number, module in enumerate(LINEARS.get(linear, ()))
            if module in self.targets
        )

    def covers(self, part: str) -> bool:
        """Returns whether layers of this kind may have adapters.

        part: logical name of a weight, as `packing.model.names` has it.
        """
        left_out = {
            "all": (),
            "shared": ("experts",),
            "routed": ("shared",),
            "routed-only": ("shared", "mlp"),
        }
        module, name = part.split(".", 1)
        return name == "gate_weight" or module not in left_out[self.lora_experts]

    def check_layout(self, tensor_parallel_size: int, num_query_groups: int) -> None:
        """Raises ValueError where ranks would hold unequal shares of an adapter."""
        layout = Layout(tensor=tensor_parallel_size)
        check_rules(self.rules, options=self, layout=layout, num_query_groups=num_query_groups)

    @property
    def scale(self) -> float:
        """The factor of what most adapters add; see `scale_beside`."""
        return self.scale_beside("")

    def rank_beside(self, part: str) -> int:
        """Returns the rank of an adapter.

        part: logical name of the weight that it is beside.
        """
        return self.lora_rank * self._times(part)

    def scale_beside(self, part: str) -> float:
        """Returns the factor of what an adapter adds; `part` as for `rank_beside`."""
        rank = self.rank_beside(part)
        alpha = self.lora_alpha * self._times(part)
        return alpha / (math.sqrt(rank) if self.lora_rslora else rank)

    def _times(self, part: str) -> int:
        return 2 if self.lora_gate_up == "doubled" and part == "experts.fc1.weight" else 1

    def identity(
        self,
        *,
        parts: Collection[str] = (),
        has_experts: bool = False,
        has_shared_experts: bool = False,
        has_dense_layers: bool = True,
    ) -> dict[str, Any]:
        """Returns what a checkpoint of such a model must share with the run that loads it.

        parts: names of those that stand in the place of attention in some layers.
        """
        if not self.lora:
            return {"lora": False}
        experts = self.lora_experts
        if experts == "routed-only" and not has_dense_layers:
            experts = "routed"
        if experts == "routed" and not has_shared_experts:
            experts = "all"
        # Apart, since checkpoints from before a part had adapters do not name its modules.
        of_parts = {part.name: modules_of_part(part) for part in known_parts()}
        others = {module for modules in of_parts.values() for module in modules}
        others -= {*_OF_ATTENTION}  # which latent attention has, too
        return {
            "lora": True,
            **{
                key_of_part(part): [one for one in self.targets if one in of_parts[part]]
                for part in parts
            },
            **({"lora_experts": experts} if has_experts else {}),
            **({"lora_gate_up": "doubled"} if self.lora_gate_up == "doubled" else {}),
            "lora_rank": self.lora_rank,
            "lora_alpha": self.lora_alpha,
            "lora_rslora": self.lora_rslora,
            "lora_target_modules": [one for one in self.targets if one not in others],
            "lora_modules_to_save": sorted(self.lora_modules_to_save),
        }


def modules_of_part(part: type[Part]) -> list[str]:
    """Returns the modules of a part that adapters may stand beside, by PEFT's names."""
    linears = [one.linear for one in part.parameters if one.takes_adapter]
    return [module for linear in linears for module in LINEARS[linear]]


def key_of_part(name: str) -> str:
    """Returns the key of a checkpoint for a part's modules among --lora-target-modules."""
    return f"lora_{name}_modules"
