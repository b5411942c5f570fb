"""What goes through a pipe comes out as it was."""

import multiprocessing
import threading
from typing import Any

import numpy as np
import pytest
import torch

from megatron.blending.loading import transport


def passed_through(value):
    theirs, ours = multiprocessing.Pipe(duplex=False)
    sender = threading.Thread(target=transport.send, args=(ours, value))
    sender.start()
    found = transport.receive(theirs)
    sender.join(10)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float16])
@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (200, 50)])
def test_tensors(dtype, shape):
    value = torch.randn(shape).mul(3).to(dtype)
    found = passed_through({"x": value})["x"]
    assert found.dtype == dtype
    assert torch.equal(found, value)
    found.zero_()


def test_parts_of_tensors():
    """A view must not bring all that it is a view of, nor lose its strides."""
    whole = torch.arange(10_000).reshape(100, 100)
    for view in (whole.T, whole[::2, 3:50], whole[5]):
        assert torch.equal(passed_through(view), view)


def test_arrays_and_all_else():
    value: dict[str, Any] = {"a": np.arange(9999.0), "b": [1, "two", None], "c": (np.zeros(0), {"d": b"bytes" * 5000})}
    found = passed_through(value)
    assert np.array_equal(found["a"], value["a"])
    assert (found["b"], found["c"][1]) == (value["b"], value["c"][1])
    found["a"][0] = 1
