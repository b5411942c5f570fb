"""pure. Record -> sample: which tokens the model reads, and which it is trained on.

Invariants:
- labels[i] is the token that follows tokens[i], and loss_mask[i] belongs to labels[i] (Megatron's convention);
- loss_mask is the record's weight where the label is the assistant's, its end-of-turn token included, and everywhere
  in a `text` and in `tokens`; elsewhere it is 0;
- a sample that comes out holds at least one token with loss, and at most `seq_length` tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.layout import OverLengthPolicy

DropReason = Literal["over length", "no loss token", "no loss token left after truncation", "bad sample"]
DROP_REASONS: tuple[str, ...] = get_args(DropReason)

ROLES: Mapping[str, str] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
"""Every accepted name of a role -> the name that tokenizers get. ShareGPT says human and gpt."""

_ACCEPTED_KEYS = "messages | conversations | instruction [input|context] output|response | text | tokens"
_UNREAD_MESSAGE_KEYS: Mapping[str, Any] = {"tool_calls": [], "function_call": {}, "reasoning_content": "", "weight": 1}
"""Keys of a message that change what is trained on, and that are refused as they are not read -> what says nothing."""


class SampleError(ValueError):
    """A record that cannot be made a sample. The message lacks the place: prefix it with `source.describe(index)`."""


class Message(NamedTuple):
    """One turn of a conversation; `role` is system, user, assistant or tool."""

    role: str
    content: str


class ChatTokens(NamedTuple):
    """A conversation: `ids` int64 [N], and `is_assistant` bool [N], true for what the assistant must produce."""

    ids: npt.NDArray[np.int64]
    is_assistant: npt.NDArray[np.bool_]


class Tokenizer(Protocol):
    """What text and conversations become. Made by `megatron.sft.data.tokenizer.build_tokenizer`."""

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    @property
    def pad(self) -> int:
        """The id that fills up; never trained on."""

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that `encode_chat` follows, None where its format is built in or missing."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` alone, without any that begin or end a document. SampleError if it has none."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return text for a person to read: white space at its end and special tokens may be left out."""

    def encode_chat(self, messages: Sequence[Message]) -> ChatTokens:
        """Return the whole conversation. SampleError if this one does not fit the format."""


@dataclass(frozen=True, eq=False)
class EncodedSample:
    """One sequence, L tokens long."""

    tokens: npt.NDArray[np.int64]
    """[L]"""
    labels: npt.NDArray[np.int64]
    """[L]: labels[i] is the token that follows tokens[i]."""
    loss_mask: npt.NDArray[np.float32]
    """[L]: the record's weight where labels[i] counts in the loss, else 0."""
    is_cut: bool
    """Whether the record was longer, and its tail was cut."""


class Dropped(NamedTuple):
    """A record that makes no sample. Counted, and shown in each step's log line."""

    reason: DropReason


@dataclass(frozen=True)
class ChatEncoder:
    """Turns a record into a sample; see `encode`."""

    tokenizer: Tokenizer
    seq_length: int
    """Most tokens that a sample may have."""
    over_length_policy: OverLengthPolicy
    """What becomes of a longer record: a SampleError, a sample of its first `seq_length` tokens, or `Dropped`."""

    def __post_init__(self) -> None:
        if self.seq_length < 1:
            raise ValueError(f"--seq-length must be at least 1, but is {self.seq_length}")
        if self.over_length_policy not in get_args(OverLengthPolicy):
            choices = "|".join(get_args(OverLengthPolicy))
            raise ValueError(f"--over-length-policy must be {choices}, but is {self.over_length_policy!r}")

    def encode(self, record: Mapping[str, Any], weight: float = 1.0) -> EncodedSample | Dropped:
        """Return the sample that `record` holds, its loss scaled by `weight`.

        The shape of the record is told by the first of these keys that it has (a key that is None counts as absent):
        `messages` or `conversations`: a list of {role, content} (OpenAI) or {from, value} (ShareGPT), where content is
        a string or a list of {"type": "text", "text": ...}; `instruction` + `output` (Alpaca) or `response` (Dolly),
        perhaps `input` or `context`; `text`; `tokens`, ids as they are. A number in `weight` scales the loss of any.
        """
        ids, is_assistant = self._tokens(record)
        loss_mask = is_assistant[1:].astype(np.float32) * np.float32(_weight(record) * weight)
        if not loss_mask.any():
            return Dropped("no loss token")
        num_tokens = len(ids) - 1
        is_cut = num_tokens > self.seq_length
        if is_cut and self.over_length_policy == "error":
            raise SampleError(
                f"sample is {num_tokens} tokens long, but --seq-length is {self.seq_length}; "
                "raise it or pass --over-length-policy truncate|drop"
            )
        if is_cut and self.over_length_policy == "drop":
            return Dropped("over length")
        ids, loss_mask = ids[: self.seq_length + 1], loss_mask[: self.seq_length]
        if not loss_mask.any():
            return Dropped("no loss token left after truncation")
        return EncodedSample(ids[:-1], ids[1:].copy(), loss_mask, is_cut)

    def _tokens(self, record: Mapping[str, Any]) -> ChatTokens:
        keys = {key for key, value in record.items() if value is not None}
        for key in ("messages", "conversations"):
            if key in keys:
                return self.tokenizer.encode_chat(_conversation(record, key))
        if "instruction" in keys and keys & {"output", "response"}:
            return self.tokenizer.encode_chat(_instruction(record))
        if "text" in keys:
            ids = np.array([*self.tokenizer.encode(_text(record["text"], "text")), self.tokenizer.eod], np.int64)
            return ChatTokens(ids, np.ones(len(ids), np.bool_))
        if "tokens" in keys:
            ids = _token_ids(record["tokens"], self.tokenizer.vocab_size)
            return ChatTokens(ids, np.ones(len(ids), np.bool_))
        raise SampleError(f"record has keys {', '.join(map(repr, record)) or '(none)'}, but must have {_ACCEPTED_KEYS}")


