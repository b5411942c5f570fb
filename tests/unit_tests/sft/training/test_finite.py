"""What is NaN or infinite ends the run before the weights change, and says where it was."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.sft.data.counts import Counts

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def checked(loss, by_source=()):
    from megatron.sft.training.finite import check_loss
    from megatron.sft.training.step_account import Reduced

    sources = np.array([by_source, [1] * len(by_source)], np.float64)
    losses = [{"lm loss": (torch.tensor(each), torch.tensor(1))} for each in (1.0, loss)]
    check_loss(
        Reduced(1.0 + loss, 2, False, Counts.none(1), sources), losses, ["a", "b", "c"], "step 3"
    )


def test_a_finite_loss_asks_nobody():
    """A collective in each step would be paid for by every run: there is no group here."""
    checked(2.0)
    checked(2.0, [2.0, 1.0, 0.0])


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite(one_rank, loss):
    """It would be trained on, and saved over the last good checkpoint."""
    from megatron.sft.training.finite import NonFiniteError

    with pytest.raises(
        NonFiniteError, match=rf"^step 3: the loss is {loss} on rank 0; nothing was saved of it; "
    ):
        checked(loss)
    with pytest.raises(
        NonFiniteError, match=rf"^step 3: the loss is {loss} on rank 0, source b; nothing was"
    ):
        checked(loss, [2.0, loss, 1.0])


@pytest.mark.parametrize("norm", [math.nan, math.inf, 2.0])
def test_norm_that_is_not_finite(one_rank, norm):
    """megatron-core's chained optimizer, whose step asks for the norm before it changes
    anything."""
    from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig

    from megatron.sft.training.finite import NonFiniteError, guard_step

    stepped: list[bool] = []

    def step() -> bool:
        stepped.append(True)
        return True

    inner = SimpleNamespace(
        config=SimpleNamespace(clip_grad=0.0, overlap_param_gather_with_optimizer_step=False),
        is_stub_optimizer=True,
        model_chunks=[],
        prepare_grads=lambda: False,
        get_grad_norm=lambda: norm,
        step_with_ready_grads=step,
    )
    optimizer = ChainedOptimizer([inner])  # type: ignore[list-item]
    optimizer.config = OptimizerConfig()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for name, parameter in model.named_parameters():
        parameter.main_grad = torch.full_like(parameter, norm if name == "1.bias" else 0.0)  # type: ignore[attr-defined]
    guard_step(optimizer, [model], lambda: "step 7")
    if math.isfinite(norm):
        assert optimizer.step()[:2] == (True, norm)
        assert stepped
        return
    with pytest.raises(
        NonFiniteError, match=rf"^step 7: the gradient norm is {norm}, first in 1.bias of rank 0; "
    ):
        optimizer.step()
    assert not stepped
