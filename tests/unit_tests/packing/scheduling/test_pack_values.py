"""Values of sequences against all packs and all packings; and the compiled form equal to the Python form."""

import itertools

import numpy as np

from megatron.packing.scheduling.pack_bounds import packs_needed
from megatron.packing.scheduling.pack_values import pack_values
from tests.unit_tests.packing.brute_force import descending, fits
from tests.unit_tests.packing.scheduling.test_pack_fit import NEEDS_33
from tests.unit_tests.packing.stubs import array, in_python, needs_compiled


def random_lengths(rng, most_sequences):
    """With a capacity: few and many lengths, long and short ones, with and without such as fill a pack."""
    capacity = int(rng.choice([1, 2, 7, 30, 700, 8192, 8193, 20_000, 10**6]))
    low = 1 + capacity // int(rng.choice([3, 5, 9, 10**7]))
    high = max(low, int(capacity * rng.choice([0.55, 0.8, 1.0])))
    length = descending(rng, low, high + 1, rng.integers(0, most_sequences + 1))
    if rng.random() < 0.3:
        length = np.sort(rng.choice(length, length.size))[::-1].copy() if length.size else length
    return length, capacity


def test_no_pack_holds_more_than_the_most_and_no_packing_has_fewer_packs(form):
    """A bound too high would make every schedule take more microbatches than it needs, and pass for a proof."""
    rng = np.random.default_rng(1)
    exact = total = 0
    for case in range(2500):
        length, capacity = random_lengths(rng, 8)
        budget = int(rng.choice([100, 10**4, 10**6]))
        values = pack_values(length, capacity=capacity, num_packs=length.size, budget=budget)
        value = values.value.tolist()
        assert values.value.shape == length.shape
        assert min(value, default=0) >= 0
        assert value == sorted(value, reverse=True)
        for chosen in itertools.product([0, 1], repeat=length.size):
            if np.dot(chosen, length) <= capacity:
                assert np.dot(chosen, value) <= values.most, (case, length, capacity)
        lengths = length.tolist()
        optimum = next(n for n in itertools.count() if fits(lengths, (capacity,) * n))
        assert values.num_packs <= optimum, (case, length, capacity)
        if budget == 10**6 and length.size:
            exact += values.num_packs == optimum
            total += 1
    assert exact > 0.97 * total, (exact, total)


@needs_compiled
def test_compiled_and_python_form_are_equal():
    """Ranks with and without a compiler would follow different schedules: tokens sent to ranks that expect others."""
    stopped = 0
    for case in range(250):
        rng = np.random.default_rng([2, case])
        length, capacity = random_lengths(rng, 60)
        num_packs = -(-int(length.sum()) // capacity) + int(rng.choice([0, 0, 60]))
        options = {"capacity": capacity, "num_packs": num_packs, "budget": int(rng.choice([100, 10**4, 10**6]))}
        compiled = pack_values(length, **options)
        with in_python():
            python = pack_values(length, **options)
        assert compiled.most == python.most, (case, options)
        assert compiled.value.dtype == python.value.dtype == np.int64
        assert compiled.value.tolist() == python.value.tolist(), (case, options)
        stopped += compiled.num_packs > num_packs
    assert stopped > 30, stopped


@needs_compiled
def test_forms_are_equal_after_a_thousand_pivots():
    """Where sums round differently, they first choose otherwise after many steps."""
    length = descending(np.random.default_rng(3), 1000, 8000, 300)
    options = {"capacity": 8192, "num_packs": 300, "budget": 4 * 10**6}
    compiled = pack_values(length, **options)
    with in_python():
        python = pack_values(length, **options)
    assert compiled.most == python.most
    assert compiled.value.tolist() == python.value.tolist()


def test_values_by_hand(form):
    """Of what is longer than half a pack each is worth one, and shorter ones are worth their share of a pack."""
    sixes = pack_values(array(*[6] * 4), capacity=10, num_packs=9, budget=10**5)
    assert sixes.num_packs == 4
    assert len(set(sixes.value.tolist())) == 1
    assert pack_values(array(*[5] * 4 + [3] * 3), capacity=10, num_packs=9, budget=10**5).num_packs == 3
    # Packs of 12 hold 7 + 5 or 4 + 4 + 4, but 7 and 4 leave 1 empty: 2 + 2 + 2/3 packs.
    assert pack_values(array(7, 7, 7, 7, 4, 4, 4, 4, 4, 4), capacity=12, num_packs=9, budget=10**5).num_packs == 5
    assert pack_values(array(), capacity=10, num_packs=0, budget=10**5).num_packs == 0
    assert pack_values(array(10), capacity=10, num_packs=0, budget=10**5).num_packs == 1
    assert pack_values(array(10), capacity=10, num_packs=0, budget=0).num_packs == 0


def test_what_no_simple_bound_refutes_is_refuted(form):
    """Batches of sequences by twos and threes are the ones that neither a search nor the sum of tokens decides."""
    assert pack_values(NEEDS_33, capacity=7845, num_packs=32, budget=10**6).num_packs == 33
    length = descending(np.random.default_rng(67), 1, 8193, 128)
    assert packs_needed(length, 8192)[-1] == 61
    assert pack_values(length, capacity=8192, num_packs=61, budget=10**6).num_packs == 62
