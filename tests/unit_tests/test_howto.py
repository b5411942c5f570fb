"""Training commands of the how-to pages, parsed to the last value as they stand there;
tests/functional_tests/test_pages.py runs them with smaller sizes.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from megatron.sft.arguments.parse import parse_config
from megatron.sft.commands import COMMANDS
from megatron.sft.launch import taken_apart
from tests.unit_tests.test_documents import ROOT, commands_in

PAGES = sorted((ROOT / "docs" / "howto").glob("*.md"))
MODELS = ROOT / "examples" / "recipes" / "models"
FOUND = [words for page in PAGES for words in commands_in(page.read_text()) if words]
TRAINING = [words for words in FOUND if words[0] not in COMMANDS or words[0] == "train"]


def name_of(words: list[str]) -> str:
    return " ".join(words)[:60]


def write_vision_folder(folder: Path, of_text: Path) -> None:
    """Writes the folder of a vision model whose language model is that of another folder."""
    shutil.copytree(of_text, folder)
    text = json.loads((of_text / "config.json").read_text()) | {"model_type": "qwen3_vl_text"}
    text["rope_scaling"] = {"rope_type": "default", "mrope_section": [24, 20, 20]}
    config = {"model_type": "qwen3_vl", "text_config": text, "vision_config": {"depth": 27}}
    (folder / "config.json").write_text(json.dumps(config))
    size = {"shortest_edge": 65536, "longest_edge": 16777216}
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": size, "patch_size": 16}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with what the pages name."""
    model = tmp_path / "Qwen3-8B"
    shutil.copytree(ROOT / "tests" / "fixtures" / "released" / "qwen", model)  # its tokenizer
    shutil.copy(MODELS / "Qwen3-8B.json", model / "config.json")
    write_vision_folder(tmp_path / "Qwen3-VL-8B-Instruct", model)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    for name in (
        "chats.jsonl",
        "code.jsonl",
        "prompts.jsonl",
        "held_out.jsonl",
        "data/chats.jsonl",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text((json.dumps({"messages": turns}) + "\n") * 64)
    pair = json.dumps({"prompt": turns[:1], "chosen": "Hello.", "rejected": "Go away."}) + "\n"
    (tmp_path / "pairs.jsonl").write_text(pair * 64)
    (tmp_path / "reference.npz").touch()
    lines = (ROOT / "docs" / "howto" / "blend.md").read_text()
    blend = re.findall(r"```yaml\n(.*?)```", lines, re.DOTALL)[0]
    (tmp_path / "blend.yaml").write_text(blend)
    (tmp_path / "run.yaml").write_text(
        "pretrained_checkpoint: Qwen3-8B\ndata_path: chats.jsonl\nsequence_packing: true\n"
    )
    monkeypatch.chdir(tmp_path)


def test_commands_are_found() -> None:
    """Without commands the test below passes."""
    assert len(TRAINING) >= 8


@pytest.mark.parametrize("words", TRAINING, ids=name_of)
def test_training_is_accepted(words: list[str]) -> None:
    """Options that exist may have values that are none, or contradict one another: all that is
    checked before a process is started.
    """
    given = taken_apart(words[1:] if words[0] == "train" else words)
    config = parse_config(given.training, given.world_size or 8)
    assert config.data.paths
