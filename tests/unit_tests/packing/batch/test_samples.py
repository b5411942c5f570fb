"""Samples as flat arrays: nothing is lost in memory or on the wire, and the usual ones take 5 bytes
per token.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.packing.batch.columns import (
    LABELS,
    LOSS_MASK,
    NODE,
    NODE_LENGTHS,
    PARENTS,
    POSITION_IDS,
    SEQUENCE,
    TOKEN,
    Column,
    Schema,
    Sizes,
    expand_ranges,
    num_words,
    schema_of,
)
from megatron.packing.batch.samples import Samples, SchemaOfPart, common_schema, joined

MOST = 2**31 - 1
DTYPES = (np.int32, np.int32, np.float32, np.int32)
Sequence = tuple[list[int], list[int], list[float], list[int]]
"""tokens, labels, loss_mask, position_ids"""


@st.composite
def sequences(draw: Any, usual: bool = False) -> Sequence:
    """1 to 20 tokens; `usual`: labels are the next tokens, a mask of one weight or zero, positions
    that count.

    Hypothesis chooses their kinds; it took longer to draw each value than all else takes.
    """
    length, rng = draw(st.integers(1, 20)), np.random.default_rng(draw(st.integers(0, 2**32)))

    def ids() -> list[int]:
        return np.where(
            rng.random(length) < 0.2, rng.choice([0, 1, MOST]), rng.integers(0, MOST, length)
        ).tolist()

    def weights() -> list[float]:
        drawn = np.where(
            rng.random(length) < 0.2, rng.choice([0, -0.0, 1, -8]), rng.uniform(-8, 8, length)
        )
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
        np.array([value for part in parts for value in part[number]], dtype)
        for number, dtype in enumerate(DTYPES)
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
    """Without it a token, weight or position could change between the data set and the model, and
    training go on.
    """
    sources = list(range(len(parts)))
    samples = samples_of(parts, sources)
    assert parts_of(samples) == parts
    for schema in (
        samples.schema,
        schema_of({*samples.schema, LABELS}),
        (LABELS, LOSS_MASK, POSITION_IDS),
    ):
        sent = samples.with_schema(schema)
        words = sent.to_words()
        assert words.dtype == np.int32
        assert words.size == num_words(sent.sizes, schema)
        received = Samples.from_words(words, sent.sizes, schema)
        assert parts_of(received) == parts
        assert received.sources.tolist() == sources
        assert received.num_loss_tokens.tolist() == [
            sum(weight != 0 for weight in part[2]) for part in parts
        ]


@given(st.lists(sequences(usual=True), max_size=5))
def test_usual_samples_take_the_short_form(parts: list[Sequence]) -> None:
    """Without it every sample could travel in full, three times the bytes, and no result would
    differ.
    """
    samples = samples_of(parts)
    assert samples.schema == ()
    padding = -samples.tokens.size % 4
    assert 4 * samples.to_words().size == 5 * samples.tokens.size + padding + 12 * len(parts)


@pytest.mark.parametrize(
    ("changed", "schema"),
    [
        ({}, ()),
        ({"labels": [6, 9, 8]}, (LABELS,)),
        ({"loss_mask": [0.5, 0.25, 0.0]}, (LOSS_MASK,)),
        ({"loss_mask": [-1.0, 0.0, 0.0]}, (LOSS_MASK,)),
        ({"position_ids": [1, 2, 3]}, (POSITION_IDS,)),
    ],
)
def test_what_is_kept_in_full(changed: dict[str, Any], schema: Schema) -> None:
    """Each exception is found on its own: a mask or labels taken for the usual case would be
    replaced by it.
    """
    usual = {
        "tokens": [5, 6, 7],
        "labels": [6, 7, 8],
        "loss_mask": [0.0, 0.5, 0.5],
        "position_ids": [0, 1, 2],
    }
    parts: list[Any] = [([1, 2], [2, 3], [1.0, 1.0], [0, 1]), tuple((usual | changed).values())]
    samples = samples_of(parts)
    assert samples.schema == schema
    assert parts_of(samples) == parts


@pytest.mark.slow
@given(st.data())
def test_take_split_and_join_move_whole_sequences(data: Any) -> None:
    """A sequence cut at another's end trains on its neighbour's tokens, and every count stays
    right.
    """
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
    assert parts_of(joined([first, others, second])) == parts_of(first) + parts_of(
        others
    ) + parts_of(second)


@given(st.lists(sequences(), min_size=1, max_size=5), st.integers(1, 20))
def test_first_cuts_all_fields(parts: list[Sequence], limit: int) -> None:
    """A truncated sample whose labels or mask keep their length would shift all that is packed
    after it.
    """
    assert parts_of(samples_of(parts).truncated(limit)) == [
        tuple(field[:limit] for field in part) for part in parts
    ]


def test_expand_ranges() -> None:
    """Every gather and every padded place is made of it."""
    assert expand_ranges(np.array([5, 0, 9]), np.array([2, 3, 1])).tolist() == [5, 6, 0, 1, 2, 9]
    assert expand_ranges(np.array([], np.int64), np.array([], np.int64)).tolist() == []


EXTRA = [
    Column("advantages", "float64", TOKEN, extra=True),
    Column("axes", "int16", TOKEN, shape=(3,), extra=True),
    Column("is_best", "bool", SEQUENCE, extra=True),
    Column("sample_id", "int64", SEQUENCE, extra=True),
    Column("void", "float32", TOKEN, (0,), extra=True),
]


def with_extra(samples: Samples, first: int = 0) -> Samples:
    """Samples whose extra columns have a number of their own in each place."""
    sizes = [samples.sizes.num_rows(column.scope) for column in EXTRA]
    values = [
        (first + np.arange(rows * int(np.prod(column.shape))))
        .reshape(rows, *column.shape)
        .astype(column.dtype)
        for column, rows in zip(EXTRA, sizes)
    ]
    return samples.with_columns(dict(zip(EXTRA, values)))


def extra_of(samples: Samples) -> dict[str, list[Any]]:
    """By name, what each sequence has of a column."""
    starts = np.cumsum(samples.lengths)[:-1]
    return {
        column.name: [part.tolist() for part in np.split(values, starts)]
        if column.scope == TOKEN
        else values.tolist()
        for column, values in samples.extra().items()
    }


@pytest.mark.slow
@given(st.data())
def test_extra_columns_go_wherever_their_sequences_go(data: Any) -> None:
    """An advantage that belongs to another token, or an id to another sample, trains another policy
    in silence.
    """
    samples = with_extra(samples_of(data.draw(st.lists(sequences(), min_size=1, max_size=5))))
    order = data.draw(st.permutations(range(samples.lengths.size)))
    expected = {name: [parts[i] for i in order] for name, parts in extra_of(samples).items()}
    taken = samples.take(np.array(order))
    assert extra_of(taken) == expected
    size = (samples.lengths.size, samples.tokens.size)
    words = taken.to_words()
    assert words.size == num_words(taken.sizes, taken.schema)
    received = Samples.from_words(words, taken.sizes, taken.schema)
    assert extra_of(received) == expected
    assert [values.dtype.name for values in received.extra().values()] == [
        column.dtype for column in EXTRA
    ]
    cut = data.draw(st.integers(0, size[0]))
    first, second = received.split(np.array([cut, size[0] - cut]))
    assert extra_of(joined([second, Samples.none(), first])) == {
        name: parts[cut:] + parts[:cut] for name, parts in expected.items()
    }
    assert extra_of(received.truncated(1))["axes"] == [part[:1] for part in expected["axes"]]


def test_words_of_another_size_are_refused() -> None:
    """Cut where columns do not begin, they would be other tokens, and training would go on."""
    samples = samples_of([([1, 2], [2, 3], [1.0, 1.0], [0, 1])])
    with pytest.raises(ValueError, match="1 sequences take 6 words, but there are 5"):
        Samples.from_words(samples.to_words()[:-1], samples.sizes, samples.schema)
    with pytest.raises(ValueError, match="take 8 words"):
        Samples.from_words(samples.to_words(), samples.sizes, (LABELS,))


def test_extra_columns_are_in_all_samples_alike() -> None:
    """Zeros that fill a gap would be trained on as numbers of the user's."""

    def common(*schemas: tuple[Column, ...]) -> tuple[Column, ...]:
        return common_schema([SchemaOfPart(schema, False) for schema in schemas])

    column = EXTRA[0]
    assert common((column,), (LABELS, column)) == (LABELS, column)
    assert common((column,), (column._replace(dtype="float32"),)) == (column,)
    with pytest.raises(
        ValueError, match="'advantages' must be in all samples of a global batch or in none"
    ):
        common((column,), ())
    with pytest.raises(ValueError, match="one scope and shape in all samples of a run"):
        common((column,), (column._replace(scope="sequence"),))


