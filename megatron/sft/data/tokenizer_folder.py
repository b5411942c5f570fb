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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.packing.user_files import read_json
from megatron.sft.data.tokenizer_probe import encode_alike, model_flags, part_state, parts

GENERIC_CLASS = "PreTrainedTokenizerFast"
"""Class that takes all of tokenizer.json, in each version of transformers."""


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
        said = [f"tokens are those of {self.source} ({self.num_tokens:,})"]
        if self.post_processor is not None:
            said.append(f"a text begins with {self.tokenizer.bos_token}, by add_bos_token")
        if self.rebuilt_as is not None:
            import transformers

            said.append(
                f"AutoTokenizer of transformers {transformers.__version__} reads other tokens, by "
                f"its class {self.rebuilt_as}, {self._way_out()}"
            )
        return "; ".join(said)

    def _way_out(self) -> str:
        if self.is_class_forced:
            return (
                "for each folder of this model_type: where the model is served, read its tokenizer "
                f"with {GENERIC_CLASS}.from_pretrained"
            )
        return f"unless tokenizer_class is {GENERIC_CLASS}, as it is in exports"


def read_folder_tokenizer(folder: str) -> FolderTokenizer:
    """Reads the tokenizer of a folder. Raises ImportError without transformers, ValueError if its
    tokens cannot be those of its tokenizer.json, and whatever transformers raises.
    """
    with _without_torch():
        from transformers import AutoTokenizer

        # trust_remote_code=False, because the default asks on a terminal whether to run the
        # folder's code.
        tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False)
    file, settings = Path(folder) / "tokenizer.json", _settings(folder)
    if tokenizer.is_fast and file.is_file() and not settings.get("fix_mistral_regex"):
        return _with_tokens_of_file(tokenizer, file, settings)
    names = sorted(set(tokenizer.vocab_files_names.values()) | {file.name})
    read = [name for name in names if (Path(folder) / name).is_file()]
    return FolderTokenizer(
        tokenizer=tokenizer,
        vocabulary=tokenizer.get_vocab(),
        source=f"{', '.join(read) or folder}, as transformers reads it",
    )


def _settings(folder: str) -> dict[str, Any]:
    path = Path(folder) / "tokenizer_config.json"
    try:
        settings = read_json(path, any_integer=True) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return settings if isinstance(settings, dict) else {}


def _with_tokens_of_file(
    tokenizer: Any, path: Path, settings: Mapping[str, Any]
) -> FolderTokenizer:
    """Returns AutoTokenizer's `tokenizer`, whose parts become those of tokenizer.json if they
    differ.

    Args:
        tokenizer: AutoTokenizer's, changed in place.
        path: tokenizer.json.
        settings: content of tokenizer_config.json.
    """
    from tokenizers import Tokenizer

    by_class, file = tokenizer.backend_tokenizer, Tokenizer.from_file(str(path))
    for backend in (by_class, file):  # as in each call of transformers that does not ask for them
        backend.no_truncation()
        backend.no_padding()
    file.encode_special_tokens = by_class.encode_special_tokens
    if _prefixed(file, settings) == part_state(by_class.pre_tokenizer):
        file.pre_tokenizer = by_class.pre_tokenizer
    names, tokens = tokenizer.get_vocab(), file.get_vocab()
    reads_otherwise = model_flags(by_class.model) != model_flags(file.model) or not encode_alike(
        by_class, file, tuple(names.keys() ^ tokens.keys())
    )
    if reads_otherwise or names != tokens or parts(by_class) != parts(file):
        _add_tokens(file, tokenizer, _named_tokens(path.parent, settings) - tokens.keys())
        tokenizer._tokenizer = file  # has no setter, in any version of transformers
        tokens = file.get_vocab()
        for name, token in tokenizer.special_tokens_map.items():
            if isinstance(token, str) and token not in tokens:
                setattr(tokenizer, name, None)  # the class's default, which the model never saw
    for part in ("decoder", "post_processor"):
        if part_state(getattr(by_class, part)) != part_state(getattr(file, part)):
            setattr(tokenizer.backend_tokenizer, part, getattr(file, part))
    return FolderTokenizer(
        tokenizer=tokenizer,
        vocabulary=names if tokens.items() <= names.items() else tokens,
        source=path.name,
        rebuilt_as=type(tokenizer).__name__ if reads_otherwise else None,
        is_class_forced=reads_otherwise and _is_class_forced(path.parent, settings),
        settings=_settings_to_write(tokenizer, settings) if reads_otherwise else {},
        post_processor=_begin_with_start(tokenizer, settings),
    )


def _named_tokens(folder: Path, settings: Mapping[str, Any]) -> set[str]:
    """Returns all texts in the folder's files that name tokens."""
    texts: set[str] = set()
    pending = [{key: value for key, value in settings.items() if key != "chat_template"}]
    for name in ("special_tokens_map.json", "added_tokens.json"):
        if (folder / name).is_file():
            pending.append(read_json(folder / name, any_integer=True))
    while pending:
        value: Any = pending.pop()
        if isinstance(value, str):
            texts.add(value)
        elif isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list):
            pending += value
    return texts


def _add_tokens(file: Any, tokenizer: Any, named: set[str]) -> None:
    """Adds those of AutoTokenizer's tokens to the file's that are `named`, and its end token. The
    others are defaults of the class that the model has never seen.
    """
    added = sorted(tokenizer.backend_tokenizer.get_added_tokens_decoder().items())
    for _, token in added:
        is_end = token.content == tokenizer.eos_token and file.token_to_id(token.content) is None
        if is_end or token.content in named:
            (file.add_special_tokens if token.special else file.add_tokens)([token])


def _prefixed(file: Any, settings: Mapping[str, Any]) -> Any:
    """Returns the state of the file's pre-tokenizer with `add_prefix_space` of
    tokenizer_config.json, which transformers follows for a pre-tokenizer of one part.
    """
    state = part_state(file.pre_tokenizer)
    wanted = settings.get("add_prefix_space")
    if isinstance(wanted, bool) and isinstance(state, dict) and "add_prefix_space" in state:
        return state | {"add_prefix_space": wanted}
    return state


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
    if backend.encode("").ids[:1] == [number]:
        return None
    from tokenizers import processors

    begin = processors.TemplateProcessing(
        single=[start, "$A"], pair=[start, "$A", start, "$B:1"], special_tokens=[(start, number)]
    )
    held = backend.post_processor
    backend.post_processor = begin if held is None else processors.Sequence([held, begin])
    return json.loads(backend.post_processor.__getstate__())


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
