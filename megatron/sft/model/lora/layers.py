"""pure. The HuggingFace modules in each linear layer of megatron-core, and those of them that have
an adapter.

PEFT puts an adapter beside a module of the HuggingFace model. A megatron-core layer consists of
several such modules, and families divide it differently:

    layer      most families               Phi-3           Qwen3.5
    qkv        q_proj | k_proj | v_proj    qkv_proj        q_proj (queries, gates) | k_proj | v_proj
    fc1        gate_proj | up_proj         gate_up_proj    gate_proj | up_proj
                                           Qwen3-Next
    in_proj of a delta net                 in_proj_qkvz    in_proj_qkv | in_proj_z
                                           | in_proj_ba    | in_proj_b | in_proj_a

All rows of one module share its A.

If a family has the experts of a layer as one stacked parameter, PEFT (`target_parameters`) has an
adapter for each expert, and stacks all of them in one tensor.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron.sft.model.huggingface.tensors import Weight
from megatron.sft.options.lora import FUSED, LINEARS, LoraConfig


class Adapted(NamedTuple):
    """A HuggingFace module with an adapter."""

    module: str
    """Its name in PEFT: q_proj."""
    tensor: str
    """Name of its weight in a HuggingFace folder."""
    parts: tuple[int, ...]
    """Numbers of its parts in the `Weight.parts` of the megatron-core layer."""


def adapted_layers(linear: str, weight: Weight, lora: LoraConfig) -> tuple[Adapted, ...]:
    """Returns the HuggingFace modules of a megatron-core layer that have an adapter.

    Raises ValueError if --lora-target-modules names only some of several modules that this family
    has as one (q_proj of Phi-3's qkv_proj).

    Args:
        linear: kind of the layer, a key of `LINEARS`.
        weight: weight of the layer; the name of each part is that of its HuggingFace tensor.
    """
    modules = LINEARS[linear]
    tensors = tuple(dict.fromkeys(part.name for part in weight.parts))
    is_fused = len(tensors) < len(modules)
    stand_for = FUSED[linear] if is_fused else {module: (module,) for module in modules}
    found = []
    for (name, own), tensor in zip(stand_for.items(), tensors, strict=True):
        chosen = [module for module in own if module in lora.targets]
        parts = tuple(n for n, part in enumerate(weight.parts) if part.name == tensor)
        # An MLP without a gate has a gate with 0 rows, which needs no adapter.
        if not chosen or not any(weight.parts[n].shape[0] for n in parts):
            continue
        if len(chosen) < len(own):
            raise ValueError(
                f"--lora-target-modules must have all of {' '.join(own)}, or none of them: this "
                f"family stores them as {tensor}, beside which PEFT has one adapter; pass {name}"
            )
        found.append(Adapted(name, tensor, parts))
    return tuple(found)
