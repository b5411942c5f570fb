"""Preference losses of trees in a layout, beside those of answers that are computed one by one.

`PreferencePasses` runs the product: the trainer's own passes, objective and reference, on trees of
the trainer's own encoder. `OneByOne` is the reference: each answer alone, and each loss written
again, over all records of the global batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron.packing.device import CPU
from megatron.packing.step.global_batch import GROUPS, schedule_global_batch
from megatron.packing.step.groups import is_data_rank
from megatron.sft.data.chat_encoder import ChatEncoder, EncodedSample
from megatron.sft.data.counts import Counts
from megatron.sft.data.preference.encode import PairEncoder
from megatron.sft.data.preference.partners import with_answer_of
from megatron.sft.data.preference.score_file import ScoreFile
from megatron.sft.data.tokenizer import build_tokenizer
from megatron.sft.model.build import Training
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.data import TemplateChoice
from megatron.sft.options.preference import PreferenceConfig
from megatron.sft.training.passes import Passes, StepObjective
from megatron.sft.training.preference.objective import Preference
from megatron.sft.training.preference.references import Reference
from megatron.sft.training.preference.rewards import RewardPairs
from megatron.sft.training.preference.scoring import scored_packs, write_log_probs
from megatron.sft.training.step_batches import StepBatch
from tests.functional_tests.oracle import (
    SCORES,
    SEQ_LENGTH,
    VOCAB_SIZE,
    Sample,
    draws_of,
    scores_alone,
)

BETA = 0.3


class Case(NamedTuple):
    """A loss with all that it reads, and its definition over a global batch."""

    options: PreferenceConfig
    definition: Callable[[Rows], Tensor]


class Rows(NamedTuple):
    """Numbers of the answers of a global batch, one row per record; chosen answers first."""

    policy: Tensor
    """[n, 2] sums over the answer's tokens; in marked data [n, 1]"""
    reference: Tensor
    counts: Tensor
    """[n, 2] answer tokens"""
    heads: Tensor
    """[n, 2] policy's sums over the first tokens, as many as the shorter answer has."""
    reference_heads: Tensor
    whole: Tensor
    """[n, 2] sums over all tokens, the prompt's too"""
    num_whole: Tensor
    good: Tensor
    last: Tensor
    """[n, 2] of the last token: the score, where a reward model is trained"""
    margins: Tensor
    """[n]"""
    others: Tensor
    """[n] policy less reference of the answer of the record before, in marked data"""
    plain: Tensor
    """Cross entropy of the chats to imitate, a mean over their answers' tokens."""


class Record(NamedTuple):
    """Answers as ids; two, of which the first is chosen, one with a mark, or one to imitate."""

    prompt: list[int]
    answers: list[list[int]]
    is_good: bool = True
    position: int = 0
    before: tuple[int, ...] = ()
    """Answer of the record before; of marked data."""
    margin: float = 0.0
    is_plain: bool = False
    """True for a chat to imitate, of one answer."""

    def paths(self) -> list[Sample]:
        """Each answer as a sequence of its own, with its end token, which the tokenizer writes."""
        return [_path(self.prompt, [*answer, END]) for answer in self.answers]

    def other(self) -> Sample:
        return _path(self.prompt, [*self.before, END])

    def fields(self) -> dict[str, Any]:
        """The tree as the data loader gives it."""
        return FIELDS(self)


def _path(prompt: Sequence[int], answer: Sequence[int]) -> Sample:
    ids = np.array([*prompt, *answer])
    mask = (np.arange(1, ids.size) >= len(prompt)).astype(np.float32)
    return Sample(ids[:-1], ids[1:], mask, np.arange(ids.size - 1))


TOKENIZER = build_tokenizer("NullTokenizer", None, VOCAB_SIZE - 1, TemplateChoice())
END = TOKENIZER.eod


