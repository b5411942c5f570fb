"""pure. The order in which records are read: a function of (seed, place, epoch, index), computed and never stored.

Invariants:
- for any size, seed and epoch, `permute_index` maps range(size) onto itself, one to one;
- `permute_indices` gives what `permute_index` gives, index by index;
- `ReadingOrder` reads each record once per epoch, whatever its slices and windows;
- the result depends on the arguments alone: not on the machine, the Python version or what was asked before.

The permutation is a Feistel network by modular addition over a grid of about sqrt(size) x sqrt(size) cells, walked on
where it leaves range(size) (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The grid has at most
one row of cells too many, so a walk takes a second step once in sqrt(size) times. The rounds are keyed by
blake2b(seed, epoch) and mixed by splitmix64 (Steele, Lea and Flood, 2014): even to the eye, not a cipher.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_MASK64 = 2**64 - 1


class _Grid(NamedTuple):
    """Ints, or arrays that say it per index."""

    num_rows: Any
    num_columns: Any
    round_keys: Sequence[Any]

    def at(self, places: Any) -> "_Grid":
        return _Grid(self.num_rows[places], self.num_columns[places], [key[places] for key in self.round_keys])


def permute_index(index: int, size: int, seed: int, epoch: int) -> int:
    """Return the image of `index` under the permutation of range(size) that belongs to (seed, epoch).

    `size` may be anything from 1 to 10**12 and beyond. About 10 microseconds and no memory, whatever the size.
    """
    _check_size(size)
    if not 0 <= index < size:
        raise ValueError(f"index must be in range({size}), but is {index}")
    grid = _grid(size, seed, epoch)
    image = _permute_grid(index, grid)
    while image >= size:
        image = _permute_grid(image, grid)
    return image


def permute_indices(indices: npt.ArrayLike, size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return `permute_index` of each of `indices`, as int64 of the same shape. About 0.2 microseconds per index."""
    _check_size(size)
    asked = np.asarray(indices, dtype=np.int64)
    outside = asked[(asked < 0) | (asked >= size)]
    if outside.size:
        raise ValueError(f"indices must be in range({size}), but one is {outside[0]}")
    grid = _grid(size, seed, epoch)
    images = _permute_grid(asked.astype(np.uint64).reshape(-1), grid)
    while (beyond := images >= size).any():
        images[beyond] = _permute_grid(images[beyond], grid)
    return images.astype(np.int64).reshape(asked.shape)


def stream_position(position: int, size: int) -> tuple[int, int]:
    """Return (epoch, index) of the `position`-th record of an endless stream over `size` records.

    `stream_position(7, 3) -> (2, 1)`: two epochs of three records are over, and this one is at its second record.
    """
    _check_size(size)
    if position < 0:
        raise ValueError(f"position must be at least 0, but is {position}")
    return divmod(position, size)


def salted_seed(seed: int, place: str) -> int:
    """Return the seed of a node of a blend: sources of equal size would otherwise be read in lockstep."""
    return int.from_bytes(hashlib.blake2b(f"seed {seed} place {place}".encode(), digest_size=8).digest(), "little")


