"""Bytes alive, by part and phase."""

import gc

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.sft.fit.counter import ByteCounter

KIB = 1024


def test_a_storage_counts_once_and_until_it_is_freed() -> None:
    """Views counted as memory of their own would make every reshape cost a tensor."""
    counter = ByteCounter()
    with counter:
        with counter.phase("make"):
            whole = torch.zeros(4, 64)  # 1 KiB
            part = whole[1:].t()
        with counter.phase("peak"):
            torch.zeros(512)  # freed at once
        with counter.phase("free"):
            del whole
        assert counter.current == KIB  # the view keeps it
        del part
    gc.collect()
    assert counter.current == 0
    assert [(phase.start, phase.end, phase.peak) for phase in counter.phases] == [
        (0, KIB, KIB),
        (KIB, KIB, 3 * KIB),
        (KIB, KIB, KIB),
    ]


def test_saved_tensors_of_autograd_count_until_the_backward_pass() -> None:
    """Activations are nothing else."""
    counter = ByteCounter(keeps_storages=True)
    with counter:
        weight = torch.zeros(16, 16, requires_grad=True)
        with counter.phase("forward"):
            loss = (weight @ weight).exp().sum()
        with counter.phase("backward"):
            loss.backward()
    forward, backward = counter.phases
    # The exponential is kept, the product is not.
    operations = {made.operation for made in forward.alive}
    assert operations == {"aten.zeros.default", "aten.exp.default", "aten.sum.default"}
    assert forward.end == 2 * KIB + 4
    assert backward.end == 2 * KIB + 4  # the weight, its gradient, and the loss
    assert sum(made.operation == "aten.mm.default" for made in backward.made) == 2


def test_parts_sum_to_the_peak() -> None:
    """What is printed beside a peak must be its parts."""
    counter = ByteCounter(unit=512)
    with counter:
        counter.part = "first"
        kept = torch.zeros(1)
        counter.part = "second"
        with counter.phase("step"):
            torch.zeros(512)
        counter.count_as("moved", [kept])
    (phase,) = counter.phases
    assert phase.at_peak == {"first": 512, "second": 2048}
    assert sum(phase.at_peak.values()) == phase.peak
    assert {part: size for part, size in counter.by_part.items() if size} == {"moved": 512}


def test_fake_tensors_count_as_real_ones_do() -> None:
    """Else nothing could be said of a GPU that is not there."""

    def steps(counter: ByteCounter) -> list[tuple[int, int]]:
        with counter:
            weight = torch.zeros(64, 64, requires_grad=True)
            optimizer = torch.optim.Adam([weight])
            for _ in range(2):
                with counter.phase("step"):
                    optimizer.zero_grad()
                    (weight @ weight).sum().backward()
                    optimizer.step()
        return [(phase.end, phase.peak) for phase in counter.phases]

    real = steps(ByteCounter())
    with FakeTensorMode():
        fake_counter = ByteCounter()
        with fake_counter:
            weight = torch.zeros(64, 64, requires_grad=True)
            with fake_counter.phase("step"):
                (weight @ weight).sum().backward()
    assert real[0][0] > 4 * 4 * 64 * 64 - 1  # weight, gradient and two states
    assert fake_counter.phases[0].end == 2 * 4 * 64 * 64


def test_given_arrays_and_workspaces() -> None:
    """Arrays are not the device's; what a kernel has meanwhile is at its peak only."""
    relu = torch.ops.aten.relu.default
    counter = ByteCounter(workspaces={relu: lambda x: 3 * x.numel()})
    given = torch.from_numpy(np.zeros(256, np.float32))
    with counter, counter.phase("step"):
        torch.relu(given.view(16, 16))
    (phase,) = counter.phases
    assert phase.peak == 1024 + 3 * 256
    assert phase.at_peak == {"other": 1024, "workspaces of kernels": 3 * 256}
    assert phase.end == 0
