"""pure. Copies what a HuggingFace folder is served with beside its weights: files of the tokenizer,
of a vision model's processor, and Python files of models with code of their own.

Chat templates are written so that tokenizer and processor of transformers both find those that were
trained. They look in this order:

    tokenizer    chat_template.jinja and additional_chat_templates/, tokenizer_config.json
    processor    processor_config.json, chat_template.json, chat_template.jinja
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.packing.user_files import read_json
from megatron.sft.data.templates.chat_template import ChatTemplate
from megatron.sft.data.templates.named import (
    DEFAULT,
    PROCESSOR_FILES,
    TEMPLATE_FILES,
    processor_template,
    render_alike,
)
from megatron.sft.data.tokenizer_folder import (
    GENERIC_CLASS,
    FolderTokenizer,
    read_folder_tokenizer,
)

TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("*.model", "*.tiktoken", "tekken.json", "chat_template.*"),
    "additional_chat_templates/*.jinja",
)
"""Patterns of a tokenizer's files, those of its chat templates included."""
_PROCESSOR_FILES = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("audio_tokenizer_config.json", "*.py"),
)
_TEMPLATE, _MORE_TEMPLATES = TEMPLATE_FILES
_CONFIG = "tokenizer_config.json"
_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")


def files_like(folder: Path, patterns: Iterable[str]) -> Iterator[Path]:
    """Yields the files of a folder that match patterns, each pattern's in order."""
    for pattern in patterns:
        yield from (path for path in sorted(folder.glob(pattern)) if path.is_file())


def copy_tokenizer(source: Path, target: Path, trained: Mapping[str, ChatTemplate]) -> None:
    """Copies a tokenizer, with its chat templates if they are those that were trained, else with
    the trained ones. Call it behind `copy_processor`.

    trained: chat templates by name.
    """
    _copy(source, target, TOKENIZER_FILES)
    held = read_object(source / _CONFIG).get("chat_template")
    texts = {name: template.source for name, template in trained.items()}
    of_processor = processor_template(target)
    if texts and (
        _tokenizer_templates(source, held) != texts
        or (of_processor is not None and not _is_trained(trained, of_processor))
    ):
        _write_templates(target, held, texts)


def _is_trained(trained: Mapping[str, ChatTemplate], of_processor: str) -> bool:
    """Returns whether a processor's template renders text as the one that was trained. It may be
    another that also places images, which must stay.
    """
    default = trained.get(DEFAULT)
    return default is not None and (
        default.source == of_processor or render_alike(default, of_processor)
    )


def write_as_read(source: Path, target: Path, files: FolderTokenizer) -> None:
    """Changes a tokenizer's copied files so that AutoTokenizer and tokenizers read the tokens of
    the training. They stay as they are if both do so anyway, as for most released folders.
    """
    settings = files.settings
    kinds = [read_object(folder / "config.json").get("model_type") for folder in (source, target)]
    if not settings and kinds[1] is not None and kinds[0] != kinds[1]:
        # AutoTokenizer's class depends on the model, and the tokenizer came from another folder.
        settings = read_folder_tokenizer(str(target)).settings
    if not settings and _is_named_llama_but_bytes(target):
        settings = {"tokenizer_class": GENERIC_CLASS}
    if settings:
        write_object(target / _CONFIG, read_object(target / _CONFIG) | dict(settings))
    if files.post_processor is not None:
        whole = json.loads((target / "tokenizer.json").read_text(encoding="utf-8"))
        write_object(target / "tokenizer.json", whole | {"post_processor": files.post_processor})


def _is_named_llama_but_bytes(folder: Path) -> bool:
    """Returns whether a byte-level tokenizer.json is named as Llama's class, as DeepSeek-V3's is.
    transformers 5.24 takes the file; 5.20, and with it vLLM 0.33, drops its spaces.
    """
    if read_object(folder / _CONFIG).get("tokenizer_class") not in _LLAMA_CLASSES:
        return False
    decoder = read_object(folder / "tokenizer.json").get("decoder")
    return isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"


def copy_processor(source: Path, target: Path) -> None:
    """Copies a processor's files and Python files, which config.json may name in `auto_map`."""
    _copy(source, target, _PROCESSOR_FILES)


def _copy(source: Path, target: Path, patterns: Iterable[str]) -> None:
    for path in files_like(source, patterns):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def _tokenizer_templates(folder: Path, held: Any) -> dict[str, str]:
    """Returns the chat templates that a tokenizer of transformers finds, by name.

    held: `chat_template` of tokenizer_config.json.
    """
    found = {
        path.stem: path.read_text(encoding="utf-8")
        for path in files_like(folder, [f"{_MORE_TEMPLATES}/*.jinja"])
    }
    if (folder / _TEMPLATE).is_file():
        found[DEFAULT] = (folder / _TEMPLATE).read_text(encoding="utf-8")
    if found or not held:
        return found
    return (
        {one["name"]: one["template"] for one in held}
        if isinstance(held, list)
        else {DEFAULT: held}
    )


def _write_templates(folder: Path, held: Any, trained: Mapping[str, str]) -> None:
    """Writes chat templates in each place where the copied files have one, and removes others."""
    shutil.rmtree(folder / _MORE_TEMPLATES, ignore_errors=True)
    (folder / _TEMPLATE).unlink(missing_ok=True)
    for name, text in trained.items():
        if name == DEFAULT:
            (folder / _TEMPLATE).write_text(text, encoding="utf-8")
        elif re.fullmatch(r"[\w-]+", name):  # no path to another folder
            (folder / _MORE_TEMPLATES).mkdir(exist_ok=True)
            (folder / _MORE_TEMPLATES / f"{name}.jinja").write_text(text, encoding="utf-8")
    if held:  # where versions of transformers before 4.43 look
        listed = [{"name": name, "template": text} for name, text in trained.items()]
        renewed = trained[DEFAULT] if trained.keys() == {DEFAULT} else listed
        write_object(folder / _CONFIG, read_object(folder / _CONFIG) | {"chat_template": renewed})
    for path in (folder / name for name in PROCESSOR_FILES):
        content = read_object(path)
        if "chat_template" not in content:
            continue
        if trained.keys() == {DEFAULT}:
            write_object(path, content | {"chat_template": trained[DEFAULT]})
            continue
        # A processor refuses several templates beside such a key, and finds their files without.
        del content["chat_template"]
        if content:
            write_object(path, content)
        else:
            path.unlink()


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object of a JSON file; {} without the file. Raises ValueError with its name."""
    try:
        content = read_json(path, any_integer=True) if path.is_file() else {}
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return content


def write_object(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an object as JSON, as transformers writes its files."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
