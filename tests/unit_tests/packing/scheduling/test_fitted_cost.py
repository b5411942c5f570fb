"""The cost in seconds: fitted to points whose coefficients are known, and read back from its file
or refused.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.fitted_cost import (
    Fit,
    Point,
    fit_pack_cost,
    read_fitted_cost,
    write_fitted_cost,
)

MODEL = {"num_layers": 4, "hidden_size": 128, "num_experts": None, "swiglu": True}
SHAPES = [(1, 2048), (16, 128), (1, 512), (4, 128), (1, 64)]


def points_of(cost, shapes=SHAPES, factors=(1.0,)):
    """What a device of exactly this cost would measure, times the factors in turn."""
    return [
        Point(
            num_sequences=n,
            sequence_length=length,
            seconds=(n * length * (cost.linear + cost.quadratic * length) + cost.fixed)
            * factors[i % len(factors)],
        )
        for i, (n, length) in enumerate(shapes)
    ]


DUMMY = Point(num_sequences=1, sequence_length=1, seconds=1e-3)


def dummy_of(cost) -> Point:
    return points_of(cost, [(1, 1)])[0]


@pytest.fixture
def path(tmp_path):
    fit = Fit(PackCost(linear=2e-5, quadratic=3e-9, fixed=1e-3), mean_error=0.02, worst_error=0.05)
    file = tmp_path / "cost.json"
    write_fitted_cost(
        file,
        fit,
        points_of(fit.cost),
        MODEL,
        {"device": "a GPU", "versions": {}, "date": "2026-01-02"},
    )
    return file


@given(
    st.floats(1e-9, 1e-3),
    st.one_of(st.just(0.0), st.floats(1e-3, 10)),
    st.one_of(st.just(0.0), st.floats(1e-2, 10)),
)
def test_fit_finds_the_coefficients(linear, quadratic_share, fixed_share):
    """A fit that mixes its terms up would pack for another device than the one measured, and nobody
    would see it.
    """
    cost = PackCost(
        linear=linear, quadratic=linear * quadratic_share / 512, fixed=linear * fixed_share * 512
    )
    found = fit_pack_cost(points_of(cost), dummy_of(cost))
    assert found.cost.linear == pytest.approx(cost.linear, rel=1e-6)
    assert found.cost.quadratic == pytest.approx(cost.quadratic, rel=1e-6, abs=1e-9 * linear)
    least = dummy_of(cost).seconds / 100
    assert found.cost.fixed == pytest.approx(max(cost.fixed, least), rel=1e-6, abs=1e-6 * linear)
    assert found.worst_error < (1e-6 if cost.fixed >= least else 0.01)


def test_fit_of_noisy_points_tells_its_error():
    """An error of zero beside points that disagree would sell noise as a measurement."""
    cost = PackCost(linear=1e-5, quadratic=1e-9, fixed=1e-4)
    found = fit_pack_cost(points_of(cost, SHAPES * 2, factors=(1.1, 0.9, 1.1)), dummy_of(cost))
    assert found.cost.linear == pytest.approx(cost.linear, rel=0.2)
    assert 0.02 < found.mean_error <= found.worst_error < 0.25


@pytest.mark.parametrize(("seconds", "fixed"), [(1.5, 0.5), (1.0, 0.01), (0.2, 0.002)])
def test_fixed_cost_is_at_least_a_dummy_packs(seconds, fixed):
    """Where the fit would have it negative; at a fixed cost of 0 the scheduler would take any
    number of empty packs.
    """
    shapes = [(1, 4), (2, 2), (4, 1), (1, 2)]
    points = [Point(num_sequences=n, sequence_length=t, seconds=n * t - 0.5) for n, t in shapes]
    cost = fit_pack_cost(points, Point(num_sequences=1, sequence_length=1, seconds=seconds)).cost
    assert cost.linear == pytest.approx(1.0, rel=0.3)
    assert cost.fixed == pytest.approx(max(seconds - cost.linear - cost.quadratic, seconds / 100))
    assert cost.fixed == pytest.approx(fixed, abs=0.3)


def test_points_that_cannot_be_fitted_are_refused():
    """The coefficients would be whatever the solver happens to choose."""
    one_length = [
        Point(num_sequences=n, sequence_length=64, seconds=float(n)) for n in (1, 2, 3, 4)
    ]
    with pytest.raises(
        ValueError, match="do not determine linear, quadratic and fixed cost; measure longer packs"
    ):
        fit_pack_cost(one_length, DUMMY)
    with pytest.raises(ValueError, match="do not determine"):
        fit_pack_cost(one_length[:2], DUMMY)
    flat = [Point(num_sequences=n, sequence_length=length, seconds=1.0) for n, length in SHAPES]
    with pytest.raises(ValueError, match="do not grow with the number of tokens"):
        fit_pack_cost(flat, DUMMY)
    with pytest.raises(ValueError, match="must be above 0, but the least is 0"):
        fit_pack_cost(
            [Point(num_sequences=n, sequence_length=length, seconds=0.0) for n, length in SHAPES],
            DUMMY,
        )


def test_file_reads_back(path):
    """A digit lost in the file would schedule by another cost than the one that was fitted."""
    read = read_fitted_cost(path)
    assert read.cost == PackCost(linear=2e-5, quadratic=3e-9, fixed=1e-3)
    assert read.model == MODEL
    content = json.loads(path.read_text())
    assert list(content) == [
        *(
            "linear",
            "quadratic",
            "fixed",
            "relative_error",
            "model",
            "device",
            "versions",
            "date",
            "points",
        )
    ]
    assert content["relative_error"] == {"mean": 0.02, "worst": 0.05}
    assert content["points"][0]["sequence_length"] == 2048


BROKEN = [
    ({"linear": None}, "'linear' must be a number above 0, but is None"),
    ({"linear": 0}, "'linear' must be a number above 0, but is 0"),
    ({"linear": float("nan")}, "'linear' must be a number above 0, but is nan"),
    ({"quadratic": -1e-9}, "'quadratic' must be a number of at least 0, but is -1e-09"),
    ({"fixed": float("inf")}, "'fixed' must be a number of at least 0, but is inf"),
    ({"fixed": True}, "'fixed' must be a number of at least 0, but is True"),
    ({"fixed": "1"}, "'fixed' must be a number of at least 0, but is '1'"),
    ({"model": []}, "'model' must be an object"),
    ({"linaer": 1.0}, "unknown key 'linaer'"),
]


@pytest.mark.parametrize(("changes", "words"), BROKEN)
def test_wrong_value_is_named(path, changes, words):
    """NaN would make all packs equally costly, a negative cost all bounds wrong."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=r"megatron-sft calibrate") as failure:
        read_fitted_cost(path)
    assert f"--pack-cost {path}: " in str(failure.value)
    assert words in str(failure.value)


