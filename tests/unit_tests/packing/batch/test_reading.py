"""Each accepted shape of a sample dict gives the sequences that it holds; others are refused by
name.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron.packing.batch.item import plain_item, read_item
from megatron.packing.batch.reading import SampleError, SampleReader, read_samples
from megatron.packing.batch.tree import Path, merge
from tests.unit_tests.packing.batch.test_samples import Sequence, parts_of


def read(given: Any) -> list[Sequence]:
    return parts_of(read_samples(given))


def tokens_of(given: Any) -> list[list[int]]:
    return [part[0] for part in read(given)]


DERIVED = ([5, 6, 7], [6, 7, 7], [1.0, 1.0, 0.0], [0, 1, 2])


def test_plain_sample_derives_what_is_missing() -> None:
    """Labels off by one, or a scored last label that nobody knows, train a different model without
    an error.
    """
    assert read({"tokens": [5, 6, 7]}) == [DERIVED]


def test_derived_labels_mask_the_last_one_of_a_given_mask() -> None:
    """A mask from the data set says which tokens count; the label after the last one stays
    unknown."""
    item = {"tokens": [5, 6, 7], "loss_mask": np.array([0.5, 0.25, 1.0])}
    assert read(item) == [([5, 6, 7], [6, 7, 7], [0.5, 0.25, 0.0], [0, 1, 2])]


def test_given_fields_are_kept() -> None:
    """Weights, labels and positions of the data set would be silently replaced by derived ones."""
    item = {
        "tokens": torch.tensor([[5, 6, 7]], dtype=torch.int32),
        "labels": torch.tensor([[9, 7, 8]]),
        "loss_mask": torch.tensor([[False, True, True]]),
        "position_ids": np.array([4, 5, 6]),
    }
    assert read(item) == [([5, 6, 7], [9, 7, 8], [0.0, 1.0, 1.0], [4, 5, 6])]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize("shape", [(-1,), (1, -1)])
def test_weights_are_tensors_of_any_precision(
    dtype: torch.dtype, has_gradient: bool, shape: tuple[int, ...]
) -> None:
    """numpy takes neither bfloat16 nor what has a gradient."""
    weights = torch.tensor([0.5, 0.25, 0.0], dtype=dtype, requires_grad=has_gradient).view(shape)
    item = {"tokens": torch.tensor([5, 6, 7]), "loss_mask": weights}
    wanted = ([5, 6, 7], [6, 7, 7], [0.5, 0.25, 0.0], [0, 1, 2])
    assert read(item) == [wanted]
    # Tensors are converted together where all have one type, and not as torch joins several.
    integers = item | {"loss_mask": torch.tensor([4097, 1, 0])}
    array = item | {"loss_mask": np.array([0.5, 0.25, 0.0])}
    large = (*wanted[:2], [4097.0, 1.0, 0.0], wanted[3])
    assert read([item, item]) == [wanted, wanted]
    assert read([item, integers]) == [wanted, large]
    assert read([integers, array, item]) == [large, wanted, wanted]


@pytest.mark.parametrize("as_given", [np.array, torch.tensor, lambda values: np.array([values])])
def test_plain_samples_are_read_as_others_are(as_given: Callable[[list[int]], Any]) -> None:
    """Most samples are read by fewer calls. Whatever these accept must be what the others make."""
    for names in (("tokens",), ("tokens", "labels"), ("position_ids", "tokens", "loss_mask")):
        for number, values in enumerate(([4], [4, 5, 6])):
            sample = {name: as_given(values) for name in names} | {"source": number}
            plain, read = plain_item(sample), read_item(sample, lambda name, _: pytest.fail(name))
            assert plain is not None
            assert (
                (plain.lengths, plain.source)
                == (read.lengths, read.source)
                == (
                    [len(values)],
                    number,
                )
            )
            assert {name: each.tolist() for name, each in plain.fields.items()} == {
                name: each.tolist() for name, each in read.fields.items()
            }
            assert plain._replace(fields={}) == read._replace(fields={})


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": np.arange(2)},
        {"tokens": np.empty(0, np.int64)},
        {"tokens": np.array(3)},
        {"tokens": np.ones((2, 3), np.int64)},
        {"position_ids": np.ones((3, 3), np.int64)},
        {"labels": None},
        {"labels": [1, 2, 3]},
        {"source": -1},
        {"source": "0"},
        {"extra": np.arange(3)},
        {"cu_seqlens": np.array([0, 3])},
        {"labels": np.empty(0, np.int64)},
        {"loss_mask": np.empty(0, np.float32)},
    ],
)
def test_other_samples_are_not_plain(changes: dict[str, Any]) -> None:
    """Such a sample read as plain would be trained with what must be refused, cut or converted."""
    sample = {"tokens": np.arange(3)} | changes
    assert plain_item(sample) is None
    assert plain_item(dict(reversed(sample.items()))) is None  # in any order of the keys
    assert plain_item({"tokens": np.empty(0, np.int64), "labels": np.arange(3)}) is None


def test_fields_that_only_some_samples_have() -> None:
    """A default taken from another sample's place would train on its neighbour's labels."""
    items = [
        {"tokens": [1, 2]},
        {"tokens": [3, 4], "labels": [8, 9], "position_ids": [7, 7]},
        {"tokens": [5]},
    ]
    assert read(items) == [
        ([1, 2], [2, 2], [1.0, 0.0], [0, 1]),
        ([3, 4], [8, 9], [1.0, 1.0], [7, 7]),
        ([5], [5], [0.0], [0]),
    ]


def test_labels_of_minus_100_are_masked() -> None:
    """HuggingFace's collators mark them so; with a weight the loss would be that of a label out of
    range.
    """
    item = {"tokens": [5, 6, 7], "labels": [-100, 7, -100], "loss_mask": [1.0, 0.5, 1.0]}
    assert read(item) == [([5, 6, 7], [0, 7, 0], [0.0, 0.5, 0.0], [0, 1, 2])]


@pytest.mark.parametrize("original", [3, torch.tensor(3), torch.tensor([3]), np.int64(3)])
def test_padded_sample_loses_its_padding(original: Any) -> None:
    """Padding that stays would be attended to, counted as tokens and packed as content."""
    item = {"tokens": [5, 6, 7, 0, 0], "original_seq_len": original, "padded_seq_len": 5}
    assert read(item) == [DERIVED]
    whole = item | {"labels": [6, 7, 8, 0, 0], "loss_mask": [1, 1, 1, 0, 0]}
    assert read(whole) == [([5, 6, 7], [6, 7, 8], [1.0, 1.0, 1.0], [0, 1, 2])]


@pytest.mark.parametrize("shape", [(-1,), (1, -1)])
@pytest.mark.parametrize("tail", [[], [5], [5, 5, 5]])
def test_packed_sample_is_cut_at_cu_seqlens(shape: tuple[int, ...], tail: list[int]) -> None:
    """Sequences run together attend to one another; a padded tail of `cu_seqlens` must not make
    empty ones.
    """
    item = {
        "tokens": torch.tensor([5, 6, 7, 8, 9, 0]).view(shape),
        "cu_seqlens": torch.tensor([0, 2, 5, *tail], dtype=torch.int32).view(shape),
    }
    first, second = read(item)
    assert first == ([5, 6], [6, 6], [1.0, 0.0], [0, 1])
    assert second == ([7, 8, 9], [8, 9, 9], [1.0, 1.0, 0.0], [0, 1, 2])
    more = {
        "labels": [6, 60, 8, 9, 90, 0],
        "loss_mask": [1, 2, 3, 4, 5, 0],
        "position_ids": [0, 1, 0, 1, 2, 3],
    }
    first, second = read(
        item | {name: torch.tensor(field).view(shape) for name, field in more.items()}
    )
    assert first == ([5, 6], [6, 60], [1.0, 2.0], [0, 1])
    assert second == ([7, 8, 9], [8, 9, 90], [3.0, 4.0, 5.0], [0, 1, 2])


def test_padded_packs_are_read_where_their_sequences_stand() -> None:
    """With padding between sequences, `cu_seqlens` are lengths and not places: all but the first
    would be shifted.
    """
    item = {
        "tokens": [1, 2, 0, 0, 5, 6, 7, 0],
        "cu_seqlens": [0, 2, 5],
        "cu_seqlens_padded": [0, 4, 8],
    }
    assert tokens_of(item) == [[1, 2], [5, 6, 7]]
    with pytest.raises(ValueError, match="'cu_seqlens_padded' must have 3 entries, but has 2"):
        read({**item, "cu_seqlens_padded": [0, 8]})
    with pytest.raises(
        ValueError, match="'cu_seqlens_padded' must place sequences within 8 tokens"
    ):
        read({**item, "cu_seqlens_padded": [0, 6, 8]})


def test_lists_of_samples_keep_their_order() -> None:
    """Sequences lost or moved here are trained on never, or by the wrong rank, and no count is off
    by much.
    """
    items: list[dict[str, Any]] = [
        {"tokens": [1, 2]},
        {"tokens": [3, 4, 5, 6], "cu_seqlens": [0, 1, 4], "source": 3},
        {"tokens": [7, 0], "original_seq_len": 1, "source": 2**31 - 1},
    ]
    expected = [[1, 2], [3], [4, 5, 6], [7]]
    assert tokens_of(items) == tokens_of(iter(items)) == expected
    assert read_samples(items).sources.tolist() == [0, 3, 3, 2**31 - 1]
    assert read([]) == []


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_rows_of_a_batch_are_samples(make: Any) -> None:
    """Collators stack; rows run together would attend to one another, and lengths would be the
    padded ones.
    """
    batch = {
        "tokens": make([[5, 6, 7], [8, 9, 0]]),
        "original_seq_len": make([[3], [2]]),
        "source": make([4, 1]),
    }
    assert tokens_of(batch) == [[5, 6, 7], [8, 9]]
    assert read_samples(batch).sources.tolist() == [4, 1]
    packs = {"tokens": make([[5, 6, 7], [8, 9, 0]]), "cu_seqlens": make([[0, 1, 3], [0, 2, 2]])}
    assert tokens_of(packs) == [[5], [6, 7], [8, 9]]


def test_huggingface_samples() -> None:
    """Labels stand above their own token there: trained as they are, a model would learn to repeat
    its input.
    """
    answer = ([5, 6, 7, 8], [0, 7, 8, 0], [0.0, 1.0, 1.0, 0.0], [0, 1, 2, 3])
    sides = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 0], [0, 5, 6, 7, 8]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]),
        "labels": torch.tensor([[-100, -100, 7, 8, -100], [-100, -100, -100, 7, 8]]),
    }
    assert read(sides) == [answer, answer]
    assert read({"input_ids": [5, 6, 7]}) == [DERIVED]


@pytest.mark.parametrize("ends", [{"position_ids": [0, 1, 2, 0, 1]}, {"cu_seq_lens_q": [0, 3, 5]}])
def test_huggingface_samples_without_padding_between_them(ends: dict[str, Any]) -> None:
    """The collator that flattens a batch says only so where each begins; the label after the last
    one is unknown.
    """
    item = {"input_ids": [[5, 6, 7, 8, 9]], "labels": [[5, 6, 7, 8, 9]], **ends}
    assert read(item) == [
        ([5, 6, 7], [6, 7, 0], [1.0, 1.0, 0.0], [0, 1, 2]),
        ([8, 9], [9, 0], [1.0, 0.0], [0, 1]),
    ]


def test_a_reader_knows_which_fetch_gave_each() -> None:
    """Schedulers keep together what was loaded together, and errors name the fetch."""
    reader = SampleReader()
    reader.add([{"tokens": [1, 2]}, {"tokens": [3, 4, 5], "cu_seqlens": [0, 1, 3]}], 0)
    reader.add([], 1)
    reader.add({"tokens": [6]}, 2)
    assert reader.fetch.tolist() == [0, 0, 0, 2]
    reader.add({"tokens": [2**31]}, 4)
    with pytest.raises(SampleError) as error:
        reader.samples()
    assert error.value.fetch == 4


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"text": [1]}, "must have the key 'tokens' or 'input_ids', but has ['text']"),
        ({"tokens": None, "labels": [1]}, "must have the key 'tokens' or 'input_ids'"),
        (
            {"input_ids": [1, 2], "labels": [2]},
            "'labels' must be as long as 'input_ids' (2), but is 1",
        ),
        (
            {"input_ids": [1, 2], "attention_mask": [0, 0]},
            "at least one token, but 'attention_mask' says",
        ),
        (
            {"input_ids": [1, 2], "cu_seq_lens_q": [0, 3]},
            "'cu_seq_lens_q' must rise from 0 to 1 to 2 tokens",
        ),
        (
            {"tokens": np.ones((2, 3), int), "cu_seqlens": np.array([0, 3])},
            "'cu_seqlens' must rise from 0",
        ),
        ({"tokens": [1, 2], "labels": [2]}, "'labels' must be as long as 'tokens' (2), but is 1"),
        (
            {"tokens": [1, 2], "loss_mask": [1, 1, 1]},
            "'loss_mask' must be as long as 'tokens' (2), but is 3",
        ),
        (
            {"tokens": [1, 2], "position_ids": []},
            "'position_ids' must be as long as 'tokens' (2), but is 0",
        ),
        ({"tokens": [1, 2], "cu_seqlens": []}, "'cu_seqlens' must rise from 0"),
        ({"tokens": [1, 2**31]}, "'tokens' must be below 2**31, but has 2147483648"),
        ({"tokens": [1, 2], "labels": [-(2**31), 1]}, "'labels' must be below 2**31"),
        ({"tokens": [0.5, 2]}, "'tokens' must be integers, but are float64"),
        ({"tokens": [1, 2], "loss_mask": [1, float("inf")]}, "'loss_mask' must be finite"),
        ({"tokens": [1, 2], "loss_mask": [float("nan"), 1]}, "'loss_mask' must be finite"),
        (
            {"tokens": [1, 2], "cu_seqlens": [1, 2]},
            "'cu_seqlens' must rise from 0 to 1 to 2 tokens, but is [1, 2]",
        ),
        ({"tokens": [1, 2, 3], "cu_seqlens": [0, 2, 1]}, "'cu_seqlens' must rise from 0"),
        (
            {"tokens": [1, 2], "cu_seqlens": [0, 3]},
            "'cu_seqlens' must rise from 0 to 1 to 2 tokens",
        ),
        (
            {"tokens": [1, 2], "cu_seqlens": [0, 0]},
            "'cu_seqlens' must rise from 0 to 1 to 2 tokens",
        ),
        ({"tokens": []}, "at least one token"),
        ({"tokens": [1, 2], "original_seq_len": 0}, "at least one token"),
        ({"tokens": [1, 2], "original_seq_len": 3}, "at least one token, but has 3 of 2 tokens"),
        ({"tokens": [[1, 2, 3], [4, 5, 6]]}, "must be [L] or [1, L], but 'tokens' is [2, 3]"),
        ({"tokens": [5], "source": -1}, "'source' must be from 0 to 2147483647, but is -1"),
        ({"tokens": [5], "source": 2**31}, "'source' must be from 0"),
        ({"tokens": [5, 6], "source": [1, 2]}, "'source' must be one number, but is [1, 2]"),
        ({"tokens": [5, 6], "input_ids": [5, 7]}, "'input_ids' must be those of 'tokens'"),
        (
            {"tokens": [1, 2, 3], "cu_seqlens": [0, 1, 3], "seq_idx": [0, 0, 1]},
            "'cu_seqlens' and 'seq_idx' must bound the same sequences, but differ at token 1",
        ),
        (
            {"input_ids": [1, 2], "cu_seq_lens_q": [0, 1, 2], "cu_seq_lens_k": [0, 2]},
            "'cu_seq_lens_q' and 'cu_seq_lens_k' must bound the same sequences",
        ),
        ({"tokens": [1, 2], "cu_seqlens": [0, 0.5, 2]}, "'cu_seqlens' must be integers"),
        ({"tokens": [1, 2], "cu_seqlens_padded": [0, 2]}, "must come with 'cu_seqlens'"),
        (
            {"tokens": [1, 2, 3], "cu_seqlens": [0, 2, 3], "cu_seqlens_padded": [0, 1, 3]},
            "'cu_seqlens_padded' must place sequences within 3 tokens, one behind the other",
        ),
        ({"tokens": [1, 2, 3], "attention_mask": [1, 2, 1]}, "has a number again behind another"),
        ({"tokens": [1, 2], "attention_mask": [0, -1e9]}, "must have 0 for padding and numbers"),
        (
            {"tokens": [1, 2, 3], "attention_mask": [[1, 0, 0], [1, 1, 0], [0, 1, 1]]},
            "'attention_mask' of shape [3, 3] must be causal within each sequence",
        ),
        (
            {"tokens": [1, 2, 3], "attention_mask": np.ones((1, 1, 3, 3), bool)},
            "'attention_mask' of shape [1, 1, 3, 3] must be causal within each sequence",
        ),
        (
            {"tokens": [1, 2, 3], "original_seq_len": [1, 1]},
            "'original_seq_len' must be one number, or the lengths that 'cu_seqlens' bound",
        ),
    ],
)
def test_malformed_samples_are_refused(item: dict[str, Any], message: str) -> None:
    """Each would be cut or stretched by slicing without an error, and train on something else."""
    for given in (item, [{"tokens": [1]}, item]):
        with pytest.raises(ValueError) as error:  # noqa: PT011  the text is compared below, it holds brackets
            read(given)
        assert message in str(error.value)


def extra_of_read(given: Any) -> dict[str, tuple[str, Any]]:
    """Type and rows of each extra column by name."""
    return {
        column.name: (column.dtype, values.tolist())
        for column, values in read_samples(given).extra().items()
    }


def test_other_fields_are_extra_columns() -> None:
    """What a loss of the user's needs beside labels would arrive as nothing."""
    items = [
        {
            "tokens": [1, 2],
            "advantages": [0.5, -1.0],
            "sample_id": 2**40,
            "axes": np.arange(6, dtype=np.int16).reshape(2, 3),
        },
        {
            "tokens": [3],
            "advantages": [7.0],
            "sample_id": np.array([9]),
            "axes": np.ones((1, 3), np.int16),
        },
    ]
    assert extra_of_read(items) == {
        "advantages": ("float64", [0.5, -1.0, 7.0]),
        "axes": ("int16", [[0, 1, 2], [3, 4, 5], [1, 1, 1]]),
        "sample_id": ("int64", [2**40, 9]),
    }


