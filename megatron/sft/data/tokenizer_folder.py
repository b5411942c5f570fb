"""pure. Reads the tokenizer of a folder with transformers, in the tokens of its tokenizer.json.

AutoTokenizer of transformers 5 takes only vocabulary and merges from that file for many classes
(GPT2Tokenizer, Qwen2Tokenizer, LlamaTokenizer, CohereTokenizer). Normalizer and pre-tokenizer are
those of the class. A tokenizer that splits text otherwise than the first model of its class, as
SmolLM2's and StarCoder's do, then gives other tokens than the model was trained with. The text
decodes alike, so that nothing else shows it.

    "\\n\\n1." with GPT-2's class     \\n\\n  1  .
    by SmolLM2's tokenizer.json       \\n  \\n  1  .

Rules:
- tokenizer.json decides on normalizer, pre-tokenizer, vocabulary, post-processor and decoder.
- tokenizer_config.json adds: tokens that tokenizer.json lacks, the names of special tokens,
  `add_bos_token: true`, `split_special_tokens`, `fix_mistral_regex`, and `add_prefix_space` where
  transformers follows it.
- A folder without tokenizer.json is read as transformers reads it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.packing.user_files import read_json

PROBE = (
    "\n\n1. One\n2. Two 3,141.59 and 20260101",
    "def f(x):\n    if x:\n\t\treturn  x+1  # (ok)\r\n\r\n\n\n\n",
    "你好\uff0c世界。2026年 こんにちは カタカナ 안녕하세요",
    "cafe\u0301 naïve ﬁ Ａ½① Å \u1e9b\u0323",
    "I'LL don't WE'RE it's 'twas camelCase HTTPServer snake_case",
    "  leads, trails  ",
    "tab\there \u00a0\u2003wide\u200b👩\u200d👩\u200d👧 😀!?",
    "Привет مرحبا हिन्दी ไทย",
    "https://a.b/c?d=e&f=1%20 <p class='x'>{}[];--=>!= ...",
)
"""Texts that tokenizers split in different ways."""
_MAX_PROBED_TOKENS = 300
GENERIC_CLASS = "PreTrainedTokenizerFast"
"""Class that takes all of tokenizer.json, in each version of transformers."""
_MODEL_FLAGS = (
    *("dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback"),
    *("ignore_merges", "unk_token"),
)


@dataclass(frozen=True, kw_only=True)
class FolderTokenizer:
    """A tokenizer of transformers, and what a reader of its folder must know."""

    tokenizer: Any
    """transformers' tokenizer."""
    vocabulary: Mapping[str, int]
    """Token -> id. Tokens that transformers adds for a class (`<mask>` for Gemma) are among them,
    although no text is encoded in them.
    """
    source: str
    """Files that the tokens are read from."""
    rebuilt_as: str | None = None
    """Class of transformers that reads the folder in other tokens; None if AutoTokenizer reads it
    in these.
    """
    is_class_forced: bool = False
    """True if AutoTokenizer takes `rebuilt_as` whatever tokenizer_config.json says."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Entries of tokenizer_config.json that make AutoTokenizer read an exported folder in these
    tokens.
    """
    post_processor: Mapping[str, Any] | None = None
    """Post-processor that begins texts with the start token, for the tokenizer.json of an exported
    folder; None if it is the one of the file.
    """

    @property
    def num_tokens(self) -> int:
        """Number of tokens that text is encoded in."""
        return len(self.tokenizer)

    @cached_property
    def note(self) -> str:
        """Returns one line on the tokens, for the log."""
        parts = [f"tokens are those of {self.source} ({self.num_tokens:,})"]
        if self.post_processor is not None:
            parts.append(f"a text begins with {self.tokenizer.bos_token}, by add_bos_token")
        if self.rebuilt_as is not None:
            import transformers

            version = transformers.__version__
            parts.append(
                f"AutoTokenizer of transformers {version} reads other tokens, by its class "
                f"{self.rebuilt_as}, "
                + (
                    "for each folder of this model_type: where the model is served, read its "
                    f"tokenizer with {GENERIC_CLASS}.from_pretrained"
                    if self.is_class_forced
                    else f"and those of tokenizer.json where tokenizer_class is {GENERIC_CLASS}, "
                    "as it is in exports"
                )
            )
        return "; ".join(parts)


