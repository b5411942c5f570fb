"""mcore. The loss of preference tuning: means over the pairs of the global batch, in any layout.

megatron-core divides the sum of all microbatches' losses by the sum of their counts. The counts are
tokens here, as in supervised fine-tuning, so that balancing losses of experts keep their scale; the
loss of pairs is multiplied by (tokens / pairs) of the global batch, which are counted over all
ranks before its passes.

    before the passes    counts over ranks; the reference's log-probabilities, by a pass without
                         gradients; of KTO the divergence, by a pass of the policy
    of a microbatch      sums of log-probabilities per path -> pairs -> `losses`

Rows of a microbatch's paths stand in the order of the pack. Those of one record have its position
in the data for an id, and their rank among its answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron.packing.batch.paths import PATH_TOKENS
from megatron.packing.model.get_batch import Batch
from megatron.packing.model.path_log_probs import weighted_path_log_probs
from megatron.packing.step.trees import why_paths_stay_apart
from megatron.sft.data.preference.encode import (
    ANSWER_INDEX,
    ANSWER_TOKENS,
    GOOD,
    HEAD_TOKENS,
    PLAIN,
    RANK,
    REFERENCE,
    REFERENCE_HEAD,
    WEIGHT,
)
from megatron.sft.model.forward import Asked, Loss
from megatron.sft.options.preference import PreferenceConfig
from megatron.sft.training.preference.losses import KTO, Marked, Pairs, log_odds_ratio, pair_losses
from megatron.sft.training.preference.references import Reference
from megatron.sft.training.preference.rewards import RewardPairs
from megatron.sft.training.preference.rows import (
    PER_PATH,
    chosen_of_rows,
    counted_once,
    fields_or_none,
    fields_per_path,
    is_last_stage,
    summed_over_replicas,
    sums_by_source,
)

if TYPE_CHECKING:
    from megatron.sft.model.build import Training
    from megatron.sft.options.config import SFTConfig
    from megatron.sft.training.passes import Passes, StepObjective
    from megatron.sft.training.step_batches import StepBatch

ANSWER, HEAD, WHOLE = range(3)
"""Rows of the sums of a path: tokens of the answer; those within the shorter answer's length; all
trained tokens.
"""


class Totals(NamedTuple):
    """Numbers of the global batch, float64 scalars, at least 1 each."""

    tokens: Tensor
    """Trained tokens, once for each path."""
    terms: Tensor
    """Pairs; in marked data answers."""
    nll_tokens: Tensor
    """Tokens of the cross entropy of chosen answers."""
    plain_tokens: Tensor
    """Trained tokens of chats to imitate."""


class PathSums(NamedTuple):
    """Sums of log-probabilities of a pack's n paths, float64 [n]."""

    answer: Tensor
    head: Tensor
    """Of the first tokens of the answer, as many as the shorter answer has; equal to `answer` if
    the loss does not tell them apart.
    """
    whole: Tensor
    """Of all trained tokens."""


def path_sums(batch: Batch, output: Tensor, cp_group: dist.ProcessGroup) -> PathSums:
    """Returns the sums of a pack's paths, the same on all context-parallel ranks."""
    index = batch.extra.get(ANSWER_INDEX)
    if index is None or batch.paths is None:  # every trained token is of the answer
        (answer,) = weighted_path_log_probs(batch, output, cp_group, None)
        return PathSums(answer, answer, answer)
    of_pairs = index.flatten().index_select(0, batch.paths.token)
    is_answer = of_pairs >= 0
    weights = [is_answer, is_answer, torch.ones_like(is_answer)]
    heads = batch.extra.get(HEAD_TOKENS)
    if heads is not None:
        weights[HEAD] = is_answer & (of_pairs < heads.index_select(0, batch.paths.path))
    return PathSums(
        *weighted_path_log_probs(batch, output, cp_group, torch.stack(weights).double())
    )


class Scores:
    """Stands for a loss in a pass without gradients: its log has the sums of each path."""

    def loss(self, batch: Batch, output: Tensor, asked: Asked) -> Loss:
        zero = output.sum() * 0
        log: dict[str, Any] = {"lm loss": (zero, zero.int()), "paths": None}
        if batch.paths is not None:
            group = parallel_state.get_context_parallel_group()
            log["paths"] = torch.stack(path_sums(batch, output, group))
        return zero, zero.int(), log


