"""tensor. transformers' Trainer, and those made of it (TRL's SFTTrainer), as a subject: its own
collator, its own loss and its own step.

    from megatron.packing.doctor.hook import examine_here
    from megatron.packing.doctor.subjects.trainer_subject import subject_from_trainer

    examine_here(lambda: subject_from_trainer(trainer))
    trainer.train()
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.packing.doctor.subject import (
    LENGTHS,
    Ranks,
    Sample,
    Step,
    Subject,
    draw_pack,
    draw_weights,
)
from megatron.packing.doctor.subjects.collators import IGNORED
from megatron.packing.doctor.subjects.trainer_rows import rows_of_trainer
from megatron.packing.doctor.unusable import Unusable

MAX_RANKS = 5
"""Sequences of the examined step, of which each rank has to have one."""


def subject_from_trainer(trainer: Any, name: str = "this trainer") -> Subject:
    """Draws random weights, and returns a Trainer as a subject. Collective over all its processes.

    Random weights stay in the model, which is prepared as `train` does it: in mixed precision, and
    in DistributedDataParallel where there are several processes. Samples go into the trainer's
    collator as its data set gives them (`trainer_rows`), so that what makes the data set is not
    examined.

    Raises:
        Unusable: for a trainer whose collator makes no rows of the doctor's sequences, or whose
            ranks hold parts of the model.
    """
    if any(getattr(trainer, name, False) for name in _HOLD_PARTS):
        raise Unusable(
            f"{name}: ranks hold parts of the model (FSDP, DeepSpeed, tensor parallelism); run the "
            "script without them, on a small model"
        )
    num_ranks = trainer.args.world_size
    if num_ranks > MAX_RANKS:
        raise Unusable(
            f"{name}: {num_ranks} processes, but the doctor's step has {MAX_RANKS} sequences; run "
            f"the script with at most {MAX_RANKS}"
        )
    draw_weights(trainer.model)
    trainer.model.train()
    passes = _Passes(trainer, name)
    notes = passes.check()
    config = trainer.model.config.get_text_config()
    is_plain = _is_cross_entropy(trainer)
    if not is_plain:
        notes.append("loss and step: this trainer's loss is no plain cross entropy")
    if trainer.args.n_gpu > 1:
        notes.append("DataParallel: one GPU was examined; start the script by torchrun")
    return Subject(
        name=name,
        model=trainer.model,
        vocab_size=config.vocab_size,
        logits=passes.logits,
        places=lambda sequences: passes.batch(sequences, 0).rows,
        num_slots=lambda sequences: passes.batch(sequences, 0).inputs["input_ids"].numel(),
        loss=passes.loss if is_plain else None,
        masks_prompts=passes.masks_prompts,
        embedding=trainer.model.get_input_embeddings(),
        head=trainer.model.get_output_embeddings(),
        step=passes.step if is_plain else None,
        balances=bool(getattr(trainer, "aux_loss_enabled", False))
        or bool(getattr(config, "output_router_logits", False)),
        ranks=None
        if num_ranks == 1
        else Ranks(gather=_gather, is_first=trainer.args.process_index == 0),
        num_copies={"data-parallel ranks": num_ranks},
        notes=tuple(notes),
    )


_HOLD_PARTS = (
    "is_fsdp_enabled",
    "is_fsdp_xla_enabled",
    "is_deepspeed_enabled",
    "is_distributed_loading_by_transformers",
)
"""Attributes of trainers whose ranks have no whole model."""


def _gather(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _is_cross_entropy(trainer: Any) -> bool:
    return (
        getattr(trainer.args, "loss_type", None) in (None, "nll", "chunked_nll")
        and not trainer.args.label_smoothing_factor
        and getattr(trainer, "compute_loss_func", None) is None
    )


@dataclass(frozen=True, kw_only=True)
class _Batch:
    inputs: dict[str, Any]
    """As the collator makes them, on the trainer's device."""
    rows: list[Tensor]
    """Rows of each sequence in the flattened tokens, int64 [length]."""


