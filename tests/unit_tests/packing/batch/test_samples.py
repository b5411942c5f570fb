"""Samples as flat arrays: nothing is lost in memory or on the wire, and the usual ones take 5 bytes per token."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.packing.batch.samples import LABELS, MASK, POSITIONS, Samples, joined, num_words, spread

MOST = 2**31 - 1
DTYPES = (np.int32, np.int32, np.float32, np.int32)
Sequence = tuple[list[int], list[int], list[float], list[int]]
"""tokens, labels, loss_mask, position_ids"""


@st.composite
def sequences(draw: Any, usual: bool = False) -> Sequence:
    """1 to 20 tokens; `usual`: labels are the next tokens, a mask of one weight or zero, positions that count.

    Hypothesis chooses their kinds; it took longer to draw each value than all else takes.
    """
    length, rng = draw(st.integers(1, 20)), np.random.default_rng(draw(st.integers(0, 2**32)))

    def ids() -> list[int]:
        return np.where(rng.random(length) < 0.2, rng.choice([0, 1, MOST]), rng.integers(0, MOST, length)).tolist()

    def weights() -> list[float]:
        drawn = np.where(rng.random(length) < 0.2, rng.choice([0, -0.0, 1, -8]), rng.uniform(-8, 8, length))
        return drawn.astype(np.float32).tolist()

    tokens = ids()
    labels = [*tokens[1:], draw(st.sampled_from([0, MOST]))]
    weight = draw(st.floats(0, 8, width=32, exclude_min=True, allow_subnormal=False))
    loss_mask = rng.choice([0.0, weight], length).tolist()
    position_ids = list(range(length))
    if not usual:
        labels = draw(st.sampled_from([labels, ids()]))
        loss_mask = draw(st.sampled_from([loss_mask, [0.0] * length, [1.0] * length, weights()]))
        position_ids = draw(st.sampled_from([position_ids, ids()]))
    return tokens, labels, loss_mask, position_ids


def samples_of(parts: list[Sequence], sources: list[int] | None = None) -> Samples:
    columns: list[Any] = [
        np.array([value for part in parts for value in part[number]], dtype) for number, dtype in enumerate(DTYPES)
    ]
    lengths = np.array([len(part[0]) for part in parts], np.int64)
    return Samples.of(lengths, np.array(sources or [0] * len(parts), np.int32), *columns)


def parts_of(samples: Samples) -> list[Sequence]:
    ends = np.cumsum(samples.lengths)[:-1]
    assert [values.dtype for values in samples.fields()] == list(DTYPES)
    columns = [[part.tolist() for part in np.split(values, ends)] for values in samples.fields()]
    return list(zip(*columns)) if samples.lengths.size else []


@given(st.lists(sequences(), min_size=1, max_size=5))
def test_fields_and_wire_round_trip(parts: list[Sequence]) -> None:
    """Without it a token, weight or position could change between the data set and the model, and training go on."""
    sources = list(range(len(parts)))
    samples = samples_of(parts, sources)
    assert parts_of(samples) == parts
    for form in (samples.form, samples.form | LABELS, LABELS | MASK | POSITIONS):
        sent = samples.in_form(form)
        words = sent.to_words()
        assert words.dtype == np.int32
        assert words.size == num_words(len(parts), sent.tokens.size, form)
        received = Samples.from_words(words, samples.lengths, form)
        assert parts_of(received) == parts
        assert received.sources.tolist() == sources
        assert received.num_loss_tokens.tolist() == [sum(weight != 0 for weight in part[2]) for part in parts]


@given(st.lists(sequences(usual=True), max_size=5))
def test_usual_samples_take_the_short_form(parts: list[Sequence]) -> None:
    """Without it every sample could travel in full, three times the bytes, and no result would differ."""
    samples = samples_of(parts)
    assert samples.form == 0
    padding = -samples.tokens.size % 4
    assert 4 * samples.to_words().size == 5 * samples.tokens.size + padding + 12 * len(parts)


@pytest.mark.parametrize(
    ("changed", "form"),
    [
        ({}, 0),
        ({"labels": [6, 9, 8]}, LABELS),
        ({"loss_mask": [0.5, 0.25, 0.0]}, MASK),
        ({"loss_mask": [-1.0, 0.0, 0.0]}, MASK),
        ({"position_ids": [1, 2, 3]}, POSITIONS),
    ],
)
def test_what_is_kept_in_full(changed: dict[str, Any], form: int) -> None:
    """Each exception is found on its own: a mask or labels taken for the usual case would be replaced by it."""
    usual = {"tokens": [5, 6, 7], "labels": [6, 7, 8], "loss_mask": [0.0, 0.5, 0.5], "position_ids": [0, 1, 2]}
    parts: list[Any] = [([1, 2], [2, 3], [1.0, 1.0], [0, 1]), tuple((usual | changed).values())]
    samples = samples_of(parts)
    assert samples.form == form
    assert parts_of(samples) == parts


@given(st.data())
def test_take_split_and_join_move_whole_sequences(data: Any) -> None:
    """A sequence cut at another's end trains on its neighbour's tokens, and every count stays right."""
    parts = data.draw(st.lists(sequences(), max_size=6))
    samples = samples_of(parts, list(range(len(parts))))
    order = data.draw(st.permutations(range(len(parts))))[: data.draw(st.integers(0, len(parts)))]
    taken = samples.take(np.array(order, np.int64))
    assert parts_of(taken) == [parts[i] for i in order]
    assert taken.sources.tolist() == order
    cut = data.draw(st.integers(0, len(order)))
    first, second = taken.split(np.array([cut, len(order) - cut]))
    assert parts_of(first) + parts_of(second) == parts_of(taken)
    others = samples_of(data.draw(st.lists(sequences(usual=True), max_size=3)))
    assert parts_of(joined([first, others, second])) == parts_of(first) + parts_of(others) + parts_of(second)


@given(st.lists(sequences(), min_size=1, max_size=5), st.integers(1, 20))
def test_first_cuts_all_fields(parts: list[Sequence], limit: int) -> None:
    """A truncated sample whose labels or mask keep their length would shift all that is packed after it."""
    assert parts_of(samples_of(parts).first(limit)) == [tuple(field[:limit] for field in part) for part in parts]


def test_spread() -> None:
    """Every gather and every padded place is made of it."""
    assert spread(np.array([5, 0, 9]), np.array([2, 3, 1])).tolist() == [5, 6, 0, 1, 2, 9]
    assert spread(np.array([], np.int64), np.array([], np.int64)).tolist() == []
