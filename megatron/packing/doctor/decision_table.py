"""pure. From results to names: the decision table.

One row is one fault: when it applies, how it is put to a reader, how it is mended. To add a fault,
add a row; the first row of each property that applies names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.packing.doctor.evidence import Evidence, Mixing
from megatron.packing.doctor.loss_reading import LossReading, read_loss
from megatron.packing.doctor.module_kinds import kind_of

MAX_KERNEL = 7
"""Tokens before a border that a short convolution reaches over it, at most."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A fault, or something that is not one but looks like it."""

    name: str
    property: str
    """What is examined; see PROPERTIES."""
    applies: Callable[[Evidence], bool]
    text: Callable[[Evidence], str]
    mend: str = ""
    threads: tuple[str, ...] = ()
    """Where people met and mended the same."""
    is_fault: bool = True
    """False for what belongs to the model or the method: told, and no fault."""


PROPERTIES = {
    "repeat": "the same pack gives the same",
    "crossing": "sequences do not see one another",
    "causal": "no token sees a later one",
    "padding": "padding is not seen",
    "window": "attention windows are as wide as declared",
    "packed": "a sequence is in the pack what it is alone",
    "backward": "gradients do not cross",
    "labels": "tokens have their own labels",
    "weights": "the loss is one mean",
}
"""What is examined -> how it is called in the report."""


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


def _place(e: Evidence) -> str:
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
        if m:
            seen = (
                f" {len(m.targets)} of {m.length_changed} tokens of sequence {m.changed} see "
                f"{len(m.sources)} of {m.length_disturbed} of sequence {m.disturbed}."
            )
        kernel = len(m.sources) + 1 if m else 0
        return (
            f"{sentence.format(width=kernel, late=len(m.targets) if m else 0, early=kernel - 1)} "
            f"Born in {_place(e)}.{seen} {_layers(e)} Sequences: {_borders(e)}."
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
        applies=_mixing(lambda e, m: _kind(m) == "experts"),
        text=_crossing(
            "Tokens compete for places in experts: whoever is dropped depends on the pack."
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
    ),
    Row(
        name="short convolution without borders",
        property="crossing",
        applies=_mixing(lambda e, m: _is_tail(m) and (m.disturbed < m.changed)),
        text=_crossing("A convolution or token shift of {width} tokens runs over the borders."),
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
    ),
    Row(
        name="attention forgets borders",
        property="crossing",
        applies=_mixing(lambda e, m: _kind(m) == "attention"),
        text=_crossing("Attention sees the sequences before."),
        mend=_BORDERS,
        threads=("NVIDIA-NeMo/Megatron-Bridge#2952",),
    ),
    Row(
        name="sequences are mixed",
        property="crossing",
        applies=lambda e: bool(e.crossings),
        text=_crossing("Sequences see one another."),
        mend="The module named here needs the borders of sequences.",
    ),
)


def _not_causal(e: Evidence) -> bool:
    return not e.crossings and not e.is_causal()


def _only_places(e: Evidence) -> bool:
    """Returns whether nothing is seen that must not be: what is left are places and kernels."""
    return not e.crossings and e.is_causal() and not e.sees_padding()


