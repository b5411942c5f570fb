"""What payloads cost, and that schedulers see it."""

from dataclasses import replace

import numpy as np
import pytest

from megatron.packing.scheduling.default import default
from megatron.packing.scheduling.payload_cost import (
    PayloadCost,
    PayloadCosts,
    cost_of_payloads,
    vision_cost,
)
from megatron.packing.scheduling.pipelines import LIMITS, _sample_of
from megatron.packing.scheduling.problem import check_schedule
from tests.unit_tests.packing.requests import MODELS, request


def test_images_cost_their_patches_and_pairs_of_them() -> None:
    """Attention over all of an image, or within windows, of which the last may be smaller."""
    units = np.array([3, 5, 0])
    assert PayloadCost(linear=2.0, quadratic=1.0)(units).tolist() == [15, 35, 0]
    windowed = PayloadCost(linear=0.0, windows=((4, 1.0),))
    assert windowed(np.array([3, 4, 11, 0])).tolist() == [9, 16, 16 + 16 + 9, 0]
    both = PayloadCost(linear=1.0, quadratic=0.5, windows=((4, 2.0),))
    assert both.times(3)(units).tolist() == (3 * both(units)).tolist()


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_flops_of_a_tower_are_those_of_its_products(is_gated: bool, window: int | None) -> None:
    """Counted product by product: [n, h] times [h, k] is 2 n h k, forward, and twice backward."""
    hidden, ffn, patches = 6, 10, 11
    matrices = [(hidden, hidden)] * 4 + [(hidden, ffn)] * (2 if is_gated else 1) + [(ffn, hidden)]
    forward = 0
    for layer in range(5):
        forward += sum(2 * patches * rows * columns for rows, columns in matrices)
        groups = [patches] if window is None or layer < 2 else [4, 4, 3]
        forward += sum(2 * 2 * size * size * hidden for size in groups)  # scores, values
    shape = {"num_layers": 5, "hidden_size": hidden, "ffn_hidden_size": ffn, "is_gated": is_gated}
    cost = vision_cost(**shape, window=window, num_full_layers=2, num_ranks=2)  # type: ignore[arg-type]
    assert cost(np.array([patches])).tolist() == [3 * forward * 2]
    frozen = vision_cost(**shape, window=window, num_full_layers=2, is_trained=False)  # type: ignore[arg-type]
    assert frozen(np.array([patches])).tolist() == [forward]


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"audio": [3]}, r"has 'audio', but there is no function for it; pass PayloadStore"),
        ({"vision": [-1]}, "must be whole numbers of at least 0, but 'vision' is"),
        ({"vision": [0.5]}, "must be whole numbers of at least 0, but 'vision' is"),
        ({"odd": [1]}, "must be at least 0, but is -1.0"),
    ],
)
def test_costs_that_mean_nothing_are_refused(costs: dict, message: str) -> None:
    """A kind without a cost would count as free, and the rank with the images would be the last."""
    functions: PayloadCosts = {"vision": PayloadCost(linear=2.0), "odd": lambda units: -units}
    with pytest.raises(ValueError, match=message):
        cost_of_payloads(costs, functions)
    assert cost_of_payloads({"vision": [3, 4]}, functions) == 14
    assert cost_of_payloads({"vision": []}, functions) == 0


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_ranks_share_images_as_they_share_tokens(model) -> None:
    """Balanced by tokens alone, one rank may have all images: all sequences are as long here."""
    rng = np.random.default_rng(4)
    images = np.where(rng.random(48) < 0.25, rng.choice([4000.0, 9000.0], 48), 0.0)
    asked = request([100] * 48, 4, 400, model=model, microbatch_multiple=model.stage_group)
    true = replace(asked, payload_costs=images)
    schedules = default(true), default(asked)
    for schedule in schedules:
        check_schedule(true, schedule)
    times = [true.time_of(schedule) for schedule in schedules]
    assert true.bound > asked.bound
    assert times[0] < 0.9 * times[1]


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([1.0], r"payload_costs must be float64 \[2\]"),
        ([1.0, -1.0], "payload_costs must be at least 0"),
        ([1.0, float("nan")], "payload_costs must be at least 0"),
    ],
)
def test_a_request_with_such_costs_is_refused(costs: list[float], message: str) -> None:
    """NaN compares as false with everything, so a scheduler would place anything anywhere."""
    with pytest.raises(ValueError, match=message):
        request([5, 6], 1, 11, payload_costs=costs)


def test_a_sample_of_a_large_batch_keeps_what_each_sequence_costs() -> None:
    """The number of microbatches is chosen by it; squares of trees and images go along."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 50, 3000)
    asked = replace(
        request(lengths, 64, 64, model=MODELS[2], payload_costs=rng.random(3000) * 100),
        squares=lengths * 3,
    )
    sample = _sample_of(asked, LIMITS)
    assert sample is not None
    assert sample.squares is not None
    assert (sample.squares == 3 * sample.lengths).all()
    assert set(sample.sequence_costs) <= set(asked.sequence_costs)
