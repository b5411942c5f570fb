"""What a config and its layout ask of the packs."""

from types import SimpleNamespace

import pytest

from megatron.packing.step.settings import PackingSettings
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
