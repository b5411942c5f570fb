"""Byte-level tokenizers that are named as Llama's class."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.sft.model.huggingface.served_files import write_as_read

_AS_READ: Any = SimpleNamespace(settings={}, post_processor=None)


@pytest.mark.parametrize(
    ("named", "decoder", "written"),
    [
        ("LlamaTokenizerFast", "ByteLevel", "PreTrainedTokenizerFast"),
        ("LlamaTokenizerFast", "Sequence", "LlamaTokenizerFast"),
        ("Qwen2Tokenizer", "ByteLevel", "Qwen2Tokenizer"),
    ],
)
def test_their_class_is_written_as_the_general_one(
    tmp_path: Path, named: str, decoder: str, written: str
) -> None:
    """transformers 5.20 within vLLM 0.33 would drop all spaces of DeepSeek-V3's prompts."""
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"tokenizer_class": named}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"decoder": {"type": decoder}}))
    write_as_read(tmp_path, tmp_path, _AS_READ)
    assert json.loads(path.read_text())["tokenizer_class"] == written
