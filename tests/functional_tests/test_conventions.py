"""Megatron-LM's own way of calling: a namespace for the config, samples that are padded, no
iterator on most ranks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunDataIterator

from megatron.packing import conventions, plugin
from megatron.packing.data_schedule import (
    get_batch_on_this_rank_for_sequence_packing,
    wrap_data_iterator,
)
from megatron.packing.step.settings import PackingOptions
from tests.functional_tests.ranks import run_ranks
from tests.unit_tests.packing.plugged import Model, forward_step, make_config

CALLS = PackingOptions(megatron_lm_calls=True)
LENGTHS = [[30, 500, 17, 256], [1000, 3, 64, 128]]


def sample(length: int) -> dict[str, torch.Tensor]:
    padded = -(-length // 16) * 16
    tokens = torch.arange(1, padded + 1)
    return {
        "tokens": tokens,
        "labels": tokens + 1,
        "position_ids": torch.arange(padded),
        "loss_mask": (tokens <= length).float(),
        "original_seq_len": torch.tensor([length]),
        "padded_seq_len": torch.tensor([padded]),
        "advantages": -tokens.double(),
        "sample_id": torch.tensor(length),
    }


def wrap_and_drain(tensor: int, pipeline: int, scheduler: str) -> tuple[int, int, float, float]:
    """Data-parallel rank, tokens that count, and both sums."""
    parallel_state.initialize_model_parallel(tensor, pipeline)
    config = SimpleNamespace(
        max_seqlen_per_dp_cp_rank=1024,
        microbatch_group_size_per_vp_stage=pipeline,
        virtual_pipeline_model_parallel_size=None,
        sequence_packing_scheduler=scheduler,
    )
    rank, draws = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank() == 0,
    )
    given = iter([sample(length) for length in LENGTHS[rank]]) if draws else None
    iterator: Any
    iterator, num_microbatches, num_tokens, square_sum = wrap_data_iterator(
        given, config, len(LENGTHS[rank])
    )
    counted = 0
    for _ in range(num_microbatches):
        batch = get_batch_on_this_rank_for_sequence_packing(
            iterator, dynamic_cp=False, config=config
        )
        tokens, labels, loss_mask, attention_mask, _, params, padding_mask = batch
        assert attention_mask is None
        assert params.qkv_format == "thd"
        assert params.cu_seqlens_q[-1] == padding_mask.numel()
        if loss_mask is not None and labels is not None:
            assert torch.equal(loss_mask.bool(), ~padding_mask)
            counted += int(loss_mask.sum())
            advantages, ids = batch.extra["advantages"], batch.extra["sample_id"].tolist()
            assert torch.equal(advantages, (1 - labels) * loss_mask.double())
            real = padding_mask.logical_not().sum()
            assert sum(ids) == real, "each id is its sample's length, 0 at padding"
        assert (tokens is None, labels is None) == (
            not parallel_state.is_pipeline_first_stage(),
            not parallel_state.is_pipeline_last_stage(),
        )
    return rank, counted, num_tokens, square_sum


@pytest.mark.parametrize("scheduler", ["DP_BALANCED", "default"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_calls_as_megatron_lm_has_them(tensor: int, pipeline: int, scheduler: str) -> None:
    """A script that calls the functions itself has no model's config at hand, and reads only some
    ranks' data.
    """
    ranks = run_ranks(wrap_and_drain, 4, tensor, pipeline, scheduler)
    real = [length for lengths in LENGTHS for length in lengths]
    counted = {rank: count for rank, count, *_ in ranks if count}
    assert sum(counted.values()) == sum(real)
    for _, _, num_tokens, square_sum in ranks:
        assert (num_tokens, square_sum) == (sum(real), sum(length**2 for length in real))


def call_as_written(
    tensor: int, pipeline: int, context: int, virtual: int | None
) -> dict[str, Any]:
    """What upstream's packing tests do on each rank: wrap, look at the microbatches, and take them
    one by one.
    """
    parallel_state.initialize_model_parallel(
        tensor, pipeline, virtual, context_parallel_size=context
    )
    config = SimpleNamespace(
        max_seqlen_per_dp_cp_rank=1024,
        microbatch_group_size_per_vp_stage=pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        sequence_packing_scheduler="dp_balanced",
    )
    is_first, stage = (
        parallel_state.get_tensor_model_parallel_rank() == 0,
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    samples = [sample(length) for length in LENGTHS[parallel_state.get_data_parallel_rank()]]
    given: Any = (
        RerunDataIterator(iter(samples)) if is_first and stage in (0, pipeline - 1) else None
    )
    if virtual is not None and is_first:
        given = [given] + [None] * (virtual - 1) if stage == 0 else [None] * (virtual - 1) + [given]
    iterator: Any
    iterator, count, *sums = conventions.wrap_data_iterator(given, config, len(samples))
    # The hook must find alike on all ranks that these are packs already: else some would wait to
    # pack them again.
    model = Model(make_config(sequence_packing_scheduler="default", sequence_packing_options=CALLS))
    hook = plugin.PackingSchedule(lambda **arguments: [arguments["data_iterator"]])
    assert hook(data_iterator=iterator, model=model, forward_step_func=forward_step) == [iterator]
    found: dict[str, Any] = {
        "place": (
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
            stage,
        )
    }
    if not is_first:
        assert iterator == (None if virtual is None else [None] * virtual)
        iterator = [None] * (virtual or 1)
    else:
        iterator = [iterator] if virtual is None else iterator
        stages = [[next(one) for _ in range(count)] for one in iterator]
        assert {len(microbatches) for microbatches in stages} == {count}
        shown = stages[0 if stage == 0 else -1]
        found["tokens"] = [
            int(each["tokens"].sum()) for each in shown if stage in (0, pipeline - 1)
        ]
        hidden = ("padding_mask", "sources")  # which Megatron-LM's microbatches lack
        iterator = [
            iter([{k: v for k, v in each.items() if k not in hidden} for each in one])
            for one in stages
        ]
    batches = []
    for vp_stage, one in enumerate(iterator):
        place: dict[str, Any] = (
            {} if virtual is None else {"vpp_size": virtual, "vp_stage": vp_stage}
        )
        for _ in range(count):
            batch = conventions.get_batch_on_this_rank_for_sequence_packing(
                one, **place, dynamic_cp=False, config=None
            )
            batches.append(batch)
        with pytest.raises(StopIteration):
            conventions.get_batch_on_this_rank_for_sequence_packing(one, **place)
    with pytest.raises(
        (ValueError, RuntimeError), match="must have a data iterator"
    ):  # on all, and none waits
        conventions.get_batch_on_this_rank_for_sequence_packing(None)
    params = [batch.packed_seq_params for batch in batches]
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    layouts = [{tuple(getattr(each, name).tolist()) for name in names} for each in params]
    assert [each.padded_lengths for each in params] == [
        tuple(each.cu_seqlens_q.diff().tolist()) for each in params
    ]
    fields = ("tokens", "labels", "loss_mask", "position_ids", "padding_mask")
    found["batches"] = [
        [None if getattr(b, f) is None else getattr(b, f).tolist() for f in fields] for b in batches
    ]
    return {
        **found,
        "sums": sums,
        "layouts": layouts,
        "longest": [each.max_seqlen_q for each in params],
    }


@pytest.mark.parametrize(
    ("tensor", "pipeline", "context", "virtual"), [(2, 1, 2, None), (2, 2, 1, None), (1, 4, 1, 2)]
)
def test_calls_as_upstreams_own_tests_write_them(
    tensor: int, pipeline: int, context: int, virtual: int | None
) -> None:
    """Megatron-LM's scripts have an iterator on one tensor-parallel rank, and are told there is
    none elsewhere.
    """
    ranks = run_ranks(call_as_written, 4, tensor, pipeline, context, virtual)
    replicas = 4 // (tensor * pipeline * context)
    real = [length for lengths in LENGTHS[:replicas] for length in lengths]
    by_place: dict[Any, list[dict[str, Any]]] = {}
    for found in ranks:
        by_place.setdefault(found.pop("place"), []).append(found)
        assert found["sums"] == [sum(real), sum(length**2 for length in real)]
        assert all(len(names) == 1 for names in found["layouts"])
    assert {len(peers) for peers in by_place.values()} == {tensor}
    tokens = {(stage, context): 0 for _, context, stage in by_place}
    for (replica, part, stage), (first, *others) in by_place.items():
        assert all(
            other["batches"] == first["batches"] and other["layouts"] == first["layouts"]
            for other in others
        )
        assert first["layouts"] == by_place[replica, 0, 0][0]["layouts"]
        tokens[stage, part] += sum(first["tokens"])
        held = [[values is not None for values in batch] for batch in first["batches"]]
        count = len(held) // (virtual or 1)
        is_first, is_last = stage == 0, stage == pipeline - 1
        assert held[0] == [
            is_first,
            is_last and virtual is None,
            is_last and virtual is None,
            is_first,
            True,
        ]
        assert held[-1] == [
            is_first and virtual is None,
            is_last,
            is_last,
            is_first and virtual is None,
            True,
        ]
        assert count == len(first["tokens"]) or stage not in (0, pipeline - 1)
        for batch, (layout,) in zip(first["batches"], first["layouts"]):
            assert len(batch[-1][0]) == layout[-1] // context
    expected = sum(length * (length + 1) // 2 for length in real)
    assert {count for (stage, _), count in tokens.items() if stage in (0, pipeline - 1)} == {
        expected
    }
