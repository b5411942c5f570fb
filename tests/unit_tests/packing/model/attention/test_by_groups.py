"""Attention by groups is attention of all groups at once, to the bit, and keeps less."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.packing.model.attention import core_attention as attention_module
from megatron.packing.model.attention.core_attention import PackedDotProductAttention
from megatron.packing.model.attention.tree_keys import PackTree
from tests.unit_tests.packing.model.attention.test_core_attention import (
    HEADS,
    WIDTH,
    attention,
    packed,
    shards_of,
    tensors,
)
from tests.unit_tests.packing.stubs import Ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_size": (4, 0)},
    "own": {"window_size": (0, 0)},  # as many keys as queries, but of all that are gathered
    "all": {"window_size": (9, 0), "softmax_type": "learnable", "softcap": 2.0},
}


class Gather:
    """Stands for the gather over context parallel: finds the groups that were sent, and returns
    those of all ranks.
    """

    def __init__(self, shards: list[Tensor]) -> None:
        self.shards, self.num_groups = shards, list[int]()

    def __call__(self, mine: Tensor, *, tensor_parallel_output_grad: bool, group: Ranks) -> Tensor:
        assert tensor_parallel_output_grad, "gradients of other ranks' queries would be lost"
        whole, size = self.shards[group.rank()], mine.shape[1]
        starts = range(whole.shape[1] - size + 1)
        (start,) = (s for s in starts if torch.equal(mine, whole[:, s : s + size]))
        self.num_groups.append(size)
        parts = [shard.detach()[:, start : start + size] for shard in self.shards]
        parts[group.rank()] = mine
        return torch.cat(parts)


def found(
    module: PackedDotProductAttention, leaves: list[Tensor], pack: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    out = module(*leaves, None, packed_seq_params=pack)
    (weights,) = tensors(tuple(out.shape))
    wanted = [*leaves, *module.parameters()]
    return out, torch.autograd.grad((out * weights.detach()).sum(), wanted)


def assert_equal(groups: int, per_gather: int, ranks: Ranks, pack: Any, name: str) -> None:
    lengths = pack.cu_seqlens_q_padded.diff().tolist()
    total = sum(lengths)
    whole = tensors((total, HEADS, WIDTH), (total, groups, WIDTH), (total, groups, WIDTH))
    shards = shards_of(tuple(lengths), ranks.size()) or [torch.arange(total)]
    leaves = [x.detach()[shards[ranks.rank()]].requires_grad_() for x in whole]
    gather = Gather([torch.cat((whole[1][shard], whole[2][shard]), dim=-1) for shard in shards])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "gather_from_sequence_parallel_region", gather)
        module = attention(ranks, **OPTIONS[name])
        expected, gradients = found(module, leaves, pack)
        gather.num_groups.clear()
        module.groups_per_gather = per_gather
        out, others = found(module, leaves, pack)
    assert torch.equal(out, expected)
    for one, other in zip(others, gradients, strict=True):
        assert other.abs().max() > 0
        assert torch.equal(one, other)
    if ranks.size() > 1:  # in both passes each step gathers its own groups
        steps = [min(per_gather, groups - start) for start in range(0, groups, per_gather)]
        assert gather.num_groups == 2 * steps


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("groups", "per_gather"), [(4, 3), (2, 1)])
def test_context_parallel_by_groups_is_all_at_once(groups: int, per_gather: int, name: str) -> None:
    """A gradient that is summed in another order, or of another group, would go unseen elsewhere.
    200 keys are several blocks of scores, whose size follows the number of heads.
    """
    for rank in (0, 1):
        assert_equal(groups, per_gather, Ranks(2, rank), packed(24, 400, 4), name)


@pytest.mark.parametrize("size", [1, 2])
def test_nodes_of_trees_by_groups_are_all_at_once(size: int) -> None:
    """Nodes are picked for each step; without context parallel nothing is gathered."""
    pack: Any = packed(8, 4, 12)
    pack.tree = PackTree((8, 4, 12), (7, 4, 9), (-1, 0, 0), (0, 7, 7))
    for rank in range(size):
        assert_equal(2, 1, Ranks(size, rank), pack, "all")


def test_what_is_gathered_is_not_kept() -> None:
    """Kept keys and values are what the option is for: 4 ranks' beside one's own."""
    size, total = 4, 4 * 64
    query, key, value = tensors(*[(total // size, HEADS, WIDTH)] * 3)
    kept = {}
    for per_gather in (None, 1):
        module = attention(Ranks(size, 3))
        module.groups_per_gather = per_gather
        bytes_by_storage: dict[int, int] = {}

        def note(x: Tensor, sizes: dict[int, int] = bytes_by_storage) -> Tensor:
            sizes[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
            return x

        with (
            pytest.MonkeyPatch.context() as patch,
            torch.autograd.graph.saved_tensors_hooks(note, lambda x: x),
        ):
            patch.setattr(
                attention_module,
                "gather_from_sequence_parallel_region",
                lambda x, **_: torch.cat([x] * size),
            )
            out = module(query, key, value, None, packed_seq_params=packed(total))
        kept[per_gather] = sum(bytes_by_storage.values())
        del out
    own = query.nbytes
    log_sums = own // WIDTH
    assert kept[1] == own + 2 * own + own + log_sums  # query, keys and values, output
    assert kept[None] >= kept[1] + 2 * own  # most keys of 4 ranks, rather than its own