def read_folder_tokenizer(folder: str) -> FolderTokenizer:
    """Reads the tokenizer of a folder. Raises ImportError without transformers, ValueError if its
    tokens cannot be those of its tokenizer.json, and whatever transformers raises.
    """
    with _without_torch():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        # trust_remote_code=False, because the default asks on a terminal whether to run the
        # folder's code.
        tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False)
        file, settings = Path(folder) / "tokenizer.json", _settings(folder)
        if not tokenizer.is_fast or not file.is_file() or settings.get("fix_mistral_regex"):
            names = sorted(set(tokenizer.vocab_files_names.values()) | {file.name})
            source = [name for name in names if (Path(folder) / name).is_file()]
            return FolderTokenizer(
                tokenizer=tokenizer,
                vocabulary=tokenizer.get_vocab(),
                source=f"{', '.join(source) or folder}, as transformers reads it",
            )

        def read_as_file() -> Any:
            return PreTrainedTokenizerFast.from_pretrained(folder)

        return _with_tokens_of_file(tokenizer, read_as_file, file, settings)


def _settings(folder: str) -> dict[str, Any]:
    path = Path(folder) / "tokenizer_config.json"
    try:
        settings = read_json(path, any_integer=True) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return settings if isinstance(settings, dict) else {}


def _with_tokens_of_file(
    by_class: Any, read_as_file: Callable[[], Any], path: Path, settings: Mapping[str, Any]
) -> FolderTokenizer:
    """Returns the tokenizer with all parts of tokenizer.json.

    Args:
        by_class: AutoTokenizer's.
        read_as_file: function that reads the folder as `GENERIC_CLASS`.
        path: tokenizer.json.
        settings: content of tokenizer_config.json.
    """
    from tokenizers import Tokenizer

    file = Tokenizer.from_file(str(path))
    file.no_truncation()
    file.no_padding()
    file.encode_special_tokens = by_class.backend_tokenizer.encode_special_tokens
    if _prefixed(file, settings) == _state(by_class.backend_tokenizer.pre_tokenizer):
        file.pre_tokenizer = by_class.backend_tokenizer.pre_tokenizer
    used, names = by_class, by_class.get_vocab()
    is_same = names == file.get_vocab() and _added(by_class.backend_tokenizer) == _added(file)
    if not is_same or _parts(by_class.backend_tokenizer) != _parts(file):
        used = _with_names(read_as_file(), by_class)
    backend = used.backend_tokenizer
    # transformers 4 changes the pre-tokenizer of GENERIC_CLASS, and the post-processor of others.
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if _state(getattr(backend, part)) != _state(getattr(file, part)):
            setattr(backend, part, getattr(file, part))
    _prove(backend, file, path)
    is_rebuilt = used is not by_class and (
        _parts(by_class.backend_tokenizer) != _parts(backend)
        or _first_difference(by_class.backend_tokenizer, file) is not None
    )
    tokens = used.get_vocab()
    return FolderTokenizer(
        tokenizer=used,
        vocabulary=names if tokens.items() <= names.items() else tokens,
        source=path.name,
        rebuilt_as=type(by_class).__name__ if is_rebuilt else None,
        is_class_forced=is_rebuilt and _is_class_forced(path.parent, settings),
        settings=_settings_to_write(used, settings) if is_rebuilt else {},
        post_processor=_begin_with_start(used, settings),
    )


def _state(part: Any) -> Any:
    """Returns a part of a tokenizer as JSON would hold it, without what concerns offsets only."""
    return None if part is None else _without_offsets(json.loads(part.__getstate__()))


def _without_offsets(state: Any) -> Any:
    if isinstance(state, list):
        return [_without_offsets(each) for each in state]
    if not isinstance(state, dict):
        return state
    if state in (
        {"type": "Sequence", "normalizers": []},
        {"type": "Sequence", "pretokenizers": []},
    ):
        return None
    return {key: _without_offsets(value) for key, value in state.items() if key != "trim_offsets"}


def _parts(backend: Any) -> dict[str, Any]:
    """Returns what decides on the tokens of a text, besides the vocabulary."""
    model = backend.model
    flags = {name: getattr(model, name, None) or None for name in _MODEL_FLAGS}
    if flags["byte_fallback"]:  # then no character is unknown
        del flags["unk_token"]
    parts = {name: _state(getattr(backend, name)) for name in ("normalizer", "pre_tokenizer")}
    return {"type": type(model).__name__, **flags, **parts}


def _added(backend: Any) -> dict[int, Any]:
    """Returns the added tokens by id, with the white space that they take and the like."""
    tokens = backend.get_added_tokens_decoder()
    return {number: token.__getstate__() for number, token in tokens.items()}


