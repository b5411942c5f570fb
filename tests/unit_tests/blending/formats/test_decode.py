"""Parts of samples to values; what stands here was compared with energon 7.4.1's decoder, value by
value.
"""

import gzip
import io
import os
import pickle

import numpy as np
import pytest

from megatron.blending.energon._encoding.decode import SampleDecoder, decode_part
from megatron.blending.formats.decode import DecodeError


def saved(save, *values, **named):
    file = io.BytesIO()
    save(file, *values, **named)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "value"),
    [
        ("txt", "é\n".encode(), "é\n"),
        ("text", b"", ""),
        ("seg.v2.txt", b"dots", "dots"),
        ("cls", b"3\n", 3),
        ("index", b"-1", -1),
        ("json", b'{"a": [1]}', {"a": [1]}),
        ("json.gz", gzip.compress(b"[1, 2]", mtime=0), [1, 2]),
        ("bin", b"\0", b"\0"),
        ("TXT", b"upper case stays as it is", b"upper case stays as it is"),
        ("", b"no name", b"no name"),
    ],
)
def test_values(name, content, value):
    """A user's encoder is written for these types."""
    assert decode_part(name, content) == value


def test_arrays():
    """Of type and shape as they were saved; archives of arrays as a dict that outlives its file."""
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    decoded = decode_part("npy", saved(np.save, array))
    assert decoded.dtype == np.int16
    np.testing.assert_array_equal(decoded, array)
    several = decode_part("npz", saved(np.savez, x=array))
    np.testing.assert_array_equal(several["x"], array)


def test_tensors():
    """Saved tensors are read without running what the file may hold."""
    torch = pytest.importorskip("torch")
    assert (
        decode_part(
            "pth", saved(lambda file, value: torch.save(value, file), {"x": torch.arange(3)})
        )["x"].sum()
        == 3
    )
    with pytest.raises(DecodeError, match="part 'pth': not a pth"):
        decode_part("pth", saved(lambda file, value: torch.save(value, file), Call()))


class Call:
    """Whoever unpickles it calls a function, here a harmless one."""

    def __reduce__(self):
        return os.getcwd, ()


@pytest.mark.parametrize("name", ["pkl", "pickle", "pyd", "a.pkl"])
def test_pickles_are_refused_unless_allowed(name):
    """Opening a data set from elsewhere would run its author's code."""
    with pytest.raises(DecodeError, match=f"part '{name}': pickles run code; pass allow_code=True"):
        decode_part(name, pickle.dumps(Call()))
    assert SampleDecoder(allow_code=True)(name, pickle.dumps({"a": 1})) == {"a": 1}
    with pytest.raises(DecodeError, match="part 'npy'"):
        decode_part("npy", saved(np.save, np.array([Call()], object)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("txt", b"\xff"),
        ("json", b"{"),
        ("cls", b"x"),
        ("npy", b"x"),
        ("jpg", b"x"),
        ("json.gz", b""),
    ],
)
def test_what_is_not_what_its_name_says(name, content):
    """The message names the part, whatever library it was that stumbled."""
    with pytest.raises(DecodeError, match=f"^part '(json|{name})': not a "):
        decode_part(name, content)


@pytest.mark.parametrize("name", ["mp", "cbor"])
def test_libraries_that_are_not_installed_are_named(name, monkeypatch):
    """A part of a rare kind would fail with an error that speaks of modules only."""
    library = {"mp": "msgpack", "cbor": "cbor2"}[name]
    monkeypatch.setitem(__import__("sys").modules, library, None)
    with pytest.raises(
        DecodeError, match=f"part '{name}': needs {library}, which is not installed here"
    ):
        decode_part(name, b"\x01")


@pytest.mark.parametrize("wrong", [{"image_decode": "torchrbg"}, {"av_decode": "AV"}])
def test_unknown_modes_are_refused_at_once(wrong):
    """Every image of a run would fail, one by one."""
    with pytest.raises(ValueError, match="must be one of"):
        SampleDecoder(**wrong)
