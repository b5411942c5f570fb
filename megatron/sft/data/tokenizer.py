"""pure. The tokenizers that `chat_encoder` knows behind one small interface: bytes, numbers, and those of transformers.

megatron-core has classes for all three, too. They only pass calls on, and change what an id means from one version to
the next (0.19 gives NullTokenizer one id less, and begins every text of a Hugging Face tokenizer with its start token),
so ids here come from no megatron-core. Nothing here imports torch: the planner counts tokens with it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.sft.data.chat_encoder import ChatTokens, Message, SampleError, Tokenizer

BYTE_LEVEL_SPECIAL_TOKENS = ("<eod>", "<pad>", "<system>", "<user>", "<assistant>", "<tool>", "<end>", "<unused>")
"""Ids 256 to 263, after the 256 bytes; eight, so that the vocabulary splits evenly over tensor-parallel ranks."""

_GENERATION_MARK = re.compile(r"{%-?\s*generation\s*-?%}")


def build_tokenizer(
    tokenizer_type: str, tokenizer_model: str | None = None, vocab_size: int | None = None
) -> Tokenizer:
    """Build the tokenizer that --tokenizer-type, --tokenizer-model and --vocab-size name; ValueError if they are wrong.

    ByteLevelTokenizer: UTF-8 bytes and 8 special tokens; needs nothing, and takes any text.
    HuggingFaceTokenizer: the directory `tokenizer_model`, with its chat template.
    NullTokenizer: text is token ids below `vocab_size`, separated by single spaces; for benchmarks.
    """
    if tokenizer_type == "ByteLevelTokenizer":
        return _build_byte_level()
    if tokenizer_type == "HuggingFaceTokenizer":
        return _build_hugging_face(tokenizer_model)
    if tokenizer_type == "NullTokenizer":
        return _build_null(vocab_size)
    raise ValueError(
        f"--tokenizer-type must be ByteLevelTokenizer, HuggingFaceTokenizer or NullTokenizer, but is {tokenizer_type!r}"
    )


@dataclass(frozen=True, kw_only=True)
class MarkedTokenizer:
    """A tokenizer without a template: each turn is a start token for its role, its content, an end-of-turn token."""

    text: _Bytes | _Numbers
    """What turns text into ids."""
    vocab_size: int
    eod: int
    pad: int
    start_of_turn: Mapping[str, int]
    """Role -> its start token; a role that is missing here has none."""
    end_of_turn: int
    chat_template: None = None

    def encode(self, text: str) -> list[int]:
        try:
            ids = self.text.encode(text)
        except ValueError as error:
            raise SampleError(f"{self.text.name} cannot read {text!r:.60}: {error}") from error
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise SampleError(f"token ids must be in range({self.vocab_size}), but span {min(ids)} to {max(ids)}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.text.decode(ids)

    def encode_chat(self, messages: Sequence[Message]) -> ChatTokens:
        ids: list[int] = []
        lengths, owners = [], []
        for message in messages:
            if message.role in self.start_of_turn:
                ids.append(self.start_of_turn[message.role])
                lengths.append(1)
                owners.append(False)
            content = self.encode(message.content)
            ids += content
            ids.append(self.end_of_turn)
            lengths.append(len(content) + 1)
            owners.append(message.role == "assistant")
        return ChatTokens(np.array(ids, np.int64), np.repeat(np.array(owners), lengths))


@dataclass(frozen=True, kw_only=True)
class TemplateTokenizer:
    """A Hugging Face tokenizer, whose chat template says what a conversation looks like.

    What the assistant must produce is what the template marks with {% generation %}. Without that mark it is what the
    template adds to the generation prompt of a turn, white space after its end-of-turn token left out; that takes two
    more renderings per assistant turn.
    """

    tokenizer: Any
    """transformers' fast tokenizer."""
    vocab_size: int
    eod: int
    pad: int
    chat_template: str | None

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.convert_tokens_to_ids(self.tokenizer.tokenize(text))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def encode_chat(self, messages: Sequence[Message]) -> ChatTokens:
        if self.chat_template is None:
            raise ValueError(
                "the tokenizer of --tokenizer-model has no chat template, which conversations need; "
                "add chat_template.jinja to its directory"
            )
        if _GENERATION_MARK.search(self.chat_template):
            encoded = self._apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            is_assistant = np.array(encoded["assistant_masks"], np.bool_)
            return ChatTokens(np.array(encoded["input_ids"], np.int64), is_assistant)
        text = self._render(messages)
        spans = [
            self._span(messages, turn, text) for turn, message in enumerate(messages) if message.role == "assistant"
        ]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts, ends = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        is_assistant = np.zeros(len(starts), np.bool_)
        for start, end in spans:
            # A token over the border is the assistant's, who must produce its second half.
            is_assistant |= (starts < end) & (ends > start)
        return ChatTokens(np.array(encoded["input_ids"], np.int64), is_assistant)

    def _span(self, messages: Sequence[Message], turn: int, text: str) -> tuple[int, int]:
        """Return where in `text`, the whole conversation, the assistant's `turn` starts and ends, in characters."""
        if turn == 0:
            raise SampleError("the assistant speaks first, which needs a chat template with {% generation %}")
        prompt = self._render(messages[:turn], add_generation_prompt=True)
        answered = self._render(messages[: turn + 1])
        if not answered.startswith(prompt) or not text.startswith(answered):
            raise ValueError(
                f"the chat template renders the turns before or at number {turn} anew as more follow, so that the "
                "assistant's tokens cannot be told; put {% generation %} ... {% endgeneration %} around them in it"
            )
        # Without an end-of-turn token, only white space can tell that the turn is over.
        has_end_token = answered[len(prompt) :].strip() != messages[turn].content.strip()
        return len(prompt), len(answered.rstrip() if has_end_token else answered)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        return self._apply(messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    def _apply(self, messages: Sequence[Message], **options: Any) -> Any:
        from jinja2 import TemplateError

        conversation = [message._asdict() for message in messages]
        try:
            return self.tokenizer.apply_chat_template(conversation, chat_template=self.chat_template, **options)
        except TemplateError as error:
            raise SampleError(f"the chat template refuses the conversation: {error}") from error


class _Bytes:
    """UTF-8."""

    name = "ByteLevelTokenizer"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(number for number in ids if number < 256).decode(errors="ignore")


class _Numbers:
    """Ids in decimal, a single space between them."""

    name = "NullTokenizer"

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split(" ")]

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
    )


