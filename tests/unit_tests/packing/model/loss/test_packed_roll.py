"""One token further in each sequence of a pack, on any number of context-parallel ranks."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction

from megatron.packing.model.attention.zigzag import shard_index
from megatron.packing.model.loss import auxiliary_losses
from megatron.packing.model.loss.packed_roll import PackedRoll, _ends_of_pieces
from tests.unit_tests.packing.model.attention.test_rotary import Operations
from tests.unit_tests.packing.stubs import Ranks


def roll(tensor, lengths, group=None):
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor((0, *lengths)).cumsum(0))
    return multi_token_prediction.roll_tensor(tensor, -1, -1, group, params)


@pytest.fixture(autouse=True)
def mended():
    with auxiliary_losses.installed():
        assert isinstance(multi_token_prediction._roll_tensor_packed_seq, PackedRoll)
        yield


def test_is_megatron_cores_own():
    """A sequence whose last target is the first token of the next one learns to end in the wrong
    place.
    """
    plain = multi_token_prediction._roll_tensor_packed_seq.__wrapped__
    lengths = (3, 1, 4)
    for tensor in (torch.arange(1, 9)[None], torch.rand(2, 8)):
        rolled, total = roll(tensor, lengths)
        params = PackedSeqParams(cu_seqlens_q=torch.tensor((0, *lengths)).cumsum(0))
        expected, expected_total = plain(tensor, -1, -1, params)
        assert torch.equal(rolled, expected)
        assert torch.equal(total, expected_total)
    assert roll(torch.arange(1, 9)[None], lengths)[0].tolist() == [[2, 3, 0, 0, 6, 7, 8, 0]]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_context_parallel_is_the_whole(size, rows, monkeypatch):
    """Borders come from the neighbours of each piece; an exchange in another order trains on other
    targets.
    """
    lengths = tuple(2 * size * pieces for pieces in (1, 3, 2))
    whole = torch.arange(1, rows * sum(lengths) + 1).view(rows, -1)
    shards = [whole[:, shard_index(lengths, size, rank)] for rank in range(size)]
    firsts, _ = _ends_of_pieces(lengths, size, torch.device("cpu"))
    sent = []

    def gather(into, mine, group):
        assert into.shape == (size * len(mine), *mine.shape[1:])  # what gloo asks for
        parts = [shard.index_select(-1, firsts).flatten() for shard in shards]
        assert torch.equal(mine.flatten(), parts[group.rank()])
        sent.append(mine.numel())
        into.copy_(torch.cat(parts).view(into.shape))

    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    expected, _ = roll(whole, lengths)
    for rank, shard in enumerate(shards):
        rolled, total = roll(shard, lengths, Ranks(size, rank))
        assert torch.equal(rolled, expected[:, shard_index(lengths, size, rank)])
        assert total == rolled.sum()
    assert sent == [2 * rows * len(lengths)] * size  # one message for all sequences


def test_no_operation_is_per_sequence():
    """megatron-core's own launches six for each, of each tensor."""
    counts = []
    for lengths in ((6, 6), (1,) * 12):
        roll(torch.arange(12)[None], lengths)  # which reads the lengths, once per microbatch
        with Operations() as operations:
            roll(torch.arange(12)[None], lengths)
        counts.append(operations.counts)
    assert counts[0] == counts[1]
    assert counts[0]["aten.roll.default"] == 1