def encoded(
    record: Record, options: PreferenceConfig, scores: ScoreFile | None = None
) -> EncodedSample:
    """The sample that the trainer makes of a record."""
    is_marked = options.loss == "kto"
    encoder = PairEncoder(
        is_marked=is_marked,
        trains_prompt=options.nll_of_prompt,
        has_head=options.ld_alpha is not None,
        scores=scores,
        has_keys=options.write_reference_file is not None,
        scores_last=options.scores_answers,
        takes_plain=options.sft_weight is not None,
    )
    chat = ChatEncoder(TOKENIZER, SEQ_LENGTH, "error", preferences=encoder)

    def made(answers: Sequence[Sequence[int]]) -> EncodedSample:
        prompt, *texts = (" ".join(map(str, ids)) for ids in (record.prompt, *answers))
        fields: dict[str, Any] = {"completion": texts[0]}
        if is_marked:
            fields["label"] = record.is_good
        elif not record.is_plain:
            fields = {"chosen": texts[0], "rejected": texts[1], "margin": record.margin}
        sample = chat.encode({"prompt": prompt, **fields})
        assert isinstance(sample, EncodedSample)
        return sample

    sample = made(record.answers)
    if is_marked and "kto" in options.types:
        sample = with_answer_of(sample, made([record.before]), SEQ_LENGTH)
    return sample


class Fields:
    """Makes the fields of records, by the options of the case at hand."""

    options = PreferenceConfig(loss="dpo")
    scores: ScoreFile | None = None

    def __call__(self, record: Record) -> dict[str, Any]:
        sample = encoded(record, self.options, self.scores)
        assert sample.tree is not None
        num_paths = len(sample.fields["path_weight"])
        return {
            "tokens": sample.tokens,
            "labels": sample.labels,
            "loss_mask": sample.loss_mask,
            "num_paths": sample.tree.num_paths,
            "cu_seqlens": sample.tree.cu_seqlens,
            "parents": sample.tree.parents,
            **sample.fields,
            "path_position": np.full(num_paths, record.position, np.int64),
            "path_source": np.zeros(num_paths, np.int32),
        }


FIELDS = Fields()


class PreferencePasses:
    """Takes the place of the schedule in `train_packed`."""

    def __init__(
        self,
        options: PreferenceConfig,
        config: SFTConfig,
        model: list[Any],
        batches: Sequence[Sequence[Record]] = (),
        objective: StepObjective | None = None,
    ) -> None:
        """batches: of the run, whose answers are scored first where the options have a file.
        objective: in place of that of the options.
        """
        FIELDS.options = options
        from_file = options.reference_file is not None
        copies = options.needs_reference and not from_file
        reference = Reference(model) if copies else None
        training = Training(model, None, None, None, CPU)  # type: ignore[arg-type]
        if objective is None:
            is_reward = options.scores_answers
            objective = RewardPairs(options) if is_reward else Preference(options, reference)
        self._passes = Passes(config, training, objective)
        self._config = get_model_config(model[0])
        self._groups = ProcessGroupCollection.use_mpu_process_groups(GROUPS)
        self._is_first = True
        self._has_reference = options.needs_reference
        # Policy and reference are one before the first step: to the bit, unless they were computed
        # in other packs.
        self._margin = 1e-12 if from_file else 0.0
        if from_file:
            FIELDS.scores = self._written(options, batches)

    def __call__(self, *, data_iterator: Any, num_microbatches: int, **_: object) -> list[Any]:
        step = self._scheduled(data_iterator, num_microbatches)
        losses = self._passes.forward_backward(step, 1, forward_only=False)
        objective = self._passes.objective
        is_compared = self._is_first and self._has_reference and objective.sums
        for log in losses if is_compared else ():
            rewards = [
                value
                for name, value in zip(objective.sums, log["sums"].tolist())
                if name.startswith("rewards/") and (not self._margin or "acc" not in name)
            ]
            assert all(abs(value) <= self._margin for value in rewards), rewards
        self._is_first = False
        return losses

    def _scheduled(self, data_iterator: Any, num_microbatches: int) -> StepBatch:
        batch = schedule_global_batch(data_iterator, self._config, num_microbatches, self._groups)
        return StepBatch(batch, [], Counts.none(1))

    def _written(self, options: PreferenceConfig, batches: Sequence[Sequence[Record]]) -> ScoreFile:
        """Writes the file of log-probabilities in this layout, and reads it."""
        path = options.reference_file
        assert path is not None
        FIELDS.options = replace(options, reference_file=None, write_reference_file=path)
        write_log_probs(path, {}, scored_packs(map(self._of_turned_round, batches), self._passes))
        dist.barrier()
        FIELDS.options = options
        return ScoreFile.read(path)

    def _of_turned_round(self, records: Sequence[Record]) -> StepBatch:
        """Returns a global batch of records in another order than that of training."""
        rank, size = (
            function()
            for function in (
                parallel_state.get_data_parallel_rank,
                parallel_state.get_data_parallel_world_size,
            )
        )
        draws = draws_of(records[::-1], "even", "plain", rank, size)  # type: ignore[arg-type]
        return self._scheduled(iter(draws) if is_data_rank(self._groups) else None, len(draws))


