"""pure. From results to names: the decision table.

One row is one fault: when it applies, how it is put to a reader, how it is mended. To add a fault,
add a row, here or to `crossing_rows` or `loss_rows`. The first row of each property that applies
names it.
"""

from __future__ import annotations

from megatron.packing.doctor.decisions.crossing_rows import CROSSING, birthplace
from megatron.packing.doctor.decisions.decision_row import Row
from megatron.packing.doctor.decisions.loss_rows import BALANCING, LOSS
from megatron.packing.doctor.decisions.step_rows import STEP
from megatron.packing.doctor.evidence import Evidence
from megatron.packing.doctor.module_kinds import kind_of


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
        name="logits are not finite in packs",
        property="packed",
        applies=lambda e: bool(e.not_finite),
        text=lambda e: (
            f"Logits of sequences {[*e.not_finite]} are NaN or infinite in the pack, and finite "
            "alone."
        ),
        mend="A row of the mask in which nothing is seen gives NaN, which other rows see in the "
        "next layer: let padding see itself, or mask with the smallest number, not infinity.",
    ),
    Row(
        name="order of tokens is changed",
        property="causal",
        applies=lambda e: _not_causal(e) and e.mixing is not None and e.mixing.is_reordered,
        text=lambda e: (
            f"In {birthplace(e)} tokens see as many others as a causal mask shows, but in another "
            "order: halves of context-parallel ranks are swapped, or positions do not go with "
            "tokens."
        ),
        mend="Undo the order in which context-parallel ranks hold a sequence before the mask.",
    ),
    Row(
        name="future is seen",
        property="causal",
        applies=_not_causal,
        text=lambda e: f"Tokens see later ones of their own sequence. Born in {birthplace(e)}.",
        mend="The causal mask is lost, or the order of tokens is changed.",
    ),
    Row(
        name="padding is seen",
        property="padding",
        applies=lambda e: (
            e.sees_padding()
            and not (
                e.mixing is not None
                and kind_of(e.mixing.module, e.mixing.module_class) == "experts"
            )
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
        mend="Padding before a sequence moves its positions unless position_ids are passed; else "
        "compare the kernels, scales and masks of the packed and the plain path.",
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
    Row(
        name="gradient is lost between ranks",
        property="backward",
        applies=lambda e: bool(e.lost),
        text=lambda e: (
            f"The last token of a sequence sees its tokens {', '.join(map(str, e.lost))} on "
            "another rank, but no gradient comes back to them."
        ),
        mend="Sum the gradients of keys and values over context-parallel ranks: a reduce-scatter "
        "belongs to the all-gather of the forward pass.",
    ),
)


RANDOM = Row(
    name="dropout",
    property="repeat",
    applies=lambda e: not e.repeat.unseeded <= 8 * e.repeat.difference,
    text=lambda e: "Logits depend on the random seed (dropout, jitter); runs were seeded alike.",
    is_fault=False,
)
ROWS = (*CROSSING, *OTHERS, *LOSS, *STEP, BALANCING, RANDOM)
"""The decision table. Of rows of one property that are faults the first that applies counts."""