def _prefixed(file: Any, settings: Mapping[str, Any]) -> Any:
    """Returns the state of the file's pre-tokenizer with `add_prefix_space` of
    tokenizer_config.json, which transformers follows for a pre-tokenizer of one part.
    """
    state = _state(file.pre_tokenizer)
    wanted = settings.get("add_prefix_space")
    if isinstance(wanted, bool) and isinstance(state, dict) and "add_prefix_space" in state:
        return state | {"add_prefix_space": wanted}
    return state


def _with_names(tokenizer: Any, by_class: Any) -> Any:
    """Returns `tokenizer` with the special tokens of `by_class` that it has an id for. Others are
    defaults of the class that the model has never seen, but text must end in a token.
    """
    known = tokenizer.get_vocab()
    for name, token in by_class.special_tokens_map.items():
        if isinstance(token, str) and getattr(tokenizer, name, None) is None:
            if token in known:
                setattr(tokenizer, name, token)
            elif name == "eos_token":
                tokenizer.add_special_tokens({name: token})
    return tokenizer


def _prove(backend: Any, file: Any, path: Path) -> None:
    if getattr(file.model, "dropout", None):  # the tokens are random
        return
    text = _first_difference(backend, file)
    if text is not None:
        raise ValueError(
            f"transformers reads {path} in other tokens than tokenizers does: {text!r} is "
            f"{_encode(backend, text)} and {_encode(file, text)}; save the tokenizer again with "
            "transformers"
        )


def _first_difference(one: Any, other: Any) -> str | None:
    """Returns a text of the probe that two tokenizers encode in different ids; None if there is
    none. Tokens that only one of them has are left out.
    """
    alone = set(one.get_vocab()) ^ set(other.get_vocab())
    tokens = [each.content for _, each in sorted(other.get_added_tokens_decoder().items())]
    half = _MAX_PROBED_TOKENS // 2
    chosen = tokens if len(tokens) <= 2 * half else [*tokens[:half], *tokens[-half:]]
    for text in (*PROBE, *(f"a{token}b {token} c\n{token}\n\nd" for token in chosen)):
        if any(token in text for token in alone):
            continue
        if _encode(one, text) != _encode(other, text):
            return text
    return None


def _encode(backend: Any, text: str) -> list[int] | None:
    """Returns ids, or None if the tokenizer fails on the text."""
    try:
        return backend.encode(text, add_special_tokens=False).ids
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        return None


def _is_class_forced(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Returns whether AutoTokenizer takes another class than the one in tokenizer_config.json. It
    has a list of models whose released files name a wrong one.
    """
    from transformers.models.auto import tokenization_auto as auto

    path = folder / "config.json"
    config = read_json(path, any_integer=True) if path.is_file() else {}
    kind = config.get("model_type")
    forced = getattr(auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", ())
    return kind in forced or settings.get("tokenizer_class") == GENERIC_CLASS


def _settings_to_write(tokenizer: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    # The names of special tokens may be defaults of the class that the folder has no more.
    names = {
        name: token
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str) and settings.get(name) is None
    }
    return {"tokenizer_class": GENERIC_CLASS, **names}


def _begin_with_start(tokenizer: Any, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Makes texts begin with the start token if tokenizer_config.json says so and the file's
    post-processor does not. Returns the new post-processor; None if it stays.
    """
    start, number = tokenizer.bos_token, tokenizer.bos_token_id
    if settings.get("add_bos_token") is not True or start is None or number is None:
        return None
    backend = tokenizer.backend_tokenizer
    if number in (backend.encode("a").ids or [number])[:1]:
        return None
    from tokenizers import processors

    begin = processors.TemplateProcessing(
        single=[start, "$A"], pair=[start, "$A", start, "$B:1"], special_tokens=[(start, number)]
    )
    held = backend.post_processor
    backend.post_processor = begin if held is None else processors.Sequence([held, begin])
    return json.loads(backend.post_processor.__getstate__())


def is_panic(error: BaseException) -> bool:
    """Returns whether an error is a failed assertion in Rust code, which is no Exception."""
    return type(error).__name__ == "PanicException"


@contextmanager
def _without_torch() -> Iterator[None]:
    """Hides torch from transformers, which works without it, and would take seconds to import it.
    No effect if torch is imported already.
    """
    if "torch" in sys.modules:
        yield
        return
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: (
        None if name == "torch" else find_spec(name, package)
    )
    verbosity = os.environ.get("TRANSFORMERS_VERBOSITY")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # without its warning that torch is missing
    try:
        yield
    finally:
        importlib.util.find_spec = find_spec
        if verbosity is None:
            del os.environ["TRANSFORMERS_VERBOSITY"]
        else:
            os.environ["TRANSFORMERS_VERBOSITY"] = verbosity