class OneByOne:
    """The objective of `train_one_by_one`; the reference is the model as it begins."""

    def __init__(self, case: Case, batches: Sequence[Sequence[Record]]) -> None:
        self._case, self._batches = case, batches
        self._reference: dict[int, Rows] = {}

    def __call__(
        self, batch: Sequence[Record], losses_of: Callable[[Sample], Tensor]
    ) -> Iterator[Tensor]:
        if not self._reference:
            with torch.no_grad():
                self._reference = {
                    number: self._rows(records, losses_of)
                    for number, records in enumerate(self._batches)
                }
        number = next(n for n, records in enumerate(self._batches) if records is batch)
        rows, before = self._rows(batch, losses_of), self._reference[number]
        rows = rows._replace(
            reference=before.policy,
            reference_heads=before.heads,
            others=(rows.others - before.others).detach(),
        )
        yield self._case.definition(rows)

    def _rows(self, batch: Sequence[Record], losses_of: Callable[[Sample], Tensor]) -> Rows:
        sums: list[list[list[Tensor]]] = []
        counts, others = [], []
        plain = [torch.zeros(2)]
        for record in batch:
            paths = record.paths()
            if record.is_plain:
                losses = losses_of(paths[0])[0] * torch.from_numpy(paths[0].loss_mask)
                plain.append(torch.stack([losses.sum(), torch.tensor(paths[0].loss_mask.sum())]))
                continue
            least = min(len(answer) + 1 for answer in record.answers)
            sums.append([])
            for path in paths:
                logs = -losses_of(path._replace(loss_mask=np.ones_like(path.loss_mask)))[0]
                start = len(record.prompt) - 1
                heads = logs[start : start + least].sum()
                sums[-1].append([logs[start:].sum(), heads, logs.sum(), logs[-1]])
            counts.append([[len(a) + 1, len(record.prompt) + len(a)] for a in record.answers])
            other = record.other()
            logs = -losses_of(other._replace(loss_mask=np.ones_like(other.loss_mask)))[0]
            others.append(logs[len(record.prompt) - 1 :].sum())
        tensor = torch.stack([torch.stack([torch.stack(one) for one in row]) for row in sums])
        numbers = torch.tensor(counts, dtype=tensor.dtype)
        imitated = torch.stack(plain).sum(0)
        compared = [record for record in batch if not record.is_plain]
        return Rows(
            policy=tensor[..., 0],
            reference=tensor[..., 0].detach(),
            counts=numbers[..., 0],
            heads=tensor[..., 1],
            reference_heads=tensor[..., 1].detach(),
            whole=tensor[..., 2],
            num_whole=numbers[..., 1],
            last=tensor[..., 3],
            margins=torch.tensor([record.margin for record in compared]).to(tensor),
            good=torch.tensor([record.is_good for record in compared]),
            others=torch.stack(others),
            plain=imitated[0] / imitated[1].clamp(min=1),
        )


def _dpo(rows: Rows) -> Tensor:
    ratios = rows.policy - rows.reference
    return -logsigmoid(BETA * (ratios[:, 0] - ratios[:, 1])).mean()


def _dpo_with_chats(rows: Rows) -> Tensor:
    return _dpo(rows) + 0.5 * rows.plain


def _ipo_by_length(rows: Rows) -> Tensor:
    half = 0.5
    policy = half * rows.policy + (1 - half) * rows.heads
    reference = half * rows.reference + (1 - half) * rows.reference_heads
    means = (policy - reference) / rows.counts
    return ((means[:, 0] - means[:, 1] - 1 / (2 * BETA)) ** 2).mean()


def _mixture(rows: Rows) -> Tensor:
    a, b = (BETA * (rows.policy - rows.reference)).unbind(1)
    bco = (-logsigmoid(a) - logsigmoid(-b)).mean()
    nll = -rows.policy[:, 0].sum() / rows.counts[:, 0].sum()
    return 0.8 * -logsigmoid(a - b).mean() + 0.2 * bco + 0.5 * nll


