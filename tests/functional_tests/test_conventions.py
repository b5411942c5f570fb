"""Megatron-LM's own way of calling: a namespace for the config, samples that are padded, no iterator on most ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from megatron.packing.data_schedule import get_batch_on_this_rank_for_sequence_packing, wrap_data_iterator
from tests.functional_tests.ranks import run_ranks

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
    rank, draws = parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank() == 0
    given = iter([sample(length) for length in LENGTHS[rank]]) if draws else None
    iterator: Any
    iterator, num_microbatches, num_tokens, square_sum = wrap_data_iterator(given, config, len(LENGTHS[rank]))
    counted = 0
    for _ in range(num_microbatches):
        tokens, labels, loss_mask, attention_mask, _, params, padding_mask = (
            get_batch_on_this_rank_for_sequence_packing(iterator)
        )
        assert attention_mask is None
        assert params.qkv_format == "thd"
        assert params.cu_seqlens_q[-1] == padding_mask.numel()
        if loss_mask is not None:
            assert torch.equal(loss_mask.bool(), ~padding_mask)
            counted += int(loss_mask.sum())
        assert (tokens is None, labels is None) == (
            not parallel_state.is_pipeline_first_stage(),
            not parallel_state.is_pipeline_last_stage(),
        )
    return rank, counted, num_tokens, square_sum


@pytest.mark.parametrize("scheduler", ["DP_BALANCED", "default"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_calls_as_megatron_lm_has_them(tensor: int, pipeline: int, scheduler: str) -> None:
    """A script that calls the functions itself has no model's config at hand, and reads only some ranks' data."""
    ranks = run_ranks(wrap_and_drain, 4, tensor, pipeline, scheduler)
    real = [length for lengths in LENGTHS for length in lengths]
    counted = {rank: count for rank, count, *_ in ranks if count}
    assert sum(counted.values()) == sum(real)
    for _, _, num_tokens, square_sum in ranks:
        assert (num_tokens, square_sum) == (sum(real), sum(length**2 for length in real))
