"""pure. The layers of a HuggingFace model that adapters stand beside, in each of our linear layers.

PEFT puts an adapter beside a layer of the HuggingFace model, which may be several parts of ours:

    ours       HuggingFace's, of most      Phi-3           Qwen3.5
    qkv        q_proj | k_proj | v_proj    qkv_proj        q_proj (queries, gates) | k_proj | v_proj
    fc1        gate_proj | up_proj         gate_up_proj    gate_proj | up_proj
                                           Qwen3-Next
    in_proj of a delta net                 in_proj_qkvz    in_proj_qkv | in_proj_z
                                           | in_proj_ba    | in_proj_b | in_proj_a

The parts of one such layer share its A.

Experts that a folder holds as one tensor are one parameter in the HuggingFace model. Beside it PEFT
(`target_parameters`) has an adapter for each expert, all of which are one tensor in its files.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron.sft.model.huggingface.tensors import Weight
from megatron.sft.options.lora import FUSED, LINEARS, LoraConfig


class Adapted(NamedTuple):
    """A layer with an adapter."""

    module: str
    """PEFT's name of it: q_proj."""
    tensor: str
    """Name of its weight in a folder."""
    parts: tuple[int, ...]
    """Numbers of the parts of our layer's weight that it computes."""


def adapted_layers(linear: str, weight: Weight, lora: LoraConfig) -> tuple[Adapted, ...]:
    """Returns the layers with adapters that make up a linear layer of ours.

    ValueError where some of the modules of --lora-target-modules are one layer with others.

    Args:
        linear: kind of layer, as `LINEARS` has it.
        weight: of our layer; each part's name is that of the tensor which it is in.
    """
    modules = LINEARS[linear]
    tensors = tuple(dict.fromkeys(part.name for part in weight.parts))
    is_fused = len(tensors) < len(modules)
    stand_for = FUSED[linear] if is_fused else {module: (module,) for module in modules}
    found = []
    for (name, own), tensor in zip(stand_for.items(), tensors, strict=True):
        chosen = [module for module in own if module in lora.targets]
        parts = tuple(n for n, part in enumerate(weight.parts) if part.name == tensor)
        # An MLP that is not gated has a gate of no rows.
        if not chosen or not any(weight.parts[n].shape[0] for n in parts):
            continue
        if len(chosen) < len(own):
            raise ValueError(
                f"--lora-target-modules must have all of {' '.join(own)}, or none of them: this "
                f"family stores them as {tensor}, beside which PEFT has one adapter; pass {name}"
            )
        found.append(Adapted(name, tensor, parts))
    return tuple(found)
