"""Agreement and lengths, as far as a group of one process shows them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.packing.step import lengths
from megatron.packing.step.lengths import (
    GlobalBatchError,
    LengthTable,
    agree,
    broadcast_numbers,
    device_of,
    gather_table,
)


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def array(*values) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_gloo_lives_on_the_host(group):
    """A CPU group that is handed CUDA tensors fails only on machines that have both."""
    assert device_of(group) == torch.device("cpu")


def test_agree_gathers_numbers(group):
    """Counts travel here: rounded, or with the error's column among them, ranks would cut the table wrongly."""
    table = agree(group, [3, 2**53 + 1, -1], None)
    assert table.dtype == np.int64
    assert table.tolist() == [[3, 2**53 + 1, -1]]
    assert agree(group, [], None).shape == (1, 0)


@pytest.mark.parametrize("text", ["rank 3, draw 7: ValueError: no 'tokens'", "Prüfsumme ≠ 数"])
def test_agree_raises_with_the_text(group, text):
    """All ranks must show the cause; a length counted in characters would cut, or hang on, text that is not ASCII."""
    with pytest.raises(GlobalBatchError) as error:
        agree(group, [1, 2], text)
    assert str(error.value) == text


@pytest.mark.parametrize("rows", [[], [[3, 1, 0]], [[3, 1, 0], [2**40, 0, 0], [5, 7, 2]]])
def test_gather_table(group, rows):
    """A column taken for another schedules kinds as lengths; the padding of the gather must not become sequences."""
    table = gather_table(group, array(*rows).reshape(-1, 3), array(len(rows)), array(7))
    assert table.length.tolist() == [row[0] for row in rows]
    assert table.kind.tolist() == [row[1] for row in rows]
    assert table.draw.tolist() == [row[2] for row in rows]
    assert table.source_rank.tolist() == [0] * len(rows)
    assert all(field.dtype == np.int64 for field in (table.length, table.kind, table.draw, table.source_rank))


def test_fingerprint_tells_batches_apart():
    """It is all that finds first and last stages which read different data: equal prints pair tokens with the labels
    of others.
    """
    ranks = {"source_rank": array(0, 1), "checksums": array(7, 8)}
    table = LengthTable(length=array(3, 5), kind=array(0, 1), draw=array(0, 0), **ranks)
    same = LengthTable(length=array(3, 5), kind=array(0, 1), draw=array(0, 0), **ranks)
    others = [
        replace(table, length=array(3, 6)),
        replace(table, length=array(5, 3)),
        replace(table, kind=array(1, 0)),
        replace(table, source_rank=array(0, 0)),
        replace(table, checksums=array(7, 9)),
    ]
    assert table.fingerprint() == same.fingerprint()
    assert table.fingerprint() not in [other.fingerprint() for other in others]


def test_steps_waited_stand_in_the_column_of_draws():
    """A draw taken for a delay, or a row left out in one column only, would let other sequences wait."""
    rank = {"source_rank": array(0, 0, 1), "checksums": array(7, 8)}
    table = LengthTable(length=array(3, 5, 4), kind=array(0, 1, 2), draw=array(-2, 0, 3), **rank)
    assert table.steps_waited.tolist() == [2, 0, 0]
    chosen = table.only(np.array([True, False, True]))
    assert [getattr(chosen, name).tolist() for name in ("length", "kind", "draw", "source_rank")] == [
        *([3, 4], [0, 2], [-2, 3], [0, 1])
    ]
    assert chosen.checksums.tolist() == [7, 8]


@pytest.mark.parametrize("numbers", [array(), array(1, -2, 2**62 + 1), array(1, 2, 3, 4)[::2]])
def test_broadcast_numbers(group, numbers):
    """Plans travel here as exact int64, also views with strides."""
    received = broadcast_numbers(group, numbers, source=0)
    assert received.dtype == np.int64
    assert received.tolist() == numbers.tolist()


def test_error_texts_of_any_bytes_travel(group):
    """A file name that is not UTF-8 must not raise on one rank alone, while the others wait."""
    with pytest.raises(GlobalBatchError, match="name"):
        agree(group, [1], "name \udce9")


@pytest.mark.parametrize(
    ("backend", "has_cuda", "device"),
    [
        ("gloo", True, "cpu"),
        ("nccl", True, "cuda"),
        ("undefined", True, "cuda"),
        ("cpu:gloo,cuda:nccl", True, "cuda"),
        ("undefined", False, "cpu"),
    ],
)
def test_device_of_groups_of_any_backend(group, monkeypatch, backend, has_cuda, device):
    """Groups of the default backends are called neither nccl nor gloo: tokens would stay on the CPU."""
    monkeypatch.setattr(lengths.dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(lengths.torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(lengths.torch.cuda, "current_device", lambda: 0)
    assert lengths.device_of(group).type == device
