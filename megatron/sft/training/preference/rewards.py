"""mcore. The loss of reward models: scores of the answers' last tokens, compared in pairs.

    loss of a pair = -log sigmoid(chosen - rejected - margin) + k (chosen + rejected)^2

Source: arXiv 2203.02155; margins 2307.09288; k, the coefficient that keeps scores near zero,
2312.09244. Means are taken over the pairs of the global batch. Scores of a pack's paths come from
`score_head`, through the sums that other losses of pairs have, of one token each.

What the sum is divided by counts tokens of the answers' branches, so that balancing losses of
experts have about the scale that they have in supervised fine-tuning (see `objective`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron.packing.model.get_batch import Batch
from megatron.packing.model.path_log_probs import weighted_path_log_probs
from megatron.sft.data.preference.encode import ANSWER_TOKENS, MARGIN, RANK, WEIGHT
from megatron.sft.model.forward import Asked, Loss
from megatron.sft.options.preference import PreferenceConfig
from megatron.sft.training.preference.rows import (
    chosen_of_rows,
    counted_once,
    fields_per_path,
    is_last_stage,
    summed_over_replicas,
    sums_by_source,
)

if TYPE_CHECKING:
    from megatron.sft.training.passes import Passes
    from megatron.sft.training.step_batches import StepBatch


class RewardPairs:
    """The loss of a run that trains a reward model; see the module."""

    sums: Sequence[str] = ("terms", "rewards", "accuracy", "margin")
    maxima: Sequence[str] = ("max_reward", "negated_min_reward")

    def __init__(self, options: PreferenceConfig) -> None:
        self._centred = options.center_rewards_coefficient
        self._scale: Tensor | None = None
        """Branch tokens per pair of the global batch, a float64 scalar."""

    def prepare(self, batch: StepBatch, passes: Passes) -> None:
        """Counts pairs and tokens over all ranks: an all-reduce of two numbers. Collective."""
        assert batch.packed is not None  # a rule of the options
        numbers = torch.zeros(2, dtype=torch.float64)
        for fields in fields_per_path(batch.packed.microbatches):
            is_pair = fields[RANK].gt(0)
            numbers += torch.stack([fields[ANSWER_TOKENS].sum(), is_pair.sum()]).cpu()
        if is_last_stage():
            numbers = summed_over_replicas(numbers)
        tokens, pairs = numbers.clamp(min=1)
        self._scale = tokens / pairs

    def loss(self, batch: Batch, output: Tensor, asked: Asked) -> Loss:
        """Returns the loss of a pack (see `Objective`)."""
        assert self._scale is not None
        group = parallel_state.get_context_parallel_group()
        if batch.paths is None or not len(batch.extra[RANK]):  # a dummy pack
            total, log = self._nothing(output, asked)
            num_tokens = total.detach().to(torch.int32)
        else:
            scores = weighted_path_log_probs(batch, output, group, None)[0]
            total, log = self._loss_of_pairs(batch.extra, scores, asked)
            is_counted = int(dist.get_rank(group) == 0)
            num_tokens = (batch.extra[ANSWER_TOKENS].sum() * is_counted).to(torch.int32)
        maxima = log.pop("maxima")
        logged = counted_once(log, group)
        scaled = total * self._scale.to(total.device)
        return scaled, num_tokens, {**logged, "maxima": maxima, "tokens": num_tokens.detach()}

    def _nothing(self, output: Tensor, asked: Asked) -> tuple[Tensor, dict[str, Any]]:
        zero = output.double().sum() * 0
        log: dict[str, Any] = {
            "lm loss": (zero.detach(), zero.detach()),
            "sums": zero.new_zeros(len(self.sums)),
            "maxima": zero.new_full((len(self.maxima),), -torch.inf),
        }
        if asked.num_sources > 1:
            log["source losses"] = zero.new_zeros(2, asked.num_sources)
        return zero, log

    def _loss_of_pairs(
        self, extra: Mapping[str, Tensor], scores: Tensor, asked: Asked
    ) -> tuple[Tensor, dict[str, Any]]:
        """Returns the sum of the losses of a pack's pairs. Row i is the pair of path i and its
        record's chosen answer; those of chosen answers are no pairs.

        scores: float64 [n], of each path.
        """
        is_pair = (extra[RANK] > 0).double()
        chosen = scores[chosen_of_rows(extra)]
        each = -logsigmoid(chosen - scores - extra[MARGIN].double())
        if self._centred:
            each = each + self._centred * (chosen + scores) ** 2
        total = (each * extra[WEIGHT].double() * is_pair).sum()
        a, b = chosen.detach(), scores.detach()
        columns = [torch.ones_like(a), (a + b) / 2, (a > b).double(), a - b]
        log: dict[str, Any] = {
            "lm loss": (total.detach(), is_pair.sum()),
            "sums": torch.stack([(column * is_pair).sum() for column in columns]),
            "maxima": torch.stack([b.max(), (-b).max()]),
        }
        if asked.num_sources > 1:
            log["source losses"] = sums_by_source(extra, each.detach() * is_pair, is_pair, asked)
        return total, log

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns metrics under TRL's names, from sums and maxima over all ranks."""
        terms = sums["terms"]
        if not terms:
            return {}
        return {
            "accuracy": sums["accuracy"] / terms,
            "margin": sums["margin"] / terms,
            "mean_reward": sums["rewards"] / terms,
            "min_reward": -sums["negated_min_reward"],
            "max_reward": sums["max_reward"],
            "pairs": terms,
        }
