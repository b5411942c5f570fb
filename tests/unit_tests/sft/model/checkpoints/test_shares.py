"""What each data-parallel replica writes of a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.packing.model.sections import by_section
from megatron.sft.model.checkpoints import shares
from megatron.sft.model.checkpoints.shares import read_pieces_in_place, rectangles, share_out


@pytest.mark.parametrize(
    ("sizes", "start", "stop", "expected"),
    [
        ((4, 3), 2, 10, [((0, 1), (2, 3)), ((3, 4), (0, 1)), ((1, 3), (0, 3))]),
        ((4, 3), 4, 5, [((1, 2), (1, 2))]),
        ((4, 3), 3, 12, [((1, 4), (0, 3))]),
        ((4, 3), 0, 12, [((0, 4), (0, 3))]),
        ((4, 3), 5, 5, []),
        ((5,), 2, 9, [((2, 5),)]),
        ((), 0, 1, [()]),
        ((0, 3), 0, 4, []),
    ],
)
def test_a_range_is_few_rectangles(
    sizes: tuple[int, ...], start: int, stop: int, expected: list[Any]
) -> None:
    strides = torch.empty(sizes, device="meta").stride()
    assert list(rectangles(sizes, strides, start, stop)) == expected


@given(st.lists(st.integers(1, 4), max_size=4), st.integers(-5, 90), st.integers(-5, 90), st.data())
def test_each_value_of_a_range_is_in_one_rectangle(
    sizes: list[int], start: int, stop: int, data: st.DataObject
) -> None:
    """Also where the tensor is a part of another, or transposed: a value that is missing would be
    other memory's after a restart.
    """
    order = data.draw(st.permutations(range(len(sizes))))
    gap = data.draw(st.integers(1, 2))
    whole = torch.arange(gap * torch.Size(sizes).numel()).reshape(*(sizes[a] for a in order), gap)
    tensor = whole[..., 0].permute([order.index(axis) for axis in range(len(sizes))])
    assert list(tensor.shape) == sizes
    found = []
    for box in rectangles(tensor.shape, tensor.stride(), start, stop):
        part = tensor[tuple(slice(*ends) for ends in box)]
        assert part.numel()
        found += part.reshape(-1).tolist()
    assert sorted(found) == [n for n in sorted(whole[..., 0].reshape(-1)) if start <= n < stop]


def a_layer(number: int, replica: int, copy: int = 0) -> dict[str, Any]:
    """Tensors of the second of two layers in a stack, as one replica has them."""
    ids, offsets = (0, copy, replica), ((0, number, 2),)
    rows = torch.arange(30.0).reshape(6, 5) + 100 * number
    matrix = ShardedTensor.from_rank_offsets(
        "rows", rows, *offsets, replica_id=ids, prepend_axis_num=1
    )
    halves = torch.nn.Parameter(torch.arange(21.0).reshape(7, 3) + 100 * number)
    return {
        "rows": matrix,
        "halves": by_section(
            ShardedTensor.from_rank_offsets(
                "halves", halves, *offsets, replica_id=ids, prepend_axis_num=1
            ),
            {"gate": 3, "up": 4},
            (0, 1),
            offsets,
        ),
        "groups": [{"lr": 0.1}],
    }


def filled(states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The whole tensors that shares make, of which none may hold another's values."""
    whole: dict[str, torch.Tensor] = {}
    for state in states:
        for share in nested_values(state):
            if isinstance(share, ShardedTensor):
                assert share.axis_fragmentations is None
                into = whole.setdefault(share.key, torch.full(share.global_shape, torch.nan))
                block = into[share.global_slice()]
                assert block.shape == share.data.shape
                assert block.isnan().all()
                block.copy_(share.data)
    return whole


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 7])
def test_replicas_write_equal_shares(monkeypatch: pytest.MonkeyPatch, num_replicas: int) -> None:
    """Of all tensors together, whether checkpoints hold them whole or in pieces."""
    monkeypatch.setattr(
        parallel_state, "get_data_parallel_world_size", lambda with_context_parallel: num_replicas
    )
    states, num_bytes = [], []
    for replica in range(num_replicas):
        state: dict[str, Any] = {str(n): a_layer(n, replica) for n in range(2)}
        share_out(state)
        assert state["1"]["groups"] == [{"lr": 0.1}]
        held = [v.data for v in nested_values(state) if isinstance(v, ShardedTensor)]
        # Of what is part of a larger storage megatron-core makes copies.
        assert all(values.untyped_storage().nbytes() == values.nbytes for values in held)
        num_bytes.append(sum(values.nbytes for values in held))
        states.append(state)
    assert max(num_bytes) - min(num_bytes) <= 4
    found = filled(states)
    assert {key: list(values.shape) for key, values in found.items()} == {
        "rows": [2, 6, 5],
        "halves.gate": [2, 3, 3],
        "halves.up": [2, 4, 3],
    }
    assert found["rows"][1].flatten().tolist() == list(range(100, 130))
    halves = torch.cat((found["halves.gate"][1], found["halves.up"][1]))
    assert halves.flatten().tolist() == list(range(100, 121))


