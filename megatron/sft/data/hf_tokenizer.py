"""pure. A tokenizer of transformers with its chat template: turns text and conversations into
tokens, and marks those that are trained.
"""

from __future__ import annotations

import hashlib
import logging
import os
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.packing.quoting import shortened, shown
from megatron.packing.user_files import Kind, check_types, read_json, read_text
from megatron.sft.base_exceptions import describe_failure, is_failure
from megatron.sft.data.chat_encoder import ChatTokens, Tokenizer
from megatron.sft.data.records.content import Conversation, Passage
from megatron.sft.data.records.turns import Contexts
from megatron.sft.data.records.values import SampleError
from megatron.sft.data.templates.chat_template import ChatTemplate, Span, Turn
from megatron.sft.data.templates.named import (
    DEFAULT,
    TEMPLATE_FILES,
    NamedTemplates,
    note_on_templates,
    read_templates,
)
from megatron.sft.data.text_segments import TextSegments, read_segments
from megatron.sft.data.token_bytes import TokenBytes, read_token_bytes
from megatron.sft.data.tokenizer_folder import FolderTokenizer, read_folder_tokenizer
from megatron.sft.options.chat_template import AS_RELEASED, TemplateChoice

_log = logging.getLogger("megatron.sft.data")
_MANY_TOKENS = 10_000
_KINDS: Mapping[Kind, str] = {
    str: "padding_side truncation_side tokenizer_class",
    float: "model_max_length",
    bool: "split_special_tokens",
    (str, dict): "bos_token eos_token pad_token unk_token sep_token cls_token mask_token",
    dict: "added_tokens_decoder",
    list: "model_input_names",
    (list, dict): "auto_map additional_special_tokens extra_special_tokens",
}
"""Types of the values in tokenizer_config.json that transformers fails over."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceTokenizer:
    """transformers' fast tokenizer behind the interface `Tokenizer`."""

    tokenizer: Any
    """transformers' fast tokenizer."""
    files: FolderTokenizer
    """Facts about the folder that it was read from."""
    eod: int
    pad: int
    templates: NamedTemplates
    """Templates that `encode_chat` follows."""

    @cached_property
    def vocab_size(self) -> int:
        # The number of tokens is less if there are ids without a token.
        return max(self.files.vocabulary.values()) + 1

    @property
    def note(self) -> str:
        return self.files.note

    @property
    def contexts(self) -> Contexts:
        return self.templates.contexts

    @property
    def chat_template(self) -> str | None:
        template = self.templates.by_name.get(DEFAULT)
        return None if template is None else template.source

    @cached_property
    def _backend(self) -> Any:
        """The tokenizer of `tokenizers`. transformers' own call sets these three each time, and
        takes a tenth as long again to fill its BatchEncoding.
        """
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = self.tokenizer.split_special_tokens
        return backend

    @cached_property
    def _token_bytes(self) -> TokenBytes | None:
        return read_token_bytes(self._backend)

    @cached_property
    def _segments(self) -> TextSegments | None:
        return read_segments(self._backend)

    def forget_texts(self) -> None:
        """Empties the memory of texts that were tokenized of late."""
        if self._segments is not None:
            self._segments.forget()

    @cached_property
    def fingerprint(self) -> str:
        tokens = sorted(self.files.vocabulary.items(), key=lambda item: (item[1], item[0]))
        return hashlib.sha256(repr(tokens).encode(errors="surrogatepass")).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.convert_tokens_to_ids(self.tokenizer.tokenize(text))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def show(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def encode_passage(self, passage: Passage) -> ChatTokens:
        text = passage.prompt + passage.completion
        bos = self.tokenizer.bos_token
        tokens = self._tokens(
            text,
            [Span(len(passage.prompt), len(text), 1.0)],
            # A text that a template has rendered begins with it.
            add_special_tokens=not (bos and text.startswith(bos)),
        )
        # The tokenizer's post-processor may have added the end, which then only becomes trained.
        if len(tokens.ids) and tokens.ids[-1] == self.eod:
            tokens.weights[-1] = 1.0
            return tokens
        return ChatTokens(
            np.append(tokens.ids, np.int32(self.eod)), np.append(tokens.weights, np.float32(1))
        )

    def encode_chat(self, conversation: Conversation) -> ChatTokens:
        rendering = self.templates.select(conversation).render(conversation)
        return self._tokens(*rendering, add_special_tokens=False)

    def encode_turns(self, conversation: Conversation) -> list[ChatTokens]:
        template = self.templates.select(conversation)
        if template.contexts == "kept":
            return [self.encode_chat(conversation)]
        return [self._turn(turn) for turn in template.render_turns(conversation)]

    def _turn(self, turn: Turn) -> ChatTokens:
        """Returns the tokens of a context and its answer. The context has the tokens that the model
        is prompted with, so that training and generation begin alike.

        Tokenizers may merge characters over the border: "a:" and " b" give [a][:][ b], but "a: b"
        may give [a][: b]. Then context and answer are tokenized apart.
        """
        context = self._ids(turn.prompt)
        whole = self._ids(turn.prompt + turn.answer)
        if whole[: len(context)] != context:
            whole = context + self._ids(turn.answer)
        weights = np.zeros(len(whole), np.float32)
        weights[len(context) :] = turn.weight
        return ChatTokens(np.array(whole, np.int32), weights)

    def _ids(self, text: str) -> list[int]:
        return self._tokens(text, [], add_special_tokens=False).ids.tolist()

    def _plain_ids(self, text: str) -> npt.NDArray[np.int32]:
        """Returns the ids of a text, found without their characters."""
        if self._segments is not None:
            return self._segments.ids(text)
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return np.fromiter(encoding.ids, np.int32)

    def _tokens(self, text: str, spans: Sequence[Span], *, add_special_tokens: bool) -> ChatTokens:
        try:
            found = None if add_special_tokens else self._fast_tokens(text, spans)
            if found is not None:
                return found
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        # Of many kinds: a vocabulary without an unknown token, a pattern that gives up on millions
        # of spaces. A panic of Rust is no Exception.
        except BaseException as error:
            if not is_failure(error):
                raise
            raise SampleError(f"the tokenizer fails on the text: {error!s:.300}") from None
        ids = np.array(encoding.ids, np.int32)
        weights = np.zeros(len(ids), np.float32)
        if spans:
            places = _Places(encoding) if len(ids) > _MANY_TOKENS else encoding.offsets
        for span in spans:
            # A token that begins before the span and ends within it is trained: the assistant must
            # produce its second half.
            first = bisect_right(places, span.start, key=itemgetter(1))
            last = bisect_left(places, span.end, key=itemgetter(0))
            weights[first:last] = span.weight
        return ChatTokens(ids, weights)

    def _fast_tokens(self, text: str, spans: Sequence[Span]) -> ChatTokens | None:
        """Returns the tokens of a text, found without their characters; None if it takes them."""
        if spans and self._token_bytes is None:
            return None
        ids = self._plain_ids(text)
        weights = np.zeros(len(ids), np.float32)
        if self._token_bytes is None or not spans:
            return ChatTokens(ids, weights)
        found = self._token_bytes.find_tokens(text, ids, [span[:2] for span in spans])
        if found is None:
            return None
        for (first, last), span in zip(found, spans):
            weights[first:last] = span.weight
        return ChatTokens(ids, weights)


class _Places(Sequence[tuple[int, int]]):
    """Characters [start, end) of each token in the text; (0, 0) for tokens that were added. They
    are read one by one: the list of all, `encoding.offsets`, takes 200 bytes a token.
    """

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding

    def __len__(self) -> int:
        return len(self._encoding)

    def __getitem__(self, token: Any) -> Any:
        return self._encoding.token_to_chars(token) or (0, 0)


def build_hugging_face(
    tokenizer_model: str | None,
    choice: TemplateChoice = AS_RELEASED,
    flag: str = "--tokenizer-model",
) -> HuggingFaceTokenizer:
    """Reads a tokenizer from its folder, with the chosen chat template. Raises ValueError if one of
    them cannot be read.

    flag: option that names the folder, for messages; empty for an argument.
    """
    if tokenizer_model is None or not os.path.isdir(tokenizer_model):
        raise ValueError(
            "--tokenizer-model must be the directory of a Hugging Face tokenizer for "
            f"--tokenizer-type HuggingFaceTokenizer, but is "
            f"{shown(tokenizer_model)}; download it first"
        )
    check_tokenizer_types(Path(tokenizer_model))
    # Texts are encoded one by one, in workers of their own: threads would only wait for work.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    named = f"{flag} {tokenizer_model}".lstrip()
    files = _read_folder(tokenizer_model, named)
    tokenizer = files.tokenizer
    if not tokenizer.is_fast:
        raise ValueError(f"{named} must be a fast tokenizer; save it with tokenizer.json")
    if is_without_vocabulary(tokenizer):
        raise ValueError(
            f"{named} has an empty vocabulary, special tokens aside; "
            "download its tokenizer.json, or vocab.json and merges.txt, or tokenizer.model, too"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{named} has no eos_token; set it in tokenizer_config.json")
    return HuggingFaceTokenizer(
        tokenizer=tokenizer,
        files=files,
        eod=tokenizer.eos_token_id,
        pad=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        templates=build_templates(tokenizer, tokenizer_model, choice),
    )


def is_without_vocabulary(tokenizer: Any) -> bool:
    """Returns whether a tokenizer has special tokens alone. transformers 5 makes one of a
    config.json, which turns any text into no token, or into unknown ones.
    """
    return set(tokenizer.get_vocab().values()) <= tokenizer.added_tokens_decoder.keys()


def check_tokenizer_types(folder: Path) -> None:
    """Raises ValueError for a value of a wrong type in tokenizer_config.json, of which transformers
    says neither file nor key, or nothing before the first text.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    try:
        values = read_json(path, any_integer=True)
    except ValueError:  # transformers says why
        return
    check_types(values, _KINDS, path, any_integer=True)  # an endless length is 10**30
    templates = values.get("chat_template")
    has_files = any((folder / name).exists() for name in TEMPLATE_FILES)  # they go first
    are_sound = not isinstance(templates, list) or all(map(_is_named_template, templates))
    if not are_sound and not has_files:
        raise ValueError(
            f"{path} has a list chat_template, but not of objects with a name and a template, both "
            "text; correct it"
        )


def _is_named_template(entry: object) -> bool:
    keys = ("name", "template")
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in keys)


def note_on_rows(tokenizer: Tokenizer, num_rows: object) -> str:
    """Returns what the log adds about tokens without a row in the model; "" if all have one."""
    if not isinstance(num_rows, int) or tokenizer.vocab_size <= num_rows:
        return ""
    return f"; ids from {num_rows} on have no row in the model: a sample that holds one is refused"


def _read_folder(folder: str, named: str) -> FolderTokenizer:
    try:
        return read_folder_tokenizer(folder)
    except ImportError as error:
        raise ValueError(
            "--tokenizer-type HuggingFaceTokenizer needs transformers; pip install it"
        ) from error
    # Of many kinds, by the fault of the files. A panic of Rust is no Exception.
    except BaseException as error:
        if not is_failure(error):
            raise
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{named} needs Python code of its own (auto_map), which is "
                "never run; pass a folder with a tokenizer.json that transformers reads by itself"
            ) from None
        # transformers reads both files, and says of one value only its key.
        of_config = "/config.json" * ("alidation error for" in str(error))
        raise ValueError(f"{named}{of_config} cannot be read: {describe_failure(error)}") from error


def build_templates(tokenizer: Any, folder: str, choice: TemplateChoice) -> NamedTemplates:
    """Returns the chosen template, or those of the tokenizer's folder. Logs the choice among
    several.
    """
    if choice.file is not None:
        try:
            sources = {DEFAULT: read_text(choice.file)}
        except ValueError as error:
            raise ValueError(f"--chat-template {choice.file} cannot be read: {error}") from None
    else:
        sources = read_templates(tokenizer.chat_template, folder)
    tokens = {
        name: token
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }
    templates = NamedTemplates(
        {
            name: ChatTemplate(source, tokens, choice.today, choice.variables)
            for name, source in sources.items()
        }
    )
    if choice.file is None and (
        note := note_on_templates(templates, tokenizer.chat_template, folder)
    ):
        _log.warning("%s", shortened(note))
    return templates
