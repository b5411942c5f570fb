"""Samples of tar archives, against Python's own tarfile."""

import io
import itertools
import re
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.blending.formats.files import open_file
from megatron.blending.formats.prepared.tar import (
    Buffer,
    TarError,
    header_key,
    parse_sample,
    scan_tar,
    split_name,
    walk_tar,
)
from tests.unit_tests.blending.archives import write_tar

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)


def by_tarfile(path):
    """Samples as tarfile and the expression in energon's description of the format give them."""
    samples: list[tuple[str, dict[str, bytes]]] = []
    starts = []
    with tarfile.open(path, encoding="utf-8") as archive:
        for member in archive:
            match = NAME.fullmatch(member.name)
            if not member.isreg() or not match or re.match(r"__[^/]*__($|/)", member.name):
                continue
            if not samples or samples[-1][0] != match[1]:
                samples.append((match[1], {}))
                starts.append(member.offset)
            samples[-1][1][match[2]] = (archive.extractfile(member) or io.BytesIO()).read()
        return samples, [*starts, archive.offset]


def by_us(path):
    content = path.read_bytes()
    scan = scan_tar(open_file(str(path)))
    offsets = [*(sample.start for sample in scan.samples), scan.end]
    samples = []
    for start, end in itertools.pairwise(offsets):
        parts: dict[str, bytes] = {}
        samples.append((parse_sample(content, start, end, parts), parts))
        header = content[start : start + 512]
        assert header_key(header) in (None, samples[-1][0])
    scanned = [
        (
            sample.key,
            {part.name: content[part.start : part.start + part.size] for part in sample.parts},
        )
        for sample in scan.samples
    ]
    assert scanned == samples
    return samples, offsets


def test_offsets_are_energons(tmp_path):
    """Written down from energon 7.4.1, which is asked to read the same files."""
    path = write_tar(
        tmp_path / "a.tar",
        [
            ("a.txt", b"hello"),
            ("a.json", b"{}"),
            ("__meta__.json", b"{}"),
            ("dir/b.seg.v2.txt", b"b2"),
            ("dir/b.txt", b"b"),
            ("noext", b"zz"),
            ("c.d/c.txt", b"cc"),
        ],
    )
    assert by_us(path) == (
        [
            ("a", {"txt": b"hello", "json": b"{}"}),
            ("__meta__", {"json": b"{}"}),
            ("dir/b", {"seg.v2.txt": b"b2", "txt": b"b"}),
            ("c.d/c", {"txt": b"cc"}),
        ],
        [0, 2048, 3072, 6144, 7168],
    )


@pytest.mark.parametrize("archive_format", FORMATS)
def test_odd_members(tmp_path, archive_format):
    """Long names, folders, links and stray files: a sample that begins with them must begin with
    their headers.
    """
    members = [
        ("folder", "DIRTYPE"),
        ("L" * 60 + "/" + "M" * 60 + "/x.txt", b"long"),
        ("L" * 60 + "/" + "M" * 60 + "/x.json", b"{}"),
        ("e.link", "SYMTYPE"),
        ("f.txt", b""),
        ("f.json", b"1" * 512),
        ("__pack__/g.txt", b"no sample"),
        ("deep/__pack__/g.txt", b"a sample"),
        ("q.txt", b"1"),
        (".hidden.txt", b"2"),
        ("r..txt", b"3"),
        ("./s.txt", b"4"),
        ("t.", b"5"),
        ("n" * 96 + ".txt", b"a name that fills its field"),
        ("p" * 95 + ".txt", b"one that ends just before"),
    ]
    if archive_format != tarfile.USTAR_FORMAT:
        members += [
            ("é" * 80 + "/y.txt", b"accents"),
            ("o" * 300 + ".txt", b"longer than any field"),
        ]
    path = write_tar(tmp_path / "a.tar", members, archive_format)
    samples, offsets = by_us(path)
    assert (samples, offsets) == by_tarfile(path)
    keys = [
        "/".join(("L" * 60, "M" * 60, "x")),
        "f",
        "deep/__pack__/g",
        "q",
        "r",
        "./s",
        "t",
        "n" * 96,
        "p" * 95,
    ]
    assert [key for key, _ in samples][:9] == keys


