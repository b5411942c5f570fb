"""Options of long contexts: a layout of `make long-contexts`, and the arithmetic that they take."""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatron.packing.device import CPU
from megatron.packing.model import layer_inputs
from megatron.packing.model.layer_inputs import HostBytes
from megatron.sft.fit.counter import ByteCounter
from megatron.sft.fit.fake.host_reads import HostReads
from megatron.sft.fit.fake.world import fake_world
from megatron.sft.fit.step import run_step
from tests.functional_tests.fit_check import EXPERTS, FULL, GROUPED, PACKED, VOCAB_SIZE, Case
from tests.functional_tests.layouts import Layout
from tests.functional_tests.long_contexts import ATTENTION, LIMIT, OPTIONS, Row
from tests.functional_tests.oracle import largest_difference


def test_all_together_train_as_none_does() -> None:
    """Each replaces an order of sums or a tensor that another one reads."""
    row = Row(Layout(tensor=2, sequence=True, model="grouped"), FULL, has_trees=True)
    assert row.names() == list(OPTIONS)
    assert largest_difference(row.run(" ".join(OPTIONS.values())), row.run("")) <= LIMIT


class Flops(TorchDispatchMode):
    """Sums the FLOPs of products. torch's own counter refuses `autograd.grad` of parameters."""

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def test_inputs_are_on_the_host_and_leave_it() -> None:
    """Kept by a hook they would be on both; left on the host, each step would add some."""
    ledgers: list[HostBytes] = []

    class Noted(HostBytes):
        def __init__(self) -> None:
            ledgers.append(self)

    option, peaks = "--fine-grained-activation-offloading", []
    for options in ("", option):
        # Norms behind save what looks like an input of a layer, in a pass that keeps nothing.
        flags = f"{PACKED} {GROUPED} {FULL} --norm-position both {options}"
        case = Case(1, flags, num_layers=4)
        config, reads, counter = case.config(), HostReads(), ByteCounter()
        patch = mock.patch.object(layer_inputs, "HostBytes", Noted)
        with patch, fake_world(config, 0, 1, reads) as mode:
            run_step(config, VOCAB_SIZE, case.data, counter, (mode, reads), num_steps=1)
        peaks.append((counter.phases[1].peak, counter.phases[1].host_peak))
        assert counter.phases[1].end == counter.phases[2].start
    size = 64 * 32 * 4  # tokens of each microbatch, hidden size, float32
    (ledger,) = ledgers
    assert (ledger.peak, ledger.current) == (3 * size, 0)
    assert [on_host for _, on_host in peaks] == [0, 3 * size]  # as operations make them
    # At the peak, in the last layer's backward pass, another is on its way back.
    assert peaks[0][0] - peaks[1][0] == 2 * size


def flops(options: str, model: str = GROUPED) -> int:
    """Returns the FLOPs of a step's products on fake tensors."""
    case = Case(1, f"{PACKED} {model} {options}", num_layers=3)
    config, reads = case.config(), HostReads()
    with fake_world(config, 0, 1, reads) as mode, Flops() as counter:
        run_step(
            config, VOCAB_SIZE, case.data, ByteCounter(), (mode, reads), num_steps=1, device=CPU
        )
    return counter.total


def test_tiles_take_the_arithmetic_of_recomputation() -> None:
    """A tiled MLP in a recomputed layer would run forward three times, a sixth more in all."""
    recomputed, tiles = flops(FULL), "--mlp-chunks-for-training 3"
    assert flops("") < recomputed
    assert flops(f"{FULL} {tiles}") == recomputed
    assert flops("") < flops(tiles) < recomputed
    assert flops(f"{FULL} {tiles}", EXPERTS) == flops(FULL, EXPERTS)


def test_kept_attention_is_not_computed_again() -> None:
    """Of a million tokens attention is most of what a layer computes."""
    windows = "--window-size 15 0"  # of which both kinds take the same kernel
    recomputed = flops(f"{FULL} {windows}")
    kept = flops(f"{FULL} {windows} {OPTIONS[ATTENTION]}")
    # Each of 2 packs of 64 tokens, 3 layers: scores and values of blocks of queries, 4 heads of 8
    # channels. 40 and 24 queries see at most a window of keys before the block, 64 in one block.
    pairs = 40 * 40 + 24 * 24 + 64 * 64
    assert recomputed - kept == 3 * 2 * 2 * 4 * 8 * pairs