IMAGES = Column("image_ids", "int64", "image", extra=True)
"""References that a sequence has any number of, none included."""


def with_nodes_and_images(samples: Samples) -> Samples:
    """Sequence i has i + 1 nodes, if it has as many tokens, else one; and i images."""
    rows = np.array(
        [i + 1 if i < length else 1 for i, length in enumerate(samples.lengths)], np.int64
    )
    parents = [np.arange(-1, n - 1) // 2 for n in rows]
    parts = [[1] * (n - 1) + [length - n + 1] for n, length in zip(rows, samples.lengths)]
    images = np.arange(samples.lengths.size)
    columns: dict[Column, Any] = {
        PARENTS: np.concatenate(parents).astype(np.int32),
        NODE_LENGTHS: np.concatenate(parts).astype(np.int32),
        IMAGES: np.repeat(images, images) * 10,
    }
    return samples.with_columns(columns, {NODE: rows, "image": images})


def ragged_of(samples: Samples) -> list[Any]:
    """What each sequence has of PARENTS, NODE_LENGTHS and IMAGES."""
    found = []
    for column in (PARENTS, NODE_LENGTHS, IMAGES):
        ends = np.cumsum(samples.sizes.rows(column.scope))[:-1]
        found.append([part.tolist() for part in np.split(samples.columns[column], ends)])
    return list(zip(*found))


@given(st.data())
def test_columns_of_other_scopes_go_wherever_their_sequences_go(data: Any) -> None:
    """A node of another tree, or an image of another sample, would be trained on in silence."""
    parts = data.draw(st.lists(sequences(), min_size=1, max_size=5))
    samples = with_nodes_and_images(samples_of(parts))
    order = data.draw(st.permutations(range(len(parts))))
    expected = [ragged_of(samples)[i] for i in order]
    taken = samples.take(np.array(order))
    assert ragged_of(taken) == expected
    words = taken.to_words()
    assert words.size == num_words(taken.sizes, taken.schema)
    received = Samples.from_words(words, taken.sizes, taken.schema)
    assert ragged_of(received) == expected
    assert parts_of(received)[0][0] == parts[order[0]][0]
    cut = data.draw(st.integers(0, len(parts)))
    first, second = received.split(np.array([cut, len(parts) - cut]))
    assert ragged_of(joined([second, Samples.none(), first])) == expected[cut:] + expected[:cut]


def test_a_plain_sequence_is_a_tree_of_one_node() -> None:
    """Trees and plain sequences share a global batch: the plain ones become trees of one node."""
    plain = samples_of([([5, 6], [6, 7], [1.0, 1.0], [0, 1])])
    tree = samples_of([([1, 2, 3, 4, 5, 6], [2, 3, 4, 9, 6, 9], [1.0] * 6, [0, 1, 2, 3, 4, 5])])
    nodes: dict[Column, Any] = {
        PARENTS: np.array([-1, 0, 0], np.int32),
        NODE_LENGTHS: np.array([2, 2, 2], np.int32),
    }
    tree = tree.with_columns(nodes, {NODE: np.array([3])})
    both = joined([plain, tree])
    assert both.sizes.rows(NODE).tolist() == [1, 3]
    assert both.columns[PARENTS].tolist() == [-1, -1, 0, 0]
    assert both.columns[NODE_LENGTHS].tolist() == [2, 2, 2, 2]
    # Positions count along the path: both branches stand behind the trunk's two tokens.
    assert both.fields().position_ids.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    with pytest.raises(ValueError, match="a tree of more than 5 tokens cannot be truncated"):
        both.truncated(5)
    assert plain.with_schema(plain.schema).sizes.ragged == {}
    assert num_words(Sizes(lengths=np.array([2])), ()) == plain.to_words().size
