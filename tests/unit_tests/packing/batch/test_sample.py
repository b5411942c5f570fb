"""Samples: nothing is lost on the wire, and each accepted shape gives the sequences that it holds."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.packing.batch.sample import (
    LABELS_EXPLICIT,
    MASK_EXPLICIT,
    POSITIONS_EXPLICIT,
    Sample,
    decode,
    encode,
    num_words,
    samples_of,
)

FIELDS = {"tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32, "position_ids": torch.int64}
IDS = st.integers(0, 2**31 - 1)
WEIGHTS = st.floats(-8, 8, width=32, allow_subnormal=False)


@st.composite
def samples(draw, usual=False):
    """Samples of 1..40 tokens; `usual`: labels shifted, a mask of one weight or zero, positions that count."""

    def values(elements):
        return draw(st.lists(elements, min_size=length, max_size=length))

    length = draw(st.integers(1, 40))
    tokens = values(IDS)
    labels = [*tokens[1:], draw(st.sampled_from([-100, 0, 2**31 - 1]))]
    weight = draw(WEIGHTS.filter(lambda w: w > 0))
    loss_mask = values(st.sampled_from([0.0, weight]))
    position_ids = list(range(length))
    if not usual:
        if draw(st.booleans()):
            labels = values(st.integers(-100, 2**31 - 1))
        loss_mask = draw(st.sampled_from([loss_mask, [0.0] * length, [1.0] * length, values(WEIGHTS)]))
        if draw(st.booleans()):
            position_ids = values(IDS)
    return sample_of(tokens, labels, loss_mask, position_ids)


def sample_of(*columns) -> Sample:
    tokens, labels, mask, positions = (torch.tensor(c, dtype=dtype) for c, dtype in zip(columns, FIELDS.values()))
    return Sample(tokens, labels, mask, positions)


def assert_same(sample: Sample, expected: Sample) -> None:
    for name, dtype in FIELDS.items():
        field = getattr(sample, name)
        assert field.dtype == dtype, name
        assert torch.equal(field, getattr(expected, name)), f"{name} is {field}, not {getattr(expected, name)}"


def columns(sample: Sample) -> list[list[float]]:
    assert all(getattr(sample, name).dtype == dtype for name, dtype in FIELDS.items())
    return [getattr(sample, name).tolist() for name in FIELDS]


@settings(deadline=None)
@given(samples())
def test_wire_round_trip(sample):
    """Without it a token, weight or position could change between the data set and the model, and training go on."""
    kind, words = encode(sample)
    assert words.dtype == torch.int32
    assert_same(decode(len(sample), kind, words), sample)


@settings(deadline=None)
@given(st.lists(samples(), min_size=1, max_size=4))
def test_num_words_cuts_a_stream_of_samples(batch):
    """Receivers know words by length and kind only: one word off, and each later sample reads its neighbour's."""
    encoded = [encode(sample) for sample in batch]
    sizes = num_words(np.array([len(sample) for sample in batch]), np.array([kind for kind, _ in encoded]))
    assert sizes.tolist() == [words.numel() for _, words in encoded]
    stream = torch.cat([words for _, words in encoded]).split(sizes.tolist())
    for sample, (kind, _), words in zip(batch, encoded, stream):
        assert_same(decode(len(sample), kind, words), sample)


@settings(deadline=None)
@given(samples(usual=True))
def test_usual_samples_take_the_short_form(sample):
    """Without it every sample could travel in the long form, three times the bytes, and no result would differ."""
    assert encode(sample)[0] == 0


@pytest.mark.parametrize("source", [0, 1, 999, 2**31 - 1])
@pytest.mark.parametrize("positions", [[0, 1, 2], [5, 6, 7]])
def test_the_source_travels_in_the_kind(source, positions):
    """Losses would be those of another source; words of its own would cost every sample bytes."""
    drawn = {"tokens": [5, 6, 7], "position_ids": positions, "source": source}
    (sample,) = samples_of(drawn)
    (without,) = samples_of({**drawn, "source": 0})
    kind, words = encode(sample)
    assert torch.equal(words, encode(without)[1])
    assert num_words(np.array(3), np.array(kind)) == words.numel()
    assert decode(3, kind, words).source == source
    assert sample.first(2).source == source
    assert np.array([kind], np.int64)[0] == kind


@pytest.mark.parametrize("source", [-1, 2**31])
def test_a_source_that_cannot_travel_is_refused(source):
    """It would change the kind's lower bits, or another sample's loss."""
    with pytest.raises(ValueError, match=f"'source' must be from 0 to .*{source}"):
        samples_of({"tokens": [5], "source": source})


