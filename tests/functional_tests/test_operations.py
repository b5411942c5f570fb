"""Operations of a step, counted: numbers that may go down, never up. On a GPU each is a kernel that
the host launches; packs of few tokens wait for them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch
from megatron.core import tensor_parallel
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.packing.device import CPU
from megatron.sft.distributed import make_groups
from megatron.sft.fit.counter import SettledCounter
from megatron.sft.fit.step import StepData, forward_backward, on_device, prepare
from megatron.sft.model import cpu_support, mcore_fixes
from megatron.sft.model.build import build_training
from tests.functional_tests.fit_check import CP2, PACKED, ROPE, VOCAB_SIZE, Case
from tests.functional_tests.ranks import run_ranks

FLAGS = f"{PACKED} {ROPE} --group-query-attention --num-query-groups 2"
DATA = StepData(lengths=((64,), (64,), (64,)), loss_share=0.7)


class _Counted(TorchDispatchMode):
    """Counts operations that compute or copy, not those that see a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        """By name; `integers` are the int64 tensors that they make, `functions` autograd's that are
        written in Python.
        """

    def __enter__(self) -> _Counted:
        plain: Any = torch.autograd.Function.__dict__["apply"]

        def apply(cls: type, *arguments: Any) -> Any:
            self.found["functions"] += 1
            return plain.__get__(None, cls)(*arguments)

        self._patch: Any = mock.patch.object(torch.autograd.Function, "apply", classmethod(apply))
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, schema = func(*args, **(kwargs or {})), func._schema
        aliases = [one.alias_info for one in schema.returns if one.alias_info is not None]
        if all(alias.is_write for alias in aliases):
            self.found[schema.name.split("::")[1]] += 1
            if isinstance(result, torch.Tensor) and result.dtype == torch.int64:
                self.found["integers"] += 1
        return result


def operations(case: Case) -> Counter[str]:
    """Those of a third microbatch, with all layers, on this rank."""
    config = case.config()
    mcore_fixes.install()
    cpu_support.install()
    make_groups(config)
    tensor_parallel.model_parallel_cuda_manual_seed(config.training.seed)
    prepared = prepare(config, case.data)
    training = build_training(config, VOCAB_SIZE, CPU)
    found = []
    for packs in (prepared, prepared[:2], prepared):  # the first step makes what is kept
        with _Counted() as counted:
            forward_backward(config, training, [on_device(packs, CPU)], packs)
        found.append(counted.found)
    return found[2] - found[1]


def of_depths(num_ranks: int, flags: str) -> tuple[Counter[str], Counter[str]]:
    """Operations of a layer, and those of a model of two layers; of a microbatch each."""
    two, three = (
        run_ranks(operations, num_ranks, Case(num_ranks, flags, DATA, depth))[0] for depth in (2, 3)
    )
    return three - two, two


def total(found: Counter[str]) -> int:
    """All but those counted a second time."""
    return sum(found.values()) - found["integers"] - found["functions"]


def assert_at_most(found: Counter[str], limits: dict[str, int]) -> None:
    counts = {name: total(found) if name == "all" else found[name] for name in limits}
    assert all(counts[name] <= limit for name, limit in limits.items()), (counts, limits, found)


def test_operations_of_a_layer_and_of_a_microbatch() -> None:
    """A product, a copy or a read that slips in costs nothing that any other test sees."""
    layer, model = of_depths(1, FLAGS)
    assert_at_most(layer, {"all": 94, "mm": 12, "cat": 6, "clone": 1, "integers": 0})
    # Queries and keys that are turned; it costs the host as much as a kernel.
    assert_at_most(layer, {"functions": 1})
    # Two layers, embedding, positions, output layer and loss; integers are rows and labels.
    assert_at_most(model, {"all": 283, "integers": 9})
    # The microbatch's mask is on the host, where the rows that count are found.
    assert_at_most(model, {"_local_scalar_dense": 0, "item": 0, "nonzero": 1})


def test_keys_and_values_are_gathered_once_over_context_parallel() -> None:
    """Forward one gather and one copy in the order of the sequence, backward one of each back."""
    layer, model = of_depths(2, f"{FLAGS} {CP2}")
    copies = {"_allgather_base_": 1, "_reduce_scatter_base_": 1, "index_select": 1, "index_add": 1}
    assert_at_most(layer, {**copies, "cat": 4, "integers": 0})
    assert_at_most(model, {"integers": 11, "_local_scalar_dense": 0, "nonzero": 1})


OTHER_LENGTHS = ((40, 24, 56), (32, 48, 16), (8, 44, 60), (12, 20, 28))
A_COUNT = 4
"""Bytes of a number of tokens, which later releases of megatron-core keep."""
OF_INDICES = 3880
"""Bytes on the host, of the places of tokens in packs of these lengths, on one of two ranks."""


def bytes_left(case: Case) -> tuple[list[int], int]:
    """Bytes alive after steps of 3, 2 and 3 microbatches, and what steps of other lengths add."""
    config = case.config()
    mcore_fixes.install()
    cpu_support.install()
    make_groups(config)
    tensor_parallel.model_parallel_cuda_manual_seed(config.training.seed)
    prepared = prepare(config, case.data)
    others = [
        prepare(config, StepData(lengths=tuple((n,) for n in lengths), loss_share=0.7))
        for lengths in OTHER_LENGTHS
    ]
    training = build_training(config, VOCAB_SIZE, CPU)
    with SettledCounter() as counter:
        for packs in (prepared, prepared[:2], prepared, *others):
            with counter.phase("step"):
                forward_backward(config, training, [on_device(packs, CPU)], packs)
    left = [phase.end for phase in counter.phases]
    return left[:3], left[-1] - left[2]


def test_a_microbatch_leaves_nothing_behind() -> None:
    """What is kept of each would end a run after hours. Of packs of other lengths only places of
    their tokens are kept: with context parallel, and so many lengths at most.
    """
    for num_ranks, flags, of_lengths in ((1, FLAGS, 0), (2, f"{FLAGS} {CP2}", OF_INDICES)):
        first, added = run_ranks(bytes_left, num_ranks, Case(num_ranks, flags, DATA, 2))[0]
        assert first[2] <= first[1] <= first[0] + A_COUNT
        assert added <= of_lengths
