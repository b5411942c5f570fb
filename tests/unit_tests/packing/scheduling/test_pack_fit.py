"""Whether sequences fit: what is found and refuted at once, by values, and by pairs."""

from collections import Counter
from unittest import mock

import numpy as np

from megatron.packing.scheduling import pack_fit
from megatron.packing.scheduling.pack_fit import fit_into, fit_quickly
from megatron.packing.scheduling.pack_search import Answer
from megatron.packing.scheduling.placement import best_fit
from tests.unit_tests.packing.brute_force import check_packing, descending, fits
from tests.unit_tests.packing.stubs import array, in_python, needs_compiled

# Of a lognormal distribution: 32 packs by L2 and by tokens, of which they are 98.2 %; but 33 are needed.
NEEDS_33 = array(
    *[7845, 7584, 7540, 7232, 6925, 6393, 6191, 6121, 6034, 5937, 5918, 5872, 5720, 5698, 5388, 5347, 4866, 4855],
    *[4832, 4804, 4748, 4630, 4493, 4486, 4477, 4369, 4256, 4047, 4019, 3914, 3910, 3836, 3828, 3700, 3698, 3541],
    *[3407, 3398, 3397, 3019, 3003, 2990, 2780, 2777, 2750, 2573, 2538, 2341, 2205, 2036, 2017, 1897, 1780, 1553],
    *[1511, 1476, 1461, 1413, 1279, 1272, 1261, 1214, 1068, 1043],
)


def test_what_no_simple_bound_refutes_is_refuted(form):
    """The steps that a search may take once decided it: half the microbatches of a step hung on this proof."""
    assert fit_into(NEEDS_33, capacity=7845, num_packs=32).is_proof
    assert fit_into(NEEDS_33, capacity=7845, num_packs=33).pack is not None


def test_a_packing_is_found_that_best_fit_misses(form):
    """Packs of 10 + 5 + 5, 7 + 7 + 6 and 8 + 6 + 6; best-fit puts 8 beside 10 and needs a fourth."""
    length = array(10, 8, 7, 7, 6, 6, 6, 5, 5)
    assert best_fit(length, capacity=20)[1] == 4
    answer = fit_into(length, capacity=20, num_packs=3)
    assert answer.pack is not None
    check_packing(answer.pack, length, 20, 3)


def test_values_decide_what_a_search_leaves_open(form):
    """Three to thirty percent of a step, where sequences fill nearly all room by twos and threes."""
    rng = np.random.default_rng(67)
    refuted = descending(rng, 1, 8193, 128)
    assert fit_into(refuted, capacity=8192, num_packs=61).is_proof
    rng = np.random.default_rng(6)
    found = np.sort(np.maximum(rng.integers(1024, 8193, 128) * rng.integers(1024, 8193, 128) // 8192, 1024))[
        ::-1
    ].copy()
    assert int(found.sum()) > 44.8 * 8192
    assert best_fit(found, capacity=8192)[1] > 45
    pack = fit_into(found, capacity=8192, num_packs=45).pack
    assert pack is not None
    check_packing(pack, found, 8192, 45)
    with (
        mock.patch.object(pack_fit, "_VALUE_SEARCHES", ()),
        mock.patch.object(pack_fit, "_with_closest_pairs", return_value=Answer(None, False)),
    ):
        assert fit_into(refuted, capacity=8192, num_packs=61).is_open
        assert fit_into(found, capacity=8192, num_packs=45).is_open


def test_search_by_hand(form):
    """Sets of few sequences come first, of those the fullest; nothing fits into no packs but nothing."""
    length = array(7, 4, 3, 3, 2, 1)  # beside 7: the 3, not 2 and 1
    answer = fit_into(length, capacity=10, num_packs=2)
    assert answer.pack is not None
    assert answer.pack.tolist() == [0, 1, 0, 1, 1, 1]
    assert fit_into(array(6, 6, 6), capacity=10, num_packs=2).is_proof
    assert fit_into(array(), capacity=10, num_packs=0).pack is not None
    assert fit_into(array(1), capacity=10, num_packs=0).is_proof


def test_answers_are_right_whatever_is_left_out(form):
    """Each way to decide is right by itself; that most are decided at once hides the others."""
    rng = np.random.default_rng(8)
    for _ in range(600):
        capacity = int(rng.integers(20, 60))
        length = descending(rng, 1 + capacity // int(rng.choice([4, 6])), capacity + 1, rng.integers(0, 11))
        num_packs = -(-int(length.sum()) // capacity) + int(rng.integers(0, 2))
        possible = fits(length.tolist(), (capacity,) * num_packs)
        answers = [fit(length, capacity=capacity, num_packs=num_packs) for fit in (fit_into, fit_quickly)]
        with (
            mock.patch.object(pack_fit, "find_packing", return_value=Answer(None, False)),
            mock.patch.object(pack_fit, "_MOST_TO_REFUTE", 0),
        ):
            answers.append(fit_into(length, capacity=capacity, num_packs=num_packs))
            with mock.patch.object(pack_fit, "_VALUE_SEARCHES", ()):
                answers.append(fit_into(length, capacity=capacity, num_packs=num_packs))
        for answer in answers:
            assert not (answer.is_proof and possible), (length, capacity, num_packs)
            if answer.pack is not None:
                check_packing(answer.pack, length, capacity, num_packs)
        assert answers[0].is_open is False


def test_pairs_find_what_values_do_not(form):
    """Sequences by twos and threes: once those that make good pairs are away, the others are easily found room for."""
    rng = np.random.default_rng([7, 212])
    length = 1024 * np.exp(rng.normal(1.1, 0.7, int(rng.choice([48, 64, 96]))))
    length = np.sort(np.clip(length.astype(np.int64), 1024, 8192))[::-1].copy()
    with mock.patch.object(pack_fit, "_with_closest_pairs", return_value=Answer(None, False)):
        assert fit_into(length, capacity=8192, num_packs=31).is_open
    pack = fit_into(length, capacity=8192, num_packs=31).pack
    assert pack is not None
    check_packing(pack, length, 8192, 31)


@needs_compiled
def test_compiled_and_python_form_are_equal():
    """Where all ways to decide are tried."""
    seen: Counter[str] = Counter()
    for case in range(60):
        rng = np.random.default_rng([11, case])
        length = descending(rng, 128, int(rng.choice([513, 1025])), rng.integers(12, 48))
        num_packs = -(-int(length.sum()) // 1024) + int(rng.integers(0, 2))
        with (
            mock.patch.object(pack_fit, "find_packing", return_value=Answer(None, False)),
            mock.patch.object(pack_fit, "_MOST_TO_REFUTE", 0),
        ):
            compiled = fit_into(length, capacity=1024, num_packs=num_packs)
            with in_python():
                python = fit_into(length, capacity=1024, num_packs=num_packs)
        assert compiled.is_proof == python.is_proof
        assert (compiled.pack is None) == (python.pack is None)
        if compiled.pack is not None and python.pack is not None:
            assert compiled.pack.tolist() == python.pack.tolist()
        seen["packing" if compiled.pack is not None else "proof" if compiled.is_proof else "open"] += 1
    assert min(seen["packing"], seen["proof"]) > 5, seen