def test_bytes_on_the_wire():
    """The promise of 5 bytes per token, and of at most 16, as numbers; only a slower step would show its loss."""
    length, every = np.array(4096), LABELS_EXPLICIT | MASK_EXPLICIT | POSITIONS_EXPLICIT
    assert 4 * num_words(length, np.array(0)) == 5 * 4096 + 8
    assert 4 * num_words(length, np.array(every)) == 16 * 4096


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({}, 0),
        ({"labels": [6, 9, 8]}, LABELS_EXPLICIT),
        ({"loss_mask": [0.5, 0.25, 0.0]}, MASK_EXPLICIT),
        ({"loss_mask": [-1.0, 0.0, 0.0]}, MASK_EXPLICIT),
        ({"position_ids": [1, 2, 3]}, POSITIONS_EXPLICIT),
    ],
)
def test_what_travels_explicitly(changed, kind):
    """Each exception is found on its own: a mask or labels taken for the usual case would be replaced by it."""
    given_fields = {"tokens": [5, 6, 7], "labels": [6, 7, 8], "loss_mask": [0.0, 0.5, 0.5], "position_ids": [0, 1, 2]}
    sample = sample_of(*(given_fields | changed).values())
    assert encode(sample)[0] == kind
    assert_same(decode(3, *encode(sample)), sample)


def test_plain_sample_derives_what_is_missing():
    """Labels off by one, or a scored last label that nobody knows, train a different model without an error."""
    (sample,) = samples_of({"tokens": [5, 6, 7]})
    assert columns(sample) == [[5, 6, 7], [6, 7, 7], [1.0, 1.0, 0.0], [0, 1, 2]]


def test_derived_labels_mask_the_last_one_of_a_given_mask():
    """A mask from the data set says which tokens count; the label after the last one stays unknown."""
    (sample,) = samples_of({"tokens": [5, 6, 7], "loss_mask": np.array([0.5, 0.25, 1.0])})
    assert columns(sample) == [[5, 6, 7], [6, 7, 7], [0.5, 0.25, 0.0], [0, 1, 2]]


def test_given_fields_are_kept():
    """Weights, labels and positions of the data set would be silently replaced by derived ones."""
    item = {
        "tokens": torch.tensor([[5, 6, 7]], dtype=torch.int32),
        "labels": torch.tensor([[-100, 7, 8]]),
        "loss_mask": torch.tensor([[False, True, True]]),
        "position_ids": np.array([4, 5, 6]),
    }
    (sample,) = samples_of(item)
    assert columns(sample) == [[5, 6, 7], [-100, 7, 8], [0.0, 1.0, 1.0], [4, 5, 6]]


@pytest.mark.parametrize("original", [3, torch.tensor(3), torch.tensor([3]), np.int64(3)])
def test_padded_sample_loses_its_padding(original):
    """Padding that stays would be attended to, counted as tokens and packed as content."""
    item = {"tokens": [5, 6, 7, 0, 0], "original_seq_len": original, "padded_seq_len": 5}
    (derived,) = samples_of(item)
    assert columns(derived) == [[5, 6, 7], [6, 7, 7], [1.0, 1.0, 0.0], [0, 1, 2]]
    (whole,) = samples_of(item | {"labels": [6, 7, 8, 0, 0], "loss_mask": [1, 1, 1, 0, 0]})
    assert columns(whole) == [[5, 6, 7], [6, 7, 8], [1.0, 1.0, 1.0], [0, 1, 2]]


@pytest.mark.parametrize("shape", [(-1,), (1, -1)])
@pytest.mark.parametrize("tail", [[], [5], [5, 5, 5]])
def test_packed_sample_is_cut_at_cu_seqlens(shape, tail):
    """Sequences run together attend to one another; a padded tail of `cu_seqlens` must not make empty ones."""
    item = {
        "tokens": torch.tensor([5, 6, 7, 8, 9, 0]).view(shape),
        "cu_seqlens": torch.tensor([0, 2, 5, *tail], dtype=torch.int32).view(shape),
    }
    first, second = samples_of(item)
    assert columns(first) == [[5, 6], [6, 6], [1.0, 0.0], [0, 1]]
    assert columns(second) == [[7, 8, 9], [8, 9, 9], [1.0, 1.0, 0.0], [0, 1, 2]]
    more = {"labels": [6, 60, 8, 9, 90, 0], "loss_mask": [1, 2, 3, 4, 5, 0], "position_ids": [0, 1, 0, 1, 2, 3]}
    first, second = samples_of(item | {name: torch.tensor(field).view(shape) for name, field in more.items()})
    assert columns(first) == [[5, 6], [6, 60], [1.0, 2.0], [0, 1]]
    assert columns(second) == [[7, 8, 9], [8, 9, 90], [3.0, 4.0, 5.0], [0, 1, 2]]