class ReadingOrder(NamedTuple):
    """In which order an endless stream reads a source of `num_records`, epoch by epoch."""

    num_records: int
    seed: int
    """Of this source alone: see `salted_seed`."""
    shuffle: bool = True
    num_turns: int = 1
    """How often an epoch reads each record; -1: every read is drawn anew, from all of them."""
    slice_length: int = 1
    """This many consecutive records stay together, for the sake of whoever reads them."""
    window_length: int = 1
    """Within this many records of that order the single ones are mixed; at least a slice is."""

    @property
    def epoch_length(self) -> int:
        return self.num_records * max(1, self.num_turns)

    @property
    def window(self) -> int:
        """The window made of whole slices, and of one more than asked for: 1 where nothing is to be mixed."""
        if self.slice_length == 1:
            return 1
        return (
            (-(-self.window_length // self.slice_length) + 1) * self.slice_length
            if self.window_length > 1
            else (self.slice_length)
        )


def records_at(
    orders: Sequence[ReadingOrder], positions: Sequence[npt.NDArray[np.int64]]
) -> list[npt.NDArray[np.int64]]:
    """Return which records several streams read at some positions of each.

    About 0.3 microseconds per position and 100 per call, for one stream or a thousand.
    """
    records = [_unshuffled(order, asked) for order, asked in zip(orders, positions)]
    pages: list[tuple[_Page, tuple[int, ...]]] = []
    parts: list[tuple[int, Any, npt.NDArray[np.int64]]] = []
    for stream, (order, asked) in enumerate(zip(orders, positions)):
        if not order.shuffle or order.num_turns < 0 or not len(asked):
            continue
        epochs = asked // order.epoch_length
        indices = asked - epochs * order.epoch_length
        if epochs[0] == epochs[-1] and (epochs == epochs[0]).all():
            pages.append(_page(order, int(epochs[0])))
            parts.append((stream, slice(None), indices))
            continue
        for epoch in np.unique(epochs).tolist():
            here = np.flatnonzero(epochs == epoch)
            pages.append(_page(order, epoch))
            parts.append((stream, here, indices[here]))
    if parts:
        shuffled = _shuffled(pages, [indices for _, _, indices in parts])
        for (stream, here, _), found in zip(parts, shuffled):
            records[stream][here] = found % orders[stream].num_records
    return records


class _Page(NamedTuple):
    """One epoch of a stream, in numbers. Slices that are full are permuted; what is left over at the end of the source,
    `num_rest` records, is read before full slice number `rest_at`.
    """

    size: int
    slice_length: int
    window: int
    num_full: int
    rest_at: int
    slice_rows: int
    slice_columns: int
    window_rows: int
    window_columns: int
    last_rows: int
    last_columns: int


@lru_cache(maxsize=8192)
def _page(order: ReadingOrder, epoch: int) -> tuple[_Page, tuple[int, ...]]:
    size, window = order.epoch_length, min(order.window, order.epoch_length)
    length = min(order.slice_length, size)
    keys = _grid(size, order.seed, epoch).round_keys
    sides = [_sides(part) for part in (size // length, window, size % window or window)]
    rest_at = keys[0] % (size // length + 1)
    page = _Page(size, length, window, size // length, rest_at, *sides[0], *sides[1], *sides[2])
    return page, tuple(keys)


def _unshuffled(order: ReadingOrder, asked: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if order.shuffle and order.num_turns < 0:
        drawn = _mix(asked.astype(np.uint64), order.seed & _MASK64)
        return (drawn % np.uint64(order.num_records)).astype(np.int64)
    return asked % order.num_records


def _shuffled(pages: Sequence[Any], indices: Sequence[npt.NDArray[np.int64]]) -> list[npt.NDArray[np.int64]]:
    """The permuted `indices` of each page, all of them in one go."""
    joined = np.concatenate(indices).astype(np.uint64)
    page_of = np.repeat(np.arange(len(pages)), [len(part) for part in indices])
    numbers = np.array([page for page, _ in pages], np.uint64).T
    keys = np.array([keys for _, keys in pages], np.uint64).T
    if (numbers[2] > 1).any():
        joined = _mixed_in_windows(joined, _Page(*numbers[:, page_of]), keys[:, page_of])
    found = _mixed_slices(joined, _Page(*numbers[:, page_of]), keys[:, page_of]).astype(np.int64)
    return np.split(found, np.cumsum([len(part) for part in indices])[:-1])


def _mixed_in_windows(index: Any, page: _Page, keys: Any) -> Any:
    number = index // page.window
    is_last = (number + 1) * page.window > page.size
    length = np.where(is_last, page.size - number * page.window, page.window)
    rows = np.where(is_last, page.last_rows, page.window_rows)
    columns = np.where(is_last, page.last_columns, page.window_columns)
    grid = _Grid(rows, columns, [_mix(number + 1, key) for key in keys])
    return number * page.window + _walk(index % page.window, length, grid)


def _mixed_slices(place: Any, page: _Page, keys: Any) -> Any:
    rest_start = page.rest_at * page.slice_length
    num_rest = page.size - page.num_full * page.slice_length
    is_rest = (place >= rest_start) & (place < rest_start + num_rest)
    place_in_full = np.where(place >= rest_start + num_rest, place - num_rest, place)
    # Those of the rest are given any full slice here, and their own place below.
    number = np.minimum(place_in_full // page.slice_length, page.num_full - 1)
    grid = _Grid(page.slice_rows, page.slice_columns, list(keys))
    full = _walk(number, page.num_full, grid) * page.slice_length + place_in_full % page.slice_length
    return np.where(is_rest, page.num_full * page.slice_length + place - rest_start, full)


def _walk(index: Any, size: Any, grid: _Grid) -> Any:
    """Permute arrays of indices, each under a grid of its own."""
    images = _permute_grid(index, grid)
    beyond = np.flatnonzero(images >= size)
    while beyond.size:
        images[beyond] = _permute_grid(images[beyond], grid.at(beyond))
        beyond = beyond[images[beyond] >= size[beyond]]
    return images


def _sides(size: int) -> tuple[int, int]:
    """Rows and columns of the smallest grid for a size."""
    num_rows = math.isqrt(size - 1) + 1
    return num_rows, -(-size // num_rows)


def _check_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"size must be at least 1, but is {size}")


def _grid(size: int, seed: int, epoch: int) -> _Grid:
    digest = hashlib.blake2b(f"seed {seed} epoch {epoch}".encode(), digest_size=64).digest()
    return _Grid(*_sides(size), struct.unpack("<8Q", digest))


def _permute_grid(cell: Any, grid: _Grid) -> Any:
    """Shift the row by a random number that the column decides, then the column likewise, four times over.

    One body for int and uint64 array: the masks of `_mix` do to the one what overflow does to the other.
    """
    row, column = cell // grid.num_columns, cell % grid.num_columns
    for row_key, column_key in zip(grid.round_keys[::2], grid.round_keys[1::2]):
        row = (row + _mix(column, row_key) % grid.num_rows) % grid.num_rows
        column = (column + _mix(row, column_key) % grid.num_columns) % grid.num_columns
    return row * grid.num_columns + column


def _mix(value: Any, key: int) -> Any:
    """Return number `value` of the splitmix64 sequence that starts at `key`: 64 random bits."""
    value = (value * 0x9E3779B97F4A7C15 + key) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
