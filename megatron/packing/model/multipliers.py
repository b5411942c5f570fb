"""mcore. Factors at both ends of a GPTModel: embeddings that are multiplied, logits that are scaled
and capped.

`head` applies the same rule to the tokens that count, a chunk at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LogitRule:
    """Logits x of the output layer become x * scale, and then softcap * tanh(that / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Returns whether it changes nothing."""
        return self.scale == 1.0 and self.softcap is None

    def apply_(self, logits: Tensor) -> Tensor:
        """Changes logits in place, and returns them."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def chain_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Turns the gradient of applied `logits` into that of the output layer's, in place; zero
        where they are minus infinity.
        """
        if self.softcap is not None:
            gradient.mul_(1 - (logits / self.softcap).clamp(min=-1).square_())
        return gradient.mul_(self.scale) if self.scale != 1.0 else gradient


PLAIN = LogitRule()


def adjust_logits(gpt: GPTModel, rule: LogitRule) -> None:
    """Lets the output layer of `gpt` give logits under `rule`; before anything that hides logits.

    Where `head.skip_masked_tokens` takes the output layer's place, give it the same rule.
    """
    if gpt.post_process and not rule.is_plain:
        gpt.output_layer.register_forward_hook(_Adjust(rule))


class _Adjust:
    def __init__(self, rule: LogitRule) -> None:
        self._rule = rule

    def __call__(self, layer: object, inputs: object, output: tuple[Any, Any]) -> Any:
        logits, bias = output
        if not isinstance(logits, Tensor):
            return output  # `head` applies the rule itself
        if self._rule.scale != 1.0:
            logits = logits * self._rule.scale
        if self._rule.softcap is not None:
            logits = self._rule.softcap * torch.tanh(logits / self._rule.softcap)
        return logits, bias


def multiply_embeddings(gpt: GPTModel, factor: float, *, is_rounded: bool = False) -> None:
    """Lets the embedding layer of `gpt`, where this stage has one, multiply its output by `factor`.

    is_rounded: the factor is rounded to the embedding's type first, as Gemma rounds it.
    """

    def multiply(layer: object, inputs: object, output: Tensor) -> Tensor:
        if is_rounded:
            return output * torch.tensor(factor, dtype=output.dtype)
        return output * factor

    if factor != 1.0 and hasattr(gpt, "embedding"):
        gpt.embedding.word_embeddings.register_forward_hook(multiply)