def test_extra_fields_of_padded_and_packed_samples() -> None:
    """Padding that keeps its place in one field, and not in another, shifts what stands behind
    it."""
    padded = {
        "tokens": [1, 2, 0],
        "original_seq_len": 2,
        "old": torch.tensor([[1.5, 2.5, 9.0]]),
        "id": 3,
    }
    assert extra_of_read(padded) == {"id": ("int64", [3]), "old": ("float32", [1.5, 2.5])}
    packed = {
        "tokens": [1, 2, 3, 0],
        "cu_seqlens": [0, 1, 3],
        "old": torch.tensor([1, 2, 3, 0]).bfloat16(),
        "id": [7, 8],
        "best": True,
    }
    assert extra_of_read(packed) == {
        "best": ("bool", [True, True]),
        "id": ("int64", [7, 8]),
        "old": ("float32", [1.0, 2.0, 3.0]),
    }
    collated = {
        "input_ids": torch.tensor([[5, 6, 0]]),
        "attention_mask": torch.tensor([[1, 1, 0]]),
        "old": [4, 5, 6],
        "id": 2,
    }
    assert extra_of_read(collated) == {"id": ("int64", [2]), "old": ("int64", [5, 0])}
    rows = {
        "tokens": torch.ones(2, 3, dtype=torch.int64),
        "old": torch.arange(6).reshape(2, 3),
        "id": torch.tensor([4, 5]),
    }
    assert extra_of_read(rows) == {"id": ("int64", [4, 5]), "old": ("int64", [0, 1, 2, 3, 4, 5])}


