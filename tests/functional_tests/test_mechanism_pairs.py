"""Mechanisms train together as each sequence alone; `make mechanisms` has all pairs in all layouts.

All mechanisms are in one of four cases, as many at once as can be trained together.
"""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.functional_tests.mechanism_matrix import fault_of
from tests.functional_tests.mechanism_pairs import (
    CASES,
    LAYOUTS,
    MECHANISMS,
    TOLERANCE,
    Case,
    Refused,
    expected_refusal,
    outcome_of,
    train_rank,
)
from tests.functional_tests.oracle import RankStep
from tests.functional_tests.ranks import run_ranks

ALL_OF_SEQUENCES = (
    *("shared experts", "MTP", "output gate", "windows", "delta net"),
    *("fields", "images"),
)
ALL_OF_TREES = ("shared experts", "LoRA", "output gate", "windows", "trees", "fields")
ALL_OF_GEMMA_4 = ("shared experts", "global attention", "LoRA", "trees", "fields")
ALL_OF_DEEPSEEK = ("shared experts", "latent attention", "LoRA", "trees", "fields")
CHOSEN = [
    Case(ALL_OF_SEQUENCES, "TP2 SP, full recomputation"),
    Case(ALL_OF_TREES, "PP2 uneven, recomputation of parts"),
    Case(ALL_OF_GEMMA_4, "TP2 SP"),
    Case(ALL_OF_DEEPSEEK, "PP2 uneven, recomputation of parts"),
]


def train_all(cases: list[Case]) -> list[list[RankStep] | Refused]:
    return [train_rank(case) for case in cases]


def test_many_mechanisms_train_as_each_sequence_alone() -> None:
    """Each mechanism is right alone. Two of them were seen to give no gradients, to read the
    layer's kind beyond a list, or to hand on tokens of another length.
    """
    per_rank = run_ranks(train_all, 2, CHOSEN)
    for case, *ranks in zip(CHOSEN, *per_rank):
        outcome = outcome_of(case, ranks)
        assert outcome.difference is not None, f"{case}: {outcome.refusal}"
        assert outcome.difference <= TOLERANCE, f"{case}: {outcome.difference}"


def test_the_chosen_cases_have_all_mechanisms() -> None:
    """A mechanism left out would be seen by `make mechanisms` alone."""
    chosen = {mechanism for case in CHOSEN for mechanism in case.mechanisms}
    assert chosen | {"experts"} == set(MECHANISMS)  # shared experts have others beside them
    assert all(expected_refusal(case) is None for case in CHOSEN)
    assert len(CASES) > len(MECHANISMS) * len(LAYOUTS) + len(list(combinations(MECHANISMS, 2)))


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ({"difference": 1e-15}, None),
        ({"difference": 1e-11}, "differs by 1.0e-11"),
        ({"difference": float("nan")}, "differs by nan"),
        ({"refusal": "--lora must not be used"}, "refused: --lora must not be used"),
        ({"fault": "exit codes [1]: IndexError"}, "exit codes [1]: IndexError"),
    ],
)
def test_what_is_no_known_refusal_and_not_exact_is_a_fault(record: dict, fault: str | None) -> None:
    """A page of numbers hides one that is too large."""
    nothing = {"difference": None, "refusal": None, "fault": None}
    assert fault_of(Case(("LoRA",), "CP2"), nothing | record) == fault


def test_a_known_refusal_must_be_there() -> None:
    """Were any outcome taken where a refusal is expected, a wrong result would pass for one."""
    case = Case(("MTP", "LoRA"), "CP2")
    nothing = {"difference": None, "refusal": None, "fault": None}
    line = "--lora must not be used with --mtp-num-layers, whose layers have no adapters; drop one"
    assert fault_of(case, nothing | {"refusal": line}) is None
    assert fault_of(case, nothing | {"refusal": "something else"}) == "refused: something else"
    assert "not refused" in (fault_of(case, nothing | {"difference": 0.0}) or "")