OTHERS = (
    Row(
        name="state between calls",
        property="repeat",
        applies=lambda e: e.keeps_state(),
        text=lambda e: (
            "The same pack gives other logits after another pack "
            f"({e.repeat.after_another:.1e}): something is kept between calls."
        ),
        mend="Look for caches (use_cache, inference parameters, static buffers) in training.",
    ),
    Row(
        name="order of tokens is changed",
        property="causal",
        applies=lambda e: _not_causal(e) and e.mixing is not None and e.mixing.is_reordered,
        text=lambda e: (
            f"In {_place(e)} tokens see as many others as a causal mask shows, but in another "
            "order: halves of context-parallel ranks are swapped, or positions do not go with "
            "tokens."
        ),
        mend="Undo the order in which context-parallel ranks hold a sequence before the mask.",
    ),
    Row(
        name="future is seen",
        property="causal",
        applies=_not_causal,
        text=lambda e: f"Tokens see later ones of their own sequence. Born in {_place(e)}.",
        mend="The causal mask is lost, or the order of tokens is changed.",
    ),
    Row(
        name="padding is seen",
        property="padding",
        applies=lambda e: (
            e.sees_padding() and not (e.mixing is not None and _kind(e.mixing) == "experts")
        ),
        text=lambda e: (
            f"Another token in the padding changes the logits of real tokens by {e.padding:.1e}."
        ),
        mend="Padding between or before sequences needs the mask; behind them it is harmless.",
    ),
    Row(
        name="window of the wrong width",
        property="window",
        applies=lambda e: any(
            r.declared is not None and r.packed != r.declared and r.packed == r.alone
            for r in e.reach
        ),
        text=lambda e: "; ".join(
            f"{r.layer} sees {r.packed} tokens, {r.declared} are declared"
            for r in e.reach
            if r.declared is not None and r.packed != r.declared
        ),
        mend="A window of w tokens counts the token itself: it sees w - 1 before it.",
    ),
    Row(
        name="window is another in packs",
        property="window",
        applies=lambda e: not e.crossings and any(r.packed != r.alone for r in e.reach),
        text=lambda e: "; ".join(
            f"{r.layer} sees {r.packed} tokens in the pack, {r.alone} alone"
            for r in e.reach
            if r.packed != r.alone
        ),
        mend="The packed path or its mask lacks the window (or chunk) of the layer.",
    ),
    Row(
        name="positions run on over the pack",
        property="packed",
        applies=lambda e: _only_places(e) and bool(e.moves()) and 0 not in e.differs_alone(),
        text=lambda e: (
            f"Logits of sequences {e.moves()} depend on where in the pack they begin (by "
            f"{max(e.offset):.1e}, rounding allows {e.tolerance:.1e}), though nothing crosses."
        ),
        mend="Give each sequence positions from 0 (position_ids, or cu_seqlens to the rotary "
        "embedding).",
    ),
    Row(
        name="positions begin elsewhere",
        property="packed",
        applies=lambda e: (
            _only_places(e)
            and not e.moves()
            and bool(e.differs_alone())
            and 0 not in e.differs_alone()
        ),
        text=lambda e: (
            f"Sequences {e.differs_alone()} differ from themselves alone by {max(e.alone):.1e}, "
            "and the first does not: later sequences begin at another position than 0."
        ),
        mend="Give each sequence positions from 0.",
    ),
    Row(
        name="packed path computes otherwise",
        property="packed",
        applies=lambda e: (
            _only_places(e)
            and bool(e.differs_alone())
            and not any(r.packed != r.alone for r in e.reach)
        ),
        text=lambda e: (
            f"Sequences {e.differs_alone()} differ from themselves alone by {max(e.alone):.1e} "
            f"(rounding allows {e.tolerance:.1e}), from tokens "
            f"{[at for at in e.alone_from if at is not None]} on, though nothing crosses."
        ),
        mend="Compare the kernels, scales and masks of the packed and the plain path.",
    ),
    Row(
        name="backward pass crosses",
        property="backward",
        applies=lambda e: not e.crossings and e.backward is not None and not e.backward <= e.exact,
        text=lambda e: (
            f"Gradients of one sequence reach another's embeddings (by {e.backward:.1e} of its "
            "own), though the forward pass is separate."
        ),
        mend="The backward kernel is called without the borders.",
    ),
)


def _loss(condition: Callable[[LossReading], bool]) -> Callable[[Evidence], bool]:
    return lambda e: e.loss is not None and condition(read_loss(e.loss))


def _wrong_mean(over: str) -> Callable[[Evidence], bool]:
    return lambda e: (
        e.loss is not None and over != e.reduction and read_loss(e.loss).mean_per == over
    )


def _say(text: Callable[[LossReading], str]) -> Callable[[Evidence], str]:
    def say(e: Evidence) -> str:
        assert e.loss is not None
        return text(read_loss(e.loss))

    return say