def test_lists_of_samples_keep_their_order():
    """Sequences lost or moved here are trained on never, or by the wrong rank, and no count is off by much."""
    items: list[dict[str, Any]] = [
        {"tokens": [1, 2]},
        {"tokens": [3, 4, 5, 6], "cu_seqlens": [0, 1, 4]},
        {"tokens": [7, 0], "original_seq_len": 1},
    ]
    expected = [[1, 2], [3], [4, 5, 6], [7]]
    assert [sample.tokens.tolist() for sample in samples_of(items)] == expected
    assert [sample.tokens.tolist() for sample in samples_of(iter(items))] == expected
    assert samples_of([]) == []


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"text": [1]}, "must have the key 'tokens', but has ['text']"),
        ({"tokens": None, "labels": [1]}, "must have the key 'tokens'"),
        ({"tokens": [1, 2], "labels": [2]}, "'labels' must be as long as 'tokens' (2), but is 1"),
        ({"tokens": [1, 2], "loss_mask": [1, 1, 1]}, "'loss_mask' must be as long as 'tokens' (2), but is 3"),
        ({"tokens": [1, 2], "position_ids": []}, "'position_ids' must be as long as 'tokens' (2), but is 0"),
        ({"tokens": [1, 2], "cu_seqlens": []}, "'cu_seqlens' must rise from 0"),
        ({"tokens": [1, 2**31]}, "'tokens' must be below 2**31"),
        ({"tokens": [1, 2], "loss_mask": [1, float("inf")]}, "'loss_mask' must be finite"),
        ({"tokens": [1, 2], "cu_seqlens": [1, 2]}, "'cu_seqlens' must rise from 0 to at most 2 tokens, but is [1, 2]"),
        ({"tokens": [1, 2, 3], "cu_seqlens": [0, 2, 1]}, "'cu_seqlens' must rise from 0"),
        ({"tokens": [1, 2], "cu_seqlens": [0, 3]}, "'cu_seqlens' must rise from 0 to at most 2 tokens"),
        ({"tokens": [1, 2], "cu_seqlens": [0, 0]}, "at least one token"),
        ({"tokens": []}, "at least one token"),
        ({"tokens": [1, 2], "original_seq_len": 0}, "at least one token"),
        ({"tokens": [1, 2], "original_seq_len": 3}, "spans are [(0, 3)] of 2 tokens"),
    ],
)
def test_malformed_samples_are_refused(item, message):
    """Each would be cut or stretched by slicing without an error, and train on something else."""
    with pytest.raises(ValueError) as error:  # noqa: PT011  the text is compared below, it holds brackets
        samples_of(item)
    assert message in str(error.value)
    with pytest.raises(ValueError):  # noqa: PT011
        samples_of([{"tokens": [1]}, item])


def test_first_cuts_all_fields():
    """A truncated sample whose labels or mask keep their length would shift all that is packed after it."""
    sample = sample_of([5, 6, 7], [6, 7, 8], [0.5, 0.25, 1.0], [0, 1, 2]).first(2)
    assert len(sample) == 2
    assert columns(sample) == [[5, 6], [6, 7], [0.5, 0.25], [0, 1]]


def test_padded_packs_are_read_where_their_sequences_stand():
    """With padding between sequences, `cu_seqlens` are lengths and not places: all but the first would be shifted."""
    item = {"tokens": [1, 2, 0, 0, 5, 6, 7, 0], "cu_seqlens": [0, 2, 5], "cu_seqlens_padded": [0, 4, 8]}
    assert [sample.tokens.tolist() for sample in samples_of(item)] == [[1, 2], [5, 6, 7]]
    with pytest.raises(ValueError, match="'cu_seqlens_padded' must have 3 entries, but has 2"):
        samples_of({**item, "cu_seqlens_padded": [0, 8]})


def test_a_batch_of_rows_is_refused():
    """Read as one long sequence, each row would attend to those before it."""
    assert len(samples_of({"tokens": [[1, 2, 3]]})[0]) == 3
    with pytest.raises(ValueError, match=r"must be \[L\] or \[1, L\], but one is \[2, 3\]"):
        samples_of({"tokens": [[1, 2, 3], [4, 5, 6]]})