def test_extra_fields_without_numbers_are_named() -> None:
    """A user would look for the field in the batch, and find no reason why it is not there."""
    with pytest.warns(UserWarning, match="'text' of a sample is left out: it holds no numbers"):
        assert (
            extra_of_read({"tokens": [1, 2], "text": "ab", "max_seqlen": 2, "attention_mask": None})
            == {}
        )


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (
            [{"tokens": [1, 2], "old": [1, 2, 3]}],
            "'old' must have one row per token (2) or per sequence (1)",
        ),
        (
            [{"tokens": [1, 2], "old": [1, 2]}, {"tokens": [1, 2]}],
            "'old' must be in all samples or in none",
        ),
        (
            [{"tokens": [1, 2], "old": [1, 2]}, {"tokens": [1, 2], "old": 1}],
            "'old' must have one row per token in all",
        ),
        (
            [{"tokens": [1], "old": [[1]]}, {"tokens": [1], "old": [[1, 2]]}],
            "rows of 'old' must have one shape",
        ),
    ],
)
def test_extra_fields_that_do_not_fit_are_refused(items: list[dict[str, Any]], words: str) -> None:
    """Rows of another sample would be taken for this one's."""
    with pytest.raises(ValueError, match=re.escape(words)):
        read_samples(items)


TREE = {
    "tokens": [1, 2, 3, 4, 5, 6, 0],
    "labels": [2, 3, 4, 9, 6, 9, 0],
    "loss_mask": [2, 2, 1, 1, 1, 1, 0],
    "num_paths": [2, 2, 1, 1, 1, 1, 0],
    "cu_seqlens": [0, 2, 4, 6],
    "parents": [-1, 0, 0],
}


