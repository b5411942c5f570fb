"""pure. A file of the reference's log-probabilities, by what was scored.

    key of a path    hash of its tokens, labels and which of them are the answer's
    header           fingerprints of weights and tokenizer, precision

A path is found by its tokens alone, so that neither the order of records, nor the number of ranks,
nor a continued run can mix them up. What another template or tokenizer made is not found.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.tree import Path
from megatron.packing.folder_gate import open_output
from megatron.sft.data.records.values import SampleError

SOURCE = "weights_source"
"""Key of the header: the weights in words, for messages."""
_FORMAT = 1
_SPREAD = 0x9E3779B97F4A7C15
"""Odd constant by which keys of first tokens differ from those of whole answers."""
Keys = npt.NDArray[np.int64]


class Key(NamedTuple):
    """128 bits, as two signed integers."""

    low: int
    high: int

    def of_head(self, count: int) -> Key:
        """Returns the key of the sum over the first `count` tokens of the answer."""
        mixed = (self.high ^ (count * _SPREAD)) & (2**64 - 1)
        return Key(self.low, mixed - 2**64 if mixed >= 2**63 else mixed)


def key_of(path: Path, is_answer: npt.NDArray[np.bool_]) -> Key:
    """Returns the key of a path."""
    digest = hashlib.blake2b(digest_size=16)
    for values in (path.tokens, path.labels):
        digest.update(np.ascontiguousarray(values, np.int32).tobytes())
    digest.update(np.ascontiguousarray(is_answer).tobytes())
    low, high = np.frombuffer(digest.digest(), np.int64).tolist()
    return Key(low, high)


@dataclass(frozen=True, eq=False)
class ScoreFile:
    """Log-probabilities by key, read from a file."""

    path: str
    header: Mapping[str, Any]
    keys: Keys
    """[n, 2], sorted"""
    sums: npt.NDArray[np.float64]
    """[n]"""

    @classmethod
    def read(cls, path: str) -> ScoreFile:
        """Returns the content of a file. Raises ValueError if it is not one of `write_scores`."""
        try:
            with np.load(path, allow_pickle=False) as found:
                header = json.loads(str(found["header"]))
                keys, sums = found["keys"], found["sums"]
        except FileNotFoundError:
            raise ValueError(
                f"--reference-file {path} does not exist; make it with megatron-sft score"
            ) from None
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"--reference-file {path} is no file of megatron-sft score ({error}); make it again"
            ) from None
        if header.get("format") != _FORMAT:
            raise ValueError(f"--reference-file {path} is of another version; make it again")
        return cls(path, header, keys, sums)

    def check(self, expected: Mapping[str, Any]) -> None:
        """Raises ValueError if the file was made with other weights, tokens or precision."""
        faults = {
            "weights": f"of {self._source}, not {expected.get(SOURCE)}",
            "tokenizer": "with another tokenizer",
            "precision": f"in {self.header.get('precision')}, not {expected.get('precision')}",
        }
        if self._source == expected.get(SOURCE):
            faults["weights"] = f"of other files in {self._source}, which have changed since"
        for name, fault in faults.items():
            if self.header.get(name) != expected.get(name):
                raise ValueError(
                    f"--reference-file {self.path} was made {fault}; make it again with "
                    "megatron-sft score"
                )

    @property
    def _source(self) -> str:
        """The weights in words; files of older versions do not have them."""
        return str(self.header.get(SOURCE, "other weights"))

    def of(self, path: Path, is_answer: npt.NDArray[np.bool_]) -> float:
        """Returns the sum over the answer's tokens. Raises SampleError if it is not in the file."""
        return self._sum(key_of(path, is_answer))

    def head(self, path: Path, is_answer: npt.NDArray[np.bool_], count: int) -> float:
        """Returns the sum over the first `count` tokens of the answer."""
        return self._sum(key_of(path, is_answer).of_head(count))

    def _sum(self, key: Key) -> float:
        at = int(np.searchsorted(self.keys[:, 0], key.low))
        while at < len(self.keys) and self.keys[at, 0] == key.low:
            if self.keys[at, 1] == key.high:
                return float(self.sums[at])
            at += 1
        raise SampleError(
            f"is not in --reference-file {self.path}: its tokens, their cut or what counts of them "
            "differ; make the file again with these options"
        )


def check_can_write(flag: str, path: str, is_ours: Callable[[str], bool]) -> None:
    """Tries a file that `megatron-sft score` writes at its end. Raises ValueError if it cannot, or
    if there is a file of something else: data, as one flag names a file to read elsewhere.

    is_ours: says of an existing file whether it was written by the same command.
    """
    place = FilePath(path)
    if place.is_symlink() or (place.exists() and not place.is_file()):
        raise ValueError(f"{flag} {path} must be a file, but is none; name another")
    if place.exists() and place.stat().st_size and not is_ours(path):
        raise ValueError(
            f"{flag} {path} exists, and was not written by megatron-sft score; name another file, "
            "or remove it"
        )
    if not os.access(place if place.exists() else place.resolve().parent, os.W_OK):
        raise ValueError(
            f"{flag} {path} cannot be written: its folder does not exist, or is not yours; make it "
            "first"
        )


def is_score_file(path: str) -> bool:
    """Returns whether a file is one of `write_scores`."""
    try:
        ScoreFile.read(path)
    except ValueError:
        return False
    return True


def is_list_of_scores(path: str) -> bool:
    """Returns whether a file has a reward model's scores, as JSON lines."""
    try:
        with open(path, encoding="utf-8") as file:
            first = json.loads(file.readline(1 << 20))
    except ValueError:
        return False
    return isinstance(first, dict) and first.keys() == {"split", "record", "chosen", "rejected"}


def write_scores(path: str, header: Mapping[str, Any], keys: Keys, sums: Any) -> int:
    """Writes a file of log-probabilities, [n, 2] keys with [n] sums; returns how many different
    keys there were.
    """
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    keys, sums = keys[order], np.asarray(sums, np.float64)[order]
    is_first = np.ones(len(keys), np.bool_)
    is_first[1:] = (keys[1:] != keys[:-1]).any(1)
    text = json.dumps({"format": _FORMAT, **header})
    with open_output(path, "wb") as file:
        np.savez(file, header=np.array(text), keys=keys[is_first], sums=sums[is_first])
    return int(is_first.sum())