@pytest.mark.parametrize("key", ["linear", "quadratic", "fixed", "model"])
def test_missing_key_is_named(path, key):
    """A default in its place would be a cost that nobody measured."""
    path.write_text(
        json.dumps(
            {name: value for name, value in json.loads(path.read_text()).items() if name != key}
        )
    )
    with pytest.raises(ValueError, match=f"cost.json: key '{key}' is missing"):
        read_fitted_cost(path)


def test_unreadable_file_is_one_line(tmp_path):
    """A stack of json's or the operating system's does not say which option to look at."""
    with pytest.raises(
        ValueError, match=r"--pack-cost .*absent\.json cannot be read: .*No such file"
    ):
        read_fitted_cost(tmp_path / "absent.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ValueError, match=r"--pack-cost .*text\.json cannot be read: .*line 1"):
        read_fitted_cost(tmp_path / "text.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold an object, but holds list"):
        read_fitted_cost(tmp_path / "list.json")


def test_another_model_is_refused_by_what_differs(path):
    """The cost of a small model would be taken for a large one's."""
    fitted = read_fitted_cost(path)
    fitted.check_model(MODEL)
    fitted.check_model({"hidden_size": 128})
    with pytest.raises(
        ValueError,
        match="num_layers is 4 there, but 8 here; num_experts is null there, but 2 here; meas",
    ):
        fitted.check_model(MODEL | {"num_layers": 8, "num_experts": 2})
    with pytest.raises(ValueError, match='vocab_size is "missing" there, but 256 here'):
        fitted.check_model(MODEL | {"vocab_size": 256})


def test_ranks_share_the_work(path):
    """A prediction for a layout must know what its ranks share: with none of it, it is wrong by
    their number.
    """
    cost = read_fitted_cost(path).of_rank(tensor_parallel_size=4, context_parallel_size=2)
    assert cost == PackCost(linear=2e-5 / 8, quadratic=3e-9 / 8, fixed=1e-3 / 4)
