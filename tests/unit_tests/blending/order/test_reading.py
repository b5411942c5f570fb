"""The order of records: one to one, well shuffled, and the same everywhere and for ever."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.blending.order.permutation import make_grid, permute_indices
from megatron.blending.order.reading import ReadingOrder, _page, records_at, salted_seed

SEEDS = st.integers(-(2**70), 2**70)
EPOCHS = st.integers(0, 10**6)
MASK = 2**64 - 1


def permute_index(index, size, seed, epoch):
    """The same in Python's numbers, which never overflow."""
    grid = make_grid(size, seed, epoch)
    image = index
    while True:
        row, column = divmod(image, grid.num_columns)
        for row_key, column_key in zip(grid.round_keys[::2], grid.round_keys[1::2]):
            row = (row + mixed(column, row_key) % grid.num_rows) % grid.num_rows
            column = (column + mixed(row, column_key) % grid.num_columns) % grid.num_columns
        image = row * grid.num_columns + column
        if image < size:
            return image


def mixed(value, key):
    value = (value * 0x9E3779B97F4A7C15 + key) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def test_golden_values():
    """A changed order would make a resumed run read some records twice and others never."""
    assert [permute_index(i, 10, seed=0, epoch=0) for i in range(10)] == [
        4,
        7,
        9,
        2,
        5,
        1,
        6,
        3,
        0,
        8,
    ]
    assert [permute_index(i, 10, seed=0, epoch=1) for i in range(10)] == [
        1,
        4,
        9,
        8,
        7,
        2,
        3,
        5,
        0,
        6,
    ]
    assert [permute_index(i, 10, seed=1, epoch=0) for i in range(10)] == [
        4,
        8,
        7,
        3,
        2,
        5,
        0,
        1,
        6,
        9,
    ]
    ends = [permute_index(i, 10**12, seed=1234, epoch=5) for i in (0, 1, 10**12 - 1)]
    assert ends == [809418724796, 370906144841, 148567149776]


@given(size=st.integers(1, 400), seed=SEEDS, epoch=EPOCHS)
def test_is_a_bijection(size, seed, epoch):
    """Otherwise an epoch would repeat some records and leave out others, with a plausible loss."""
    assert sorted(permute_indices(np.arange(size), size, seed, epoch)) == list(range(size))


@given(
    size=st.integers(1, 10**12),
    fraction=st.floats(0, 1, exclude_max=True),
    seed=SEEDS,
    epoch=EPOCHS,
)
def test_arrays_and_ints_agree_at_any_size(size, fraction, seed, epoch):
    """Overflow of 64 bits would give arrays another order than ints, or an index out of range, at
    large sizes only.
    """
    index = min(int(size * fraction), size - 1)
    image = permute_index(index, size, seed, epoch)
    assert 0 <= image < size
    assert permute_indices(np.array([[index]]), size, seed, epoch).tolist() == [[image]]


@pytest.mark.parametrize("size", [10_000, 10_007])
def test_is_roughly_uniform(size):
    """A poor mix would keep neighbours of the file together, as files are often sorted by topic or
    length.
    """
    images = permute_indices(np.arange(size), size, seed=7, epoch=3)
    # Where a tenth of the inputs goes, and how far apart neighbours land: chi-square of 100 cells
    # each, whose standard deviation is about 0.14 around 1 per degree of freedom.
    cells = np.histogram2d(np.arange(size), images, bins=10)[0]
    steps = np.histogram((images[1:] - images[:-1]) % size, bins=100)[0]
    for counts in (cells.ravel(), steps):
        expected = counts.sum() / 100
        assert 0.5 < ((counts - expected) ** 2 / expected).sum() / 99 < 1.6


def test_small_sizes_reach_every_permutation():
    """Data sets of a few records would otherwise be read in a few orders only."""
    seen = {tuple(permute_indices(np.arange(4), 4, seed, epoch=0)) for seed in range(400)}
    assert len(seen) == 24


@given(seed=SEEDS, epoch=EPOCHS)
def test_differs_by_epoch_and_seed(seed, epoch):
    """Every epoch would otherwise show the records in one order, or two data sets would be read in
    lockstep.
    """
    here = permute_indices(np.arange(1000), 1000, seed, epoch)
    for other in (
        permute_indices(np.arange(1000), 1000, seed, epoch + 1),
        permute_indices(np.arange(1000), 1000, seed + 1, epoch),
    ):
        # Two unrelated permutations agree in one place on average; 12 has a chance of 1e-10.
        assert (here == other).sum() < 12


def test_refuses_what_is_out_of_range():
    """An index beyond the end would be mapped to some other record that is read twice."""
    with pytest.raises(ValueError, match=r"indices must be in range\(5\), but one is -1"):
        permute_indices([0, -1], 5, seed=0, epoch=0)
    with pytest.raises(ValueError, match="size must be at least 1, but is 0"):
        permute_indices([], 0, seed=0, epoch=0)


