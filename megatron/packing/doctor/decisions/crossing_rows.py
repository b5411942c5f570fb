"""pure. Rows of the decision table about sequences that see one another."""

from __future__ import annotations

from collections.abc import Callable

from megatron.packing.doctor.decisions.decision_row import Row
from megatron.packing.doctor.evidence import Evidence, Mixing
from megatron.packing.doctor.module_kinds import kind_of

MAX_KERNEL = 7
"""Tokens before a border that a short convolution reaches over it, at most."""


def _mixing(condition: Callable[[Evidence, Mixing], bool]) -> Callable[[Evidence], bool]:
    """Makes a condition of one on what the module mixes, which may be unknown."""
    return lambda e: bool(e.crossings) and e.mixing is not None and condition(e, e.mixing)


def _kind(m: Mixing) -> str:
    return kind_of(m.module, m.module_class)


def _is_both_ways(e: Evidence) -> bool:
    return any(one < other for one, other in e.crossings) and any(
        one > other for one, other in e.crossings
    )


def _is_tail(m: Mixing) -> bool:
    """Returns whether the sources are the last tokens of A, at most MAX_KERNEL."""
    first = m.length_disturbed - len(m.sources)
    return 0 < len(m.sources) <= MAX_KERNEL and m.sources == tuple(range(first, m.length_disturbed))


def _is_local(m: Mixing) -> bool:
    """A window or kernel slides over the border: as far as within a sequence."""
    width = len(m.sources) + 1
    return m.disturbed + 1 == m.changed and m.reach == width == len(m.targets) + 1


def birthplace(e: Evidence) -> str:
    """Returns the module in which a crossing is born, for a sentence."""
    m = e.mixing
    return f"{m.module} ({m.module_class})" if m else "an unknown module"


def _borders(e: Evidence) -> str:
    return ", ".join(f"{one} into {other}" for one, other in e.crossings)


def _layers(e: Evidence) -> str:
    count, total = len(e.crossing_layers), len(e.examined_layers)
    if not total:
        return "Layers could not be examined one by one."
    if not count:
        return "No layer crosses when it is examined by itself."
    if count == total:
        return f"All {total} layers cross."
    return f"{count} of {total} layers cross: {', '.join(e.crossing_layers)}."


def _crossing(sentence: str) -> Callable[[Evidence], str]:
    def text(e: Evidence) -> str:
        m = e.mixing
        seen = ""
        if m and m.sources:  # without sources its rows look alike
            seen = (
                f" {len(m.targets)} of {m.length_changed} tokens of sequence {m.changed} see "
                f"{len(m.sources)} of {m.length_disturbed} of sequence {m.disturbed}."
            )
        kernel = len(m.sources) + 1 if m else 0
        return (
            f"{sentence.format(width=kernel, late=len(m.targets) if m else 0, early=kernel - 1)} "
            f"Born in {birthplace(e)}.{seen} {_layers(e)} Sequences: {_borders(e)}."
        )

    return text


_BORDERS = (
    "Pass the borders on: cu_seqlens to flash or varlen attention, or a block-diagonal causal mask."
)
_KERNELS = (
    "Use kernels that take borders (fla, mamba_ssm, causal_conv1d with seq_idx or cu_seqlens) and "
    "pass them, or do not pack this model."
)
_OFF_BY_ONE = "Check how cu_seqlens is built: entry i is the first token of sequence i."

CROSSING = (
    Row(
        name="attention mask is no mask",
        property="crossing",
        applies=_mixing(
            lambda e, m: _kind(m) == "attention" and _is_both_ways(e) and not m.is_causal
        ),
        text=_crossing("Tokens see all others, later ones, too."),
        mend="Pass an additive mask of floats (0 and minus infinity), not a boolean one: eager "
        "attention adds it to the scores.",
    ),
    Row(
        name="experts with a capacity",
        property="crossing",
        applies=_mixing(lambda e, m: _kind(m) == "experts" and _is_both_ways(e)),
        text=_crossing(
            "Tokens compete for places in experts: whoever is dropped depends on the pack. Other "
            "crossings would be hidden behind it: examine without a capacity, too."
        ),
        mend="Expected of token dropping; without a capacity nothing crosses.",
        is_fault=False,
    ),
    Row(
        name="border too late",
        property="crossing",
        applies=_mixing(lambda e, m: 0 < m.num_late <= MAX_KERNEL),
        text=_crossing("The first {late} of each sequence belong to the one before."),
        mend=_OFF_BY_ONE,
    ),
    Row(
        name="border too early",
        property="crossing",
        applies=_mixing(lambda e, m: 0 < m.num_early <= MAX_KERNEL),
        text=_crossing("The last {early} of each sequence belong to the next."),
        mend=_OFF_BY_ONE,
    ),
    Row(
        name="windowed attention without borders",
        property="crossing",
        applies=_mixing(lambda e, m: _kind(m) == "attention" and _is_local(m) and m.reach > 4),
        text=_crossing("A window of {width} tokens slides over the borders."),
        mend="The mask of windowed layers is built without the borders: " + _BORDERS.lower(),
        threads=("AI-Hypercomputer/maxtext#5001",),
    ),
    Row(
        name="short convolution without borders",
        property="crossing",
        applies=_mixing(lambda e, m: _is_tail(m) and m.disturbed < m.changed),
        text=_crossing("A convolution or token shift of {width} tokens runs over the borders."),
        mend=_KERNELS,
        threads=("NVIDIA-NeMo/Automodel#2147", "EvolvingLMMs-Lab/lmms-engine#167"),
    ),
    Row(
        name="short convolution without borders",
        property="crossing",
        applies=_mixing(lambda e, m: _kind(m) == "convolution"),
        text=_crossing(
            "A convolution runs over the borders; what mixes behind it may cross, too, and is "
            "hidden by it."
        ),
        mend=_KERNELS,
    ),
    Row(
        name="recurrent state is kept",
        property="crossing",
        applies=_mixing(lambda e, m: _kind(m) == "recurrence"),
        text=_crossing(
            "The state at the end of a sequence is where the next begins; a convolution that "
            "crosses, too, would be hidden behind it."
        ),
        mend=_KERNELS,
        threads=(
            "THUDM/slime#1686",
            "NVIDIA-NeMo/Automodel#2147",
            "NovaSky-AI/SkyRL#2056",
            "fla-org/flash-linear-attention#842",
        ),
    ),
    Row(
        name="attention forgets borders",
        property="crossing",
        applies=_mixing(lambda e, m: _kind(m) == "attention"),
        text=_crossing("Attention sees the sequences before."),
        mend=_BORDERS,
        threads=("NVIDIA-NeMo/Megatron-Bridge#2952", "huggingface/transformers#46634"),
    ),
    Row(
        name="sequences are mixed",
        property="crossing",
        applies=lambda e: bool(e.crossings),
        text=_crossing("Sequences see one another."),
        mend="The module named here needs the borders of sequences.",
    ),
)
