"""The layers of each pipeline stage: a contract with megatron-core, which builds them."""

from dataclasses import replace
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron.packing.stages import StageLayers


def all_splits():
    """Splits of a few layers; embedding and loss count only where no end has its own number."""
    for num_layers, stages, chunks in product(range(1, 9), (2, 3, 4), (1, 2)):
        shape: Any = {"num_stages": stages, "num_virtual_stages": chunks}
        for first, last in product((None, 1, 2, 4), repeat=2):
            yield num_layers, StageLayers(**shape, first=first, last=last)
        for embedding, loss in ((True, False), (False, True), (True, True)):
            yield (
                num_layers,
                StageLayers(**shape, counts_embedding=embedding, counts_loss=loss),
            )


def by_megatron_core(num_layers: int, split: StageLayers) -> list[range] | None:
    """The layers that megatron-core builds of each part; None where it refuses, or builds parts of
    less than no layers.
    """
    chunks = split.num_virtual_stages if split.num_virtual_stages > 1 else None
    try:
        config = TransformerConfig(
            num_layers=num_layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=split.num_stages,
            virtual_pipeline_model_parallel_size=chunks,
            num_layers_in_first_pipeline_stage=split.first,
            num_layers_in_last_pipeline_stage=split.last,
            account_for_embedding_in_pipeline_split=split.counts_embedding,
            account_for_loss_in_pipeline_split=split.counts_loss,
            pipeline_dtype=torch.float32,
            moe_token_dispatcher_type="alltoall",
            variable_seq_lengths=True,
        )
        parts = []
        for chunk, stage in product(range(split.num_virtual_stages), range(split.num_stages)):
            vp_stage = None if chunks is None else chunk
            start = get_transformer_layer_offset(config, vp_stage, stage)
            parts.append(range(start, start + get_num_layers_to_build(config, vp_stage, stage)))
            if parts[-1].start > parts[-1].stop:  # it would build a model without some layers
                return None
    except ZeroDivisionError:  # both ends of two interleaved stages, of which one says all
        return by_megatron_core(num_layers, replace(split, last=None))
    except (ValueError, AssertionError):
        return None
    return parts


def test_it_is_what_megatron_core_builds():
    """Fit, planner and schedules would speak of another model, and a run would end in an assertion
    after its weights were read.
    """
    num_refused = num_uneven = 0
    for num_layers, split in all_splits():
        expected = by_megatron_core(num_layers, split)
        try:
            counts = split.of_parts(num_layers)
        except ValueError:
            num_refused += 1
            assert expected is None, (num_layers, split)
            continue
        ends = list(accumulate(counts))
        assert [range(end - count, end) for end, count in zip(ends, counts)] == expected
        assert sum(counts) == num_layers
        num_uneven += len(set(counts)) > 1
    assert min(num_refused, num_uneven) > 50


@pytest.mark.parametrize(
    ("num_layers", "split", "expected"),
    [
        (12, StageLayers(num_stages=4), (3, 3, 3, 3)),
        (12, StageLayers(num_stages=4, first=1, last=3), (1, 4, 4, 3)),
        (10, StageLayers(num_stages=4, counts_embedding=True, counts_loss=True), (2, 3, 3, 2)),
        (12, StageLayers(num_stages=2, num_virtual_stages=2, first=4), (2, 4, 2, 4)),
        (7, StageLayers(num_stages=2, num_virtual_stages=2, counts_loss=True), (2, 2, 2, 1)),
    ],
)
def test_examples_of_the_docstring(num_layers, split, expected):
    assert split.of_parts(num_layers) == expected