def _orpo(rows: Rows) -> Tensor:
    means = rows.policy / rows.counts
    odds = means - torch.log1p(-means.exp())
    nll = -rows.whole[:, 0].sum() / rows.num_whole[:, 0].sum()
    return nll - BETA * logsigmoid(odds[:, 0] - odds[:, 1]).mean()


def _simpo(rows: Rows) -> Tensor:
    means = rows.policy / rows.counts
    return -logsigmoid(BETA * (means[:, 0] - means[:, 1]) - 1.375).mean()


def _kto(rows: Rows) -> Tensor:
    divergence = rows.others.mean().clamp(min=0)
    z = BETA * (rows.policy[:, 0] - rows.reference[:, 0] - divergence)
    return torch.where(rows.good, 1.5 * (1 - z.sigmoid()), 1 - (-z).sigmoid()).mean()


def _reward(rows: Rows) -> Tensor:
    chosen, rejected = rows.last.unbind(1)
    centred = (chosen + rejected).square().mean()
    return -logsigmoid(chosen - rejected - rows.margins).mean() + 0.1 * centred


CASES = {
    "sigmoid": Case(PreferenceConfig(loss="dpo", beta=BETA), _dpo),
    "sigmoid, chats": Case(
        PreferenceConfig(loss="dpo", beta=BETA, sft_weight=0.5), _dpo_with_chats
    ),
    "ipo, ld_alpha": Case(
        PreferenceConfig(loss="dpo", loss_type=("ipo",), ld_alpha=0.5, beta=BETA), _ipo_by_length
    ),
    "ipo, ld_alpha, file": Case(
        PreferenceConfig(
            loss="dpo", loss_type=("ipo",), ld_alpha=0.5, beta=BETA, reference_file="reference.npz"
        ),
        _ipo_by_length,
    ),
    "sigmoid, bco_pair, sft": Case(
        PreferenceConfig(
            loss="dpo",
            loss_type=("sigmoid", "bco_pair", "sft"),
            loss_weights=(0.8, 0.2, 0.5),
            beta=BETA,
        ),
        _mixture,
    ),
    "orpo": Case(PreferenceConfig(loss="orpo", beta=BETA), _orpo),
    "simpo": Case(PreferenceConfig(loss="simpo", beta=BETA), _simpo),
    "kto": Case(PreferenceConfig(loss="kto", beta=BETA, desirable_weight=1.5), _kto),
    "reward": Case(PreferenceConfig(loss="reward", center_rewards_coefficient=0.1), _reward),
}


def _to_imitate(record: Record) -> Record:
    return record._replace(answers=record.answers[:1], is_plain=True)


def batches_of(case: Case, num_steps: int = 2, count: int = 7) -> list[list[Record]]:
    """Global batches of an odd number of records, some of whose answers begin alike, or continue
    one another.
    """
    random = np.random.default_rng(3)

    def some(low: int, high: int) -> list[int]:
        return random.integers(0, VOCAB_SIZE - 1, random.integers(low, high)).tolist()

    is_marked = case.options.loss == "kto"
    made = []
    for _ in range(num_steps):
        records = []
        for number in range(count):
            shared = some(0, 4)
            answers = [[*shared, *some(1, 9)], [*shared, *some(0 if number % 3 else 1, 9)]]
            records.append(
                Record(
                    some(2, 10),
                    answers[:1] if is_marked else answers,
                    is_good=number % 3 != 1,
                    position=number,
                    margin=0.25 * (number % 4),
                )
            )
        if case.options.sft_weight is not None:
            records[1:5:3] = [_to_imitate(record) for record in records[1:5:3]]
        made.append(
            [
                record._replace(before=tuple(records[number - 1].answers[0]))
                for number, record in enumerate(records)
            ]
        )
    return made


def with_file(case: Case, folder: str) -> PreferenceConfig:
    """Returns the options of a case, with its file of log-probabilities, if any, in a folder."""
    name = case.options.reference_file
    return (
        case.options if name is None else replace(case.options, reference_file=f"{folder}/{name}")
    )


def scores_of(case: Case) -> str:
    """The options by which the oracle builds a reward model; "" for models of words."""
    return SCORES if case.options.scores_answers else ""


def losses_of(case: Case) -> Callable[[Any, Sample], Tensor] | None:
    """What the oracle takes for a sequence's losses: negative scores of a reward model."""
    return scores_alone if case.options.scores_answers else None
