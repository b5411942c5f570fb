"""pure. Turns a record into a sample: the tokens that the model reads, and those it is trained on.

    tokens      <user>  h  i      <end>        <assistant>  y  o        (of ByteLevelTokenizer)
    labels      h       i  <end>  <assistant>  y            o  <end>
    loss_mask   0       0  0      0            1            1  1

Invariants:
- labels[i] is the token that follows tokens[i], and loss_mask[i] belongs to labels[i] (Megatron's
  convention).
- loss_mask is the record's weight times the turn's weight if the label is part of the assistant's
  turn, end-of-turn token included. The same holds for all labels of a `text`, a `completion` and
  `tokens`. All other entries are 0.
- A sample has at least one token with loss, and at most `seq_length` tokens.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.layout import OverLengthPolicy
from megatron.packing.batch.tree import MergedPaths
from megatron.packing.quoting import shortened, shown
from megatron.sft.data.image_chats import ImageChats, SampleImages
from megatron.sft.data.records.content import (
    Answers,
    Conversation,
    Passage,
    TokenIds,
    messages_of,
    said_in,
)
from megatron.sft.data.records.formats import Reading, read_record
from megatron.sft.data.records.images import MARK
from megatron.sft.data.records.token_ids import whole_numbers
from megatron.sft.data.records.turns import Contexts, merged_turns, only_last, within
from megatron.sft.data.records.values import SampleError
from megatron.sft.options.data import TrainTurns

DropReason = Literal[
    "over length",
    "no loss token",
    "no loss token left after truncation",
    "empty answer",
    "equal answers",
    "empty answer in one of several pairs",
    "equal answers in one of several pairs",
    "bad sample",
]
DROP_REASONS: tuple[str, ...] = get_args(DropReason)

_log = logging.getLogger("megatron.sft.data")


class ChatTokens(NamedTuple):
    """Tokens of a conversation or passage, N of them."""

    ids: npt.NDArray[np.int32]
    """[N]"""
    weights: npt.NDArray[np.float32]
    """[N]: weight of the loss of each token; 0 for tokens that are not trained."""


class Tokenizer(Protocol):
    """Turns text and conversations into tokens. `megatron.sft.data.tokenizer.build_tokenizer` makes
    one.
    """

    @property
    def vocab_size(self) -> int:
        """Number of ids: each id is below it."""

    @property
    def eod(self) -> int:
        """Id of the end of a document."""

    @property
    def pad(self) -> int:
        """Id of padding, which is never trained."""

    @property
    def chat_template(self) -> str | None:
        """Jinja template that `encode_chat` follows; None if the format is built in, or if there
        is no template.
        """

    @property
    def fingerprint(self) -> str:
        """Text that is equal only for tokenizers with the same meaning of each id."""

    @property
    def note(self) -> str | None:
        """One line on the files that the tokens are read from; None if they are built in."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text` alone, without those that begin or end a document. Raises
        SampleError if the text cannot be tokenized.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Returns text for a person to read. Special tokens and white space at the end may be
        missing.
        """

    def show(self, ids: Sequence[int]) -> str:
        """Returns text for a person to read, with the names of special tokens."""

    def encode_passage(self, passage: Passage) -> ChatTokens:
        """Returns the tokens of a document, which begins as the tokenizer begins one and ends with
        `eod`. `eod` is trained.
        """

    @property
    def contexts(self) -> Contexts:
        """Relation of the prompts that turns are generated from to the rendering of
        `encode_chat`.
        """

    def encode_chat(self, conversation: Conversation) -> ChatTokens:
        """Returns the whole conversation in one rendering. Raises SampleError if it does not fit
        the template.
        """

    def encode_turns(self, conversation: Conversation) -> list[ChatTokens]:
        """Returns a sequence for each trained turn of the assistant: the prompt that the turn is
        generated from, then the turn. If `contexts` is "kept", this is the one rendering of
        `encode_chat`, which has all of them.
        """


@dataclass(frozen=True, eq=False)
class EncodedSample:
    """One sequence, L tokens long."""

    tokens: npt.NDArray[np.int32]
    """[L]"""
    labels: npt.NDArray[np.int32]
    """[L]: labels[i] is the token that follows tokens[i]."""
    loss_mask: npt.NDArray[np.float32]
    """[L]: the record's weight where labels[i] counts in the loss, else 0."""
    is_cut: bool
    """True if the record was longer, and was truncated."""
    tree: MergedPaths | None = None
    """The tree of sequences that the tokens above belong to; None for a single sequence."""
    fields: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Further fields of the sample: a row per path of the tree, or per token."""
    images: SampleImages | None = None
    """Images of the sequence; None if it has none."""
    dropped: tuple[DropReason, ...] = ()
    """Reasons of the record's pairs that are not in the tree, each dropped alone."""
    further: "tuple[EncodedSample, ...]" = ()
    """Further sequences of the same record, each trained as a sample of its own: turns of a chat
    with images that have contexts of their own.
    """

    def named(self, record: str) -> "EncodedSample":
        """Returns the same sample with `record` in the names of its images, for messages."""
        if self.images is None and not self.further:
            return self
        return replace(
            self,
            images=None if self.images is None else self.images.named(record),
            further=tuple(one.named(record) for one in self.further),
        )

    @property
    def parts(self) -> "tuple[EncodedSample, ...]":
        """All sequences of the record."""
        return (self, *self.further)