def test_pax_header_of_times_alone(tmp_path):
    """A sample's first byte is that of its extended header also when this does not name it."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("a.txt", "b.txt"):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = 3, 1.5
            archive.addfile(info, io.BytesIO(b"hhh"))
    assert by_us(path) == ([("a", {"txt": b"hhh"}), ("b", {"txt": b"hhh"})], [0, 2048, 4096])


@given(
    members=st.lists(
        st.tuples(
            st.sampled_from(
                ["a", "b", "d/a", "d.x/a", "__m__", "__m__/a", "ü", "k" * 98, "w" * 120]
            ),
            st.sampled_from(["", ".txt", ".json", ".a.b", ".", "..x"]),
            st.sampled_from([b"", b"x", b"y" * 511, b"z" * 512, b"w" * 1025]),
        ),
        max_size=12,
    ),
    archive_format=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_agrees_with_tarfile(tmp_path_factory, members, archive_format):
    """Any name that one of the two ways to parse takes for another would move a part to another
    sample.
    """
    named = [(base + part, content) for base, part, content in members]
    path = write_tar(tmp_path_factory.mktemp("tar") / "a.tar", named, archive_format)
    assert by_us(path) == by_tarfile(path)


def test_sizes_beyond_octal_digits():
    """Members of 8 GiB and more have their size in another notation."""
    info = tarfile.TarInfo("a.bin")
    info.size = 3
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\x80" + (3).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    parts: dict[str, bytes] = {}
    assert parse_sample(bytes(header) + b"abc".ljust(512, b"\0"), 0, 1024, parts) == "a"
    assert parts == {"bin": b"abc"}


@pytest.mark.parametrize("cut", [1, 700, 1023, 1024 + 511, 2048 + 5])
def test_cut_archive_is_refused(tmp_path, cut):
    """A download that broke off would be a smaller data set, silently."""
    whole = write_tar(tmp_path / "a.tar", {"a.txt": b"1", "b.txt": b"2" * 600}).read_bytes()
    with pytest.raises(TarError, match=r"is cut"):
        scan_tar(Buffer(whole[:cut]))


@pytest.mark.parametrize("end", [1024, 2560])
def test_archive_without_its_end_mark(tmp_path, end):
    """Some tools write none; all members are there."""
    whole = write_tar(tmp_path / "a.tar", {"a.txt": b"1", "b.txt": b"2" * 600}).read_bytes()
    assert scan_tar(Buffer(whole[:end])).end == end


@pytest.mark.parametrize("content", [b"x" * 2000, b'{"text": 1}\n' * 200, b"\0\1" * 1000])
def test_what_is_no_archive_is_refused(content):
    """A file of another kind with the wrong suffix."""
    with pytest.raises(
        TarError, match="no member starts at byte 0; it is no tar archive, or damaged"
    ):
        scan_tar(Buffer(content))
    with pytest.raises(TarError):
        parse_sample(content, 0, len(content), {})


def test_flipped_bit_is_refused(tmp_path):
    """A size that changed by one bit moves all that follows."""
    damaged = bytearray(
        write_tar(tmp_path / "a.tar", {"a.txt": b"1", "b.txt": b"2" * 600}).read_bytes()
    )
    damaged[1024 + 130] ^= 1
    with pytest.raises(TarError, match="no member starts at byte 1024"):
        scan_tar(Buffer(bytes(damaged)))


def test_pieces_that_are_not_one_sample(tmp_path):
    """With the offsets of another archive, one sample's text would be joined with the next one's
    image.
    """
    whole = write_tar(tmp_path / "a.tar", {"a.txt": b"1", "b.txt": b"2" * 600}).read_bytes()
    for start, end, fault in [
        (0, 2560, "one sample must be here, but 2 are"),
        (1024, 2048, "goes to byte 1112 of 1024; the file is cut"),
        (512, 1024, "no member starts at byte 0"),
        (0, 0, "no sample starts here"),
        (2560, 10240, "one sample must be here, but 0 are"),
    ]:
        with pytest.raises(TarError, match=fault):
            parse_sample(whole, start, end, {})


def test_sparse_members_are_refused():
    """Their content is not what stands in the archive."""
    info = tarfile.TarInfo("a.bin")
    info.type = tarfile.GNUTYPE_SPARSE
    with pytest.raises(TarError, match="is sparse"):
        list(walk_tar(Buffer(info.tobuf(tarfile.GNU_FORMAT))))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.txt", ("a", "txt")),
        ("d.e/a.b.c", ("d.e/a", "b.c")),
        ("d.e/a", None),
        (".a", None),
        ("d/.a.b", None),
        ("__x__/a.txt", None),
        ("__x__.txt", ("__x__", "txt")),
        ("", None),
    ],
)
def test_names(name, expected):
    """Dots in folders are no suffixes."""
    assert split_name(name) == expected
