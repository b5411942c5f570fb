"""tensor. The experiments on logits: influence, causality, sequences alone, places, padding.

Comparisons of runs with equal shapes are exact: a right model gives zero in every precision. Those
of other shapes are held to what rounding does to this model, which is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from megatron.packing.doctor.evidence import Evidence, Repeat
from megatron.packing.doctor.probe import Probe, hooked, local_rows
from megatron.packing.doctor.subject import draw_other, draw_pack
from megatron.packing.doctor.unusable import Unusable

_NOISE_MARGIN = 8
_MOST_REPEAT_ULPS, _MOST_REPEAT = 1024, 0.005
"""What runs may differ by that are seeded alike, as of atomics on a device. Beyond it something
random is left: crossings change logits by 0.04 and more, and 8 times the difference counts as none.
"""
_RESPONSE_MARGIN = 4
_ULPS = {torch.bfloat16: 4}
_DEFAULT_ULPS = 64
LARGEST_ROUNDING = torch.finfo(torch.float32).eps
"""Relative rounding of a float64 model, too: norms, rotary tables and softmax often are float32."""


def difference(before: Sequence[Tensor], after: Sequence[Tensor], scale: float) -> float:
    """Returns the largest difference, relative to `scale`; infinity where only one is NaN."""
    worst = 0.0
    for one, other in zip(before, after):
        same = (one == other) | (one.isnan() & other.isnan())
        change = (one - other).abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf)
        worst = max(worst, float(change.max()) if change.numel() else 0.0)
    return worst / scale


def _is_finite(values: Tensor) -> bool:
    """Returns whether there is no NaN; words that a model never says may have minus infinity."""
    return not bool(values.isnan().any()) and bool((values.amax(-1).isfinite()).all())


def _largest(values: Tensor) -> float:
    return float(values.masked_fill(~values.isfinite(), 0.0).abs().max())


class Examination:
    """The doctor's pack of one subject, and its logits."""

    def __init__(self, probe: Probe, lengths: Sequence[int]) -> None:
        self.probe = probe
        self.subject = probe.subject
        self.pack = draw_pack(self.subject.vocab_size, lengths)
        self.other = draw_pack(self.subject.vocab_size, lengths, seed=5)
        self.dtype = next(
            (
                parameter.dtype
                for parameter in self.subject.model.parameters()
                if parameter.is_floating_point()
            ),
            torch.float32,
        )
        self.logits: list[Tensor] = []
        self.scale = 1.0
        self.gradients_of_ranks: list[list[float]] = []

    def disturbed(self, index: int) -> list[Tensor]:
        """Returns the pack with other tokens from the middle of one sequence on."""
        pack = list(self.pack)
        middle = len(pack[index]) // 2
        other = draw_other(pack[index][middle:], self.subject.vocab_size)
        pack[index] = torch.cat([pack[index][:middle], other])
        return pack

    def repeat(self, evidence: Evidence) -> None:
        """Runs the pack three times, with another pack before the first."""
        probe = self.probe
        # Kernels are chosen in the first run, states filled.
        coarsest = probe.coarsest(self.other, self.dtype)
        if torch.finfo(coarsest).eps > LARGEST_ROUNDING:  # norms in float32 are no precision
            self.dtype = coarsest
        after_other = probe.logits(self.pack)
        self.logits = probe.logits(self.pack)
        self.scale = max(max(map(_largest, self.logits)), 1e-30)
        again = probe.logits(self.pack)
        reseeded = probe.logits(self.pack, seed=77)
        evidence.repeat = Repeat(
            difference=difference(self.logits, again, self.scale),
            unseeded=difference(self.logits, reseeded, self.scale),
            after_another=difference(after_other, self.logits, self.scale),
        )
        evidence.exact = _NOISE_MARGIN * evidence.repeat.difference
        evidence.dtype = str(self.dtype).removeprefix("torch.")
        evidence.not_finite = tuple(
            index for index, values in enumerate(self.logits) if not _is_finite(values)
        )

    def check_finite_alone(self, evidence: Evidence) -> None:
        """Raises Unusable if the logits of a sequence are not finite alone either."""
        for index in evidence.not_finite:
            if not _is_finite(self.probe.logits([self.pack[index]])[0]):
                raise Unusable(
                    f"{self.subject.name}: logits of sequence {index} are not finite, alone and in "
                    "the pack; examine a model that computes: another precision, or weights of "
                    "megatron.packing.doctor.subject.draw_weights"
                )

    def check_repeats(self, evidence: Evidence) -> None:
        """Raises Unusable where runs that are seeded alike differ by more than rounding."""
        allowed = min(_MOST_REPEAT_ULPS * self.rounding, _MOST_REPEAT)
        if not evidence.repeat.difference <= allowed:
            raise Unusable(
                f"{self.subject.name}: the same pack with the same torch.manual_seed gave logits "
                f"that differ by {evidence.repeat.difference:.1e} of the largest, and {allowed:.1e}"
                " is what rounding may do; switch off what draws from elsewhere (numpy, random, a "
                "generator of its own), keeps a state or changes the weights"
            )

    def set_tolerance(self, evidence: Evidence) -> None:
        """Measures how logits answer to embeddings that differ by one rounding."""
        ulp = self.rounding
        response = 0.0
        if self.subject.embeds() is not None or self.subject.ranks is not None:
            with self.shaken(seed=4):
                response = difference(self.logits, self.probe.logits(self.pack), self.scale)
        evidence.tolerance = max(
            _RESPONSE_MARGIN * response,
            _ULPS.get(self.dtype, _DEFAULT_ULPS) * ulp,
            _NOISE_MARGIN * evidence.repeat.difference,
        )

    @property
    def has_logits(self) -> bool:
        """Returns whether the subject puts out logits, and not hidden states."""
        subject, width = self.subject, self.logits[0].shape[-1]
        is_padded = subject.head is not None and width > subject.vocab_size
        return subject.has_logits and (width == subject.vocab_size or is_padded)

    @property
    def rounding(self) -> float:
        """Returns one relative rounding of the model's activations."""
        return max(float(torch.finfo(self.dtype).eps), LARGEST_ROUNDING)

    @contextmanager
    def shaken(self, seed: int) -> Iterator[None]:
        """Changes embeddings at random by at most one rounding within the block, so that all that
        comes behind them rounds otherwise.
        """
        noise = torch.Generator().manual_seed(seed)

        def shake(_: nn.Module, args: object, kwargs: object, output: object) -> object:
            if not isinstance(output, Tensor):
                return None
            sign = torch.randn(output.shape, generator=noise).to(output).clamp(-1, 1)
            return output * (1 + self.rounding * sign)

        embedding = self.subject.embeds()
        with nullcontext() if embedding is None else hooked(embedding, shake):
            yield

    def influence(self, evidence: Evidence) -> None:
        """Changes each sequence from its middle on, and watches all of them."""
        for index, sequence in enumerate(self.pack):
            changed = self.probe.logits(self.disturbed(index))
            evidence.influence.append(
                [difference([one], [other], self.scale) for one, other in zip(self.logits, changed)]
            )
            middle = len(sequence) // 2
            evidence.early.append(
                difference([self.logits[index][:middle]], [changed[index][:middle]], self.scale)
            )
            self._check_depends(evidence, index, changed[index])

    def _check_depends(self, evidence: Evidence, index: int, changed: Tensor) -> None:
        """Notes tokens of a sequence, from its middle on, whose logits do not depend on them.

        Raises:
            Unusable: if no token's do: the model is fed something else.
        """
        middle = len(changed) // 2
        same = (self.logits[index] == changed).all(1)[middle:]
        if bool(same.all()):
            raise Unusable(
                f"{self.subject.name}: logits of sequence {index} stay the same to the bit when "
                "its tokens change; let logits(sequences, fill) feed the model the tokens that it "
                "is given"
            )
        if bool(same.any()):
            at = (middle + same.nonzero().flatten()).tolist()
            evidence.notes.append(
                f"tokens {at} of sequence {index}: their logits do not depend on them, as if they "
                "were cut off; what they see is not known"
            )

    def alone(self, evidence: Evidence) -> None:
        """Runs each sequence alone."""
        for sequence, packed in zip(self.pack, self.logits):
            single = self.probe.logits([sequence])[0]
            change = (packed - single).abs().masked_fill(packed == single, 0.0)
            rows = change.nan_to_num(nan=torch.inf).amax(1) / self.scale
            evidence.alone.append(float(rows.max()))
            late = (rows > evidence.tolerance).nonzero()
            evidence.alone_from.append(int(late[0]) if len(late) else None)

    def moved(self, evidence: Evidence) -> None:
        """Halves the first sequence, then reverses the order of the pack."""
        half = len(self.pack[0]) // 2
        changed = self.probe.logits([self.pack[0][:half], *self.pack[1:]])
        kept = [self.logits[0][:half], *self.logits[1:]]
        evidence.offset = (
            [0.0]
            + [  # the first begins where it did
                difference([one], [other], self.scale)
                for one, other in list(zip(kept, changed))[1:]
            ]
        )
        changed = self.probe.logits(self.pack[::-1])[::-1]
        evidence.order = [
            difference([one], [other], self.scale) for one, other in zip(self.logits, changed)
        ]

    def padding(self, evidence: Evidence) -> None:
        """Puts another token into the padding slots, if there are any."""
        if self.subject.slots(self.pack) > sum(map(len, self.pack)):
            changed = self.probe.logits(self.pack, fill=self.subject.vocab_size - 1)
            evidence.padding = difference(self.logits, changed, self.scale)

    def backward(self, evidence: Evidence) -> None:
        """Sends a gradient back from the middle sequence's logits to all embeddings."""
        middle = len(self.pack) // 2
        of_ranks = self._embedding_gradients(evidence, middle)
        if of_ranks is None:
            return
        largest = [max(values) for values in zip(*of_ranks)]
        own = largest[middle]
        if own > 0:
            evidence.backward = max(largest[:middle] + largest[middle + 1 :]) / own
        if self.subject.ranks is not None and self.subject.backward is not None:
            evidence.lost = tuple(self._lost(evidence, middle))

    def _lost(self, evidence: Evidence, index: int) -> list[int]:
        """Returns the tokens of a sequence, of all on a rank, that its last one sees, though no
        gradient of that one comes back to that rank.
        """
        of_ranks = self._embedding_gradients(evidence, index, only_last=True)
        places = self.subject.rows(self.pack)[index]
        here = torch.isin(places, self.subject.orders(self.pack)[0]).nonzero().flatten().tolist()
        parts = zip(self.probe.gather(here), self.gradients_of_ranks)
        found: set[int] = set()
        for tokens, largest in parts if of_ranks is not None else ():
            if largest and tokens and largest[index] == 0.0 and tokens[-1] != len(places) - 1:
                found |= {*tokens}
        if not found:
            return []
        at = torch.tensor(sorted(found))
        pack = list(self.pack)
        pack[index] = pack[index].clone()
        pack[index][at] = draw_other(pack[index][at], self.subject.vocab_size)
        changed = self.probe.logits(pack)[index][-1:]
        sees = difference([self.logits[index][-1:]], [changed], self.scale) > evidence.tolerance
        return sorted(found) if sees else []

    def _embedding_gradients(
        self, evidence: Evidence, index: int, *, only_last: bool = False
    ) -> list[list[float]] | None:
        """Returns the largest gradient of one sequence's logits at the embeddings of each, for each
        rank that has some; those of all ranks are in `gradients_of_ranks`.
        """
        outputs: list[Tensor] = []
        embedding = self.subject.embeds()
        if embedding is None and self.subject.ranks is None:
            evidence.notes.append("backward pass: no embedding is known; give Subject.embedding")
            return None

        def keep(_: nn.Module, args: object, kwargs: object, output: object) -> object:
            if not isinstance(output, Tensor) or not output.requires_grad:
                return None
            output.retain_grad()
            outputs.append(output)
            return output * 1  # some models scale it in place

        with ExitStack() as hooks:
            if embedding is not None:
                hooks.enter_context(hooked(embedding, keep))
            self.probe.num_backwards += 1
            if self.subject.backward is not None:
                self.probe.num_forwards += 1
                self.subject.backward(self.pack, index, only_last)
            else:
                logits = self.probe.run(self.pack)[index]
                weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(6))
                if not logits.requires_grad:
                    evidence.notes.append("backward pass: the logits have no gradient")
                    return None
                (logits * weights.to(logits)).sum().backward()
        self.subject.model.zero_grad(set_to_none=True)
        gradient = outputs[0].grad if outputs else None
        parts = None if gradient is None else self.by_sequence(gradient)
        largest = [
            float(rows.abs().nan_to_num(nan=torch.inf).max()) if len(rows) else 0.0
            for rows in parts or ()
        ]
        self.gradients_of_ranks = self.probe.gather(largest)
        gathered = [values for values in self.gradients_of_ranks if values]
        if not gathered:
            evidence.notes.append("backward pass: no gradient reaches the embeddings")
            return None
        return gathered

    def by_sequence(self, tensor: Tensor) -> list[Tensor] | None:
        """Returns the rows of each sequence in a tensor over the stream of tokens, those that this
        rank has, float32.
        """
        found = local_rows(tensor.detach(), self.subject.orders(self.pack))
        if found is None or found.places is None:
            return None
        return [
            found.values[torch.isin(found.places, places).to(found.values.device)].float()
            for places in self.subject.rows(self.pack)
        ]
