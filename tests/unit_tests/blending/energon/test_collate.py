"""Many values into one: shapes, padding, and what stays a list."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron.blending.energon._encoding.collate import (
    batch_pad_stack,
    concat_pad,
    generic_batch,
    generic_concat,
    homogeneous_concat_mix,
    map_tensors,
)

Pair = namedtuple("Pair", "a b")


@dataclass
class Item:
    image: torch.Tensor
    caption: Any
    extra: dict


def test_batch_pad_stack():
    stacked = batch_pad_stack([torch.tensor([[1, 2]]), torch.tensor([[3], [4]])])
    assert stacked.tolist() == [[[1, 2], [0, 0]], [[3, 0], [4, 0]]]
    assert batch_pad_stack([torch.tensor(1.5), torch.tensor(2.5)]).tolist() == [1.5, 2.5]
    assert batch_pad_stack([torch.zeros(0), torch.ones(2)]).tolist() == [[0, 0], [1, 1]]


def test_concat_pad():
    """The example of the docstring: rows of two tensors of different widths."""
    joined = concat_pad([torch.ones(2, 3, dtype=torch.int64), torch.full((1, 5), 7)])
    assert joined.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [7, 7, 7, 7, 7]]
    assert joined.dtype == torch.int64
    assert concat_pad([torch.ones(2, 1, 2), torch.ones(1, 3, 1)]).shape == (3, 3, 2)
    assert concat_pad([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]


def test_unequal_ranks_are_refused():
    with pytest.raises(
        ValueError, match=r"equally many dimensions, but have shapes \[\(2,\), \(2, 2\)\]"
    ):
        batch_pad_stack([torch.ones(2), torch.ones(2, 2)])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["a", "b"], ["a", "b"]),
        ([1, 2.5], [1, 2.5]),
        ([{"a": 1}, {"a": 2}], {"a": [1, 2]}),
        ([{"a": 1}, {"b": 2}], [{"a": 1}, {"b": 2}]),
        ([Pair(1, "x"), Pair(2, "y")], Pair([1, 2], ["x", "y"])),
        ([[1], [2]], [[1], [2]]),
        ([(1,), (2,)], [(1,), (2,)]),
        ([None, "a"], [None, "a"]),
    ],
)
def test_what_holds_no_tensor(values, expected):
    assert generic_batch(values) == expected
    assert generic_concat(values) == expected


def test_none_among_tensors_stays_a_list():
    """A sample without its optional image must not stop the batch."""
    values = [torch.ones(1), None]
    assert generic_batch(values) is not values
    assert generic_batch(values) == values


def test_homogeneous_concat_mix():
    """Batches of one become a batch; what is no tensor is a list of the parts, as energon's users
    know it.
    """
    mixed = homogeneous_concat_mix(
        [Item(torch.ones(1, 2), ["a"], {"n": 1}), Item(torch.zeros(1, 3), ["b"], {"n": 2})]
    )
    assert mixed.image.tolist() == [[1, 1, 0], [0, 0, 0]]
    assert mixed.caption == [["a"], ["b"]]
    assert mixed.extra == {"n": [1, 2]}
    with pytest.raises(
        ValueError, match=r"of one type, but are Item and Pair; pass a batch_mix_fn"
    ):
        homogeneous_concat_mix([mixed, Pair(1, 2)])


def test_map_tensors_copies_on_the_way():
    value = Item(
        torch.ones(1), "a", {"list": [torch.ones(2), 3], "pair": Pair(torch.ones(1), None)}
    )
    doubled = map_tensors(value, lambda tensor: tensor * 2)
    assert doubled.image.tolist() == [2]
    assert doubled.extra["list"][0].tolist() == [2, 2]
    assert doubled.extra["pair"].a.tolist() == [2]
    assert value.image.tolist() == [1]
