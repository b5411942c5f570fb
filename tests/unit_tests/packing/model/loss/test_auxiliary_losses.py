"""Auxiliary losses are sums over tokens, and 0 where a pack is empty."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import gpt_model
from megatron.core.transformer.moe import moe_utils, router

from megatron.packing.model.loss import auxiliary_losses

NAME = "get_tokens_per_expert_and_token_count"


class OneRank:
    """A process group."""

    def size(self) -> int:
        return 1


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's own, whatever other tests installed; alone there is nothing to reduce."""
    monkeypatch.setattr(
        moe_utils, "reduce_from_tensor_model_parallel_region", lambda counts, group: counts
    )
    count = getattr(router, NAME)
    monkeypatch.setattr(router, NAME, getattr(count, "plain", count))


def count(routing_map: torch.Tensor) -> tuple[Any, Any, Any]:
    found: Any = getattr(router, NAME)
    return found(routing_map=routing_map, reduce_group=OneRank(), topk=1, with_padding_mask=True)


def gradient_of_scores(real: list[bool]) -> torch.Tensor:
    """Of the load-balancing loss of a pack whose tokens are `real` or padding, two experts, the
    first one chosen.
    """
    scores = torch.full((len(real), 2), 0.5, requires_grad=True)
    mask = torch.tensor(real).unsqueeze(1)
    per_expert, weight, num_all = count(torch.tensor([[True, False]] * len(real)) & mask)
    loss = router.switch_load_balancing_loss_func(scores * mask, per_expert, num_all, 1, 2, 1.0)
    (loss * weight).backward()
    assert scores.grad is not None
    return scores.grad


def test_an_empty_pack_has_no_gradient() -> None:
    """NaN from a rank without sequences reaches all ranks with the next reduction of gradients."""
    assert gradient_of_scores([False, False]).isnan().all()
    with auxiliary_losses.installed():
        assert not gradient_of_scores([False, False]).any()
    assert gradient_of_scores([False, False]).isnan().all()


def test_other_packs_are_balanced_as_before() -> None:
    """2 experts * 2 tokens of the first / 2 tokens = 2 for each real token's score of the first
    expert.
    """
    before = gradient_of_scores([True, True, False])
    assert before.tolist() == [[2.0, 0.0], [2.0, 0.0], [0.0, 0.0]]
    auxiliary_losses.install()
    assert gradient_of_scores([True, True, False]).tolist() == before.tolist()


def test_the_weight_is_all_tokens_of_the_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiplied by the number of ranks once more, a layout of four ranks balances four times as
    hard.
    """

    class FourRanks:
        def size(self) -> int:
            return 4

    def sum_of_four(counts: torch.Tensor, group: Any) -> torch.Tensor:
        return counts.mul_(4)  # in place, as megatron-core does

    monkeypatch.setattr(moe_utils, "reduce_from_tensor_model_parallel_region", sum_of_four)
    auxiliary_losses.install()
    found: Any = getattr(router, NAME)
    _, weight, num_all = found(
        routing_map=torch.ones(3, 2, dtype=torch.bool),
        reduce_group=FourRanks(),
        topk=2,
        with_padding_mask=True,
    )
    assert num_all == 12
    assert weight * (4 if found.is_multiplied_by_ranks else 1) == 12


def process_mtp_loss(
    config: Any, loss_mask: torch.Tensor, hidden_states: torch.Tensor, labels: Any
) -> torch.Tensor:
    """As megatron-core 0.19 has it, of a loss that is the hidden state."""
    num_tokens = loss_mask[:4].sum()
    for _ in range(config.mtp_num_layers):
        labels, _ = roll_tensor(labels)
        loss_mask, num_predicted = roll_tensor(loss_mask)
        ratio = (num_tokens if config.calculate_per_token_loss else 1) / torch.clamp(
            num_predicted, min=1
        )
        hidden_states = MTPLossAutoScaler.apply(
            hidden_states, hidden_states * loss_mask[:4] * ratio
        )
    return hidden_states


def roll_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first four are of this context-parallel rank; the next rank's roll in."""
    rolled = torch.cat((tensor[1:], tensor[:1] * 0))
    return rolled, rolled[:4].sum()


class MTPLossAutoScaler:
    """It would attach the loss to the hidden states; here it adds it, so that one can see it."""

    apply = staticmethod(torch.add)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (
            [1.0, 1.0, 1.0, 0.0],
            [4.0, 2.0, 1.0, 1.0],
        ),  # two tokens have a target after the next, one after that
        ([0.0, 0.5, 0.0, 0.0], [1.5, 1.0, 1.0, 1.0]),
        ([0.5, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]),
        ([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]),
        ([0.0, 0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 2.0, 2.0]),  # nothing of one's own, and yet targets
    ],
)
def test_multi_token_prediction_is_a_sum(mask: list[float], expected: list[float]) -> None:
    """Each hidden state doubles for each further token that it predicts, whatever else is in the
    pack.
    """
    config: Any = SimpleNamespace(mtp_num_layers=2, calculate_per_token_loss=True)
    given = {
        "loss_mask": torch.tensor(mask),
        "hidden_states": torch.ones(4),
        "labels": torch.ones(4),
    }
    mended = auxiliary_losses.PredictionLoss(process_mtp_loss)
    assert mended(config=config, **given).tolist() == pytest.approx(expected)
    as_a_mean: Any = SimpleNamespace(mtp_num_layers=2, calculate_per_token_loss=False)
    assert mended(config=as_a_mean, **given).equal(process_mtp_loss(as_a_mean, **given))


def test_multi_token_prediction_of_megatron_core_has_what_is_taken_out() -> None:
    """A function that rolls or attaches by other names would run with its ratio."""
    plain = getattr(gpt_model, "process_mtp_loss", None)
    if plain is not None:
        plain = getattr(plain, "plain", plain)
        assert {"roll_tensor", "MTPLossAutoScaler"} <= set(plain.__code__.co_names)


def test_a_count_that_is_an_int_stays_one() -> None:
    """Without a padding mask megatron-core counts with Python's ints."""
    auxiliary_losses.install()
    found: Any = getattr(router, NAME)
    assert found(torch.ones(3, 2, dtype=torch.bool), OneRank(), topk=1)[1:] == (3, 3)


def test_installed_once_and_taken_back() -> None:
    """Wrapped per step, the count would grow slower with every step."""
    plain = getattr(router, NAME)
    with auxiliary_losses.installed():
        first = getattr(router, NAME)
        auxiliary_losses.install()
        with auxiliary_losses.installed():
            assert getattr(router, NAME) is first is not plain
        assert getattr(router, NAME) is first
    assert getattr(router, NAME) is plain


def test_versions_without_the_count_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core moves its functions about."""
    monkeypatch.delattr(router, NAME)
    with auxiliary_losses.installed():
        assert not hasattr(router, NAME)
    assert not hasattr(router, NAME)
