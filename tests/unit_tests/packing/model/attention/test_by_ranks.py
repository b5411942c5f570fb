"""What a rank's queries see of each rank's tokens, and attention that is merged from them."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.packing.model.attention.blocks import BlockKernel, Scores, Segments
from megatron.packing.model.attention.by_ranks import RankSteps, Source, attend_by_ranks, sources_of
from megatron.packing.model.attention.kernels import _VarlenKernel
from megatron.packing.model.attention.tree_keys import PackTree, tree_places
from megatron.packing.model.attention.zigzag import places_seen
from tests.unit_tests.packing.stubs import Ranks

CPU = torch.device("cpu")
TREE = PackTree((12, 0, 6, 18), (11, 0, 5, 18), (-1, -1, 0, 2), (0, 0, 11, 16))


def pairs_of(queries: Any, segments: Segments, keys: Any) -> set[tuple[int, int]]:
    """Returns (query, key) of segments that are seen wholly."""
    found, query, key = set(), 0, 0
    for num_queries, num_keys in zip(*segments, strict=True):
        for q in queries[query : query + num_queries]:
            found |= {(int(q), int(k)) for k in keys[key : key + num_keys]}
        query, key = query + num_queries, key + num_keys
    return found


def test_a_sequence_of_two_ranks() -> None:
    """Rank 0 holds tokens 0 3 of 4, rank 1 holds 1 2: token 3 sees 0, and both of rank 1. There
    token 1 sees 0, and token 2 sees 0 and 1.
    """
    own, other = sources_of((4,), None, 2, 0, CPU)
    assert (own.segments, own.keys.tolist()) == (Segments((1,), (1,)), [0])
    assert (other.segments, other.keys.tolist()) == (Segments((1,), (2,)), [0, 1])
    assert own.queries is not None
    assert own.queries.tolist() == [1]
    other, own = sources_of((4,), None, 2, 1, CPU)
    assert (other.segments, other.keys.tolist()) == (Segments((1, 1), (1, 1)), [0, 0])
    assert (own.segments, own.keys.tolist()) == (Segments((1,), (1,)), [0])
    assert other.queries is None
    assert own.queries is not None
    assert own.queries.tolist() == [1]


@pytest.mark.parametrize("tree", [None, TREE])
def test_sources_and_own_pieces_are_all_that_is_seen(tree: PackTree | None) -> None:
    """A key that is left out or seen twice changes a loss in its last digits only."""
    size, lengths = 3, (12, 6, 0, 18)
    for rank in range(size):
        seen = places_seen(lengths, size, rank) if tree is None else tree_places(tree, size, rank)
        num_tokens = sum(seen.query_lengths)
        sources = sources_of(lengths, tree, size, rank, CPU)
        assert len(sources) == size
        found, ends, key = list[tuple[int, int]](), np.cumsum(seen.query_lengths), 0
        for number, source in enumerate(sources):
            rows = torch.arange(num_tokens) if source.queries is None else source.queries
            found += pairs_of(rows, source.segments, source.keys + number * num_tokens)
        expected = list[tuple[int, int]]()
        for end, num_queries, num_keys in zip(ends, *seen[:2], strict=True):
            keys, key = seen.key_index[key : key + num_keys], key + num_keys
            whole = keys[: num_keys - num_queries]
            expected += [(q, int(k)) for q in range(end - num_queries, end) for k in whole]
            # Behind them stand the tokens of the piece, which the first call is given.
            own = rank * num_tokens + np.arange(end - num_queries, end)
            assert keys[num_keys - num_queries :].tolist() == own.tolist()
        assert len(set(found)) == len(found)
        assert sorted(found) == sorted(expected)


def test_merged_outputs_are_those_of_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank stands for two whose tokens are equal: what it sends is what it would receive, and
    the sum of gradients is its own part.
    """
    generator = torch.Generator().manual_seed(1)
    query, keys_values = (
        torch.randn(6, heads, width, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads, width in ((4, 3), (1, 5))
    )
    sinks = torch.randn(4, dtype=torch.float64, generator=generator, requires_grad=True)
    scores, whole = Scores(scale=0.7), Scores(scale=0.7, is_causal=False)
    sees_all = Source(Segments((6,), (6,)), None, torch.arange(6))
    sees_two = Source(Segments((4,), (2,)), torch.tensor([1, 2, 3, 5]), torch.tensor([4, 0]))

    def send(x: Tensor, source: int, group: Ranks) -> None:
        if source:
            x.copy_(keys_values.detach())

    monkeypatch.setattr(dist, "broadcast", send)
    monkeypatch.setattr(dist, "reduce", lambda x, source, group: None)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    steps = RankSteps(
        Ranks(2, 0),  # type: ignore[arg-type]
        BlockKernel(Segments.square((6,)), scores),
        (
            (sees_all, BlockKernel(sees_all.segments, whole)),
            (sees_two, BlockKernel(sees_two.segments, whole)),
        ),
    )
    found = attend_by_ranks(query, keys_values, sinks, steps)

    def expected(query: Tensor, own: Tensor, other: Tensor) -> Tensor:
        products = []
        for x in (own, own, other):
            products.append(torch.einsum("thd,sd->hts", query, x[:, 0, :3]) * 0.7)
        seen = torch.zeros(3, 6, 6, dtype=torch.bool)
        seen[0], seen[1] = torch.ones(6, 6).tril() > 0, True
        seen[2, sees_two.queries] = torch.tensor([True, False, False, False, True, False])
        logits = torch.cat(products, -1).masked_fill(~torch.cat(tuple(seen), -1), -torch.inf)
        logits = torch.cat((logits, sinks[:, None, None].expand(-1, 6, 1)), -1)
        values = torch.cat((own, own, other))[:, 0, 3:]
        return torch.einsum("hts,sd->thd", logits.softmax(-1)[..., :-1], values)

    other = keys_values.detach()
    reference = expected(query, keys_values, other)
    torch.testing.assert_close(found, reference, rtol=1e-13, atol=1e-13)
    gradient = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    wanted = (query, keys_values, sinks)
    of_found = torch.autograd.grad(found, wanted, gradient)
    of_reference = torch.autograd.grad(reference, wanted, gradient)
    for one, two in zip(of_found, of_reference, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_a_kernel_by_heads_gives_the_gradients_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU alone it would show that a head was given another group's keys."""
    generator = torch.Generator().manual_seed(2)
    segments, scores = Segments.square((5, 3)), Scores(scale=0.5)
    plain = BlockKernel(segments, scores)
    num_heads = list[int]()

    def backward(self: object, gradient: Tensor, inputs: tuple[Tensor, ...], *rest: Tensor) -> Any:
        num_heads.append(inputs[0].shape[1])
        return plain.backward(gradient, inputs, *rest)

    monkeypatch.setattr(_VarlenKernel, "_backward", backward)
    query, key, value, gradient = (
        torch.randn(8, heads, 4, dtype=torch.float64, generator=generator) for heads in (6, 2, 2, 6)
    )
    results = plain.forward(query, key, value)
    found = _VarlenKernel(segments, scores, by_head=True).backward(
        gradient, (query, key, value), *results
    )
    assert num_heads == [1] * 6
    for one, two in zip(found, plain.backward(gradient, (query, key, value), *results)):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
