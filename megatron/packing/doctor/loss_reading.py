"""pure. What labels and weights of a step's tokens say together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron.packing.doctor.evidence import LossEvidence, TokenLoss


@dataclass(frozen=True, kw_only=True)
class LossReading:
    """Labels and weights of one step, summed up."""

    is_cross_entropy: bool
    is_right: bool
    """Whether every token has its own label, as far as labels can be read."""
    shift: int | None
    """Distance of labels from tokens where it is not 1, as almost all tokens have it."""
    num_across: int
    """Last tokens whose label is the first token of the next sequence."""
    num_padding: int
    num_prompt: int
    """Tokens trained on a token of a prompt, their own following one."""
    num_lost: int
    lost_places: str
    num_other: int
    """Tokens with a label that is none of the above."""
    mean_per: str
    """"token", "pack", "sequence" or "unknown"; "" where labels are wrong or weights unread."""
    weights_text: str
    factor: float
    """Weight of a token beside that of a mean over all trained tokens."""
    factor_name: str
    """"" if it is 1, "slots" if it is the share of trained tokens in all slots, else "factor"."""


@lru_cache(maxsize=8)
def read_loss(loss: LossEvidence) -> LossReading:
    """Sums up a step's tokens; labels first, as other labels look like another scale."""
    tokens = loss.tokens
    shift = _shift(tokens)
    counts = _count_wrong(tokens) if shift is None else Counter()
    if not loss.is_cross_entropy:  # labels cannot be told from such gradients
        shift, counts = None, Counter()
    lost = [t for t in tokens if t.label is None and t.expected is not None]
    padding = loss.padding_trained if loss.is_cross_entropy and shift is None else 0
    is_right = shift is None and not counts and not padding
    mean_per, factor, factor_name, text = "", 1.0, "", ""
    if is_right and loss.is_cross_entropy:
        mean_per, factor, factor_name, text = _scale(loss)
    return LossReading(
        is_cross_entropy=loss.is_cross_entropy,
        is_right=is_right,
        shift=shift,
        num_across=counts["across"],
        num_padding=padding,
        num_prompt=counts["prompt"],
        num_lost=counts["lost"],
        lost_places=", ".join(
            f"token {t.position + 1} of sequence {t.sequence} in pack {t.pack}" for t in lost[:3]
        ),
        num_other=counts["other"],
        mean_per=mean_per,
        weights_text=text,
        factor=factor,
        factor_name=factor_name,
    )


def _count_wrong(tokens: Sequence[TokenLoss]) -> Counter[str]:
    """Counts tokens with another label than their own, by what they have instead."""
    places = {(t.pack, t.sequence, t.position) for t in tokens}
    counts: Counter[str] = Counter()
    for t in tokens:
        is_last = (t.pack, t.sequence, t.position + 1) not in places
        if t.label == t.expected:
            continue
        if t.label is None:
            counts["lost"] += 1
        elif is_last and (t.pack, t.sequence + 1, 0) in places:
            counts["across"] += 1
        elif t.expected is None and not is_last:
            counts["prompt"] += 1
        else:
            counts["other"] += 1
    return counts


def _shift(tokens: Sequence[TokenLoss]) -> int | None:
    """Returns 0 or 2 where most labels are that far from their tokens, else None.

    Which token a place has is known from what its neighbour should be trained on.
    """
    token_at = {
        (t.pack, t.sequence, t.position + 1): t.expected for t in tokens if t.expected is not None
    }
    trained = [t for t in tokens if t.label is not None]
    for shift in (0, 2):
        known = [
            t.label == token_at[key]
            for t in trained
            if (key := (t.pack, t.sequence, t.position + shift)) in token_at
        ]
        if known and sum(known) > 0.8 * len(known) and len(known) > 4:
            return shift
    return None


def _scale(loss: LossEvidence) -> tuple[str, float, str, str]:
    """Returns what the mean is over, the factor of it, the factor's name, and the weights."""
    trained = [t for t in loss.tokens if t.label is not None]
    known = [t for t in trained if t.weight is not None]
    if not known:
        return "", 1.0, "", ""
    tolerance = loss.tolerance
    weights = [float(t.weight or 0.0) for t in known]
    packs = sorted({t.pack for t in known})
    pack_size = {pack: sum(t.pack == pack for t in trained) for pack in packs}
    pairs = {(t.pack, t.sequence) for t in known}
    size = {pair: sum((t.pack, t.sequence) == pair for t in trained) for pair in pairs}
    factor = weights[0] * len(trained)
    text = ", ".join(
        f"{next(t.weight for t in known if (t.pack, t.sequence) == pair):.3g} in sequence "
        f"{pair[1]} of pack {pair[0]} ({size[pair]} trained)"
        for pair in sorted(pairs)
    )
    if _equal(weights, tolerance):
        if abs(factor - 1) <= 2 * tolerance:
            return "token", factor, "", text
        share = len(trained) / sum(loss.num_slots)
        name = "slots" if abs(factor - share) <= 2 * tolerance * share else "factor"
        return "token", factor, name, text
    by_pack = [w * pack_size[t.pack] for w, t in zip(weights, known)]
    if _equal(by_pack, tolerance):
        return "pack", factor, "", text
    by_sequence = [w * size[t.pack, t.sequence] for w, t in zip(weights, known)]
    if _equal(by_sequence, tolerance):
        return "sequence", factor, "", text
    return "unknown", factor, "", text


def _equal(values: Sequence[float], tolerance: float) -> bool:
    largest = max(map(abs, values))
    return max(values) - min(values) <= 2 * tolerance * largest