def _conversation(record: Mapping[str, Any], key: str) -> list[Message]:
    turns = record[key]
    if not isinstance(turns, list) or not turns:
        raise SampleError(f"{key} must be a list of at least one message, but is {turns!r:.60}")
    if record.get("tools"):
        raise SampleError("tools would be lost, as they are not read; write them into the content of a system message")
    return [_message(turn, f"{key}[{number}]") for number, turn in enumerate(turns)]


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping):
        raise SampleError(f"{where} must be {{role, content}} or {{from, value}}, but is {turn!r:.60}")
    role_key, content_key = ("from", "value") if turn.get("from") is not None else ("role", "content")
    if role_key not in turn or content_key not in turn:
        raise SampleError(f"{where} must have role and content, or from and value, but has keys {list(turn)}")
    role = turn[role_key]
    if not isinstance(role, str) or role not in ROLES:
        raise SampleError(f"{where}.{role_key} must be one of {', '.join(ROLES)}, but is {role!r:.60}")
    for key, void in _UNREAD_MESSAGE_KEYS.items():
        if turn.get(key) not in (None, void):
            raise SampleError(
                f"{where}.{key} would be lost, as it is not read; write it into {content_key} or remove it"
            )
    return Message(ROLES[role], _content(turn[content_key], f"{where}.{content_key}"))


def _content(content: Any, where: str) -> str:
    if not isinstance(content, list):
        return _text(content, where)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise SampleError(f'{where} must hold parts {{"type": "text", "text": ...}} only, but holds {part!r:.60}')
    return "".join(_text(part.get("text"), f"{where} part") for part in content)


def _instruction(record: Mapping[str, Any]) -> list[Message]:
    question = _text(record["instruction"], "instruction")
    context, response = _either(record, "input", "context"), _either(record, "output", "response")
    return [Message("user", f"{question}\n\n{context}" if context else question), Message("assistant", response)]


def _either(record: Mapping[str, Any], *names: str) -> str:
    """The text that a record holds under one of two names, "" where it holds none."""
    said = [name for name in names if record.get(name) not in (None, "")]
    if len(said) > 1:
        raise SampleError(f"record has {' and '.join(said)}, of which one would be lost; keep one")
    return _text(record[said[0]], said[0]) if said else ""


def _text(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise SampleError(f"{where} must be a string, but is {text!r:.60}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SampleError(f"{where} holds half of a surrogate pair at character {error.start}; remove it") from error
    return text


def _token_ids(tokens: Any, vocab_size: int) -> npt.NDArray[np.int64]:
    try:
        ids = np.asarray(tokens)
    except ValueError:  # lists of unlike lengths
        ids = np.empty(0, np.object_)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size:
        raise SampleError(f"tokens must be at least one whole number, but is {tokens!r:.60}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise SampleError(f"tokens must be from 0 to {vocab_size - 1}, but are from {ids.min()} to {ids.max()}")
    return ids.astype(np.int64)


def _weight(record: Mapping[str, Any]) -> float:
    weight = record.get("weight")
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= np.finfo(np.float32).max:
        raise SampleError(f"weight must be a finite float32 of at least 0, but is {weight!r:.60}")
    return float(weight)
