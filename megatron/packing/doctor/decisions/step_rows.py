"""pure. Rows of the decision table about one optimizer step as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron.packing.doctor.decisions.decision_row import Row
from megatron.packing.doctor.evidence import Evidence, SequenceShare, StepEvidence
from megatron.packing.doctor.loss_reading import read_loss

_SHARE_TOLERANCE = 0.01
_SCALE_TOLERANCE = 0.01
_RESIDUAL_TOLERANCE = 1e-3
_LOSS_TOLERANCE = 1e-4
"""Sound runs stay below 3e-7 (residual), 2e-3 (scale) and 1e-7 (loss) in float32. In bfloat16 what
rounding may do is measured (`StepNoise`).
"""
_NORM_TOLERANCE = 0.01


def is_readable(e: Evidence) -> bool:
    """Returns whether nothing is wrong that shows in the step, too: packs are what sequences are.

    Sequences that see one another have other gradients alone, and labels were read one by one.
    """
    if e.step is None or e.crossings or e.sees_padding() or e.differs_alone():
        return False
    if e.backward is not None and not e.backward <= e.exact:
        return False
    if e.loss is None:
        return True
    reading = read_loss(e.loss)
    return (
        reading.is_right
        and reading.mean_per in ("", e.reduction)
        and not reading.factor_name
        and e.loss.others <= e.exact
    )


def _step(condition: Callable[[StepEvidence], bool]) -> Callable[[Evidence], bool]:
    return lambda e: e.step is not None and is_readable(e) and condition(e.step)


def _say(text: Callable[[StepEvidence], str]) -> Callable[[Evidence], str]:
    def say(e: Evidence) -> str:
        assert e.step is not None
        return text(e.step)

    return say


def _equal(s: StepEvidence, values: Sequence[float]) -> bool:
    largest = max(map(abs, values))
    return max(values) - min(values) <= 2 * share_limit(s) * largest


def share_limit(s: StepEvidence) -> float:
    """Returns by how much shares that are equal may differ."""
    return max(_SHARE_TOLERANCE, s.noise.shares)


def _counts(s: StepEvidence) -> str:
    return ", ".join(
        f"{share.share:.3g} of sequence {share.sequence} in pack {share.pack} "
        f"({share.num_trained} trained)"
        for share in s.shares
    )


def _is_uneven(s: StepEvidence) -> bool:
    return not _equal(s, [share.share for share in s.shares])


def _alike(key: Callable[[SequenceShare], object]) -> Callable[[StepEvidence], list[float]]:
    """Returns the shares where each group of sequences counts as one, whatever its tokens."""

    def expected(s: StepEvidence) -> list[float]:
        tokens: dict[object, int] = {}
        for share in s.shares:
            tokens[key(share)] = tokens.get(key(share), 0) + share.num_trained
        if len(tokens) < 2:
            return [1.0] * len(s.shares)
        return [1 / tokens[key(share)] for share in s.shares]

    return expected


_PATTERNS: dict[str, Callable[[StepEvidence], list[float]]] = {
    "sample weights are lost": lambda s: [1 / share.weight for share in s.shares],
    "mean per rank": _alike(lambda share: share.replica),
    "mean per pack": _alike(lambda share: share.pack),
    "mean per sequence": _alike(lambda share: (share.pack, share.sequence)),
}
"""Fault -> shares that it gives the sequences, up to a factor."""


def _has_pattern(name: str) -> Callable[[StepEvidence], bool]:
    """Returns whether shares are those of a fault, and of none of the others but of one before
    which it comes and which gives the same.
    """

    def applies(s: StepEvidence) -> bool:
        if not _is_uneven(s):
            return False
        patterns = {other: pattern(s) for other, pattern in _PATTERNS.items()}
        fitting = {
            other: expected
            for other, expected in patterns.items()
            if _equal(s, [share.share / one for share, one in zip(s.shares, expected)])
        }
        if next(iter(fitting), "") != name:
            return False
        ratios = [[a / b for a, b in zip(fitting[name], other)] for other in fitting.values()]
        return all(max(r) - min(r) < 1e-9 * max(r) for r in ratios)

    return applies


MAX_SCALE_NOISE = 0.25
"""Less than what lies between 1 and any factor by which numbers of ranks make gradients wrong."""


def hidden_faults(s: StepEvidence) -> list[str]:
    """Returns the faults whose traces in the step lie below what rounding may do."""
    hidden = [
        name
        for name, pattern in _PATTERNS.items()
        if len(set(expected := pattern(s))) > 1 and _equal(s, expected)
    ]
    return hidden + ["gradient is scaled"] * (s.noise.scale > MAX_SCALE_NOISE)


def _copies(s: StepEvidence) -> str:
    words = [
        name
        for name, count in s.num_copies.items()
        if count > 1 and abs(s.scale / count - 1) < max(0.05, s.noise.scale)
    ]
    words += [
        name
        for name, count in s.num_copies.items()
        if count > 1 and abs(s.scale * count - 1) < max(0.05, s.noise.scale)
    ]
    return f": the number of {words[0]}" if words else ""


LOSSES = {
    "prompt": "prompts are trained",
    "last": "the last target of each sequence is lost",
    "slots": "the sum is divided by all slots",
    "sequence": "it is the mean of sequences' means",
    "0": "labels are the tokens themselves",
    "2": "labels are shifted twice",
    "?": "no mistake that the doctor knows gives it",
}
_MISTAKES = ("prompt", "last", "slots", "0", "2")
"""Those of labels and their number, which change what sequences count, too."""


def _is_other_loss(s: StepEvidence) -> bool:
    if s.loss is None or s.reduction == "sequence":
        return False
    return abs(s.loss - 1) > max(_LOSS_TOLERANCE, s.noise.loss)


def _mistake(s: StepEvidence) -> str:
    """Returns the one mistake that gives the reported loss and goes with the shares, else "?".

    Sequences count as declared where tokens are miscounted in the report alone, else as many tokens
    as the mistake trains of them. Shares of a step that is no sum of its sequences' say nothing.
    """
    shares = [share.share for share in s.shares]
    fitting = [
        mistake.name
        for mistake in s.mistakes
        if _has_residual(s)
        or _equal(s, shares)
        or _equal(
            s,
            [
                share.share * share.num_trained / max(count, 1)
                for share, count in zip(s.shares, mistake.num_trained)
            ],
        )
    ]
    return fitting[0] if len(fitting) == 1 else "?"


def _has_residual(s: StepEvidence) -> bool:
    return s.residual > max(_RESIDUAL_TOLERANCE, s.noise.residual)


def _is_scaled(s: StepEvidence) -> bool:
    return abs(s.scale - 1) > max(_SCALE_TOLERANCE, s.noise.scale)


_OTHER_LOSS = Row(
    name="loss is another",
    property="step",
    applies=_step(_is_other_loss),
    text=_say(
        lambda s: (
            f"The reported loss is {s.loss or 0:.4g} times that of the samples' own "
            f"labels: {LOSSES[_mistake(s)]}."
        )
    ),
    mend="Check labels, loss mask and what the sum is divided by, in the packed path.",
)

STEP = (
    replace(_OTHER_LOSS, applies=_step(lambda s: _is_other_loss(s) and _mistake(s) in _MISTAKES)),
    Row(
        name="sequence is lost",
        property="step",
        applies=_step(lambda s: any(abs(share.share) < share_limit(s) for share in s.shares)),
        text=_say(lambda s: f"A sequence has no part in the step: {_counts(s)}."),
        mend="Look for what is dropped when packs, fetches or ranks are uneven.",
    ),
    Row(
        name="sample weights are lost",
        property="step",
        applies=_step(_has_pattern("sample weights are lost")),
        text=_say(lambda s: "Samples of unlike weights count alike, token by token."),
        mend="Carry the weights into the packed loss mask.",
    ),
    Row(
        name="mean per rank",
        property="step",
        applies=_step(_has_pattern("mean per rank")),
        text=_say(
            lambda s: f"Each data-parallel rank counts alike, whatever its tokens: {_counts(s)}."
        ),
        mend="Sum losses and token counts over all ranks, then divide (calculate_per_token_loss, "
        "or num_items_in_batch over processes).",
        threads=("huggingface/transformers#35438",),
    ),
    Row(
        name="mean per pack",
        property="step",
        applies=_step(_has_pattern("mean per pack")),
        text=_say(lambda s: f"Each pack counts alike, whatever its tokens: {_counts(s)}."),
        mend="Divide by the trained tokens of the whole step.",
    ),
    Row(
        name="mean per sequence",
        property="step",
        applies=_step(_has_pattern("mean per sequence")),
        text=_say(lambda s: f"Each sequence counts alike, whatever its tokens: {_counts(s)}."),
        mend="If that is meant, say so (Subject.reduction).",
    ),
    Row(
        name="copies of a parameter differ",
        property="step",
        applies=_step(lambda s: bool(s.unequal)),
        text=_say(lambda s: f"Ranks change their copies differently: {', '.join(s.unequal[:4])}."),
        mend="Sum the gradients of what tensor-parallel ranks hold alike (sequence_parallel marks "
        "of norms, copy_to_tensor_model_parallel_region).",
    ),
    Row(
        name="step is not its sequences' sum",
        property="step",
        applies=_step(lambda s: _has_residual(s) and not s.balances),
        text=_say(
            lambda s: (
                f"{s.residual:.1%} of the step are no sum of what its sequences give alone, "
                "though logits are those of sequences alone."
            )
        ),
        mend="Look for gradients that are kept from a step before, reduced twice or not at all, "
        "for padding that is trained, or for losses beside that of tokens (multi-token "
        "prediction) that cross borders.",
    ),
    Row(
        name="sequences weigh differently",
        property="step",
        applies=_step(_is_uneven),
        text=_say(lambda s: f"Tokens of sequences count differently in the step: {_counts(s)}."),
        mend="Look for a sequence that is trained twice, cut, or masked in part, or for a loss "
        "mask that is lost: prompts and padding then count.",
    ),
    Row(
        name="balancing loss",
        property="step",
        applies=_step(lambda s: _has_residual(s) and s.balances),
        text=_say(lambda s: f"{s.residual:.1%} of the step are no sum of its sequences' own."),
        mend="Expected of a balancing loss over tokens of the pack.",
        is_fault=False,
    ),
    _OTHER_LOSS,
    Row(
        name="gradient is scaled",
        property="step",
        applies=_step(lambda s: not s.balances and not _has_residual(s) and _is_scaled(s)),
        text=_say(
            lambda s: f"The step is {s.scale:.3g} times the gradient of the loss{_copies(s)}."
        ),
        mend="Gradients are summed where they are to be averaged, or averaged twice.",
    ),
    Row(
        name="norm counts copies",
        property="norm",
        applies=lambda e: (
            e.step is not None
            and e.step.norm is not None
            and abs(e.step.norm - 1) > _NORM_TOLERANCE
        ),
        text=_say(lambda s: f"The reported norm is {s.norm or 0:.4g} times that of the gradients."),
        mend="Count a parameter once that ranks hold copies of, and each shard of one; mark shards "
        "as tensor_model_parallel. Clipping goes by this norm.",
    ),
)
