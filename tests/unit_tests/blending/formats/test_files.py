"""Ranges of bytes, from disk or from a URL: the right ones, or an error; nothing held, nothing
shared.
"""

import gc
import os
import pickle
import threading

import numpy as np
import pytest

from megatron.blending.formats.files import (
    is_file,
    is_folder,
    join_location,
    list_names,
    local_path,
    open_file,
    read_file,
    read_ranges,
)

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def memory():
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    system.pipe("/files/a.bin", CONTENT)
    yield "memory://files"
    system.rm("/files", recursive=True)


@pytest.fixture(params=["local", "url", "remote"])
def location(request, tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(CONTENT)
    if request.param == "remote":
        return f"{request.getfixturevalue('memory')}/a.bin"
    return str(path) if request.param == "local" else f"file://{path}"


def test_reads_what_is_there(location):
    """An offset wrong by one gives another sample's bytes, which often still parse."""
    file = open_file(location)
    assert file.size == 10240
    assert file.read(254, 258) == b"\xfe\xff\x00\x01"
    assert file.read(10239, 10240) == b"\xff"
    assert file.read(7, 7) == b""
    assert file.array(np.uint16, 2, 2).tolist() == [0x0302, 0x0504]
    assert file.array(np.uint64).shape == (1280,)
    assert read_file(location) == CONTENT


def test_reading_beyond_the_end_is_refused(location):
    """Beyond its end mapped memory is another's, or ends the process; a short read would be a
    sample cut in two.
    """
    file = open_file(location)
    with pytest.raises(ValueError, match=r"a\.bin: .*(asked for)"):
        file.read(10230, 10241)
    with pytest.raises(ValueError, match=r"a\.bin"):
        file.array(np.uint64, 0, 1281)


def test_many_ranges(location):
    """Ranges of several files that are fetched together could come back in another order."""
    file, again = open_file(location), open_file(location)
    assert read_ranges([(file, 1, 3), (again, 0, 1), (file, 255, 257), (file, 5, 5)]) == [
        b"\x01\x02",
        b"\x00",
        b"\xff\x00",
        b"",
    ]


def test_local_and_remote_ranges_together(memory, tmp_path):
    """A blend may have both."""
    path = tmp_path / "b"
    path.write_bytes(b"abc")
    local, remote = open_file(str(path)), open_file(f"{memory}/a.bin")
    assert read_ranges([(local, 0, 2), (remote, 7, 8), (local, 2, 3)]) == [b"ab", b"\x07", b"c"]


def test_pickles_as_its_name(location):
    """Workers would be sent the content of every file."""
    sent = pickle.dumps(open_file(location))
    assert len(sent) < 300
    assert pickle.loads(sent).read(3, 5) == b"\x03\x04"


def test_read_by_threads_and_forked_processes(location):
    """A position that two readers share gives each the other's bytes."""
    file = open_file(location)
    wrong: list[int] = []

    def check():
        wrong.extend(
            at for at in range(0, 10000, 7) if file.read(at, at + 3) != CONTENT[at : at + 3]
        )

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if location.startswith("memory"):
        assert wrong == []
        return
    child = os.fork()
    if child == 0:
        check()
        os._exit(len(wrong) > 0)
    check()
    assert os.waitpid(child, 0)[1] == 0
    assert wrong == []


def test_empty_file(tmp_path):
    """An empty file cannot be mapped."""
    path = tmp_path / "empty"
    path.write_bytes(b"")
    file = open_file(str(path))
    assert (file.size, file.read(0, 0), file.array(np.uint64).tolist()) == (0, b"", [])
    with pytest.raises(ValueError, match="empty: bytes 0 to 1 asked for, but it has 0"):
        file.read(0, 1)


def test_a_long_range_is_fetched_ahead(tmp_path):
    """The advice to the system takes an address of its own, which must be a page's."""
    path = tmp_path / "long"
    path.write_bytes(CONTENT * 100)
    assert open_file(str(path)).read(5000, 900_000) == (CONTENT * 100)[5000:900_000]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_no_file_is_held_open_and_maps_are_given_back(tmp_path):
    """A thousand sources of a thousand shards would run into the limit on open files, or that on
    maps.
    """
    for number in range(50):
        (tmp_path / str(number)).write_bytes(b"content")

    def num_maps():
        with open("/proc/self/maps") as maps:
            return sum(str(tmp_path) in line for line in maps)

    before = len(os.listdir("/proc/self/fd"))
    files = [open_file(str(tmp_path / str(number))) for number in range(50)]
    assert len(os.listdir("/proc/self/fd")) == before
    numbers = files[0].array(np.uint8)
    assert num_maps() == 50
    del files
    gc.collect()
    assert num_maps() == 1
    assert numbers.tolist() == list(b"content")


def test_arrays_cannot_be_written_to(tmp_path):
    """Writing to a map that is for reading ends the process without a word."""
    path = tmp_path / "a"
    path.write_bytes(b"12345678")
    with pytest.raises(ValueError, match="read-only"):
        open_file(str(path)).array(np.uint8)[0] = 1


def test_missing_files_are_named(tmp_path, memory):
    """The user would look for the fault in the data."""
    with pytest.raises(ValueError, match=r"nowhere: cannot be opened: No such file"):
        open_file(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"memory://files/nowhere: cannot be opened"):
        open_file(f"{memory}/nowhere")
    with pytest.raises(ValueError, match=r"nonsense://a: "):
        open_file("nonsense://a")


def test_names(tmp_path, memory):
    """A URL joined as a path loses its slashes, or is looked for on the local disk."""
    (tmp_path / "x").mkdir()
    for name in ("b.tar", "a.tar", "x/c.tar", "x/d.txt"):
        (tmp_path / name).write_bytes(b"")
    assert list_names(str(tmp_path), "**/*.tar") == ["a.tar", "b.tar", "x/c.tar"]
    assert list_names(memory, "**/*.bin") == ["a.bin"]
    assert join_location("s3://a/b", "c/d") == "s3://a/b/c/d"
    assert join_location("/a/", "c") == "/a/c"
    assert (local_path("file:///a/b"), local_path("a/b"), local_path("s3://a")) == (
        "/a/b",
        "a/b",
        None,
    )
    assert (is_file(f"{memory}/a.bin"), is_file(memory), is_folder(memory)) == (True, False, True)
    assert (is_file(str(tmp_path / "a.tar")), is_folder(str(tmp_path)), is_file(str(tmp_path))) == (
        True,
        True,
        False,
    )
