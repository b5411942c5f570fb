"""pure. Options that keep fewer activations on the device, and change no result.

`tiles` and `layer_inputs` compute what they say. A model's config carries them as its attribute
`activation_options`; without it nothing is tiled or kept elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from megatron.packing.rules import Rule, at_least, check_rules

_INPUT, _ATTENTION = "layer_input", "core_attn_output"


@dataclass(frozen=True, kw_only=True)
class ActivationOptions:
    """Activation memory. Layers are then those without Transformer Engine."""

    mlp_chunks_for_training: int = 1
    """Chunks of a rank's tokens in which MLPs and experts are computed, and again in the backward
    pass: what lies between their products exists for one chunk at a time (default: 1, all at once).
    """
    attention_chunks_for_training: int = field(
        default=1, metadata={"idle_without": "sequence_parallel"}
    )
    """Chunks of a rank's tokens in which the first and the last product of attention and the
    embedding are computed, for which tensor-parallel ranks gather tokens (default: 1).
    """

    fine_grained_activation_offloading: bool = False
    """Keep activations on the host between forward and backward pass; needs
    --recompute-granularity full.
    """
    offload_modules: tuple[str, ...] = field(
        default=(_INPUT,),
        metadata={"only_with": "fine_grained_activation_offloading", "default_holds": True},
    )
    """Activations that --fine-grained-activation-offloading keeps there: layer_input, the inputs of
    recomputed layers; core_attn_output, outputs of attention, which is then not recomputed.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        *at_least(1, "mlp_chunks_for_training", "attention_chunks_for_training"),
        Rule(
            when=lambda options: (
                options.fine_grained_activation_offloading
                and set(options.offload_modules) not in ({_INPUT}, {_INPUT, _ATTENTION})
            ),
            why=f"{{offload_modules}} must be {_INPUT}, or {_INPUT} {_ATTENTION}: what else lies "
            "in a layer is recomputed",
        ),
    )

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)

    @property
    def keeps_inputs_on_host(self) -> bool:
        """True if inputs of recomputed layers are kept on the host."""
        return self.fine_grained_activation_offloading

    @property
    def keeps_attention_on_host(self) -> bool:
        """True if outputs of attention are, too."""
        return self.fine_grained_activation_offloading and _ATTENTION in self.offload_modules

    @classmethod
    def of(cls, config: object) -> ActivationOptions:
        """Returns those that a model's config carries; the defaults where it carries none."""
        options = getattr(config, "activation_options", None)
        return options if isinstance(options, cls) else cls()
