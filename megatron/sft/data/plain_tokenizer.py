"""pure. The tokenizers of `tokenizer` without megatron-core and torch: for counting tokens where nothing is trained.

Invariant, tested: the same ids as `build_tokenizer` gives.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.sft.data.chat_encoder import Tokenizer
from megatron.sft.data.tokenizer import BYTE_LEVEL_SPECIAL_TOKENS, MarkedTokenizer, TemplateTokenizer


def build_plain_tokenizer(tokenizer_type: str, tokenizer_model: str | None, vocab_size: int | None) -> Tokenizer:
    """The tokenizer that --tokenizer-type, --tokenizer-model and --vocab-size name; ValueError if they are wrong."""
    if tokenizer_type == "ByteLevelTokenizer":
        ids = {token: 256 + place for place, token in enumerate(BYTE_LEVEL_SPECIAL_TOKENS)}
        return MarkedTokenizer(
            wrapped=_Bytes(),
            vocab_size=256 + len(ids),
            eod=ids["<eod>"],
            pad=ids["<pad>"],
            start_of_turn={role: ids[f"<{role}>"] for role in ("system", "user", "assistant", "tool")},
            end_of_turn=ids["<end>"],
        )
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None:
            raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size")
        return MarkedTokenizer(
            wrapped=_Numbers(),
            vocab_size=vocab_size + 1,
            eod=vocab_size,
            pad=vocab_size,
            start_of_turn={},
            end_of_turn=vocab_size,
        )
    return _hugging_face(tokenizer_model)


class _Bytes:
    def text_to_ids(self, text: str) -> list[int]:
        return list(text.encode())


class _Numbers:
    def text_to_ids(self, text: str) -> list[int]:
        return [int(word) for word in text.split(" ")]


class _HuggingFace:
    """What `TemplateTokenizer` asks of megatron-core's, of one from transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def text_to_ids(self, text: str) -> list[int]:
        return self.tokenizer.convert_tokens_to_ids(self.tokenizer.tokenize(text))

    def apply_chat_template(self, conversation: Any, chat_template: str, **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(conversation=conversation, chat_template=chat_template, **options)


def _hugging_face(tokenizer_model: str | None) -> Tokenizer:
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
        wrapped=_HuggingFace(tokenizer),
        vocab_size=len(tokenizer),
        eod=tokenizer.eos_token_id,
        pad=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        chat_template=tokenizer.get_chat_template() if tokenizer.chat_template else None,
    )


@contextmanager
def _without_torch() -> Iterator[None]:
    """transformers imports torch, in seconds, wherever it finds it, and works without."""
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
