"""What a config and its layout ask of the packs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packing.step.settings import PackingOptions, PackingSettings, cost_of, reads_tokens
from tests.unit_tests.packing.plugged import make_config
from tests.unit_tests.packing.stubs import Ranks


@pytest.mark.parametrize(("recipe", "pack"), [(None, 4), ("delayed", 32), ("mxfp8", 64)])
def test_packs_are_what_fp8_takes(recipe, pack):
    """Transformer Engine ends the run at the first pack whose tokens on a rank are no multiple of
    its GEMMs'.
    """
    config = make_config(max_seqlen_per_dp_cp_rank=50)
    if recipe is not None:
        config.fp8, config.fp8_recipe = "hybrid", recipe
    groups = SimpleNamespace(tp=Ranks(), cp=Ranks(2), pp=Ranks(), dp=Ranks())
    settings = PackingSettings.of(config, groups)
    assert (settings.alignment.sequence, settings.alignment.pack) == (4, pack)
    assert settings.capacity == 100 // pack * pack


@pytest.mark.parametrize(
    ("channels", "cp", "expected"), [(4, 1, 17), (1, 1, 68), (1, 2, 17), (1, 8, 8)]
)
def test_keys_of_trees_take_no_more_memory_than_their_tokens(channels, cp, expected):
    """Wide keys that are gathered for each branch would not fit beside the model."""
    config = make_config(
        max_seqlen_per_dp_cp_rank=64,
        num_query_groups=1,
        kv_channels=channels,
        context_parallel_size=cp,
    )
    ranks = SimpleNamespace(tp=Ranks(), cp=Ranks(cp), pp=Ranks(), dp=Ranks())
    assert PackingSettings.of(config, ranks).trees.keys_per_token == expected


@pytest.mark.parametrize(
    ("split", "layers"),
    [
        ({}, (2, 2)),
        ({"num_layers_in_first_pipeline_stage": 1}, (1, 3)),
        ({"pipeline_model_parallel_layout": "Ettt|tL"}, (3, 1)),
    ],
)
def test_shares_are_those_of_the_layers_that_megatron_core_builds(split, layers):
    """Schedules would be made for a pipeline whose stages are alike, without a word."""
    config: Any = TransformerConfig(
        num_layers=4,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        moe_token_dispatcher_type="alltoall",
        variable_seq_lengths=True,
        **split,
    )
    config.max_seqlen_per_dp_cp_rank = 64
    groups: Any = SimpleNamespace(tp=Ranks(), cp=Ranks(), pp=Ranks(2), dp=Ranks())
    found = PackingSettings.of(config, groups).model
    assert found.relative_shares == pytest.approx([count / 2 for count in layers])
    config.sequence_packing_options = PackingOptions(vocab_size=96)  # as much as one layer
    found = PackingSettings.of(config, groups).model
    with_head = (layers[0], layers[1] + 1)
    assert found.relative_shares == pytest.approx([count / 2.5 for count in with_head])


def test_stages_that_read_tokens():
    """A stage that predicts further tokens and gets none fails in its first microbatch."""
    config: Any = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        mtp_num_layers=1,
        pipeline_model_parallel_size=4,
        pipeline_model_parallel_layout="Et|t|m|L",
        pipeline_dtype=torch.float32,
        moe_token_dispatcher_type="alltoall",
        variable_seq_lengths=True,
    )

    def readers(config: Any, num_stages: int) -> list[bool]:
        groups: list[Any] = [Ranks(num_stages, stage) for stage in range(num_stages)]
        return [reads_tokens(config, pp) for pp in groups]

    assert readers(config, 4) == [True, False, True, True]
    assert readers(SimpleNamespace(), 3) == [True, False, True]


def test_gpus_wait_for_launches(monkeypatch):
    """Each rank of a pack launches its kernels: shared out like work they would be next to free."""
    config = make_config(num_layers=2, tensor_model_parallel_size=4, context_parallel_size=2)
    assert cost_of(config).least == 0  # a CPU computes while it would launch
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seconds = 5e-6 * (2 * 150 + 40)
    assert cost_of(config).least == pytest.approx(seconds * 400e12 * 8)
