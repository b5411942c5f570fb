"""tensor. Labels behind losses that put out no logits, such as a fused linear cross entropy.

A token is a target if the loss changes with it though the model is fed what it was: embeddings of a
first run are fed again, whatever the tokens are. Which token is trained to predict it shows in the
gradient at the embeddings: it changes there, and not behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.packing.doctor.evidence import Evidence, TokenLoss
from megatron.packing.doctor.experiments import Examination, difference
from megatron.packing.doctor.probe import as_rows, hooked
from megatron.packing.doctor.subject import Sample, draw_other
from megatron.packing.doctor.unusable import checked_loss

_NOISE_MARGIN = 8


class _Passed(NamedTuple):
    """One forward and backward pass of the loss."""

    loss: Tensor
    """Float64 [1]."""
    gradients: list[Tensor]
    """At the embeddings, for each of their calls."""


def watch_labels(
    examination: Examination, evidence: Evidence, pack: Sequence[Sample]
) -> tuple[TokenLoss, ...]:
    """Returns which tokens of a pack are targets, without their weights; () with a note where that
    cannot be watched.

    Costs one forward pass for each trained token, and a backward pass for those without effect.
    """
    if examination.subject.ranks is not None or examination.subject.embeds() is None:
        evidence.notes.append(
            "loss: no module puts out logits, so labels of single tokens are not seen"
        )
        return ()
    watch = _Watch(examination, pack)
    if not watch.feeds_all():
        evidence.notes.append(
            "loss: no module puts out logits, and tokens do not reach the model by its embeddings "
            "alone, so labels of single tokens are not seen"
        )
        return ()
    evidence.notes.append(
        "loss: no module puts out logits; labels were watched, weights of single tokens not"
    )
    return watch.tokens()


class _Watch:
    """Passes of the loss of one pack, with the embeddings of the first."""

    def __init__(self, examination: Examination, pack: Sequence[Sample]) -> None:
        self._examination, self._pack = examination, pack
        self._outputs: list[Tensor] = []
        self._first = self._run(pack)
        self._noise = _NOISE_MARGIN * self._distance(self._run(pack))

    def _run(self, pack: Sequence[Sample]) -> _Passed:
        return self._backward(*self._forward(pack))

    def _forward(self, pack: Sequence[Sample]) -> tuple[Tensor, list[Tensor]]:
        """Runs the loss, fed with the outputs of the first run; returns it, and what it was fed."""
        examination = self._examination
        subject, embedding = examination.subject, examination.subject.embeds()
        assert subject.loss is not None
        assert embedding is not None
        leaves: list[Tensor] = []
        is_first = not self._outputs

        def feed(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if is_first:
                self._outputs.append(output.detach().clone())
            leaves.append(self._outputs[len(leaves)].clone().requires_grad_())
            return leaves[-1] * 1  # some models scale it in place

        torch.manual_seed(0)
        examination.probe.num_forwards += 1
        with hooked(embedding, feed):
            loss = checked_loss(subject, subject.loss([pack]), is_trained=False)
        return loss, leaves

    def _backward(self, loss: Tensor, leaves: Sequence[Tensor]) -> _Passed:
        self._examination.probe.num_backwards += 1
        loss.backward()
        self._examination.subject.model.zero_grad(set_to_none=True)
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad.double() for x in leaves]
        return _Passed(loss.detach().double().reshape(1), gradients)

    def _distance(self, other: _Passed) -> float:
        """Returns by what share of the largest value the loss or a gradient differs from the first
        run's.
        """
        pairs = [(self._first.loss, other.loss), *zip(self._first.gradients, other.gradients)]
        return max(
            difference([before], [after], max(float(before.abs().max()), 1e-30))
            for before, after in pairs
        )

    def feeds_all(self) -> bool:
        """Returns whether logits (or hidden states) stay the same with all tokens changed, and the
        loss comes from embeddings, too.
        """
        if not self._first.gradients:
            return False
        examination = self._examination
        subject, probe = examination.subject, examination.probe
        embedding = subject.embeds()
        assert embedding is not None
        fed: list[Tensor] = []
        calls = 0

        def feed(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > len(fed):
                fed.append(output.detach().clone())
            return fed[calls - 1].clone()

        sequences = [sample.tokens for sample in self._pack]
        others = [draw_other(tokens, subject.vocab_size) for tokens in sequences]
        with ExitStack() as stack:
            stack.enter_context(hooked(embedding, feed))
            before = probe.logits(sequences)
            calls = 0
            after = probe.logits(others)
        return difference(before, after, examination.scale) <= self._noise

    def tokens(self) -> tuple[TokenLoss, ...]:
        """Returns what each token is trained on."""
        pack = self._pack
        # All that should be no targets at once, and each of them only if one is.
        watched_masks = [sample.trained for sample in pack]
        if self._changes([~mask for mask in watched_masks]):
            watched_masks = [torch.ones_like(mask) for mask in watched_masks]
        targets = [
            [
                bool(mask[place]) and self._changes(self._mask_of_token(index, place))
                for place in range(len(mask))
            ]
            for index, mask in enumerate(watched_masks)
        ]
        shift = self._shift(targets)
        stream = [
            (int(token), is_target)
            for sample, of_sequence in zip(pack, targets)
            for token, is_target in zip(sample.tokens, of_sequence)
        ]
        found, row = [], 0
        for index, sample in enumerate(pack):
            for position in range(len(sample.tokens)):
                # The row behind the last is the first one, as in a roll of the whole pack.
                label, is_target = stream[(row + shift) % len(stream)]
                following = position + 1
                is_expected = following < len(sample.tokens) and bool(sample.trained[following])
                found.append(
                    TokenLoss(
                        pack=0,
                        sequence=index,
                        position=position,
                        label=label if is_target else None,
                        weight=None,
                        expected=int(sample.tokens[following]) if is_expected else None,
                    )
                )
                row += 1
        return tuple(found)

    def _mask_of_token(self, index: int, place: int) -> list[Tensor]:
        """Returns masks of all sequences in which one token is marked."""
        masks = [torch.zeros_like(sample.trained) for sample in self._pack]
        masks[index][place] = True
        return masks

    def _changed(self, masks: Sequence[Tensor]) -> list[Sample]:
        """Returns the pack with other tokens in the places of the masks."""
        vocab_size = self._examination.subject.vocab_size
        return [
            replace(
                sample,
                tokens=torch.where(mask, draw_other(sample.tokens, vocab_size), sample.tokens),
            )
            for sample, mask in zip(self._pack, masks)
        ]

    def _changes(self, masks: Sequence[Tensor]) -> bool:
        """Returns whether the loss changes with the marked tokens, while the model is fed the old
        ones.
        """
        loss, leaves = self._forward(self._changed(masks))
        value = loss.detach().double().reshape(1)
        if not self._distance(_Passed(value, [])) <= self._noise:
            return True  # without a backward pass
        return not self._distance(self._backward(loss, leaves)) <= self._noise

    def _shift(self, targets: Sequence[Sequence[bool]]) -> int:
        """Returns how far labels are from their tokens, by the last target: with another label the
        gradient changes at the row that predicts it, and at none behind.

        Parts of the loss that no label reaches, such as balancing losses, stay the same.
        """
        subject, pack = self._examination.subject, self._pack
        index, place = max(
            ((i, p) for i, of in enumerate(targets) for p, is_target in enumerate(of) if is_target),
            default=(0, 0),
        )
        if place < 2 or not subject.is_causal or len(self._first.gradients) != 1:
            return 1
        before = self._first.gradients[0]
        relabelled = self._changed(self._mask_of_token(index, place))
        change = self._run(relabelled).gradients[0] - before
        sequences = [sample.tokens for sample in pack]
        rows = as_rows(change, subject.slots(sequences))
        if rows is None:
            return 1
        changes = rows[subject.rows(sequences)[index].to(rows.device)].abs().amax(1)
        changed = (changes > self._noise * float(before.abs().max())).nonzero().flatten().tolist()
        return place - changed[-1] if changed and 0 <= place - changed[-1] <= 2 else 1
