"""pure. Mock data: samples of random tokens with given lengths, to train and measure without data.

Invariant: sample i is a function of (configuration, seed, i) alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.blending.formats.indexed import IndexedSource
from megatron.blending.formats.record import RecordSource, check_index
from megatron.blending.order.permutation import mix_array
from megatron.packing.quoting import shown
from megatron.packing.user_files import parse_json, read_text
from megatron.sft.data.mock.distributions import LengthDistribution
from megatron.sft.data.mock.lengths import (
    DISTRIBUTIONS,
    FLAG,
    config_error,
    parse_distribution,
    read_keys,
    take_key,
)

IntArray = npt.NDArray[np.int64]
UintArray = npt.NDArray[np.uint64]

# Numbers of the random streams of a sample. Its tokens use the streams 1, 2, 3, ...
_LENGTH_STREAM = np.uint64(2**63)
_START_STREAM = np.uint64(2**63 + 1)
_MAX_BYTES_OF_LENGTHS = 1 << 28


class LengthSource(Protocol):
    """Function from indices to the lengths of these samples, int64 of the same shape."""

    def __call__(self, seed: int, indices: IntArray) -> IntArray: ...


class TokenSource(Protocol):
    """Function that returns `count` tokens of sample `index`, int64 [count]."""

    def __call__(self, seed: int, index: int, count: int) -> IntArray: ...


class MockSFTDataset(RecordSource):
    """Map-style data set of `num_samples` mock samples with at most `seq_length` tokens each, from
    a vocabulary of `vocab_size`.

    `config_json` is a JSON object, or the path of a file with one; None is `{"mode":
    "distribution"}`. Its "mode" is one of:

    - `distribution`: random tokens, with lengths from the distribution that "type" and its keys
      describe (lengths.DISTRIBUTIONS). The default is lognormal from seq_length / 2 to seq_length,
      with mean 3/4 seq_length and sigma 1.1.
    - `file`: random tokens, with lengths from the file "path", one per line, in turns. A relative
      path is relative to the folder of the JSON file.
    - `verification`: tokens of the .bin/.idx pair "data_path", with lengths as in `distribution`.
      The default is lognormal from 100 to min(4096, seq_length), with mean 2048 and sigma 1.1.

    "format" may be "thd" in all of them, as in Megatron-LM's recipes.

    A sample is a dict of `tokens` and `labels` (the next tokens), int64 [L], and `loss_mask`,
    float32 [L], all ones. Raises ValueError for a wrong configuration, and for one that could give
    a sample longer than `seq_length`.
    """

    def __init__(
        self,
        config_json: str | None,
        seq_length: int,
        vocab_size: int,
        seed: int,
        *,
        num_samples: int,
    ) -> None:
        for name, value in (
            ("seq_length", seq_length),
            ("vocab_size", vocab_size),
            ("num_samples", num_samples),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, but is {value}")
        config, folder = _load(config_json)
        mode, config = take_key(config, "mode", str)
        if config.pop("format", "thd") != "thd":
            raise config_error(
                'format must be "thd": samples are padded where --sequence-packing is left out; '
                "drop it"
            )
        self._lengths: LengthSource
        self._tokens: TokenSource = RandomTokens(vocab_size)
        if mode == "file":
            path = folder / read_keys(config, {"path": str})["path"]
            self._lengths = ListedLengths(read_lengths(path, seq_length))
        elif mode == "distribution":
            self._lengths = DrawnLengths(_distribution(config, seq_length))
        elif mode == "verification":
            prefix, config = take_key(config, "data_path", str)
            if "type" not in config:
                config = _lognormal_of_verification(seq_length) | config
            self._lengths = DrawnLengths(_distribution(config, seq_length))
            self._tokens = IndexedTokens(str(folder / prefix), vocab_size)
        else:
            hint = (
                f'; did you mean {{"mode": "distribution", "type": "{mode}", ...}}?'
                if mode in DISTRIBUTIONS
                else ""
            )
            raise config_error(
                f"mode must be file, distribution or verification, but is {shown(mode)}{hint}"
            )
        self._seed = seed
        self._num_samples = num_samples
        self._fingerprint = f"{config_json} {seq_length} {vocab_size} {seed}"

    def __len__(self) -> int:
        return self._num_samples

    def lengths(self, indices: IntArray) -> IntArray:
        """Returns the lengths of these samples, int64 of the same shape, without making them."""
        return self._lengths(self._seed, indices)

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[Any]]:
        check_index(index, self)
        length = int(self.lengths(np.array([index]))[0])
        stream = self._tokens(self._seed, index, length + 1)
        labels = stream[1:].copy()  # a copy, so that writing to tokens does not change labels
        return {"tokens": stream[:-1], "labels": labels, "loss_mask": np.ones(length, np.float32)}

    def describe(self, index: int) -> str:
        return f"mock sample {index}"

    def fingerprint(self) -> str:
        return self._fingerprint


@dataclass(frozen=True)
class DrawnLengths:
    """Lengths drawn from a distribution."""

    distribution: LengthDistribution

    def __call__(self, seed: int, indices: IntArray) -> IntArray:
        return self.distribution.quantile(_uniform(_random_bits(seed, indices, _LENGTH_STREAM)))


@dataclass(frozen=True)
class ListedLengths:
    """Lengths from a list: that of sample i is `listed[i % len(listed)]`."""

    listed: IntArray

    def __call__(self, seed: int, indices: IntArray) -> IntArray:
        return self.listed[indices % self.listed.size]


@dataclass(frozen=True)
class RandomTokens:
    """Random tokens, uniform over 0 to vocab_size - 1."""

    vocab_size: int

    def __call__(self, seed: int, index: int, count: int) -> IntArray:
        bits = _random_bits(seed, np.array([index]), np.arange(1, count + 1, dtype=np.uint64))
        return (bits % np.uint64(self.vocab_size)).astype(np.int64)


class IndexedTokens:
    """Tokens of a Megatron .bin/.idx pair. A sample starts at a random document, and continues with
    the next ones; after the last document comes the first.

    Raises ValueError for a token outside the vocabulary.
    """

    def __init__(self, prefix: str, vocab_size: int) -> None:
        self._prefix = prefix
        self._vocab_size = vocab_size
        try:
            self._documents = IndexedSource(prefix)
        except ValueError as error:
            raise config_error(f"data_path must name a .bin/.idx pair, but {error}") from None
        if not self._documents.lengths.any():
            raise config_error(f"data_path must hold tokens, but {prefix}.bin is empty")

    def __call__(self, seed: int, index: int, count: int) -> IntArray:
        num_documents = len(self._documents)
        document = int(_random_bits(seed, np.array([index]), _START_STREAM)[0]) % num_documents
        parts: list[IntArray] = []
        missing = count
        while missing:
            part = self._documents[document]["tokens"][:missing].astype(np.int64)
            self._check(part, document)
            parts.append(part)
            missing -= part.size
            document = (document + 1) % num_documents
        return np.concatenate(parts)

    def _check(self, tokens: IntArray, document: int) -> None:
        outside = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
        if outside.size:
            raise config_error(
                f"document {document} of {self._prefix} holds token {outside[0]}, but the "
                f"vocabulary is {self._vocab_size} tokens; train with the tokenizer that made the "
                "file"
            )


def read_lengths(path: Path, seq_length: int) -> IntArray:
    """Returns the lengths in a text file, one per line, as int64. Raises ValueError, with file and
    line, for a line that is no length.

    A first line that begins with a letter, a quote, `#` or `_` is a header. Blank lines at the end
    are ignored.
    """
    try:
        lines = read_text(path, _MAX_BYTES_OF_LENGTHS).rstrip().splitlines()
    except ValueError as error:
        raise config_error(
            f"path must be a readable text file of lengths, but is {shown(str(path))}: {error}"
        ) from error
    has_header = bool(lines) and (
        lines[0].strip()[:1].isalpha() or lines[0].strip()[:1] in {'"', "'", "#", "_"}
    )
    listed = []
    for number, line in enumerate(lines[has_header:], start=1 + has_header):
        text = line.strip()
        # Python refuses to parse numbers of over 4300 digits.
        if not (text.isascii() and text.isdecimal() and len(text) < 100):
            raise config_error(
                f"{path}:{number}: must be one length, a whole number, but is {shown(line)}"
            )
        length = int(text)
        if not 1 <= length <= seq_length:
            raise config_error(
                f"{path}:{number}: length must be 1 to --seq-length {seq_length}, but is {length}"
            )
        listed.append(length)
    if not listed:
        raise config_error(f"path must be a file of lengths, but {path} holds none")
    return np.array(listed, np.int64)


def _load(config_json: str | None) -> tuple[dict[str, Any], Path]:
    """Returns the configuration, and the folder for relative paths in it."""
    if config_json is None:
        return {"mode": "distribution"}, Path()
    folder, text, where = Path(), config_json, "the JSON"
    if not config_json.lstrip().startswith("{"):
        path = Path(config_json)
        folder, where = path.parent, str(path)
        try:
            text = read_text(path)
        except ValueError as error:
            raise ValueError(
                f"{FLAG} must be a JSON object or the path of a file with one, but is "
                f"{shown(config_json)}: {error}"
            ) from error
    try:
        config = parse_json(text)
    except ValueError as error:
        raise config_error(f"{where} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise config_error(f"{where} must be a JSON object, but is {shown(config)}")
    return config, folder


def _lognormal_of_verification(seq_length: int) -> dict[str, Any]:
    """Returns the values of Megatron-LM, lowered to `seq_length` where they are above it."""
    longest = min(4096, seq_length)
    shortest = min(100, longest)
    mean = min(2048, (shortest + longest) / 2)
    return {
        "type": "lognormal",
        "min_seq_len": shortest,
        "max_seq_len": longest,
        "mean_seq_len": mean,
        "lognormal_sigma": 1.1,
    }


def _distribution(config: Mapping[str, Any], seq_length: int) -> LengthDistribution:
    if not config:
        config = {
            "type": "lognormal",
            "min_seq_len": max(1, seq_length // 2),
            "max_seq_len": seq_length,
            "mean_seq_len": max(1, 0.75 * seq_length),
            "lognormal_sigma": 1.1,
        }
    distribution = parse_distribution(config)
    if distribution.longest > seq_length:
        raise config_error(
            f"samples longer than --seq-length {seq_length} cannot be trained, but the longest "
            f"here have {distribution.longest} tokens; give a lower max_seq_len or seq_len, or "
            "raise --seq-length"
        )
    return distribution


def _random_bits(seed: int, indices: IntArray, streams: UintArray | np.uint64) -> UintArray:
    """Returns 64 random bits as a function of (seed, index, stream); indices and streams broadcast.

    SplitMix64 chained over the three.
    """
    state = mix_array(np.ones(1, np.uint64), np.array([seed % 2**64], np.uint64))
    state = state + indices.astype(np.uint64)
    state = mix_array(np.ones_like(state), state) + streams
    return mix_array(np.ones_like(state), state)


def _uniform(bits: UintArray) -> npt.NDArray[np.float64]:
    """Returns numbers in [0, 1) from the upper 53 bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
