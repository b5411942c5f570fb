"""Samples on their way to their ranks, as far as a group of one process shows it."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.packing.step.redistribute import redistribute, share_with_peers


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("sizes", [[], [4], [3, 1, 6, 2]])
def test_one_rank_keeps_its_samples_in_order(group, sizes):
    """The receiver cuts the words at sizes in global order: another order gives samples of mixed content."""
    words = list(torch.arange(sum(sizes), dtype=torch.int32).split(sizes))
    zeros = np.zeros(len(sizes), dtype=np.int64)
    moved = redistribute(words, np.array(sizes, dtype=np.int64), zeros, zeros, group)
    assert moved.dtype == torch.int32
    assert moved.tolist() == list(range(sum(sizes)))


@pytest.mark.parametrize("num_words", [0, 5])
def test_one_peer_keeps_its_words(group, num_words):
    """Rank 0 decodes what it passed on; a fresh buffer instead would be whatever memory held."""
    words = torch.arange(num_words, dtype=torch.int32)
    assert torch.equal(share_with_peers(words, num_words, group), words)
