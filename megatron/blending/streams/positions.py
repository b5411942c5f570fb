"""pure. Some nodes only say which positions of their child there are, and in which order."""

import math
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np

from megatron.blending.arguments import check_whole
from megatron.blending.order.reading import ReadingOrder, records_at
from megatron.blending.order.weights import Weight
from megatron.blending.streams.node import (
    Binding,
    Block,
    Ints,
    Plan,
    SavableDataset,
    check_datasets,
)
from megatron.blending.streams.worker_config import WorkerConfig

_ENDLESS = 2**40


class PositionsDataset(SavableDataset[Any]):
    """Its outputs are those of its child at other positions."""

    def __init__(self, dataset: SavableDataset[Any], worker_config: WorkerConfig | None) -> None:
        check_datasets(type(self).__name__, [dataset])
        self.children = (dataset,)
        self.worker_config = worker_config
        self.is_block = dataset.is_block

    def within_child(self, positions: Ints) -> Ints:
        return positions

    def plan(self, positions: Ints, block: Block) -> Plan:
        return self.children[0].plan(self.within_child(positions), block)


class RepeatDataset(PositionsDataset):
    """Gives a finite data set again and again; shuffled ones in another order each time."""

    def __init__(
        self,
        dataset: SavableDataset[Any],
        repeats: Weight | None = None,
        *,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        """`repeats`: None for ever; with a fraction, the last time is a part of it: floor(len *
        repeats) outputs.
        """
        super().__init__(dataset, worker_config)
        if repeats is not None and not (
            isinstance(repeats, Real) and repeats > 0 and math.isfinite(repeats)
        ):
            raise ValueError(
                f"RepeatDataset: repeats must be above 0, or None for ever, but is {repeats!r}"
            )
        self.repeats = repeats
        if repeats is not None and dataset.size is not None:
            exact = (
                repeats if isinstance(repeats, (int, Fraction)) else Fraction(repr(float(repeats)))
            )
            self.size = int(dataset.size * exact)
            if self.size == 0:
                raise ValueError(
                    f"RepeatDataset: {repeats} times {dataset.size} outputs is none; repeat it "
                    "more often"
                )

    def __len__(self) -> int:
        return len(self.children[0]) if self.size is None else self.size

    def signature(self) -> list[Any]:
        return [type(self).__name__, self.size]


class LimitDataset(PositionsDataset):
    """Gives the first `length` outputs: of each rank with only maps above (as energon), else of the
    whole stream.

    Of an endless data set, the next pass gives the next ones, or with `reset_after_epoch` the same
    ones again.
    """

    preserves_outputs = True

    def __init__(
        self,
        dataset: SavableDataset[Any],
        length: int,
        *,
        reset_after_epoch: bool = False,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        """`reset_after_epoch`: each pass begins the data set again, as it does with a finite one in
        any case.
        """
        super().__init__(dataset, worker_config)
        check_whole("LimitDataset: length", length)
        self.length = length
        self.size: int = length if dataset.size is None else min(length, dataset.size)
        # A limit of endless data goes forward with each pass; a finite data set starts again
        # anyhow.
        continues_across_epochs = dataset.size is None or dataset.continues_across_epochs
        self.continues_across_epochs = continues_across_epochs and not reset_after_epoch
        self.begins_again = continues_across_epochs and reset_after_epoch
        self.is_outermost = False

    def __len__(self) -> int:
        return self.size

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        total = self.length * binding.world_size if is_outermost else self.length
        binding.is_size_of_ranks |= is_outermost
        # How many packs or groups a pass over finite data has is known only when they are made.
        inner = None if is_outermost and self.is_block else self.children[0].size
        self.size = total if inner is None else min(total, inner)
        self.is_outermost = is_outermost

    @property
    def is_limit(self) -> bool:
        return self.is_outermost and not self.continues_across_epochs

    @property
    def num_positions(self) -> int:
        """Positions to read from. Of an outermost node some lie behind the limit, to fill skips
        with.
        """
        if not self.is_limit:
            return self.size
        return self.children[0].num_positions or _ENDLESS

    def within_child(self, positions: Ints) -> Ints:
        if self.continues_across_epochs:
            return positions
        passes, places = np.divmod(positions, self.num_positions)
        return (
            places if self.begins_again else passes * (self.children[0].num_positions or 0) + places
        )

    def used(self, position: int) -> list[int]:
        return self.within_child(np.array([position], np.int64)).tolist()

    def signature(self) -> list[Any]:
        return [
            type(self).__name__,
            self.length,
            *(["reset_after_epoch"] if self.begins_again else []),
        ]


class EpochizeDataset(PositionsDataset):
    """Data set whose epoch has `length` outputs, or `num_epochs` times the data's own length; the
    next pass continues from there.

    A finite data set is repeated for ever within. `length` is of each rank where only maps are
    above (as energon's virtual epochs), else of the whole stream; together with `num_epochs` it is
    so many times as long. Every rank gets as many: what an epoch of the whole stream does not
    divide into comes first in the next one.
    """

    continues_across_epochs = True
    preserves_outputs = True

    def __init__(
        self,
        dataset: SavableDataset[Any],
        length: int | None = None,
        worker_config: WorkerConfig | None = None,
        *,
        num_epochs: int | None = None,
    ) -> None:
        super().__init__(dataset, worker_config)
        for name, value in (("length", length), ("num_epochs", num_epochs)):
            check_whole(f"EpochizeDataset: {name}", value, may_be_none=True)
        if length is None and num_epochs is None:
            raise ValueError("EpochizeDataset: length or num_epochs must be given")
        self.length = length
        self.num_epochs = num_epochs or 1
        self.size: int = self.num_epochs * (len(dataset) if length is None else length)

    def __len__(self) -> int:
        return self.size

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        for node in binding.nodes[self.number :]:
            if hasattr(node, "is_outermost"):
                # Below, no pass ends: the data continues in the next epoch.
                node.is_outermost = False
        if is_outermost and self.length is not None:
            self.size = self.num_epochs * self.length * binding.world_size
            binding.is_size_of_ranks = True

    def signature(self) -> list[Any]:
        return [type(self).__name__]


class ShuffleBufferDataset(PositionsDataset):
    """Mixes outputs within windows of `size`, one window after the other. Nothing is held back for
    it.
    """

    def __init__(
        self, dataset: SavableDataset[Any], size: int, *, worker_config: WorkerConfig | None = None
    ) -> None:
        super().__init__(dataset, worker_config)
        check_whole("ShuffleBufferDataset: size", size)
        if _blends_blocks(dataset):
            raise ValueError(
                "ShuffleBufferDataset: the data set is a blend of packs or groups; shuffle each "
                "data set of the blend"
            )
        self.window = size
        self.size = dataset.size
        self._seed = 0

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        self._seed = binding.seed_at(f"{self.place} shuffle {self.window}")

    def within_child(self, positions: Ints) -> Ints:
        if self.size is None:
            return self._mixed(positions, self.window)
        passes, places = np.divmod(positions, self.size)
        num_whole = self.size // self.window
        found = np.zeros_like(positions)
        is_whole = places < num_whole * self.window
        # Whole windows are numbered through from pass to pass, and so are the last, shorter ones.
        # Size 10, window 4: pass 1 has the whole windows 2 and 3, whose positions 8 to 15 stand for
        # 10 to 17 of the child.
        whole = self._mixed(passes * num_whole * self.window + places, self.window)
        found[is_whole] = (whole - passes * num_whole * self.window + passes * self.size)[is_whole]
        if not is_whole.all():
            rest = self.size - num_whole * self.window
            start = num_whole * self.window
            last = self._mixed(passes * rest + places - start, rest)
            found[~is_whole] = (last - passes * rest + start + passes * self.size)[~is_whole]
        return found

    def _mixed(self, positions: Ints, window: int) -> Ints:
        order = ReadingOrder(window, self._seed)
        return positions // window * window + records_at([order], [positions])[0]

    def signature(self) -> list[Any]:
        return [type(self).__name__, self.window]


def _blends_blocks(dataset: SavableDataset[Any]) -> bool:
    """Returns whether outputs are counted as they come, so none has a position to be shuffled."""
    is_blend = dataset.is_block and hasattr(dataset, "weights")
    return is_blend or any(map(_blends_blocks, dataset.children))
