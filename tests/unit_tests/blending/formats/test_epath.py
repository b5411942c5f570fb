"""energon's paths: local ones as pathlib's, URLs through fsspec."""

import pickle

import pytest
from megatron.blending.energon.epathlib.epath import EPath


def test_local_paths(tmp_path, monkeypatch):
    """Scripts that prepare data call these before anything else."""
    monkeypatch.chdir(tmp_path)
    folder = EPath("data")
    (folder / "sub").mkdir(parents=True)
    assert folder.is_dir()
    assert folder == EPath(tmp_path / "data") == EPath(EPath("./data/"))
    path = folder / "sub" / "a.tar"
    path.write_bytes(b"abc")
    (folder / "b.tar").write_text("\u00e9")
    assert (path.name, path.parent, path.size()) == ("a.tar", folder / "sub", 3)
    assert path.relative_to(folder) == "sub/a.tar"
    assert [str(each) for each in folder.walk()] == [
        str(tmp_path / "data" / name) for name in ("b.tar", "sub/a.tar")
    ]
    assert list(folder.glob("*.tar")) == [folder / "b.tar"]
    assert list(folder.glob("*/*.tar")) == [path]
    assert (folder / "b.tar").read_text() == "\u00e9"
    assert path.with_suffix(".idx").name == "a.idx"
    path.move(folder / "c.tar")
    assert not path.is_file()
    (folder / "c.tar").copy(path)
    assert path.read_bytes() == (folder / "c.tar").read_bytes() == b"abc"
    with open(path, "rb") as file, path.open("rb") as other:
        assert file.read() == other.read()
    path.unlink()
    assert not path.is_file()
    assert folder / "/other" == EPath("/other")
    assert sorted([folder / "b", folder / "a"]) == [folder / "a", folder / "b"]
    assert {pickle.loads(pickle.dumps(folder)): 1}[folder] == 1
    assert folder.is_local()
    assert folder.local_path() == tmp_path / "data"
    with pytest.raises(ValueError, match="is not below"):
        folder.relative_to(path)


def test_urls():
    pytest.importorskip("fsspec")
    folder = EPath("memory://bucket/data")
    assert (str(folder), folder.url, folder.is_local()) == (*["memory://bucket/data"] * 2, False)
    assert folder.parent == EPath("memory://bucket")
    (folder / "x/a.txt").write_text("hello")
    (folder / "b.txt").write_bytes(b"b")
    assert (folder / "x/a.txt").read_text() == "hello"
    assert [path.name for path in folder.walk()] == ["b.txt", "a.txt"]
    assert [path.name for path in folder.glob("*.txt")] == ["b.txt"]
    assert (folder / "b.txt").is_file()
    assert folder.is_dir()
    assert (folder / "b.txt").size() == 1
    (folder / "b.txt").unlink()
    assert not (folder / "b.txt").is_file()
    with pytest.raises(ValueError, match="no local path"):
        folder.local_path()


def test_patterns_and_links_of_local_folders(tmp_path):
    """`**/*.tar` found shards one folder down alone, so that a data set was prepared in part."""
    root = EPath(tmp_path / "data")
    for name in ("a.txt", "sub/b.txt", "sub/c.bin", "sub/deep/d.txt"):
        (root / name).write_text("x")  # makes the folders
    (tmp_path / "data" / "link").symlink_to(tmp_path / "data" / "sub", target_is_directory=True)
    (tmp_path / "data" / "sub" / "loop").symlink_to(tmp_path / "data", target_is_directory=True)

    def found(pattern):
        return sorted(path.relative_to(root) for path in root.glob(pattern))

    of_sub = ["b.txt", "deep/d.txt"]
    every = ["a.txt", *(f"link/{name}" for name in of_sub), *(f"sub/{name}" for name in of_sub)]
    assert found("**/*.txt") == every
    assert found("*.txt") == ["a.txt"]
    assert found("link/*.txt") == ["link/b.txt"]
    assert found("s?b/**/d.txt") == ["sub/deep/d.txt"]
    assert sorted(path.relative_to(root) for path in root.walk()) == sorted(
        [*every, "link/c.bin", "sub/c.bin"]
    )
