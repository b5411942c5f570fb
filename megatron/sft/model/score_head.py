"""mcore. The head of reward models: a score of each last token, in place of a GPTModel's output
layer.

    hidden [t, h] -> gather over tensor parallel where it is split -> rows that count [n, h]
        -> product with one row [1, h], in at least float32 -> scores [n] -> [b, s]

Each tensor-parallel rank has the whole row and computes all scores, so that no gradient is
exchanged for it.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor


class ScoreHead(torch.nn.Module):
    """One row [1, h] of weights, `score.weight` of a HuggingFace folder; stands in the place of
    `output_layer`.
    """

    def __init__(self, gpt: GPTModel, std: float, seed: int) -> None:
        """Starts with normal numbers, which depend on `seed` and not on the parallel layout."""
        super().__init__()
        config = gpt.config
        self._group, self.sequence_parallel = gpt.output_layer.tp_group, config.sequence_parallel
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} score".encode()))
        start = torch.randn(1, config.hidden_size, generator=generator, dtype=torch.float64) * std
        self.weight = torch.nn.Parameter(start.to(config.params_dtype))

    def forward(
        self, states: Tensor, weight: Tensor | None = None, runtime_gather_output: Any = None
    ) -> tuple[Tensor, None]:
        """Returns the hidden states of all tokens of this context-parallel rank, [s, b, h]."""
        if self.sequence_parallel and self._group.size() > 1:
            # All ranks compute the same from here on, so that each keeps the gradient of its part.
            states = gather_from_sequence_parallel_region(
                states, tensor_parallel_output_grad=False, group=self._group
            )
        return states, None

    def scores(self, rows: Tensor) -> Tensor:
        """Returns the scores of rows [n, h], in at least float32."""
        dtype = torch.promote_types(rows.dtype, torch.float32)
        return (rows.to(dtype) @ self.weight.to(dtype).t()).squeeze(1)


def add_score_head(gpt: GPTModel, std: float, seed: int) -> None:
    """Replaces output layer and loss of `gpt`, which must be called with labels and `loss_mask`:
    it then returns the negative scores of tokens whose mask is not 0, and 0 for others, [b, s].

    Negative, as sums over paths (`path_log_probs`) take losses: the sum of a path is its score.
    """
    if not gpt.post_process:
        return
    head = ScoreHead(gpt, std, seed)
    rows_of_call: list[Tensor | None] = [None]

    def begin(_: GPTModel, arguments: Any, options: dict[str, Any]) -> None:
        found = getattr(options.get("packed_seq_params"), "loss_rows", None)
        mask = options.get("loss_mask")
        if found is None and mask is not None:
            found = mask.t().flatten().nonzero().squeeze(1)
        rows_of_call[0] = found

    def loss(labels: Tensor, states: Tensor) -> Tensor:
        flat, rows = states.flatten(0, 1), rows_of_call[0]
        assert rows is not None  # forward_step gives a mask on the last stage
        scores = head.scores(flat.index_select(0, rows))
        whole = scores.new_zeros(len(flat)).index_copy(0, rows, -scores)
        return whole.view(labels.shape[1], labels.shape[0]).t().contiguous()

    gpt.register_forward_pre_hook(begin, with_kwargs=True)
    gpt.output_layer = head
    gpt.compute_language_model_loss = loss
