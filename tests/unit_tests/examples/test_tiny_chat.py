"""The example's chat data: the same everywhere, true to its format, and nothing of the user in
it."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from megatron.blending.metadatasets.metadataset import load_metadataset
from megatron.blending.metadatasets.tree import source_entries

SCRIPT = Path(__file__).parents[3] / "examples" / "tiny_chat" / "make_data.py"
MODULES = ["json", "collections", "bisect", "os.path"]


@pytest.fixture(scope="module")
def make_data():
    spec = importlib.util.spec_from_file_location("make_data", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(split):
    return [sample.name for half in split for sample in half]


def test_each_kind_of_object_is_documented(make_data):
    """Without it a change of the walk could lose all methods, or all submodules, and only make the
    data smaller.
    """
    samples = {sample.name: sample for half in make_data.build(MODULES) for sample in half}
    kinds = {
        name: samples[name].kind
        for name in ("json", "json.decoder", "json.JSONDecoder", "json.dumps")
    }
    assert kinds == {
        "json": "module",
        "json.decoder": "module",
        "json.JSONDecoder": "class",
        "json.dumps": "function",
    }
    assert samples["json.JSONDecoder.decode"].kind == "method"
    assert samples["collections.OrderedDict.fromkeys"].signature  # a classmethod
    assert (
        samples["bisect.bisect_left"].signature
        == "bisect.bisect_left(a, x, lo=0, hi=None, *, key=None)"
    )
    assert samples["os.path.join"].docstring.startswith("Join two or more pathname components")


def test_private_and_foreign_objects_are_left_out(make_data):
    """Without it each module's imports would come again under its own name."""
    found = names(make_data.build([*MODULES, "textwrap", "string"]))
    assert "string.Template" in found
    assert not [name for name in found if any(part.startswith("_") for part in name.split("."))]
    assert "json.decoder.c_scanstring" not in found
    assert "collections.itemgetter" not in found


def test_no_docstring_comes_twice(make_data):
    """Without it training data could stand in the held-out data too, and the held-out loss would
    lie.
    """
    split = make_data.build([*MODULES, "json"])
    docstrings = Counter(sample.docstring for half in split for sample in half)
    assert len(docstrings) > 80
    assert max(docstrings.values()) == 1


def test_a_module_is_held_out_whole(make_data):
    """Without it a method's near-copy in the same module would leak from the training data to the
    held-out data.
    """
    split = make_data.build(["math", "imaplib", *MODULES])
    families = [{sample.name.split(".")[0] for sample in half} for half in split]
    assert families == [{"json", "collections", "os"}, {"bisect", "math", "imaplib"}]


def test_modules_that_cannot_be_imported_are_skipped(make_data):
    """Without it the example would fail on each platform that lacks a module."""
    assert names(make_data.build(["no_such_module", "antigravity"])) == []


def test_defaults_of_the_users_own_are_not_shown(make_data, tmp_path, monkeypatch):
    """Without it the data holds the user's environment, secrets and all (`cgi.parse` has it as a
    default).
    """
    (tmp_path / "leaky_module.py").write_text(
        "import os, sys\n"
        "def call(a, b=1, c='x', d=os.environ, e=sys.executable, f=object(), *, g=None, h=dict): "
        "'Docstring.'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    [sample] = make_data.build(["leaky_module"]).train
    assert sample.signature == (
        "leaky_module.call(a, b=1, c='x', d=..., e=..., f=..., *, g=None, h=<class 'dict'>)"
    )


def test_lines_are_chats(make_data, tmp_path):
    """Without it the trainer would find no `messages`, or an answer where the question should
    be."""
    line = make_data.write(make_data.build(["math", *MODULES]), tmp_path)
    train = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    valid = [json.loads(line) for line in (tmp_path / "valid.jsonl").read_text().splitlines()]
    assert line.startswith(f"{tmp_path}: {len(train)} training and {len(valid)} held-out chats, ")
    for chat in train + valid:
        assert list(chat) == ["messages"]
        assert [(turn["role"], sorted(turn)) for turn in chat["messages"]] == [
            ("user", ["content", "role"]),
            ("assistant", ["content", "role"]),
        ]
        assert all(turn["content"].strip() for turn in chat["messages"])
    assert len({chat["messages"][0]["content"] for chat in train}) == len(train)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("calls.jsonl", "overviews.jsonl", "train.jsonl", "valid.jsonl")
    ]


def test_blend_is_of_the_training_data(make_data, tmp_path):
    """Without it the example of a blend would name files that are not there, or train on what is
    held out.
    """
    make_data.write(make_data.build(["math", *MODULES]), tmp_path / "data/tiny_chat")
    (tmp_path / "examples/tiny_chat").mkdir(parents=True)
    blend = shutil.copy(SCRIPT.parent / "blend.yaml", tmp_path / "examples/tiny_chat")
    files = [Path(entry.path) for entry in source_entries(load_metadataset(blend, "train"))]  # type: ignore[union-attr]
    assert len(files) == 2
    assert all(file.read_text() for file in files)
    parts = [line for file in files for line in file.read_text().splitlines()]
    assert sorted(parts) == sorted(
        (tmp_path / "data/tiny_chat/train.jsonl").read_text().splitlines()
    )
    (valid,) = source_entries(load_metadataset(blend, "val"))
    assert Path(valid.path).name == "valid.jsonl"  # type: ignore[union-attr]


def test_two_processes_write_identical_bytes(tmp_path):
    """Without it hash seeds could set the order, and no two runs would train on the same data."""
    code = (
        "import make_data; from pathlib import Path; "
        f"make_data.write(make_data.build({MODULES}), Path('out'))"
    )
    written = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(SCRIPT.parent)}
        subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=environment, check=True, timeout=60
        )
        written.append([path.read_bytes() for path in sorted((folder / "out").iterdir())])
    assert written[0] == written[1]
    assert len(written[0][0]) > 10_000