class Dropped(NamedTuple):
    """Reason why a record makes no sample. Drops are counted and shown in each step's log line."""

    reason: DropReason


class Preferences(Protocol):
    """Reads and encodes preference data in place of plain answers (`data.preference.encode`)."""

    def read(self, record: Mapping[str, Any], columns: Mapping[str, str]) -> Reading:
        """Returns the content of a record."""

    def encode(
        self, chat: "ChatEncoder", record: Mapping[str, Any], weight: float
    ) -> EncodedSample | Dropped:
        """Returns the sample of a record."""


@dataclass(frozen=True)
class ChatEncoder:
    """Turns a record into a sample; see `encode`."""

    tokenizer: Tokenizer
    seq_length: int
    """Maximum number of tokens of a sample."""
    over_length_policy: OverLengthPolicy
    """Treatment of a longer record: "error" raises SampleError, "truncate" keeps its first
    `seq_length` tokens, "drop" returns `Dropped`.
    """
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column of a record -> its name in `records.formats`, by --data-columns."""
    train_turns: TrainTurns = "all"
    """Turns of a conversation that are trained, and their contexts (see `records.turns`)."""
    takes_trees: bool = True
    """True if a sample may be a tree. Otherwise a record with several answers is an error."""
    num_rows: int | None = None
    """Rows of the model's embedding; None to take any token. The tokenizer may have more tokens
    (Gemma 3 1B: one more), of which a sample must hold none.
    """
    preferences: Preferences | None = None
    """Encodes records of preference data; None for those of answers to imitate."""
    images: ImageChats | None = None
    """Puts images into chats; None if a record with images is an error."""
    _listed: set[str] = field(default_factory=set, init=False, repr=False)
    """Unread keys and notes that were logged before."""

    def __post_init__(self) -> None:
        if self.seq_length < 1:
            raise ValueError(f"--seq-length must be at least 1, but is {self.seq_length}")
        if self.over_length_policy not in get_args(OverLengthPolicy):
            choices = "|".join(get_args(OverLengthPolicy))
            raise ValueError(
                f"--over-length-policy must be {choices}, but is {shown(self.over_length_policy)}"
            )

    def encode(self, record: Mapping[str, Any], weight: float = 1.0) -> EncodedSample | Dropped:
        """Returns the sample of `record`, its loss scaled by `weight`. `records.formats` lists the
        formats of records.

        Keys that are not read are logged, each once.
        """
        if self.preferences is not None:
            return self.preferences.encode(self, record, weight)
        content, own_weight, unread = self.read(record)
        self.log_unread(unread)
        if self.images is not None:
            self.images.check_texts(content)
            if any(MARK in text for text in said_in(content)):
                self.note(
                    f"a text holds {MARK}, but the record has no list of images for it: it is "
                    "trained as text"
                )
            has_images = any(message.images for message in messages_of(content))
            if isinstance(content, Conversation) and (has_images or self.train_turns != "all"):
                return self._encode_images(self.images, content, own_weight * weight)
        if isinstance(content, Answers):
            return self._encode_paths(content, own_weight * weight)
        if self.train_turns != "all" and isinstance(content, Conversation):
            return self._encode_paths(Answers([content], [1.0]), own_weight * weight)
        ids, weights = self._tokens(content)
        loss_mask = weights[1:]
        if own_weight * weight != 1:
            loss_mask *= np.float32(own_weight * weight)  # in place: it may have millions of tokens
        if not np.count_nonzero(loss_mask):  # a fourth of the time of `any`
            return Dropped("no loss token")
        is_cut = len(loss_mask) > self.seq_length
        kept = within(ids, loss_mask, self.seq_length, self.over_length_policy, "sample is")
        if kept is None:
            return Dropped("over length")
        ids, loss_mask = kept
        if is_cut and not loss_mask.any():
            return Dropped("no loss token left after truncation")
        self.check_rows(ids)
        if self.images is not None:
            self.images.check_ids(ids)
        return EncodedSample(ids[:-1], ids[1:].copy(), loss_mask, is_cut)

    def _encode_images(
        self, chats: ImageChats, conversation: Conversation, weight: float
    ) -> EncodedSample | Dropped:
        """Returns a conversation that may have images as one sample. Turns with contexts of their
        own are sequences of their own: batches with images have no trees.
        """
        messages = conversation.messages
        conversation = conversation._replace(placeholder=chats.placeholder)
        sized = chats.sized(messages)
        # The number of images up to each message, itself included.
        counts = np.cumsum([len(message.images) for message in messages]).tolist()
        if self.train_turns == "all":
            turns, visible = [self.tokenizer.encode_chat(conversation)], [len(sized)]
        else:
            chosen = only_last(conversation) if self.train_turns == "last" else conversation
            turns = self.tokenizer.encode_turns(chosen)
            visible = [
                counts[number]
                for number, one in enumerate(chosen.messages)
                if one.role == "assistant" and one.weight and number
            ]
            if self.tokenizer.contexts == "kept":
                visible = [len(sized)]
        found: list[EncodedSample] = []
        reason: DropReason = "no loss token"
        for turn, count in zip(turns, visible, strict=True):
            images = sized[:count]
            ids, weights, starts = chats.expand(*turn, [chats.grid(image) for image in images])
            loss_mask = weights[1:] * np.float32(weight)
            if not loss_mask.any():
                continue
            is_cut = len(loss_mask) > self.seq_length
            kept = within(ids, loss_mask, self.seq_length, self.over_length_policy, "sample is")
            placed = None
            if kept is not None:
                placed = chats.placed(len(kept[1]), images, starts)
            if kept is None or placed is None:  # a cut never goes through an image
                reason = "over length"
            elif not kept[1].any():
                reason = "no loss token left after truncation"
            else:
                ids, loss_mask = kept
                self.check_rows(ids)
                tokens, labels = ids[:-1], ids[1:].copy()
                images_of_turn = placed if images else None
                found.append(
                    EncodedSample(tokens, labels, loss_mask, is_cut, images=images_of_turn)
                )
        if not found:
            return Dropped(reason)
        return replace(found[0], further=tuple(found[1:]))

    def _encode_paths(self, answers: Answers, weight: float) -> EncodedSample | Dropped:
        """Returns the answers as one sample: a tree, or a sequence if only one path is left."""
        turns = [
            turn._replace(weights=turn.weights * np.float32(factor))
            for path, factor in zip(answers.paths, answers.weights)
            for turn in self._turns(path)
        ]
        merged, num_over, is_cut = merged_turns(
            turns, weight, self.seq_length, self.over_length_policy
        )
        if merged is None and num_over:
            is_dropped = self.over_length_policy == "drop"
            return Dropped("over length" if is_dropped else "no loss token left after truncation")
        if merged is None:
            return Dropped("no loss token")
        is_sequence = len(merged.parents) == 1 and merged.num_paths.max() == 1
        if not is_sequence and not self.takes_trees:
            raise SampleError(
                "record has several answers, which are trained as a tree of sequences: that takes "
                "--sequence-packing, and no --mtp-num-layers; give each answer as a record"
            )
        self.check_rows(merged.tokens)
        self.check_rows(merged.labels)
        tree = None if is_sequence else merged
        return EncodedSample(
            merged.tokens.astype(np.int32),
            merged.labels.astype(np.int32),
            merged.loss_mask,
            is_cut,
            tree,
        )

    def check_rows(self, ids: npt.NDArray[np.integer]) -> None:
        """Raises SampleError if the model has no row for a token."""
        if self.num_rows is None or not ids.size or ids.max() < self.num_rows:
            return
        token = int(ids[ids >= self.num_rows][0])
        raise SampleError(
            f"holds the token {self.tokenizer.show([token])} with id {token}, but the model has "
            f"only {self.num_rows} rows of embeddings; leave the token out, or enlarge them first"
        )

    def _turns(self, path: Conversation | Passage) -> list[ChatTokens]:
        """Returns the sequences of one path: each trained turn in its context, or the whole."""
        if isinstance(path, Passage) or self.train_turns == "all":
            return [self._tokens(path)]
        return self.tokenizer.encode_turns(only_last(path) if self.train_turns == "last" else path)

    def read(self, record: Mapping[str, Any]) -> Reading:
        """Returns the content of `record`."""
        if self.preferences is not None:
            return self.preferences.read(record, self.columns)
        return read_record(record, self.columns, takes_images=self.images is not None)

    def list_unread(self, record: Mapping[str, Any]) -> None:
        """Logs the keys of `record` that are not read. Called once before workers are forked, so
        that the workers' copies of this encoder do not log these keys again.
        """
        self.log_unread(self.read(record).unread)

    def note(self, *notes: str) -> None:
        """Logs notes about the data, each once."""
        for note in notes:
            if note not in self._listed:
                self._listed.add(note)
                _log.warning("%s", shortened(note, most=600))

    def log_unread(self, unread: set[str]) -> None:
        """Logs keys of records that are not read, each once."""
        if not unread <= self._listed:
            names = ", ".join(sorted(unread - self._listed))
            _log.warning("not read of records: %s", shortened(names, most=300))
            self._listed.update(unread)

    def _tokens(self, content: Conversation | Passage | TokenIds) -> ChatTokens:
        if isinstance(content, Conversation):
            return self.tokenizer.encode_chat(content)
        if isinstance(content, Passage):
            return self.tokenizer.encode_passage(content)
        ids = whole_numbers(content.ids, content.where)
        vocab_size = self.tokenizer.vocab_size
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise SampleError(
                f"{content.where} must be from 0 to {vocab_size - 1}, but are from {ids.min()} to "
                f"{ids.max()}: another tokenizer made them"
            )
        is_trained = np.ones(len(ids)) if content.is_trained is None else content.is_trained
        return ChatTokens(ids.astype(np.int32), is_trained.astype(np.float32))
