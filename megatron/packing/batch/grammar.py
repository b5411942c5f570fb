"""pure. The grammar of samples: all fields that are known by name, and their use in each form.

    tokens      Megatron-LM's data sets: a label is that of the next token
    input_ids   HuggingFace's collators: a label stands above its own token
    packed      `tokens` of several sequences; `input_ids` likewise, where payloads are refused
    tree        `tokens` with `parents` (see `tree`)
    paths       a tree, or sequences, with fields per path (see `paths`)

A use is one of

    read        decides what is trained
    moved       read, and moved one to the left, to the token that predicts it
    checked     must agree with the fields that are read
    ignored     says nothing that is needed
    warned      travels as a field of one's own, and one warning names it
    refused     raises a ValueError that names it

Fields of other names are a user's own (see `extra`). The reader, the documents (`use_table`) and
the tests go by this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Form = Literal["tokens", "input_ids", "packed", "tree", "paths"]
Use = Literal["read", "moved", "checked", "ignored", "warned", "refused"]

IGNORED_LABEL = -100
"""The label that HuggingFace's collators give to tokens without a loss."""

FORMS: dict[Form, str] = {
    "tokens": "Megatron-LM's",
    "input_ids": "HuggingFace's",
    "packed": "packed",
    "tree": "trees",
    "paths": "paths",
}
"""The forms, and the heading of each in the documents."""


class FieldRow(NamedTuple):
    """Fields of one meaning."""

    names: tuple[str, ...]
    uses: str
    """The use in each of FORMS, in that order; one word if it is the same in all."""
    meaning: str
    """Few words for the documents, and in warnings and errors the way out."""

    def use(self, form: Form) -> Use:
        """Returns the use of the fields in a form."""
        uses: list[Any] = self.uses.split()
        use: Use = uses[list(FORMS).index(form) % len(uses)]
        return use