class _Called(Exception):
    """Ends a loss at its call of the model."""


class _Passes:
    """Passes of a Trainer on the doctor's sequences."""

    def __init__(self, trainer: Any, name: str) -> None:
        self._trainer, self._name = trainer, name
        self._model: nn.Module = trainer.model
        self._trained: Any = trainer.model_wrapped  # in DistributedDataParallel
        if self._trained is self._model:  # before `train`
            self._trained = trainer.accelerator.prepare_model(self._model)
        self._trainer_rows = rows_of_trainer(trainer)

    @property
    def masks_prompts(self) -> bool:
        """Whether the data set says which tokens are trained."""
        return self._trainer_rows.masks_prompts

    def check(self) -> list[str]:
        """Returns notes on how sequences are put together.

        Raises:
            Unusable: if sequences cannot be found in what the collator makes.
        """
        notes = []
        if not self._trainer_rows.columns:
            notes.append(
                "data set: its rows could not be read; the collator was given input_ids and labels"
            )
        batch = self.batch(draw_pack(self._vocab_size(), LENGTHS), 0)
        if len(batch.inputs["input_ids"]) == len(LENGTHS):
            notes.append(
                "packing: rows of this data set hold one sequence each, and the collator leaves "
                "each in a row of its own"
            )
        return notes

    def _vocab_size(self) -> int:
        return int(self._trainer.model.config.get_text_config().vocab_size)

    def batch(
        self, sequences: Sequence[Tensor], fill: int, labels: Sequence[Tensor] | None = None
    ) -> _Batch:
        """Returns one batch of the sequences by the trainer's own collator.

        Args:
            sequences: token ids.
            fill: token to put into padding slots.
            labels: of the tokens, not shifted; None takes the tokens.
        """
        targets = sequences if labels is None else labels
        inputs = dict(self._trainer_rows.batch(sequences, targets))
        rows = self._rows(inputs["input_ids"], sequences)
        tokens = inputs["input_ids"].clone().flatten()
        padding = torch.ones(tokens.numel(), dtype=torch.bool)
        padding[torch.cat(rows)] = False
        tokens[padding] = fill
        inputs["input_ids"] = tokens.reshape(inputs["input_ids"].shape)
        return _Batch(inputs=self._trainer._prepare_inputs(inputs), rows=rows)

    def _rows(self, tokens: Tensor, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Finds each sequence in the flattened tokens of a batch."""
        stream, rows, start = tokens.flatten().tolist(), [], 0
        for sequence in sequences:
            wanted = sequence.tolist()
            places = range(start, len(stream) - len(wanted) + 1)
            at = next((i for i in places if stream[i : i + len(wanted)] == wanted), None)
            if at is None:
                raise Unusable(
                    f"{self._name}: its collator gives input_ids {list(tokens.shape)} in which the "
                    "doctor's sequences are not found; write logits yourself, see "
                    "megatron.packing.doctor.subject"
                )
            rows.append(torch.arange(at, at + len(wanted)))
            start = at + len(wanted)
        return rows

    def _arguments(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments with which the trainer's loss calls the model, for logits."""
        arguments: dict[str, Any] = {}

        def stop(_: Any, args: Any, kwargs: Any) -> None:
            arguments.update(kwargs)
            raise _Called

        handle = self._model.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
        try:
            self._trainer.compute_loss(self._model, dict(inputs))
        except _Called:
            pass
        finally:
            handle.remove()
        # Without labels a fused head puts out logits.
        for name in ("labels", "shift_labels", "num_items_in_batch", "fused_lm_head"):
            arguments.pop(name, None)
        return arguments

    def logits(self, sequences: Sequence[Tensor], fill: int) -> list[Tensor]:
        batch = self.batch(sequences, fill)
        with self._trainer.compute_loss_context_manager():
            output = self._model(**self._arguments(batch.inputs))
        rows = output.logits.flatten(0, 1)
        return [rows[places] for places in batch.rows]

    def _labelled(self, packs: Sequence[Sequence[Sample]]) -> list[dict[str, Any]]:
        return [
            self.batch(
                [sample.tokens for sample in pack],
                0,
                [torch.where(sample.mask(), sample.tokens, IGNORED) for sample in pack],
            ).inputs
            for pack in packs
        ]

    def _counted(self, packs: Sequence[Sequence[Sample]]) -> tuple[list[dict[str, Any]], Any]:
        """Returns batches, and the number of tokens as the trainer counts them."""
        inputs = self._labelled(packs)
        trainer = self._trainer
        trainer.current_gradient_accumulation_steps = len(inputs)
        return trainer.get_batch_samples(iter(inputs), len(inputs), trainer.args.device)

    def loss(self, packs: Sequence[Sequence[Sample]]) -> Tensor:
        inputs, count = self._counted(packs)
        total = torch.zeros((), device=self._trainer.args.device)
        for one in inputs:
            with self._trainer.compute_loss_context_manager():
                part = self._trainer.compute_loss(self._model, dict(one), num_items_in_batch=count)
            # As `training_step` does for models that ignore the number of tokens.
            total = total + (part if self._is_scaled(count) else part / len(inputs))
        return total

    def _is_scaled(self, count: Any) -> bool:
        trainer = self._trainer
        if getattr(trainer, "loss_is_scaled_for_ga", None) is not None:
            return bool(trainer.loss_is_scaled_for_ga)
        takes_count = bool(trainer.model_accepts_loss_kwargs) and count is not None
        return takes_count or getattr(trainer, "compute_loss_func", None) is not None

    def step(self, packs: Sequence[Sequence[Sample]]) -> Step:
        """Runs the trainer's own training steps, without its optimizer.

        Each of several processes trains its own sequences, or all of them the only one.
        """
        trainer = self._trainer
        rank, num_ranks = trainer.args.process_index, trainer.args.world_size
        dealt = _deal(packs, num_ranks)
        inputs, count = self._counted(dealt[rank])
        trainer.model.zero_grad(set_to_none=True)
        losses = []
        for number, one in enumerate(inputs):
            with self._synced(is_last=number == len(inputs) - 1):
                losses.append(
                    trainer.training_step(self._trained, dict(one), num_items_in_batch=count)
                )
        change = {
            name: parameter.grad.detach().clone()
            for name, parameter in trainer.model.named_parameters()
            if parameter.grad is not None
        }
        trainer.model.zero_grad(set_to_none=True)
        total = torch.stack([loss.detach().float() for loss in losses]).sum()
        owners = {
            id(sample): owner
            for owner, of_rank in enumerate(dealt)
            for pack in of_rank
            for sample in pack
        }
        return Step(
            change=change,
            loss=float(trainer.accelerator.gather(total[None]).mean()),
            copies={} if num_ranks == 1 else {name: name for name in change},
            replicas=tuple(tuple(owners[id(sample)] for sample in pack) for pack in packs),
        )

    def _synced(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Lets ranks sum gradients in the last of accumulated batches alone, as `train` does."""
        if is_last or not hasattr(self._trained, "no_sync"):
            return nullcontext()
        return self._trained.no_sync()


def _deal(packs: Sequence[Sequence[Sample]], num_ranks: int) -> list[list[list[Sample]]]:
    """Returns the batches of each rank.

    A single sample is that of all ranks, which then have the same gradients as one: batches without
    a trained token would have no mean. [[a, b, c], [d, e]] on 2 ranks -> [[[a, b, c]], [[d, e]]].
    """
    samples = [sample for pack in packs for sample in pack]
    if num_ranks == 1:
        return [[list(pack) for pack in packs]]
    if len(samples) == 1:
        return [[samples] for _ in range(num_ranks)]
    if len(packs) == num_ranks:
        return [[list(pack)] for pack in packs]
    return [[samples[rank::num_ranks]] for rank in range(num_ranks)]
