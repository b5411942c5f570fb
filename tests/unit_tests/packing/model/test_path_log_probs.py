"""Log-probabilities of paths, of packs that have the whole tree or a part of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.microbatches import layouts_of_samples, pack
from megatron.packing.batch.paths import merge_with_fields
from megatron.packing.batch.reading import read_samples
from megatron.packing.batch.samples import Samples
from megatron.packing.batch.tree import Path
from megatron.packing.batch.tree_cuts import TreeRules
from megatron.packing.batch.tree_shapes import shaped
from megatron.packing.model import path_log_probs as module
from megatron.packing.model.get_batch import _paths_of
from tests.unit_tests.packing.stubs import Ranks

ALIGNMENT = Alignment()


def tree() -> Samples:
    """Three answers of 3 tokens to a prompt of 3, of which the last token is trained."""
    paths = []
    for answer in ([4, 5, 6], [4, 7, 8], [9, 10, 11]):
        ids = np.array([1, 2, 3, *answer, 0])
        mask = np.array([0, 0, 1, 1, 1, 1], np.float32)
        paths.append(Path(ids[:-1], ids[1:], mask))
    return read_samples(merge_with_fields(paths, ids=[10, 11, 12]))


def sums_by_id(samples: Samples, **options: Any) -> dict[int, float]:
    """Sums of all packs of a sample each, of losses that are the labels."""
    counts = np.ones(samples.lengths.size, np.int64)
    sums: dict[int, float] = {}
    for microbatch in pack(samples, counts, layouts_of_samples(samples, counts, ALIGNMENT)):
        batch: Any = SimpleNamespace(paths=_paths_of(microbatch, None, torch.device("cpu")))
        group: Any = Ranks()
        found = module.path_log_probs(batch, microbatch["labels"].double()[None], group, **options)
        for number, each in zip(microbatch["extra_per_path"]["path_ids"].tolist(), found.tolist()):
            sums[number] = sums.get(number, 0.0) + each
    return sums


WANTED = {10: -15.0, 11: -19.0, 12: -30.0}


def test_a_part_of_a_tree_is_no_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preference loss of a part compares answers by what stands in the pack."""
    monkeypatch.setattr(
        module, "reduce_from_tensor_model_parallel_region", lambda sums, group: sums
    )
    whole = tree()
    rules = TreeRules(alignment=ALIGNMENT, capacity=8, linear=1, quadratic=0.1, keys_per_token=32)
    parts = shaped(whole, rules).samples
    assert (whole.lengths.size, parts.lengths.size) == (1, 3)
    assert sums_by_id(whole) == sums_by_id(whole, allow_parts=True) == WANTED
    with pytest.raises(ValueError, match="has only a part of a tree, which was larger than a pack"):
        sums_by_id(parts)
    assert sums_by_id(parts, allow_parts=True) == WANTED
