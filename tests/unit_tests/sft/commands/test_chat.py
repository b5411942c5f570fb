"""Talking to a model: what it is asked, and what it is not asked again."""

import io
import json
import shutil
from pathlib import Path

import pytest

from megatron.sft.commands import chat

RELEASED = Path(__file__).parents[3] / "fixtures" / "released"
OPTIONS = chat.ChatOptions(folder="model", system="Be brief.")


class Parrot:
    """Answers with the number of messages that it was told."""

    def __init__(self):
        self.asked = []

    def answer(self, messages, options):
        self.asked.append(list(messages))
        return str(len(messages))


def roles(messages):
    return [message["role"][0] for message in messages]


def test_a_conversation_grows_until_it_is_cleared(monkeypatch):
    """Answers without their questions, or another conversation's, make a good model look bad."""
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/clear\nthree\n/exit\nfour\n"))
    parrot = Parrot()
    chat.converse(parrot, OPTIONS)
    assert ["".join(roles(messages)) for messages in parrot.asked] == ["su", "suau", "su"]
    assert parrot.asked[1][2]["content"] == "2"
    assert parrot.asked[2][1]["content"] == "three"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the folder of a model is needed"),
        (["no-such-folder"], "no-such-folder: no such folder"),
        (["tests"], "has no config.json"),
        (["tests", "--top-p", "2"], "--top-p must be from"),
    ],
)
def test_mistakes_are_one_line(arguments, words, capsys):
    """transformers would look for the folder on the internet, and say so over a page."""
    with pytest.raises(SystemExit) as end:
        chat.main(arguments, "megatron-sft chat")
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_model_without_tokenizer_is_named_as_one(tmp_path):
    """transformers makes an empty one, and the user is told to write a chat template."""
    pytest.importorskip("transformers")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(RELEASED / "qwen" / name, tmp_path)
    with pytest.raises(ValueError, match=r"has no tokenizer; copy tokenizer\.json"):
        chat.open_speaker(tmp_path, OPTIONS)


def test_code_of_a_folder_is_not_run(tmp_path, monkeypatch):
    """On a terminal transformers asks, and `y` runs it."""
    pytest.importorskip("transformers")
    folder = Path(shutil.copytree(RELEASED / "llama2", tmp_path / "model"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    with pytest.raises(ValueError, match="trust_remote_code"):
        chat.open_speaker(folder, OPTIONS)
    assert not (tmp_path / "ran").exists()
