"""pure. Rows of the decision table about labels and weights of the loss."""

from __future__ import annotations

from collections.abc import Callable

from megatron.packing.doctor.decisions.decision_row import Row
from megatron.packing.doctor.evidence import Evidence
from megatron.packing.doctor.loss_reading import LossReading, read_loss


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
        mend="Labels of padding must be -100; behind padding in front so must the first token's, "
        "which the last of the padding would be trained to predict.",
        threads=("allenai/open-instruct#1900",),
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
        threads=("huggingface/transformers#35438",),
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
