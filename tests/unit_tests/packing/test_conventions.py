"""Megatron-LM's own calls in one process: short forms, microbatches of a script's own, schedulers
as classes.
"""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets import data_schedule as home
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.packing import conventions, data_schedule, plugin
from megatron.packing.conventions import BasePackingScheduler, register_scheduler
from megatron.packing.model import get_batch as get_batch_module
from megatron.packing.model import pipeline
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.problem import ScheduleRequest, check_schedule
from megatron.packing.scheduling.registry import SCHEDULERS, get_scheduler
from tests.unit_tests.packing.plugged import Model, forward_step, make_config
from tests.unit_tests.packing.stubs import Ranks, array

pytestmark = pytest.mark.usefixtures("taken_back")


class Names(Enum):
    DP_BALANCED = "dp_balanced"


def groups(context: int = 1) -> ProcessGroupCollection:
    collection = ProcessGroupCollection()
    collection.tp, collection.cp, collection.pp = Ranks(), Ranks(context), Ranks()
    return collection


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the plain `wrap_dataloader` is asked."""
    calls: list[tuple[Any, ...]] = []

    def wrap(*arguments: Any) -> Any:
        calls.append(arguments)
        return data_schedule.WrappedDataLoader([], 2, 3, 5)

    monkeypatch.setattr(data_schedule, "wrap_dataloader", wrap)
    return calls


def test_short_calls(asked: list[tuple[Any, ...]]) -> None:
    """A scheduler's name taken for a number of draws, or a default in its place, would pack
    otherwise than asked.
    """
    config, data, given = make_config(sequence_packing_scheduler="default"), object(), groups()
    plugin.install(config, megatron_lm_calls=True)
    installed: Any = home
    installed.wrap_dataloader(data, "dp_balanced", pg_collection=given)
    conventions.wrap_dataloader(data, config, Names.DP_BALANCED, given)
    conventions.wrap_dataloader(data, config, 3, "empty", given)
    conventions.wrap_data_iterator(data, config, 4, given)
    conventions.wrap_iterator_helper(config, data, pg_collection=given)
    assert asked == [
        (data, config, 1, "dp_balanced", given),
        (data, config, 1, "dp_balanced", given),
        (data, config, 3, "empty", given),
        (data, config, 4, None, given),
        (data, config, 1, None, given),
    ]
    assert conventions.wrap_iterator_helper(SimpleNamespace(), data) == (data, None, None, None)
    with pytest.raises(ValueError, match=r"needs a config: call plugin\.install"):
        conventions.wrap_dataloader(data, "dp_balanced")


@pytest.mark.parametrize("context", [1, 2])
def test_microbatches_of_a_scripts_own(monkeypatch: pytest.MonkeyPatch, context: int) -> None:
    """What stands in their padding would be embedded and scored, and experts would be sent it."""
    monkeypatch.setattr(get_batch_module, "device_of", lambda group: torch.device("cpu"))
    values = torch.tensor([11, 12, 13, -1, 21, 22, -1, -1])
    microbatch = {
        "tokens": values,
        "labels": values,
        "loss_mask": torch.ones(8),
        "position_ids": values,
        "cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32),
        "cu_seqlens_padded": torch.tensor([0, 4, 8], dtype=torch.int32),
        "max_seqlen": torch.tensor([4], dtype=torch.int32),
    }
    batch = conventions.get_batch_on_this_rank_for_sequence_packing(
        iter([microbatch]), pg_collection=groups(context)
    )
    mine = [0, 1, 2, 3, 4, 5, 6, 7] if context == 1 else [0, 3, 4, 7]
    expected = torch.tensor([11, 12, 13, 0, 21, 22, 0, 0])[mine]
    for field in (batch.tokens, batch.labels, batch.position_ids):
        assert field is not None
        assert torch.equal(field, expected.unsqueeze(0))
    assert batch.loss_mask is not None
    assert torch.equal(batch.loss_mask, (expected > 0).float().unsqueeze(0))
    assert torch.equal(batch.padding_mask, (expected == 0).unsqueeze(0))
    params = batch.packed_seq_params
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert getattr(params, name).tolist() == [0, 4, 8]
    assert params.padded_lengths == (4, 4)  # or our attention would ask the device in each layer
    assert (params.max_seqlen_q, params.max_seqlen_kv, params.qkv_format) == (4, 4, "thd")


class LongestFirst(BasePackingScheduler):
    """Deals sequences to ranks in turn, the longest first, a microbatch each."""

    def get_groups_and_subsamples(
        self, sample_id_seqlens: list[tuple[int, int]]
    ) -> list[list[list[int]]]:
        assert (self.cp_size, self.max_seqlen_per_dp_cp_rank) == (1, 64)
        multiple = self.dp_size * (self.microbatch_group_size_per_vp_stage or 1)
        ids = [i for i, _ in sorted(sample_id_seqlens, key=lambda entry: -entry[1])]
        packs = [[i] for i in ids] + [[] for _ in range(-len(ids) % multiple)]
        return [packs[start : start + self.dp_size] for start in range(0, len(packs), self.dp_size)]


class Forgetful(LongestFirst):
    def get_groups_and_subsamples(
        self, sample_id_seqlens: list[tuple[int, int]]
    ) -> list[list[list[int]]]:
        return super().get_groups_and_subsamples(sample_id_seqlens[1:])


class Alone(LongestFirst):
    def get_groups_and_subsamples(
        self, sample_id_seqlens: list[tuple[int, int]]
    ) -> list[list[list[int]]]:
        return [[[i for i, _ in sample_id_seqlens]]]


def test_a_scheduler_of_megatron_lms_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and microbatches exchanged, or a sequence lost, would train another batch than the
    scheduler's.
    """
    for name in ("longest", "forgetful", "alone"):
        monkeypatch.setitem(SCHEDULERS, name, None)  # type: ignore[arg-type]  # taken out again at the end
        del SCHEDULERS[name]
    function = register_scheduler("Longest", LongestFirst)
    assert get_scheduler("LONGEST") is function
    request = ScheduleRequest(
        lengths=array(8, 24, 16),
        source_rank=array(0, 0, 1),
        source_fetch=array(0, 1, 0),
        num_ranks=2,
        num_fetches=2,
        capacity=64,
        microbatch_multiple=2,
        cost=PackCost(linear=1.0, quadratic=0.0),
    )
    schedule = function(request)
    check_schedule(request, schedule)
    assert (schedule.num_ranks, schedule.num_microbatches) == (2, 2)
    assert np.array_equal(schedule.rank, [0, 0, 1])
    assert np.array_equal(schedule.microbatch, [1, 0, 0])
    with pytest.raises(
        ValueError, match=r"each of 3 samples must be in one pack, but those in packs are \[1 2\]"
    ):
        register_scheduler("forgetful", Forgetful)(request)
    with pytest.raises(ValueError, match="a list of ids for each of 2 ranks"):
        register_scheduler("alone", Alone)(request)
    with pytest.raises(
        ValueError, match="there is a packing scheduler 'default'; register LongestFirst as another"
    ):
        register_scheduler("Default", LongestFirst)


