"""Where fields come from."""

import io

import numpy as np
import pytest

from megatron.blending.energon._encoding.decode import decode_part, keep_bytes
from megatron.blending.formats.decode import DecodeError
from megatron.blending.formats.prepared.field_map import FieldMap, Missing


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


RECORD = {
    "__key__": "k",
    "txt": b"hello",
    "json": b'{"a": [{"b": 5}, null], "txt": "other", "0": "zero"}',
    "x.y": b"!",
}
PLAIN = {"x.cls": b"3", "npy": npy(np.arange(3))}


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("txt", "hello"),
        ("json[a][0][b]", 5),
        ("json[a][1]", None),
        ("json[0]", "zero"),
        ("json[txt]", "other"),
        ("missing,txt", "hello"),
        ("json[missing],json[a][7],txt", "hello"),
        ("json[a][x], txt", "hello"),
        ("txt,json[txt]", "hello"),
        ("x.y", b"!"),
    ],
)
def test_grammar(source, value):
    """Users' dataset.yaml files are written in it."""
    assert FieldMap({"f": source})(RECORD, decode_part) == {"f": value}


def test_each_part_is_decoded_once_and_only_if_asked_for():
    """Decoding is most of the price of a sample: an image that no field needs, or one that two
    need.
    """
    decoded = []

    def decode(name, content):
        decoded.append(name)
        return decode_part(name, content)

    fields = FieldMap({"a": "json[a]", "b": "json[txt],txt", "c": "json[0]"})(RECORD, decode)
    assert fields == {"a": [{"b": 5}, None], "b": "other", "c": "zero"}
    assert decoded == ["json"]
    assert FieldMap({"t": "txt", "j": "json"})(RECORD, keep_bytes) == {
        "t": b"hello",
        "j": RECORD["json"],
    }
    assert FieldMap({"t": "txt", "same": "txt"})(RECORD, decode_part) == {
        "t": "hello",
        "same": "hello",
    }


def test_parts():
    """Who reads only some parts asks which."""
    assert FieldMap({"a": "json[a],txt", "b": "jpg,png"}).parts == {"json", "txt", "jpg", "png"}


@pytest.mark.parametrize("source", ["jpg", "json[missing]", "json[a][2]", "txt[0]", "json[a][-3]"])
def test_what_is_not_there_is_named(source):
    """A sample without its field would be trained on as if it were empty."""
    with pytest.raises(
        DecodeError,
        match=r"field 'f' must come from .*, which is not there; parts: txt, json, x\.y",
    ):
        FieldMap({"f": source})(RECORD, decode_part)


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("json[a][0][c]", Missing("c", "json[a][0]", ("b",), "")),
        ("json[b]", Missing("b", "json", ("a", "txt", "0"), "")),
        ("json[a][b]", Missing("b", "json[a]", (), "list")),
        ("jpg,png", Missing("jpg", "", ("txt", "json", "x.y", "x.cls", "npy"), "")),
        ("jpg,json[b]", Missing("b", "json", ("a", "txt", "0"), "")),
        ("json[a][9]", None),
        ("json[a][1][x]", None),
        ("jpg,json[b],txt", None),
        ("txt[0]", Missing("0", "txt", (), "str")),
        ("x.cls[0]", Missing("0", "x.cls", (), "int")),
        ("npy[0]", Missing("0", "npy", (), "ndarray")),
        ("txt[0],txt", None),
        ("x.y", None),
    ],
)
def test_what_is_missing(source, missing):
    """Said of good data, it would keep users from what they train on today; so what may be there
    elsewhere is not.
    """
    expected = {} if missing is None else {"f": missing}
    assert FieldMap({"f": source, "t": "txt"}).missing({**RECORD, **PLAIN}, decode_part) == expected


def test_nothing_dear_is_decoded_to_find_what_is_missing():
    """Pickles run code, where they are allowed, and images take long."""
    decoded = []

    def decode(name, content):
        decoded.append(name)
        return decode_part(name, content)

    record = {**RECORD, "pkl": b"", "more.json": b"[1]"}
    field_map = FieldMap(
        {
            "a": "pkl[a]",
            "b": "json[a]",
            "c": "json[txt]",
            "d": "txt",
            "e": "json",
            "f": "more.json[0]",
        }
    )
    assert field_map.missing(record, decode) == {}
    assert decoded == ["json", "more.json"]


@pytest.mark.parametrize("source", ["", "json[", "json[]", "json[a]b", "a,,b", "[a]"])
def test_wrong_grammar_is_refused_at_once(source):
    """The first sample would be the place to find out, on every rank."""
    with pytest.raises(
        ValueError, match=r"dataset\.yaml: f must be like txt or json\[caption\]\[0\]"
    ):
        FieldMap({"f": source}, "dataset.yaml")


def test_what_every_sample_has_of_itself_is_no_field():
    """The key would be accepted, and the record's own taken all the same."""
    with pytest.raises(
        ValueError, match=r"field_map: __key__ must be a field of the sample's own.*; remove it"
    ):
        FieldMap({"text": "txt", "__key__": "txt"})