LOSS = (
    Row(
        name="mean over tokens",
        property="weights",
        applies=lambda e: (
            e.loss is not None
            and e.reduction == "sequence"
            and read_loss(e.loss).mean_per == "token"
        ),
        text=_say(
            lambda r: f"Means of sequences are declared, but tokens count: {r.weights_text}."
        ),
        mend="Divide each sequence's sum by its own trained tokens.",
    ),
    Row(
        name="form of the loss is unknown",
        property="weights",
        applies=_loss(lambda r: not r.is_cross_entropy),
        text=_say(lambda r: "Gradients at the logits are not a cross entropy's; weights unread."),
        is_fault=False,
    ),
    Row(
        name="labels are not shifted",
        property="labels",
        applies=_loss(lambda r: r.shift is not None),
        text=_say(lambda r: f"Each token's label is the token {r.shift} places on, 1 is right."),
        mend="Either the batch or the loss shifts labels, and just one of them.",
    ),
    Row(
        name="label across a border",
        property="labels",
        applies=_loss(lambda r: r.num_across > 0),
        text=_say(lambda r: f"{r.num_across} last tokens are trained on the next sequence's first"),
        mend="Set the label of each sequence's last token to -100, before or after the shift.",
    ),
    Row(
        name="padding is trained",
        property="labels",
        applies=_loss(lambda r: r.num_padding > 0),
        text=_say(lambda r: f"{r.num_padding} padding slots have a gradient."),
        mend="Labels of padding must be -100.",
    ),
    Row(
        name="prompt is trained",
        property="labels",
        applies=_loss(lambda r: r.num_prompt > 0),
        text=_say(lambda r: f"{r.num_prompt} tokens of prompts are trained."),
        mend="The loss mask is lost on the way into the pack, or shifted.",
    ),
    Row(
        name="target is lost",
        property="labels",
        applies=_loss(lambda r: r.num_lost > 0),
        text=_say(lambda r: f"{r.num_lost} targets are not trained: {r.lost_places}."),
        mend="Look for a slice of labels or masks that is one too short.",
    ),
    Row(
        name="labels of other tokens",
        property="labels",
        applies=_loss(lambda r: r.num_other > 0),
        text=_say(lambda r: f"{r.num_other} tokens have a label that is none of their own."),
        mend="Labels and tokens are packed in different orders.",
    ),
    Row(
        name="mean per pack",
        property="weights",
        applies=_wrong_mean("pack"),
        text=_say(lambda r: f"Tokens weigh by their pack: {r.weights_text}."),
        mend="Divide by the trained tokens of the whole step (num_items_in_batch, "
        "calculate_per_token_loss).",
        threads=("huggingface/transformers#34191",),
    ),
    Row(
        name="mean per sequence",
        property="weights",
        applies=_wrong_mean("sequence"),
        text=_say(lambda r: f"Tokens weigh by their sequence: {r.weights_text}."),
        mend="If that is meant, say so (Subject.reduction).",
    ),
    Row(
        name="weights of tokens differ",
        property="weights",
        applies=_wrong_mean("unknown"),
        text=_say(lambda r: f"Tokens weigh differently: {r.weights_text}."),
        mend="A mean over all trained tokens of the step has one weight.",
    ),
    Row(
        name="divided by slots",
        property="weights",
        applies=_loss(lambda r: r.factor_name == "slots"),
        text=_say(lambda r: f"The sum is divided by all slots: {r.factor:.3f} of the mean."),
        mend="Divide by trained tokens.",
    ),
    Row(
        name="scale of the loss",
        property="weights",
        applies=_loss(lambda r: r.factor_name == "factor"),
        text=_say(lambda r: f"The gradient is {r.factor:.4g} times that of the mean over tokens."),
        mend="Look for the number of context-parallel or data-parallel ranks, of packs, or "
        "accumulated steps that equals it.",
    ),
)
BALANCING = Row(
    name="loss couples sequences",
    property="backward",
    applies=lambda e: (
        e.loss is not None
        and read_loss(e.loss).is_right
        and not e.crossings
        and (e.backward or 0.0) <= e.exact
        and e.loss.others > e.exact
    ),
    text=lambda e: (
        "The loss of one sequence has a gradient at another's embeddings, though logits have "
        "none: a balancing loss over the pack, or a norm over it."
    ),
    mend="Expected of balancing losses over tokens of the pack.",
    is_fault=False,
)
RANDOM = Row(
    name="dropout",
    property="repeat",
    applies=lambda e: not e.repeat.unseeded <= 8 * e.repeat.difference,
    text=lambda e: "Logits depend on the random seed (dropout, jitter); runs were seeded alike.",
    is_fault=False,
)
ROWS = (*CROSSING, *OTHERS, *LOSS, BALANCING, RANDOM)
"""The decision table. Of rows of one property that are faults the first that applies counts."""
