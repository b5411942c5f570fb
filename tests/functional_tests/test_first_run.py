"""The way of a first user: a dry run, training by defaults, a chat with what came of it."""

import json
import re

import pytest

from tests.functional_tests.forked_runs import ROOT, command_forked, train_forked

MODEL = ROOT / "tests" / "fixtures" / "released" / "qwen"


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello " * 20}]
    path.write_text((json.dumps({"messages": turns}) + "\n") * 66)
    return path


def test_a_dry_run_then_the_run_then_a_chat(tmp_path, chats):
    """Three options must do; what the dry run says is what the run then does."""
    given = ["--pretrained-checkpoint", MODEL, "--data-path", chats, "--save", tmp_path / "save"]
    status, out, err = command_forked(["train", "--dry-run", *map(str, given)])
    assert (status, err) == (0, "")
    assert "--lr 1e-05 --lr-warmup-fraction 0.03 --seq-length 8192 --global-batch-size 32" in out
    assert "training   2 steps of 32 sequences, 1.00 epochs" in out
    assert re.search(r"memory     \d\.\d\d GiB on every rank, of which 2\.\d\d are a margin", out)
    assert not list((tmp_path / "save").glob("iter_*"))
    status, out, err = command_forked(["train", *map(str, given)])
    assert (status, err) == (0, "")
    assert "step 2/2" in out
    chat = ["chat", str(tmp_path / "save"), "--max-new-tokens", "3"]
    status, out, err = command_forked(chat, "Hi\n")
    assert status == 0, err
    assert out.startswith(f"writing {tmp_path / 'save'} as a HuggingFace folder")


def test_a_dry_run_of_a_layout_needs_no_launcher(tmp_path, chats):
    """A login node has one process; the layout is of many."""
    layout = ["--pipeline-model-parallel-size", "2", "--run-dir", tmp_path / "run"]
    given = ["--pretrained-checkpoint", MODEL, "--data-path", chats, *layout]
    dry_run = ["train", "--dry-run", *map(str, given)]
    status, out, err = command_forked(dry_run)
    assert status == 0, err
    assert "checked for 2 processes" in out
    assert re.search(r"memory     \d\.\d\d GiB on stage", out)
    status, _, err = command_forked([*dry_run, "--save-hf", "/proc/model"])
    assert status == 2
    assert "/proc" in err


def test_the_folder_has_a_card(tmp_path, chats):
    """A folder that is found a year later says nothing of where it is from."""
    folder = tmp_path / "tuned"
    given = ["--pretrained-checkpoint", MODEL, "--data-path", chats.parent, "--lora"]
    given += ["--train-iters", "1", "--save-hf", folder, "--run-dir", tmp_path / "run"]
    status, output = train_forked(1, list(map(str, given)))
    assert status == 0, output
    card = (folder / "README.md").read_text()
    assert 'base_model: "qwen"\nlibrary_name: peft\n' in card
    assert "| data | `chats.jsonl` |" in card
    assert "training loss" in card
    # The adapter finds its base model, and answers.
    status, out, err = command_forked(["chat", str(folder), "--max-new-tokens", "3"], "Hi\n")
    assert (status, err) == (0, ""), err
    assert out.strip()
