"""pure. Names what a text file is that its reader cannot read, and the way out: text in another
encoding, a compressed file, JSON over several lines.

It is asked once a line could not be read, so that sound files cost nothing.
"""

import json

_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_MAGICS = (
    (b"\x1f\x8b", "compressed by gzip; unpack it: gunzip -c {0} > OTHER"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd; unpack it: unzstd -c {0} > OTHER"),
    (b"BZh", "compressed by bzip2; unpack it: bunzip2 -c {0} > OTHER"),
    (b"\xfd7zXZ", "compressed by xz; unpack it: unxz -c {0} > OTHER"),
    (b"PK\x03\x04", "a zip archive; unpack it: unzip {0}"),
    (b"PAR1", "a Parquet file; name it .parquet"),
)
HEAD_BYTES = 1 << 16
"""Bytes at the beginning of a file by which it is recognised."""


def encoding_fault(path: str, head: bytes) -> str | None:
    """Returns what is wrong with a file that should be UTF-8 text, and the way out; None if its
    first bytes say nothing.

    head: its first bytes.
    """
    for magic, form in _MAGICS:
        if head.startswith(magic):
            return f"is {form.format(path)}"
    encoding = next((name for mark, name in _MARKS if head.startswith(mark)), None)
    if encoding is None:
        encoding = _encoding_by_zeros(head[:256])
    if encoding is None:
        return None
    family = encoding.removesuffix("LE").removesuffix("BE")
    return (
        f"is {family} text, but must be UTF-8; convert it: iconv -f {encoding} -t UTF-8 {path} > "
        "OTHER"
    )


def _encoding_by_zeros(start: bytes) -> str | None:
    """Returns the encoding of text without a mark. In UTF-16 each other byte of a JSON file's or a
    table's first letters is zero, and UTF-8 has no zeros.
    """
    if len(start) >= 4 and start[1] == start[3] == 0 and start[0] and start[2]:
        return "UTF-16LE"
    if len(start) >= 4 and start[0] == start[2] == 0 and start[1] and start[3]:
        return "UTF-16BE"
    return None


def json_lines_fault(path: str, head: bytes) -> str | None:
    """Returns what is wrong with a file of JSON that has not one object per line, and the way out;
    None if its first bytes are no such JSON.
    """
    text = head.decode("utf-8-sig", "replace").lstrip()
    first = text.partition("\n")[0].strip()
    if text.startswith("[") and _is_list(text):
        return "is one JSON list, not an object per line; name it .json"
    if not text.startswith("{") or _length_of_json(first) is not None:
        return None
    if _length_of_json(text) is None and first not in ("{", '{"'):
        return None
    return (
        "holds objects over several lines, but must have one per line; write it so: "
        f"jq -c . {path} > OTHER"
    )


def _is_list(text: str) -> bool:
    """Returns whether text begins a list of objects: `[{` as the only line, or over several."""
    return text[1:].lstrip()[:1] == "{"


def _length_of_json(text: str) -> int | None:
    try:
        return json.JSONDecoder().raw_decode(text)[1]
    except (ValueError, RecursionError):
        return None