ORDERS = st.builds(
    ReadingOrder,
    num_records=st.integers(1, 300),
    seed=st.integers(0, 2**64 - 1),
    num_turns=st.integers(1, 3),
    slice_length=st.integers(1, 40),
    window_length=st.integers(1, 60),
)


def read(order, start, count):
    return records_at([order], [np.arange(start, start + count)])[0].tolist()


@given(order=ORDERS, epoch=st.integers(0, 10**6))
def test_every_epoch_reads_each_record(order, epoch):
    """Slices and windows must lose nothing, above all at the end of the source."""
    found = read(order, epoch * order.epoch_length, order.epoch_length)
    assert sorted(found) == sorted(order.num_turns * list(range(order.num_records)))


@given(order=ORDERS, start=st.integers(0, 2000), count=st.integers(1, 300))
def test_any_part_is_a_part_of_the_whole(order, start, count):
    """A rank asks for its own positions only, across epochs; the answer must be that of the whole
    stream.
    """
    whole = read(order, 0, start + count)
    assert read(order, start, count) == whole[start:]
    shuffled = np.random.RandomState(0).permutation(start + count)
    assert records_at([order], [shuffled])[0].tolist() == [whole[at] for at in shuffled]


@given(orders=st.lists(ORDERS, min_size=1, max_size=6))
def test_many_streams_at_once_are_each_their_own(orders):
    positions = [np.arange(number * 7, 50 + number * 11) for number in range(len(orders))]
    together = records_at(orders, positions)
    for order, asked, found in zip(orders, positions, together):
        assert found.tolist() == records_at([order], [asked])[0].tolist()


@given(
    num_records=st.integers(600, 3000),
    seed=st.integers(0, 2**64 - 1),
    slice_length=st.sampled_from([1, 7, 100]),
    window_length=st.sampled_from([1, 50, 300]),
    epoch=st.integers(0, 10**6),
)
def test_long_parts_are_as_short_ones(num_records, seed, slice_length, window_length, epoch):
    """Many positions of an epoch are computed on a way of their own: a rank with more workers would
    see other data.
    """
    order = ReadingOrder(num_records, seed, slice_length=slice_length, window_length=window_length)
    positions = np.arange(epoch * num_records, (epoch + 1) * num_records)
    parts = np.array_split(positions, 10)
    short = np.concatenate(records_at([order] * len(parts), parts)).tolist()
    assert records_at([order], [positions])[0].tolist() == short
    assert sorted(short) == list(range(num_records))


def test_pages_of_old_epochs_are_let_go():
    """A long run over a small source would keep those of thousands of epochs."""
    order = ReadingOrder(5, seed=0)
    before = [read(order, epoch * 5, 5) for epoch in range(50)]
    assert 0 < (_page.cache_info().maxsize or 0) <= 8192
    _page.cache_clear()
    assert [read(order, epoch * 5, 5) for epoch in range(50)] == before


def test_without_slices_it_is_the_permutation():
    order = ReadingOrder(10, seed=0)
    assert read(order, 10, 10) == [permute_index(i, 10, seed=0, epoch=1) for i in range(10)]


def test_golden_values_of_slices():
    assert read(ReadingOrder(12, seed=3, slice_length=3, window_length=3), 0, 24) == GOLDEN_SLICES


def test_neighbours_are_read_near_one_another():
    """What slices are for: any 128 reads in a row touch few stretches of the source."""
    order = ReadingOrder(100_000, seed=1, slice_length=100, window_length=100)
    for start in range(0, 20_000, 1000):
        assert len({record // 100 for record in read(order, start, 100)}) <= 4
    mixed = read(order, 0, 200)
    assert mixed != sorted(mixed)
    assert len({record // 100 for record in read(ReadingOrder(100_000, seed=1), 0, 100)}) > 80


def test_slices_themselves_are_shuffled():
    order = ReadingOrder(1000, seed=1, slice_length=10)
    firsts = [read(order, start, 10) for start in range(0, 1000, 10)]
    assert all(max(records) - min(records) == 9 for records in firsts)
    assert [min(records) // 10 for records in firsts] != list(range(100))


def test_file_order_and_replacement():
    assert read(ReadingOrder(3, seed=0, shuffle=False), 0, 7) == [0, 1, 2, 0, 1, 2, 0]
    drawn = read(ReadingOrder(50, seed=0, num_turns=-1), 0, 5000)
    assert set(drawn) == set(range(50))
    assert len(set(drawn[:50])) < 50


def test_places_have_seeds_of_their_own():
    """Equal seeds read sources of equal size in lockstep, as energon's do."""
    assert (
        len({salted_seed(seed, place) for seed in (0, 1) for place in ("", "0", "1", "0.1", "1.0")})
        == 10
    )
    assert salted_seed(0, "0") == 724353970069188240


GOLDEN_SLICES = [0, 6, 1, 8, 7, 2, 4, 9, 11, 10, 5, 3, 8, 5, 3, 7, 4, 6, 1, 2, 10, 9, 11, 0]