PAIR_SUMS = (
    *("terms", "rewards/chosen", "rewards/rejected", "rewards/accuracies"),
    *("logps/chosen", "logps/rejected", "nll", "nll_tokens", "log_odds_ratio"),
)
PLAIN_SUMS = ("plain", "plain_tokens")
MARKED_SUMS = ("good", "bad", "rewards/good", "rewards/bad", "logps/good", "logps/bad", "kl")


class Preference:
    """The loss of a run of preference tuning; see the module."""

    def __init__(self, options: PreferenceConfig, reference: Reference | None) -> None:
        """reference: None for a loss without one, or with log-probabilities from a file."""
        self._options, self._numbers = options, options.numbers
        self._reference = reference
        self._is_marked = options.loss == "kto"
        self.sums: Sequence[str] = (*(MARKED_SUMS if self._is_marked else PAIR_SUMS), *PLAIN_SUMS)
        self.maxima: Sequence[str] = ()
        self._totals: Totals | None = None
        self._has_terms = True
        """False for a global batch of chats to imitate alone."""
        self._divergence = torch.zeros((), dtype=torch.float64)

    def prepare(self, batch: StepBatch, passes: Passes) -> None:
        """Counts over all ranks, and computes what the loss compares with. Collective.

        Price: an all-reduce of three numbers; with a reference a forward pass, with KTO's
        divergence another one.
        """
        assert batch.packed is not None  # a rule of the options
        microbatches = batch.packed.microbatches
        self._totals = self._count(microbatches)
        if self._reference is not None:
            with self._reference.weights():
                self._attach(microbatches, passes, batch)
        if "kto" in self._options.types and self._is_marked:
            self._divergence = self._estimate(microbatches, passes, batch)

    def _count(self, microbatches: Sequence[Mapping[str, Any]]) -> Totals:
        """Returns the totals of the global batch, on the last stage; ones elsewhere."""
        numbers = torch.zeros(4, dtype=torch.float64)
        for fields in fields_per_path(microbatches):
            rank, tokens = fields[RANK], fields[PATH_TOKENS.name]
            counted = tokens if self._options.nll_of_prompt else fields[ANSWER_TOKENS]
            is_first = rank.eq(0)
            terms = is_first if self._is_marked else rank.gt(0)
            plain = (tokens * rank.eq(PLAIN)).sum()
            found = [tokens.sum(), terms.sum(), (counted * is_first).sum(), plain]
            numbers += torch.stack(found).double().cpu()
        if is_last_stage():
            numbers = summed_over_replicas(numbers)
        self._has_terms = numbers[1].item() > 0
        return Totals(*numbers.clamp(min=1))

    def _attach(self, microbatches: Sequence[Any], passes: Passes, batch: StepBatch) -> None:
        """Gives the paths of each microbatch the reference's log-probabilities."""
        for microbatch, found in zip(microbatches, _scored(passes, batch), strict=False):
            if found is not None:
                fields = microbatch[PER_PATH]
                fields[REFERENCE], fields[REFERENCE_HEAD] = found[ANSWER], found[HEAD]

    def _estimate(self, microbatches: Sequence[Any], passes: Passes, batch: StepBatch) -> Tensor:
        """Returns KTO's divergence: the mean of policy less reference over answers to the prompts
        of others, at least 0.
        """
        sums = torch.zeros(2, dtype=torch.float64)
        for fields, found in zip(
            fields_or_none(microbatches), _scored(passes, batch), strict=False
        ):
            if found is None or fields is None:
                continue
            gains = (found[ANSWER] - fields[REFERENCE].to(found)).cpu()
            is_other = fields[RANK].gt(0).cpu()
            sums += torch.stack([gains[is_other].sum(), is_other.sum().double()])
        if is_last_stage():
            sums = summed_over_replicas(sums)
        return (sums[0] / sums[1].clamp(min=1)).clamp(min=0)

    def loss(self, batch: Batch, output: Tensor, asked: Asked) -> Loss:
        """Returns the loss of a pack (see `Objective`)."""
        assert self._totals is not None
        assert batch.loss_mask is not None
        counts = batch.loss_mask.ne(0) if batch.num_paths is None else batch.num_paths
        num_tokens = counts.sum().to(torch.int32)
        group = parallel_state.get_context_parallel_group()
        if batch.paths is None or not len(batch.extra[RANK]):  # a dummy pack
            total, log = self._nothing(output, asked)
        else:
            compare = self._loss_of_marked if self._is_marked else self._loss_of_pairs
            sums = path_sums(batch, output, group)
            total, log = compare(batch, sums, asked)
            total, log = self._with_plain(batch.extra, sums, total, log, asked)
        logged = counted_once(log, group)
        totals = Totals(*(number.to(total.device) for number in self._totals))
        scaled = total * (totals.tokens / totals.terms)
        return scaled, num_tokens, {**logged, "tokens": num_tokens.detach()}

    def _with_plain(
        self,
        extra: Mapping[str, Tensor],
        sums: PathSums,
        total: Tensor,
        log: dict[str, Any],
        asked: Asked,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Returns the loss and log of a pack's comparisons, with the cross entropy of its chats to
        imitate added: a mean over their tokens in the global batch.
        """
        assert self._totals is not None
        is_plain = (extra[RANK] == PLAIN).double()
        losses = -sums.answer * is_plain
        counts = extra[ANSWER_TOKENS].double() * is_plain
        numbers = torch.stack([losses.detach().sum(), counts.sum()])
        log["sums"] = torch.cat([log["sums"], numbers])
        if self._options.sft_weight is None:
            return total, log
        per_token = (1 / self._totals.plain_tokens).to(total.device)
        weighted = (losses * extra[WEIGHT].double()).sum() * self._options.sft_weight
        total = total + weighted * per_token * self._totals.terms.to(total.device)
        # Without anything to compare, the terms of the reported loss are one in all packs together.
        terms = log["lm loss"][1] if self._has_terms else numbers[1] * per_token
        log["lm loss"] = (total.detach(), terms)
        if asked.num_sources > 1:
            log["source losses"] += sums_by_source(extra, losses.detach(), counts, asked)
        return total, log

    def _nothing(self, output: Tensor, asked: Asked) -> tuple[Tensor, dict[str, Any]]:
        zero = output.double().sum() * 0
        sums = zero.new_zeros(len(self.sums)).detach()
        log: dict[str, Any] = {"lm loss": (zero.detach(), zero.detach()), "sums": sums}
        if asked.num_sources > 1:
            log["source losses"] = sums.new_zeros(2, asked.num_sources)
        return zero, log

    def _loss_of_pairs(
        self, batch: Batch, sums: PathSums, asked: Asked
    ) -> tuple[Tensor, dict[str, Any]]:
        """Returns the sum of the losses of a pack's pairs, with its share of the cross entropy of
        chosen answers, as if that were of pairs, too.
        """
        assert self._totals is not None
        options, extra = self._options, batch.extra
        rank, weight = extra[RANK], extra[WEIGHT].double()
        is_pair = (rank > 0).double()
        pairs, shown = self._pairs(extra, sums)
        each = pair_losses(options.loss, options.types, options.weights, pairs, self._numbers)
        total = (each * weight * is_pair).sum()
        is_chosen = (rank == 0).double()
        nll_sums = sums.whole if options.nll_of_prompt else sums.answer
        nll = -(nll_sums * is_chosen)
        counted = extra[PATH_TOKENS.name] if options.nll_of_prompt else extra[ANSWER_TOKENS]
        if options.nll_weight:
            share = (self._totals.terms / self._totals.nll_tokens).to(total.device)
            total = total + options.nll_weight * (nll * weight).sum() * share
        beta = self._numbers.beta
        chosen, rejected = (beta * gain.detach() for gain in shown.gains)
        ratios = log_odds_ratio(pairs).detach() if options.loss == "orpo" else chosen * 0
        columns = [
            is_pair * value
            for value in (
                torch.ones_like(is_pair),
                chosen,
                rejected,
                (chosen > rejected).double(),
                shown.chosen.detach(),
                shown.rejected.detach(),
            )
        ]
        columns += [nll.detach(), counted.double() * is_chosen, ratios * is_pair]
        log: dict[str, Any] = {
            "lm loss": (total.detach(), is_pair.sum()),
            "sums": torch.stack([column.sum() for column in columns]),
        }
        if asked.num_sources > 1:
            log["source losses"] = sums_by_source(extra, each.detach() * is_pair, is_pair, asked)
        return total, log

    def _pairs(self, extra: Mapping[str, Tensor], sums: PathSums) -> tuple[Pairs, Pairs]:
        """Returns the numbers of pairs as the loss reads them, and as metrics show them. Row i is
        the pair of path i and its record's chosen answer: those of chosen answers are no pairs.
        """
        partner = chosen_of_rows(extra)
        policy = sums.answer
        alpha = self._options.ld_alpha
        if alpha is not None:
            policy = alpha * sums.answer + (1 - alpha) * sums.head
        reference = torch.zeros_like(policy)
        if self._options.needs_reference:
            reference = extra[REFERENCE].to(policy)
            if alpha is not None:
                reference = alpha * reference + (1 - alpha) * extra[REFERENCE_HEAD].to(policy)
        count = extra[ANSWER_TOKENS].double()
        pairs = Pairs(policy[partner], policy, reference[partner], reference, count[partner], count)
        means = self._options.loss in ("cpo", "simpo") and {"simpo", "ipo"} & {*self._options.types}
        if self._options.loss == "orpo" or means:
            mean, ones = policy / count, torch.ones_like(count)
            shown = Pairs(mean[partner], mean, reference, reference, ones, ones)
            return pairs, shown
        return pairs, pairs

    def _loss_of_marked(
        self, batch: Batch, sums: PathSums, asked: Asked
    ) -> tuple[Tensor, dict[str, Any]]:
        """Returns the sum of the losses of a pack's marked answers."""
        extra = batch.extra
        own = (extra[RANK] == 0).double()
        is_good = extra[GOOD] > 0
        divergence = self._divergence.to(sums.answer.device)
        gains = sums.answer - extra[REFERENCE].to(sums.answer)
        marked = Marked(gains, is_good, divergence)
        each = torch.zeros_like(gains)
        for name, weight in zip(self._options.types, self._options.weights, strict=True):
            each = each + weight * KTO[name](marked, self._numbers)
        total = (each * extra[WEIGHT].double() * own).sum()
        good, bad = own * is_good, own * ~is_good
        rewards, logps = self._numbers.beta * gains.detach(), sums.answer.detach()
        columns = [good, bad, rewards * good, rewards * bad, logps * good, logps * bad]
        columns.append(divergence * own)
        log: dict[str, Any] = {
            "lm loss": (total.detach(), own.sum()),
            "sums": torch.stack([column.sum() for column in columns]),
        }
        if asked.num_sources > 1:
            log["source losses"] = sums_by_source(extra, each.detach() * own, own, asked)
        return total, log

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns metrics under TRL's names, from sums over all ranks, and apart those of chats to
        imitate.
        """
        tokens = sums["plain_tokens"]
        plain = {"sft_loss": sums["plain"] / tokens, "sft_tokens": tokens} if tokens else {}
        if self._is_marked:
            return {**_figures_of_marked(sums), **plain}
        terms = sums["terms"]
        if not terms:
            return plain
        names = [name for name in PAIR_SUMS if "/" in name]
        found = {name: sums[name] / terms for name in names}
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        if self._options.nll_weight and sums["nll_tokens"]:
            found["nll_loss"] = sums["nll"] / sums["nll_tokens"]
        if self._options.loss == "orpo":
            found["log_odds_chosen"] = sums["log_odds_ratio"] / terms
        return {**found, "pairs": terms, **plain}


def _figures_of_marked(sums: Mapping[str, float]) -> dict[str, float]:
    good, bad = sums["good"], sums["bad"]
    found = {"count/chosen": good, "count/rejected": bad}
    for name in ("rewards", "logps"):
        found |= {f"{name}/chosen": sums[f"{name}/good"] / good} if good else {}
        found |= {f"{name}/rejected": sums[f"{name}/bad"] / bad} if bad else {}
    if good and bad:
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    return {**found, "kl": sums["kl"] / (good + bad)} if good + bad else found


def _scored(passes: Passes, batch: StepBatch) -> list[Tensor | None]:
    """Returns the sums of the paths of each microbatch, [3, n], by a pass without gradients; [] but
    on the last stage.
    """
    with passes.without_training():
        return [one["paths"] for one in passes.run(batch, Scores(), forward_only=True)]


def objective_of(config: SFTConfig, training: Training) -> StepObjective:
    """Returns the objective of a run, at its beginning: the reference is a copy of the weights as
    they are now.

    Raises ValueError for a model whose trees are trained apart.
    """
    from megatron.core.utils import get_model_config

    from megatron.sft.training.passes import ImitationObjective

    options = config.preference
    if not options.is_on:
        return ImitationObjective()
    apart = why_paths_stay_apart(get_model_config(training.model[0]))
    if apart:
        raise ValueError(
            f"--loss {options.loss} compares answers within a pack, but here each is a sequence of "
            f"its own: {apart}; train without it"
        )
    if options.scores_answers:
        return RewardPairs(options)
    reference = Reference(training.model) if options.computes_reference else None
    return Preference(options, reference)