def test_a_tree_is_one_sample() -> None:
    """Read as three sequences, branches would be trained without the trunk before them."""
    samples = read_samples([{"tokens": [7, 8]}, TREE])
    assert samples.lengths.tolist() == [2, 6]
    assert samples.sizes.rows("node").tolist() == [1, 3]
    columns = {column.name: values.tolist() for column, values in samples.columns.items()}
    assert columns["parents"] == [-1, -1, 0, 0]
    assert columns["node_lengths"] == [2, 2, 2, 2]
    assert columns["num_paths"] == [1, 0, 2, 2, 1, 1, 1, 1]
    assert samples.fields().position_ids.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    given = read_samples([TREE, {"tokens": [7, 8], "position_ids": [5, 6]}])
    assert given.fields().position_ids.tolist() == [0, 1, 2, 3, 2, 3, 5, 6]


def test_merged_paths_are_given_as_they_are() -> None:
    """What `merge` returns is a tuple of arrays, each of which would be taken for a sample."""
    paths = [Path(np.array([7, 8]), np.array([8, last]), np.ones(2, np.float32)) for last in (9, 5)]
    merged = merge(paths)
    expected = read_samples([merged._asdict(), {"tokens": [7, 8]}])
    given = read_samples([merged, {"tokens": [7, 8]}])
    assert given.schema == expected.schema
    assert given.to_words().tolist() == expected.to_words().tolist()
    assert read_samples(merged).lengths.tolist() == [3]