CUMULATIVE = (
    *("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv"),
    *("cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k"),
)
UNPADDED = "cu_seqlens_unpadded"
CUMULATIVE_PADDED = ("cu_seqlens_padded", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
LENGTHS = ("seq_lens", "seqlens", "seq_lengths", "sequence_lengths")
LENGTHS_PADDED = ("seq_lens_padded",)
LOSS_MASKS = (
    *("completion_mask", "assistant_masks", "assistant_mask", "loss_masks", "response_mask"),
    *("label_mask", "target_mask", "answer_mask", "loss_scale", "loss_weights"),
)
NUMBERS_OF_SEQUENCES = ("segment_ids", "document_ids", "doc_ids", "sequence_ids")
SIZES = ("length", "seq_len", "seqlen", "num_tokens", "token_count")
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")

ROWS = (
    FieldRow(("tokens",), "read", "ids of tokens"),
    FieldRow(("input_ids",), "checked read read refused refused", "ids of tokens"),
    FieldRow(
        ("labels",),
        "read moved read read read",
        "ids to predict, -100 where none is; the next tokens where they are missing",
    ),
    FieldRow(("shift_labels",), "read", "labels of the next tokens, in place of `labels`"),
    FieldRow(("loss_mask",), "read moved read read read", "weight of each label's loss"),
    FieldRow(
        ("position_ids",),
        "read",
        "`[L]`, or `[3, L]` for mRoPE; with `input_ids` a sequence begins where they do not rise",
    ),
    FieldRow(
        ("attention_mask",),
        "read read read checked checked",
        "0 is padding, other numbers count sequences; or a causal matrix `[..., L, L]`",
    ),
    FieldRow(("padding_mask",), "read read read checked checked", "true is padding"),
    FieldRow(("original_seq_len",), "read read read checked checked", "tokens before padding"),
    FieldRow(CUMULATIVE, "read", "where sequences (in trees: nodes) begin and end"),
    FieldRow(
        (UNPADDED,), "read", "the same without padding, beside `cu_seqlens` that count padding"
    ),
    FieldRow(CUMULATIVE_PADDED, "read", "places of the sequences that `cu_seqlens` measure"),
    FieldRow((*LENGTHS, *LENGTHS_PADDED), "read", "length of each sequence; room of each"),
    FieldRow(
        ("seq_idx",),
        "read read read refused refused",
        "number of each token's sequence; in trees `cu_seqlens` bound nodes",
    ),
    FieldRow(("source",), "read", "number of the data source, whose loss is reported"),
    FieldRow(
        ("parents",),
        "read refused read read read",
        "number of each node's parent; give a tree's `tokens`, with labels of the next ones",
    ),
    FieldRow(
        ("num_paths",),
        "read refused read read read",
        "how often each token counts; give a tree's `tokens`, with labels of the next ones",
    ),
    FieldRow(
        ("first_path",),
        "ignored refused ignored ignored read",
        "number of the first path through each token, which `merge_with_fields` makes",
    ),
    FieldRow(
        ("payloads", "payload_key", "costs"),
        "read read refused refused refused",
        "[images](images.md) and other tensors; give each sequence as a sample",
    ),
    FieldRow(
        (
            *("padded_seq_len", "max_seqlen", "max_seqlen_q", "max_seqlen_kv"),
            *("max_length_q", "max_length_k", "cu_seqlens_argmin", "cu_seqlens_unpadded_argmin"),
        ),
        "ignored",
        "follow from the others, as all `__names__` of energon do",
    ),
    FieldRow(
        LOSS_MASKS,
        "warned",
        "mask nothing here, nor do other names that end in `mask`: give `loss_mask`, or labels of "
        "-100",
    ),
    FieldRow(
        NUMBERS_OF_SEQUENCES,
        "warned",
        "bound nothing here: give `seq_idx`, or `attention_mask` with 0 for padding",
    ),
    FieldRow(
        SIZES,
        "warned",
        "bound nothing here where they differ from the tokens: give `original_seq_len`",
    ),
    FieldRow(TOKEN_TYPES, "warned", "change nothing here: attention is causal"),
    FieldRow(
        (
            *("inputs_embeds", "pixel_values", "pixel_values_videos", "image_grid_thw"),
            *("video_grid_thw", "input_features"),
        ),
        "warned",
        "reach no model by themselves: give [payloads](images.md)",
    ),
    FieldRow(("path_tokens",), "refused", "is counted here: choose another name"),
)
"""All fields that are known."""

KNOWN: Mapping[str, FieldRow] = {name: row for row in ROWS for name in row.names}

_RESERVED = frozenset(
    name for name, row in KNOWN.items() if row.use("tokens") not in ("warned", "refused")
) | {"axis_positions"}
_REFUSED = {
    form: frozenset(name for name, row in KNOWN.items() if row.use(form) == "refused")
    for form in FORMS
}
_MASK_ENDINGS = ("mask", "masks")
_NO_LOSS_MASKS = ("special_tokens_mask", "pixel_attention_mask", "image_attention_mask")


def is_own(name: str) -> bool:
    """Returns whether a field of this name travels as one of the user's own."""
    return name not in _RESERVED and not (name.startswith("__") and name.endswith("__"))


def names_elsewhere(name: str) -> tuple[str, ...]:
    """Returns the known fields that one of a user's own means the same as in other libraries, of
    which it is warned; () for none.
    """
    row = KNOWN.get(name)
    if row is None:
        is_mask = name.endswith(_MASK_ENDINGS) and name not in _NO_LOSS_MASKS
        return LOSS_MASKS if is_mask else ()
    return row.names if row.use("tokens") == "warned" else ()


def refuse(item: Mapping[str, Any], form: Form) -> None:
    """Raises ValueError for a field that the form refuses."""
    for name in sorted(_REFUSED[form].intersection(item)):
        if item[name] is not None:
            meaning = plain_text(KNOWN[name].meaning)
            raise ValueError(f"'{name}' cannot be read in {_DESCRIPTIONS[form]}: {meaning}")


_DESCRIPTIONS: dict[Form, str] = {
    "tokens": "a sample with 'tokens'",
    "input_ids": "a sample with 'input_ids'",
    "packed": "a sample of several sequences",
    "tree": "a tree of sequences",
    "paths": "a sample with fields per path",
}


def plain_text(meaning: str) -> str:
    """Returns a meaning as errors and warnings have it."""
    return (
        meaning.replace("`", "'")
        .replace("](images.md)", "")
        .replace("[images", "images")
        .replace("[payloads", "payloads")
    )


def use_table() -> list[str]:
    """Returns the table of the documents, in Markdown."""
    headings = ["field", *FORMS.values(), "meaning"]
    lines = [headings, ["---"] * len(headings)]
    for row in ROWS:
        names = ", ".join(f"`{name}`" for name in row.names)
        lines.append([names, *(row.use(form) for form in FORMS), row.meaning])
    return [f"| {' | '.join(line)} |" for line in lines]