@pytest.mark.usefixtures("calls")
def test_the_plug_in_takes_these_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them the names that a script imports have other contracts; they must go, too, when it
    is taken back.
    """
    monkeypatch.setattr(conventions, "from_first_rank", lambda value, groups: value)
    stats = SimpleNamespace(microbatches=1, tokens=7, square_sum=25)
    batch = SimpleNamespace(iterators=lambda num_virtual_stages, device: iter([]), stats=stats)
    monkeypatch.setattr(pipeline, "schedule_global_batch", lambda *arguments, **options: batch)
    monkeypatch.setattr(pipeline, "device_of", lambda group: torch.device("cpu"))
    collection = SimpleNamespace(**dict.fromkeys(data_schedule.GROUPS, "group"))
    name = "get_batch_on_this_rank_for_sequence_packing"

    def losses(**install: Any) -> list[Any]:
        with plugin.install(config := make_config(), **install):
            expected = conventions if install else data_schedule
            assert getattr(home, name) is getattr(expected, name)
            return get_forward_backward_func()(
                data_iterator=iter([]),
                model=Model(config),
                forward_step_func=forward_step,
                num_microbatches=1,
                forward_only=True,
                pg_collection=collection,
            )

    (loss,) = losses()
    assert losses(megatron_lm_calls=True) == [loss, 7, 25]
    assert not hasattr(home, name)
    assert not hasattr(home, "register_scheduler")
