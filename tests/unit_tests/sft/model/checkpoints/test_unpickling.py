"""Pickles of a checkpoint: what belongs there is read, what could run code is not."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from megatron.sft.model.checkpoints.unpickling import check_metadata, only_weights

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Code:
    """Whoever unpickles it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


STATE = {"weights": torch.ones(3, 4), "half": torch.ones(2, dtype=torch.bfloat16), "object": "text"}


def test_metadata_of_torch_is_read(tmp_path):
    """A checkpoint that cannot be continued is lost work."""
    save(STATE, checkpoint_id=tmp_path, no_dist=True)
    check_metadata(tmp_path)


def test_foreign_metadata_runs_nothing(tmp_path):
    """torch reads it with plain pickle: whoever may write a checkpoint may run code on the
    cluster."""
    ran = tmp_path / "ran"
    storage = {"x": Code(ran)}
    (tmp_path / ".metadata").write_bytes(
        pickle.dumps(Metadata(state_dict_metadata={}, storage_data=storage))
    )
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}/.metadata holds a posix.mkdir, which does not belong"
    ):
        check_metadata(tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize("name", ["os.getcwd", "FileSystemReader", "pickle.dumps"])
def test_modules_are_no_way_round(tmp_path, name):
    """Modules of the known classes import others: a dotted name would reach all of those."""
    module = "torch.distributed.checkpoint.filesystem"
    pickled = (
        b"\x80\x04\x8c"
        + bytes([len(module)])
        + module.encode()
        + b"\x8c"
        + bytes([len(name)])
        + name.encode()
    )
    (tmp_path / ".metadata").write_bytes(pickled + b"\x93.")
    with pytest.raises(ValueError, match=rf"holds a {module}\.{name}, which"):
        check_metadata(tmp_path)


class Member:
    """What it gets, Python 3.11.0 to 3.11.3 write as a call of getattr."""

    def __init__(self, owner: Any, name: str) -> None:
        self.called_with = owner, name

    def __reduce__(self):
        return getattr, self.called_with


def test_members_of_enums_are_read_as_python_3_11_2_writes_them(tmp_path):
    """Its users, Debian's among them, could continue no checkpoint."""
    member = Member(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data=member)))
    check_metadata(tmp_path)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "mro"), (_MEM_FORMAT_ENCODING, "__class__")],
)
def test_getattr_gets_members_of_enums_only(tmp_path, owner, name):
    """It would reach any function from any known class."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Member(owner, name)))
    with pytest.raises(ValueError, match=r"holds a builtins\.getattr, which"):
        check_metadata(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"garbage", None])
def test_broken_metadata_is_named(tmp_path, content):
    """A traceback of pickle does not say which file."""
    if content is not None:
        (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/.metadata cannot be read: "):
        check_metadata(tmp_path)


@pytest.mark.parametrize("before", [None, "0"])
def test_objects_of_torch_run_nothing(tmp_path, monkeypatch, before):
    """torch's planner loads objects beside the tensors with weights_only=False."""
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)
    if before is not None:
        monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", before)
    ran, kept = tmp_path / "ran", dict(os.environ)
    save({**STATE, "object": Code(ran)}, checkpoint_id=tmp_path / "bad", no_dist=True)
    with (
        pytest.raises(
            ValueError, match=rf"^{tmp_path}/x.distcp holds a posix.mkdir, which does not belong"
        ),
        only_weights(tmp_path / "x.distcp"),
    ):
        load({**STATE, "object": ""}, checkpoint_id=tmp_path / "bad", no_dist=True)
    assert not ran.exists()
    assert dict(os.environ) == kept
    save(STATE, checkpoint_id=tmp_path / "good", no_dist=True)
    found: dict[str, Any] = {**STATE, "object": ""}
    with only_weights(tmp_path):
        load(found, checkpoint_id=tmp_path / "good", no_dist=True)
    assert found["object"] == STATE["object"]


def test_other_errors_are_their_own(tmp_path):
    """A missing file told as an attack would send the user the wrong way."""
    with pytest.raises(FileNotFoundError), only_weights(tmp_path):
        torch.load(tmp_path / "absent.pt")


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_checkpoint_is_checked_before_it_is_read(tmp_path, name, one_rank):
    """As a run does it that continues."""
    from megatron.sft.model.checkpoints.content import Wanted, load_checkpoint
    from megatron.sft.model.checkpoints.folder import TRACKER, checkpoint_path

    ran, path = tmp_path / "ran", checkpoint_path(tmp_path, 1)
    save(STATE, checkpoint_id=path, no_dist=True)
    (path / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    (tmp_path / TRACKER).write_text("1")
    torch.save(
        {}, path / "common.pt"
    )  # without it, megatron-core 0.16.1 would be told that it is too old
    if name == "common.pt":
        torch.save({"model_options": Code(ran)}, path / name)
    else:
        (path / name).write_bytes(pickle.dumps(Code(ran)))
    with pytest.raises(ValueError, match=rf"{name} holds a posix.mkdir, which"):
        load_checkpoint(tmp_path, None, {}, {}, Wanted())  # type: ignore[arg-type]  # nothing is built yet
    assert not ran.exists()
