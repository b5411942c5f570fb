"""What goes through a socket, or through shared memory, comes out as it was."""

import gc
import multiprocessing
import os
import pathlib
import pickle
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from megatron.blending.loading.worker import SHARED_BYTES, Sender
from megatron.blending.loading.worker_pool import receive


def all_passed_through(values):
    theirs, ours = multiprocessing.Pipe(duplex=True)
    sender = threading.Thread(
        target=lambda send: list(map(send, values)), args=(Sender(ours, os.getpid()).send,)
    )
    sender.start()
    found = [receive(theirs) for _ in values]
    sender.join(10)
    return found


def passed_through(value):
    return all_passed_through([value])[0]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float16]
)
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
    value: dict[str, Any] = {
        "a": np.arange(9999.0),
        "b": [1, "two", None],
        "c": (np.zeros(0), {"d": b"bytes" * 5000}),
    }
    found = passed_through(value)
    assert np.array_equal(found["a"], value["a"])
    assert (found["b"], found["c"][1]) == (value["b"], value["c"][1])
    found["a"][0] = 1


def shared_maps():
    return pathlib.Path("/proc/self/maps").read_text().count("memfd:batch")


def test_large_ones_go_through_shared_memory():
    """Through a pipe 19 MB of images a batch took the training process 30 milliseconds."""
    images = torch.arange(3 * 500 * 500, dtype=torch.float32).reshape(3, 500, 500)
    value: dict[str, Any] = {
        "images": images,
        "odd": np.arange(4097, dtype=np.uint8),
        "words": np.arange(9999.0),
    }
    before = set(os.listdir("/proc/self/fd"))
    found = passed_through(value)
    assert images.nbytes > SHARED_BYTES
    assert torch.equal(found["images"], images)
    assert np.array_equal(found["odd"], value["odd"])
    assert np.array_equal(found["words"], value["words"])
    found["images"].zero_()
    found["words"][0] = 1
    again = passed_through(value)
    assert torch.equal(again["images"], images)
    assert shared_maps() == 2
    del found, again
    gc.collect()
    assert shared_maps() == 0
    assert set(os.listdir("/proc/self/fd")) <= before


def test_one_after_the_other():
    """What is left of a value in the memory that the sender keeps would be taken for a part of the
    next.
    """
    same, array = ["shared"], np.arange(9999.0)
    values = [
        b"x" * 3_000_000,
        [same, same, array],
        "short",
        [same, array],
        b"y" * 2_000_000,
        {},
        "z" * 70_000,
        same,
    ]
    found = all_passed_through(values)
    for sent, got in zip(values, found):
        assert repr(got) == repr(sent)
    assert found[1][0] is found[1][1]


def test_a_sender_keeps_nothing_of_what_it_sent():
    """A worker would hold one more batch than it was asked for."""
    theirs, ours = multiprocessing.Pipe(duplex=True)
    sender = Sender(ours, os.getpid())
    values = [np.zeros(1000), {1, 2}]
    kept = weakref.ref(values[1])
    sender.send(values)
    del values
    assert kept() is None
    with pytest.raises((AttributeError, pickle.PicklingError)):
        sender.send([1, lambda: None])
    sender.send("after")
    receive(theirs)
    assert receive(theirs) == "after"