def test_nodes_without_branches_are_a_sequence() -> None:
    """It would pay for the tree that it is not, and so would all of its global batch."""
    chain = {**TREE, "parents": [-1, 0, 1], "num_paths": [1] * 6 + [0], "loss_mask": [1] * 6 + [0]}
    samples = read_samples([chain])
    assert samples.lengths.tolist() == [6]
    assert {column.name for column in samples.schema} == {"labels"}
    assert samples.sizes.ragged == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parents": [-1, 0]}, "one entry per node (3), but has 2"),
        ({"parents": [-1, 2, 0]}, "is 2 for node 1"),
        ({"cu_seqlens": [0, 2, 2, 6]}, "node 1 has none"),
        ({"labels": None}, "must come with 'cu_seqlens' and 'labels'"),
        ({"cu_seqlens": None}, "must come with 'cu_seqlens' and 'labels'"),
        ({"num_paths": [1, -1, 0, 0, 0, 0, 0]}, "'num_paths' must be at least 0, but is -1"),
        ({"num_paths": [0.5] * 7}, "'num_paths' must be integers"),
    ],
)
def test_malformed_trees_are_refused(changes: dict[str, Any], words: str) -> None:
    """What is wrong with a record is said where it is read, on the rank that read it."""
    with pytest.raises(ValueError, match=re.escape(words)):
        read_samples([{**TREE, **changes}])
