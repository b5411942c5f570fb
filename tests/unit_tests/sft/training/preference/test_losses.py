"""Each loss beside its definition, written again with Python's floats, and its gradient beside
finite differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from megatron.sft.options.preference import LOSS_TYPES, LossNumbers
from megatron.sft.training.preference.losses import (
    CPO,
    DPO,
    KTO,
    LOSSES,
    Marked,
    Pairs,
    log_odds_ratio,
    pair_losses,
)

B, E, TAU, GAMMA = 0.35, 0.1, 0.05, 0.5
NUMBERS = LossNumbers(beta=B, label_smoothing=E, gamma=GAMMA, discopop_tau=TAU)


class One(NamedTuple):
    """A pair: policy's sums, reference's sums, numbers of tokens."""

    c: float
    r: float
    rc: float
    rr: float
    nc: int
    nr: int

    @property
    def a(self) -> float:
        return self.c - self.rc

    @property
    def b(self) -> float:
        return self.r - self.rr


PAIRS = [
    One(-12.5, -20.25, -13.0, -19.0, 7, 9),
    One(-31.0, -8.5, -29.75, -9.25, 20, 3),
    One(-4.0, -4.5, -4.0, -4.5, 1, 2),
    One(-60.0, -75.0, -80.5, -71.25, 33, 40),
]


def s(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def ls(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def exo(x: float) -> float:
    p = s(x)
    return p * (ls(x) - math.log(1 - E)) + (1 - p) * (ls(-x) - math.log(E))


def popped(z: float) -> float:
    m = s(z / TAU)
    return -ls(z) * (1 - m) + math.exp(-z) * m


DEFINITIONS: dict[str, Callable[[One], float]] = {
    "sigmoid": lambda p: -ls(B * (p.a - p.b)),
    "hinge": lambda p: max(0.0, 1 - B * (p.a - p.b)),
    "ipo": lambda p: (p.a / p.nc - p.b / p.nr - 1 / (2 * B)) ** 2,
    "sigmoid_norm": lambda p: -ls(B * (p.a / p.nc - p.b / p.nr)),
    "robust": lambda p: (-(1 - E) * ls(B * (p.a - p.b)) + E * ls(-B * (p.a - p.b))) / (1 - 2 * E),
    "exo_pair": lambda p: exo(B * (p.a - p.b)),
    "nca_pair": lambda p: -ls(B * p.a) - ls(-B * p.a) / 2 - ls(-B * p.b) / 2,
    "bco_pair": lambda p: -ls(B * p.a) - ls(-B * p.b),
    "sppo_hard": lambda p: (p.a - 1 / (2 * B)) ** 2 + (p.b + 1 / (2 * B)) ** 2,
    "apo_zero": lambda p: 1 - s(B * p.a) + s(B * p.b),
    "apo_down": lambda p: s(B * p.a) + 1 - s(B * (p.a - p.b)),
    "discopop": lambda p: popped(B * (p.a - p.b)),
}
CPO_DEFINITIONS: dict[str, Callable[[One], float]] = {
    "sigmoid": lambda p: -(1 - E) * ls(B * (p.c - p.r)) - E * ls(-B * (p.c - p.r)),
    "hinge": lambda p: max(0.0, 1 - B * (p.c - p.r)),
    "ipo": lambda p: (p.c / p.nc - p.r / p.nr - 1 / (2 * B)) ** 2,
    "simpo": lambda p: (
        -(1 - E) * ls(B * (p.c / p.nc - p.r / p.nr) - GAMMA)
        - E * ls(-(B * (p.c / p.nc - p.r / p.nr) - GAMMA))
    ),
}


def odds(p: One) -> float:
    c, r = p.c / p.nc, p.r / p.nr
    return (c - r) - (math.log(1 - math.exp(c)) - math.log(1 - math.exp(r)))


def tensors(requires_grad: bool = False) -> Pairs:
    columns = torch.tensor(PAIRS, dtype=torch.float64).T
    return Pairs(*(column.clone().requires_grad_(requires_grad) for column in columns))


def check(of: Callable[[Pairs], torch.Tensor], definition: Callable[[One], float]) -> None:
    expected = torch.tensor([definition(pair) for pair in PAIRS], dtype=torch.float64)
    torch.testing.assert_close(of(tensors()), expected, rtol=1e-12, atol=1e-12)
    pairs = tensors(requires_grad=True)
    of(pairs).sum().backward()
    step = 1e-6
    for name in ("c", "r"):
        found = (pairs.chosen if name == "c" else pairs.rejected).grad
        slopes = []
        for pair in PAIRS:
            up, down = (
                definition(pair._replace(**{name: getattr(pair, name) + by}))
                for by in (step, -step)
            )
            slopes.append((up - down) / (2 * step))
        torch.testing.assert_close(
            found, torch.tensor(slopes, dtype=torch.float64), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("name", DPO)
def test_dpo_losses_are_their_definitions(name: str) -> None:
    """A loss under the wrong name would train, and lower itself: nobody would see it."""
    check(lambda pairs: DPO[name].of(pairs, NUMBERS), DEFINITIONS[name])


@pytest.mark.parametrize("name", CPO)
def test_losses_without_a_reference_are_their_definitions(name: str) -> None:
    """Sums in the place of means favour short answers, in silence."""
    check(lambda pairs: CPO[name].of(pairs, NUMBERS), CPO_DEFINITIONS[name])


def test_orpo_is_its_definition() -> None:
    """The odds of sums, not of means, would vanish for long answers."""
    check(lambda pairs: LOSSES["orpo"]["orpo"].of(pairs, NUMBERS), lambda p: -B * ls(odds(p)))
    torch.testing.assert_close(
        log_odds_ratio(tensors()), torch.tensor([odds(p) for p in PAIRS], dtype=torch.float64)
    )


def test_a_sure_answer_has_finite_gradients_in_orpo() -> None:
    """Log-probability 0 has infinite odds: one NaN would end the run."""
    pairs = tensors(requires_grad=True)
    sure = pairs._replace(chosen=torch.zeros(4, dtype=torch.float64, requires_grad=True))
    loss = LOSSES["orpo"]["orpo"].of(sure, NUMBERS)
    loss.sum().backward()
    assert loss.abs().max() < 1e-12
    assert sure.chosen.grad is not None
    assert sure.chosen.grad.isfinite().all()


DIVERGENCES: dict[str, Callable[[float], float]] = {
    "reverse_kl": lambda u: u,
    "forward_kl": lambda u: 1 - math.exp(-u),
    "js_divergence": lambda u: math.log(2) + ls(u),
    "alpha_divergence": lambda u: (math.exp(min((0.7 - 1) * u, 80)) - 1) / (0.7 - 1),
}


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("name", [name for name, loss in DPO.items() if loss.takes_divergence])
def test_a_divergence_takes_the_place_of_log_ratios(kind: str, name: str) -> None:
    """A divergence that only some losses read would be another run than was asked for."""
    numbers = LossNumbers(
        beta=B,
        label_smoothing=E,
        discopop_tau=TAU,
        f_divergence_type=kind,
        f_alpha_divergence_coef=0.7,
    )

    def definition(p: One) -> float:
        f = DIVERGENCES[kind]
        return DEFINITIONS[name](p._replace(c=f(p.a), r=f(p.b), rc=0.0, rr=0.0))

    expected = [definition(pair) for pair in PAIRS]
    found = DPO[name].of(tensors(), numbers).tolist()
    assert found == pytest.approx(expected, rel=1e-12)


def test_mixtures_are_weighted_sums() -> None:
    """`sft` is a mean over tokens, which the objective adds: here it must count nothing."""
    found = pair_losses("dpo", ("sigmoid", "bco_pair", "sft"), (0.8, 0.2, 1), tensors(), NUMBERS)
    expected = [0.8 * DEFINITIONS["sigmoid"](p) + 0.2 * DEFINITIONS["bco_pair"](p) for p in PAIRS]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_kto_is_its_definition() -> None:
    """Weights or signs of good and bad answers exchanged would train to answer badly."""
    gains, good, kl = [1.5, -2.0, 0.25], [True, False, False], 0.75
    numbers = LossNumbers(beta=B, desirable_weight=1.5, undesirable_weight=0.5)
    marked = Marked(
        torch.tensor(gains, dtype=torch.float64), torch.tensor(good), torch.tensor(kl).double()
    )
    kto = [
        1.5 * (1 - s(B * (g - kl))) if is_good else 0.5 * (1 - s(-B * (g - kl)))
        for g, is_good in zip(gains, good)
    ]
    apo = [1.5 * (1 - s(B * g)) if is_good else 0.5 * s(B * g) for g, is_good in zip(gains, good)]
    assert KTO["kto"](marked, numbers).tolist() == pytest.approx(kto, rel=1e-12)
    assert KTO["apo_zero_unpaired"](marked, numbers).tolist() == pytest.approx(apo, rel=1e-12)


def test_options_name_each_loss() -> None:
    """An offered name without a function would fail hours later, at the first step."""
    tables = {**{name: tuple(table) for name, table in LOSSES.items()}, "kto": tuple(KTO)}
    tables["dpo"] += ("sft",)
    tables["reward"] = ("reward",)  # in `rewards`
    assert {name: set(types) for name, types in LOSS_TYPES.items() if types} == {
        name: set(types) for name, types in tables.items()
    }
    assert all(LOSS_TYPES[name][0] == types[0] for name, types in tables.items())