def _build_hugging_face(tokenizer_model: str | None) -> Tokenizer:
    if tokenizer_model is None or not os.path.isdir(tokenizer_model):
        raise ValueError(
            "--tokenizer-model must be the directory of a Hugging Face tokenizer for --tokenizer-type "
            f"HuggingFaceTokenizer, but is {tokenizer_model!r}; download it first"
        )
    with _without_torch():
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ValueError("--tokenizer-type HuggingFaceTokenizer needs transformers; pip install it") from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(tokenizer_model, use_fast=True)
        except Exception as error:  # of many kinds, by what is wrong with the files
            raise ValueError(f"--tokenizer-model {tokenizer_model} cannot be read: {error}") from error
    if not tokenizer.is_fast:
        raise ValueError(f"--tokenizer-model {tokenizer_model} must be a fast tokenizer; save it with tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"--tokenizer-model {tokenizer_model} has no eos_token; set it in tokenizer_config.json")
    return TemplateTokenizer(
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
        eod=tokenizer.eos_token_id,
        pad=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        chat_template=tokenizer.get_chat_template() if tokenizer.chat_template else None,
    )


@contextmanager
def _without_torch() -> Iterator[None]:
    """transformers imports torch, in seconds, wherever it finds it, and works without; what is imported is left."""
    if "torch" in sys.modules:
        yield
        return
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find_spec(name, package)
    verbosity = os.environ.get("TRANSFORMERS_VERBOSITY")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # else it says that torch is missing
    try:
        yield
    finally:
        importlib.util.find_spec = find_spec
        if verbosity is None:
            del os.environ["TRANSFORMERS_VERBOSITY"]
        else:
            os.environ["TRANSFORMERS_VERBOSITY"] = verbosity


def _build_null(vocab_size: int | None) -> Tokenizer:
    if vocab_size is None or vocab_size < 1:
        raise ValueError(f"--vocab-size must be at least 1 for --tokenizer-type NullTokenizer, but is {vocab_size}")
    # One token beyond the ids ends documents and turns, and fills up.
    return MarkedTokenizer(
        text=_Numbers(),
        vocab_size=vocab_size + 1,
        eod=vocab_size,
        pad=vocab_size,
        start_of_turn={},
        end_of_turn=vocab_size,
    )
