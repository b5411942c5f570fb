"""The load-balancing loss of an empty pack is 0, and no other's changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils, router

from megatron.packing.model import load_balancing

NAME = "get_tokens_per_expert_and_token_count"


class OneRank:
    """A process group."""

    def size(self) -> int:
        return 1


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's own, whatever other tests installed; alone there is nothing to reduce."""
    monkeypatch.setattr(moe_utils, "reduce_from_tensor_model_parallel_region", lambda counts, group: counts)
    count = getattr(router, NAME)
    monkeypatch.setattr(router, NAME, getattr(count, "plain", count))


def gradient_of_scores(real: list[bool]) -> torch.Tensor:
    """Of the load-balancing loss of a pack whose tokens are `real` or padding, two experts, the first one chosen."""
    scores = torch.full((len(real), 2), 0.5, requires_grad=True)
    mask = torch.tensor(real).unsqueeze(1)
    routing_map = torch.tensor([[True, False]] * len(real)) & mask
    count: Any = getattr(router, NAME)
    per_expert, num_local, num_all = count(
        routing_map=routing_map, reduce_group=OneRank(), topk=1, with_padding_mask=True
    )
    loss = router.switch_load_balancing_loss_func(scores * mask, per_expert, num_all, 1, 2, 1.0)
    (loss * num_local).backward()
    assert scores.grad is not None
    return scores.grad


def test_an_empty_pack_has_no_gradient() -> None:
    """NaN from a rank without sequences reaches all ranks with the next reduction of gradients."""
    assert gradient_of_scores([False, False]).isnan().all()
    with load_balancing.installed():
        assert not gradient_of_scores([False, False]).any()
    assert gradient_of_scores([False, False]).isnan().all()


def test_other_packs_are_balanced_as_before() -> None:
    """2 experts * 2 tokens of the first / 2 tokens = 2 for each real token's score of the first expert."""
    before = gradient_of_scores([True, True, False])
    assert before.tolist() == [[2.0, 0.0], [2.0, 0.0], [0.0, 0.0]]
    load_balancing.install()
    assert gradient_of_scores([True, True, False]).tolist() == before.tolist()


def test_a_count_that_is_an_int_stays_one() -> None:
    """Without a padding mask megatron-core counts with Python's ints."""
    load_balancing.install()
    count: Any = getattr(router, NAME)
    assert count(torch.ones(3, 2, dtype=torch.bool), OneRank(), topk=1)[1:] == (3, 3)


def test_installed_once_and_taken_back() -> None:
    """Wrapped per step, the count would grow slower with every step."""
    plain = getattr(router, NAME)
    with load_balancing.installed():
        first = getattr(router, NAME)
        load_balancing.install()
        with load_balancing.installed():
            assert getattr(router, NAME) is first is not plain
        assert getattr(router, NAME) is first
    assert getattr(router, NAME) is plain


def test_versions_without_the_count_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.15.3 counts otherwise."""
    monkeypatch.delattr(router, NAME)
    with load_balancing.installed():
        assert not hasattr(router, NAME)
    assert not hasattr(router, NAME)
