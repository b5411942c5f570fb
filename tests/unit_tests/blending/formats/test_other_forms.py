"""Files that are no UTF-8 text, or no lines of JSON, are named as what they are."""

import gzip
import json

import pytest

from megatron.blending.formats.sources import open_source

OBJECTS = [{"text": "a", "tags": ["b", "c"]}, {"text": "gr\u00fcn"}]
LINES = "".join(json.dumps(one) + "\n" for one in OBJECTS)
TABLE = "text,tags\na,b\n"


def fault(path, content):
    path.write_bytes(content)
    try:
        record = open_source(path).read([0])[0]
    except ValueError as error:
        return str(error)
    return str(record)


@pytest.mark.parametrize(
    ("encoding", "told"),
    [
        ("utf-16", "is UTF-16 text, but must be UTF-8; convert it: iconv -f UTF-16 -t UTF-8 "),
        ("utf-16-le", "is UTF-16 text, but must be UTF-8; convert it: iconv -f UTF-16LE -t UTF-8 "),
        ("utf-16-be", "is UTF-16 text, but must be UTF-8; convert it: iconv -f UTF-16BE -t UTF-8 "),
        ("utf-32", "is UTF-32 text, but must be UTF-8; convert it: iconv -f UTF-32 -t UTF-8 "),
    ],
)
@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", LINES), ("a.json", json.dumps(OBJECTS)), ("a.csv", TABLE), ("a.tsv", TABLE)],
)
def test_other_encodings_are_named(tmp_path, name, text, encoding, told):
    """Windows writes UTF-16 by default; byte 1 of line 1 was to be fixed."""
    message = fault(tmp_path / name, text.encode(encoding))
    assert f"{told}{tmp_path / name} > OTHER" in message
    assert message.startswith(str(tmp_path / name))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (json.dumps(OBJECTS[0], indent=2).encode(), "over several lines, but must have one per"),
        (
            "\n".join(json.dumps(one, indent=4) for one in OBJECTS).encode(),
            "over several lines, but must have one per line; write it so: jq -c . ",
        ),
        (json.dumps(OBJECTS).encode(), "is one JSON list, not an object per line; name it .json"),
        (json.dumps(OBJECTS, indent=1).encode(), "is one JSON list, not an object per line"),
        (gzip.compress(LINES.encode(), mtime=0), "is compressed by gzip; unpack it: gunzip -c "),
        (b"PAR1\x15\x04", "is a Parquet file; name it .parquet"),
        # Faults of one line stay faults of that line.
        (b'{"text": "a" "b"}\n' + LINES.encode(), "a.jsonl:1: not JSON: Expecting ',' delimiter"),
        (b'{"text": "gr\xfcn"}\n', "a.jsonl:1: not UTF-8 at byte 13 of the line; fix the line"),
        (b"[1, 2]\n" + LINES.encode(), "a.jsonl:1: must be a JSON object, but is a list"),
    ],
)
def test_other_forms_of_jsonl_are_named(tmp_path, content, told):
    """`Extra data at column 4` of each line, in a file of an editor that wraps JSON."""
    assert told in fault(tmp_path / "a.jsonl", content)


def test_sound_files_are_not_asked(tmp_path):
    """A broken line far down is not the file's form."""
    content = LINES.encode() + b"{\n" + LINES.encode()
    (tmp_path / "a.jsonl").write_bytes(content)
    source = open_source(tmp_path / "a.jsonl")
    assert "a.jsonl:3: not JSON: " in str(source.read([2])[0])
    assert source.read([0, 1, 3, 4]) == OBJECTS * 2