def test_copies_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a norm on the second tensor-parallel rank: two writers of one block are refused."""
    monkeypatch.setattr(
        parallel_state, "get_data_parallel_world_size", lambda with_context_parallel: 1
    )
    state = a_layer(0, 0, copy=1)
    share_out(state)
    assert isinstance(state["rows"], LocalNonpersistentObject)
    assert isinstance(state["halves"], LocalNonpersistentObject)


def test_pieces_that_were_read_in_place_are_not_copied() -> None:
    """A run that just fits would otherwise not continue: all copies exist at once."""
    state = a_layer(0, 0)
    read_pieces_in_place(state)
    assert isinstance(state["rows"], ShardedTensor)
    factory = state["halves"]
    pieces = [entry.data.detach() for entry in factory.build()]
    whole = factory.merge_fn(pieces)
    assert whole.data_ptr() == factory.data.data_ptr()
    assert whole.shape == factory.data.shape
    # Of pieces that are elsewhere, or of some, the tensor is not full.
    for others in ([piece + 1 for piece in pieces], [pieces[0], pieces[1] + 1], [pieces[1]]):
        assert torch.equal(factory.merge_fn(others), torch.cat(others))


@pytest.mark.parametrize("is_loading", [False, True])
def test_a_sharded_optimizer_has_its_ranges_alone(is_loading: bool) -> None:
    """As they are in memory: eight ranks of a machine would else gather or read the state of all of
    them, and run out of it.
    """
    first, second = torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(4))
    ids = {"first": (0, 0, 1), "second": (0, 1, 1)}
    held = {kind: torch.arange(8.0) for kind in ("param", "exp_avg", "exp_avg_sq")}
    part: Any = SimpleNamespace(
        gbuf_ranges=[
            {"dtypes": [{"param_map": {first: a_range(2, 10)}}]},
            {"dtypes": [{"param_map": {second: a_range(0, 4)}}]},
        ],
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
        _get_main_param_and_optimizer_states=lambda parameter: {
            "step": torch.tensor(3.0),
            **{kind: values[: parameter.numel()] for kind, values in held.items()},
        },
    )
    model = {
        name: ShardedTensor.from_rank_offsets(name, parameter, replica_id=ids[name])
        for name, parameter in (("first", first), ("second", second))
    }
    state = shares._own_state(part, model, is_loading)
    del state["own_tensors"]
    # The second is a copy on this rank, which reads it and doesn't write it.
    assert len(state) == 1 + is_loading
    for kind, values in held.items():
        (found,) = (entry for entry in [state[1][kind]])
        assert {entry.key for entry in found} == {f"optimizer.state.{kind}.first"}
        assert [(entry.global_offset, entry.local_shape) for entry in found] == [
            ((0, 2), (1, 1)),
            ((3, 0), (1, 1)),
            ((1, 0), (2, 3)),
        ]
        assert all(
            entry.data.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
            for entry in found
        )
        assert torch.cat([found[i].data.flatten() for i in (0, 2, 1)]).tolist() == list(range(8))


def a_range(start: int, stop: int) -> dict[str, Any]:
    return {"param": SimpleNamespace(start=start, end=stop)}


def test_megatron_core_saves_and_loads_so() -> None:
    """It would gather over gloo, and read all ranks' state."""
    for name in ("_set_main_param_and_optimizer_states", "_get_main_param_and_optimizer_states"):
        assert callable(getattr(DistributedOptimizer, name))
    shares.install()
    shares.install()
    saves: Any = DistributedOptimizer.sharded_param_state_fully_reshardable
    loads: Any = DistributedOptimizer.load_parameter_state_from_fully_reshardable
    assert (saves, loads) == (shares._own_state, shares._take_own_state)
