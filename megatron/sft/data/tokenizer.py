"""pure. Tokenizers behind one small interface: UTF-8 bytes, numbers, and those of transformers
(`hf_tokenizer`).

megatron-core has classes for all three, too, but they are not used: the meaning of an id changes
between its versions. (0.19 gives NullTokenizer one id less, and begins every text of a Hugging Face
tokenizer with its start token.) Nothing here imports torch, so that the planner can count tokens
within milliseconds of its start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
import numpy.typing as npt

from megatron.packing.quoting import shown
from megatron.sft.data.chat_encoder import ChatTokens, Tokenizer
from megatron.sft.data.records.content import Conversation, Passage
from megatron.sft.data.records.values import SampleError
from megatron.sft.options.chat_template import AS_RELEASED, TemplateChoice

BYTE_LEVEL_SPECIAL_TOKENS = (
    "<eod>",
    "<pad>",
    "<system>",
    "<user>",
    "<assistant>",
    "<tool>",
    "<end>",
    "<unused>",
)
"""Names of the ids 256 to 263, which follow the 256 bytes. There are eight of them, so that the
vocabulary splits evenly over tensor-parallel ranks.
"""

_NO_IDS = np.empty(0, np.uint8)


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
    template: TemplateChoice = AS_RELEASED,
) -> Tokenizer:
    """Builds the tokenizer of --tokenizer-type, --tokenizer-model and --vocab-size. Raises
    ValueError if one of them is wrong.

        ByteLevelTokenizer      UTF-8 bytes and 8 special tokens; needs no files, takes any text
        HuggingFaceTokenizer    the folder `tokenizer_model`, with its chat template or `template`
        NullTokenizer           text is ids below `vocab_size`, "17 4 99"; for benchmarks
    """
    if tokenizer_type == "ByteLevelTokenizer":
        return _build_byte_level()
    if tokenizer_type == "HuggingFaceTokenizer":
        from megatron.sft.data.hf_tokenizer import build_hugging_face

        return build_hugging_face(tokenizer_model, template)
    if tokenizer_type == "NullTokenizer":
        return _build_null(vocab_size)
    raise ValueError(
        "--tokenizer-type must be ByteLevelTokenizer, HuggingFaceTokenizer or NullTokenizer, but "
        f"is {shown(tokenizer_type)}"
    )


@dataclass(frozen=True, kw_only=True)
class MarkedTokenizer:
    """A tokenizer with a built-in chat format: each turn is the start token of its role, its
    content, and an end-of-turn token.

        user: hi, assistant: yo  ->  <user> h i <end> <assistant> y o <end>
    """

    text: _Bytes | _Numbers
    """Codec between text and ids."""
    vocab_size: int
    eod: int
    pad: int
    start_of_turn: Mapping[str, int]
    """Role -> its start token. Roles that are not in it have none."""
    end_of_turn: int
    special: Mapping[int, str]
    """Id of a special token -> its name."""
    chat_template: None = None
    note: None = None
    contexts: Literal["kept"] = "kept"

    @property
    def fingerprint(self) -> str:
        return f"{self.text.name} {self.vocab_size}"

    def encode(self, text: str) -> list[int]:
        return self._ids(text).tolist()

    def _ids(self, text: str) -> npt.NDArray[np.integer]:
        try:
            ids = self.text.encode(text)
        except (ValueError, OverflowError) as error:
            raise SampleError(f"{self.text.name} cannot read {shown(text)}: {error}") from error
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise SampleError(
                f"token ids must be in range({self.vocab_size}), but span {ids.min()} to "
                f"{ids.max()}"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.text.decode(ids)

    def show(self, ids: Sequence[int]) -> str:
        runs = [(name, list(run)) for name, run in groupby(ids, key=self.special.get)]
        return "".join(
            self.text.decode(run) if name is None else name * len(run) for name, run in runs
        )

    def encode_passage(self, passage: Passage) -> ChatTokens:
        prompt, completion = (self._ids(text) if text else _NO_IDS for text in passage)
        weights = np.repeat(np.array([0, 1], np.float32), [len(prompt), len(completion) + 1])
        ids = np.concatenate((prompt, completion, [self.eod]), dtype=np.int32)
        return ChatTokens(ids, weights)

    def encode_chat(self, conversation: Conversation) -> ChatTokens:
        if conversation.tools:
            raise SampleError(
                f"tools would be lost, as {self.text.name} has no chat template that writes them"
            )
        ids: list[npt.ArrayLike] = []
        lengths, weights = [], []
        for number, message in enumerate(conversation.messages):
            for field in sorted({"tool_calls", "reasoning_content"} & message.fields.keys()):
                raise SampleError(
                    f"{field} of message {number} would be lost, as {self.text.name} has no chat "
                    "template that writes it; write it into the content"
                )
            if message.role in self.start_of_turn:
                ids.append([self.start_of_turn[message.role]])
                lengths.append(1)
                weights.append(0.0)
            content = self._ids(message.content)
            ids += [content, [self.end_of_turn]]
            lengths.append(len(content) + 1)
            weights.append(message.weight if message.role == "assistant" else 0.0)
        return ChatTokens(
            np.concatenate(ids, dtype=np.int32),
            np.repeat(np.array(weights, np.float32), lengths),
        )

    def encode_turns(self, conversation: Conversation) -> list[ChatTokens]:
        return [self.encode_chat(conversation)]


class _Bytes:
    """UTF-8."""

    name = "ByteLevelTokenizer"

    def encode(self, text: str) -> npt.NDArray[np.uint8]:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(number for number in ids if number < 256).decode(errors="ignore")


class _Numbers:
    """Ids in decimal, a single space between them."""

    name = "NullTokenizer"

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        return np.array([int(word) for word in text.split(" ")], np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def _build_byte_level() -> Tokenizer:
    ids = {token: 256 + place for place, token in enumerate(BYTE_LEVEL_SPECIAL_TOKENS)}
    return MarkedTokenizer(
        text=_Bytes(),
        vocab_size=256 + len(ids),
        eod=ids["<eod>"],
        pad=ids["<pad>"],
        start_of_turn={role: ids[f"<{role}>"] for role in ("system", "user", "assistant", "tool")},
        end_of_turn=ids["<end>"],
        special={number: token for token, number in ids.items()},
    )


def _build_null(vocab_size: int | None) -> Tokenizer:
    if vocab_size is None or vocab_size < 1:
        raise ValueError(
            "--vocab-size must be at least 1 for --tokenizer-type NullTokenizer, but is "
            f"{vocab_size}"
        )
    # One id above those of the text ends documents and turns, and is the padding.
    return MarkedTokenizer(
        text=_Numbers(),
        vocab_size=vocab_size + 1,
        eod=vocab_size,
        pad=vocab_size,
        start_of_turn={},
        end_of_turn=vocab_size,
        special={vocab_size: "<end>"},
    )
