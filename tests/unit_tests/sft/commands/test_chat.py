"""Talking to a model: what it is asked, and what it is not asked again."""

import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

    def check_image(self, path):
        if "missing" in path:
            raise ValueError(f"there is no file {path}")


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


def test_images_go_with_the_next_message(monkeypatch, capsys):
    """An image that is told and not shown, or shown twice, is answered about all the same."""
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n/image b c.png\n/image missing\ntwo\nthree"))
    parrot = Parrot()
    chat.converse(parrot, chat.ChatOptions(folder="model", image=("a.png",)))
    assert capsys.readouterr().out == "there is no file missing\n"
    last = parrot.asked[-1]
    assert [message.get("images") for message in last[::2]] == [["a.png"], ["b c.png"], None]


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
    with pytest.raises(ValueError, match=r"has an empty vocabulary, .*; download its tok"):
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
    with pytest.raises(ValueError, match="needs Python code of its own"):
        chat.open_speaker(folder, OPTIONS)
    assert not (tmp_path / "ran").exists()


def rename(folder, name, new):
    (folder / name).rename(folder / new)


def set_values(folder, name, **values):
    content = json.loads((folder / name).read_text()) | values
    (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda f: rename(f, "model.safetensors", "pytorch_model.bin"), "can run any code"),
        (lambda f: rename(f, "model.safetensors", "model.gguf"), "holds its weights as GGUF"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors"),
        (lambda f: set_values(f, "config.json", num_hidden_layers=9), "config.json"),
        (lambda f: set_values(f, "config.json", intermediate_size=9), "says [9, "),
        (lambda f: set_values(f, "config.json", rope_theta="x" * 10**6), "has rope_theta 'xxx"),
        (lambda f: set_values(f, "config.json", quantization_config={"a": 1}), "quantization"),
        (lambda f: set_values(f, "tokenizer_config.json", model_max_length="x"), "_max_length 'x'"),
        (lambda f: set_values(f, "tokenizer_config.json", eos_token=None), "has no eos_token"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "chat_template.jinja").unlink(), "has no chat template"),
        (
            lambda f: (f / "adapter_config.json").write_text(
                json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "modules_to_save": True})
            ),
            "has modules_to_save True, but it must be of type list",
        ),
        (lambda f: (f / "adapter_config.json").write_text("["), "adapter_config.json"),
        (
            lambda f: (f / "adapter_config.json").write_text(
                json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1})
            ),
            "must hold adapter_model.safetensors, but does not",
        ),
    ],
)
def test_what_a_run_refuses_is_refused(tmp_path, monkeypatch, change, told):
    """The same folder trained in one command and failed over pages of transformers in another."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(chat, "_load_model", lambda *_: pytest.fail("it is loaded"))
    folder = Path(shutil.copytree(RELEASED / "qwen", tmp_path / "model"))
    change(folder)
    with pytest.raises(ValueError, match=re.escape(told)) as failure:
        chat.open_speaker(folder, OPTIONS)
    assert str(folder) in str(failure.value)
    assert "--" not in str(failure.value).partition(";")[0].replace(str(folder), "")
    assert len(str(failure.value)) < 1000


def test_sound_folders_are_opened(monkeypatch):
    """Also an adapter beside its base, and a family that only transformers knows."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(chat, "_load_model", lambda *_: SimpleNamespace(eval=lambda: "model"))
    for name in ("qwen", "gemma", "llama2", "llama3", "mistral", "trl"):
        chat._check_files(RELEASED / name, is_model=True, has_adapter=False)
    chat.check_served(RELEASED / "trl", RELEASED / "trl-adapter")
    speaker: Any = chat.open_speaker(RELEASED / "qwen", OPTIONS)
    assert speaker.templates.by_name
