"""mcore. Layers of multi-token prediction in packs: recomputed, and beside images.

- megatron-core before 0.18 hands all arguments of a layer that is recomputed to
  `save_for_backward`, which takes tensors alone: `PackedSeqParams` among them raises TypeError.
- Embeddings of images are merged before sequence parallel cuts them, so that the embedding must not
  cut. Then it does not for these layers either, which fail on two lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor

from megatron.packing.model.replaced_method import ReplacedMethod


class PredictionRecompute(ReplacedMethod):
    """`MultiTokenPredictionLayer._checkpointed_forward`, which saves the tensors among its
    arguments and keeps the others as they are.
    """

    def __call__(
        self, layer: Any, forward_func: Callable[..., Any] | None = None, **arguments: Any
    ) -> Any:
        """See megatron-core. Later releases pass no `forward_func` and keep the others apart."""
        if forward_func is None:
            return self.plain(layer, **arguments)
        tensors = {name: each for name, each in arguments.items() if isinstance(each, Tensor)}
        others = {name: each for name, each in arguments.items() if name not in tensors}

        def forward(*values: Tensor, **named: Tensor) -> Any:
            # By position where they were saved, by name where nothing is recomputed.
            return forward_func(**dict(zip(tensors, values)), **named, **others)

        return self.plain(layer, forward, **tensors)


class PredictionInput(ReplacedMethod):
    """`MultiTokenPredictionLayer._concat_embeddings`, which cuts embeddings of the whole pack to
    this tensor-parallel rank's part under sequence parallel.
    """

    def __call__(self, layer: Any, hidden_states: Tensor, decoder_input: Tensor) -> Tensor:
        """See megatron-core; [t / tp, 1, h] and [t / tp or t, 1, h]."""
        if len(decoder_input) != len(hidden_states):
            decoder_input = scatter_to_sequence_parallel_region(
                decoder_input, group=layer.eh_proj.tp_group
            )
        return self.plain(layer, hidden_states, decoder_input)
