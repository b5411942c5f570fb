"""pure. Nodes that only choose which positions of their child there are, and in which order."""

import math
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np

from megatron.blending.arguments import check_whole, shown
from megatron.blending.order.reading import ReadingOrder, records_at
from megatron.blending.order.weights import Weight
from megatron.blending.streams.node import (
    Binding,
    Ints,
    Plan,
    PlanBatch,
    SavableDataset,
    check_datasets,
)
from megatron.blending.streams.worker_config import WorkerConfig

_ENDLESS = 2**40


class PositionsDataset(SavableDataset[Any]):
    """Gives the outputs of its child at other positions."""

    def __init__(self, dataset: SavableDataset[Any], worker_config: WorkerConfig | None) -> None:
        check_datasets(type(self).__name__, [dataset])
        self.children = (dataset,)
        self.worker_config = worker_config
        self.is_block = dataset.is_block

    def within_child(self, positions: Ints) -> Ints:
        """Returns the position of the child that each position of the node is."""
        return positions

    def plan(self, positions: Ints, plan_batch: PlanBatch) -> Plan:
        return self.children[0].plan(self.within_child(positions), plan_batch)


class RepeatDataset(PositionsDataset):
    """Gives a finite data set again and again; shuffled ones in another order each time."""

    def __init__(
        self,
        dataset: SavableDataset[Any],
        repeats: Weight | None = None,
        *,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        """`repeats`: number of passes over the data; None: for ever. With a fraction the last pass
        is cut: 10 outputs repeated 2.55 times are floor(25.5) = 25.
        """
        super().__init__(dataset, worker_config)
        if repeats is not None and not (
            isinstance(repeats, Real) and repeats > 0 and math.isfinite(repeats)
        ):
            raise ValueError(
                f"RepeatDataset: repeats must be above 0, or None for ever, but is {shown(repeats)}"
            )
        self.repeats = repeats
        if repeats is not None and dataset.size is not None:
            # The decimals as written, not the float: 0.29 * 100 must give 29, not 28.
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
    """Gives the first `length` outputs.

    They are counted per rank if only maps stand above the node (as in energon), else over the whole
    stream. Of an endless data set the next pass gives the next `length` outputs; with
    `reset_after_epoch` it gives the same ones again.
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
        """`reset_after_epoch`: each pass begins the data set again. Finite data sets always do."""
        super().__init__(dataset, worker_config)
        check_whole("LimitDataset: length", length)
        self.length = length
        self.size: int = length if dataset.size is None else min(length, dataset.size)
        # A further pass over endless data continues where the last one ended, unless it is reset.
        # Over finite data it starts again.
        continues_across_epochs = dataset.size is None or dataset.continues_across_epochs
        self.continues_across_epochs = continues_across_epochs and not reset_after_epoch
        self.begins_again = continues_across_epochs and reset_after_epoch
        self.is_outermost = False

    def __len__(self) -> int:
        return self.size

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        total = self.length * binding.world_size if is_outermost else self.length
        binding.size_is_per_rank |= is_outermost
        # The number of packs or groups in a pass over finite data is known only when they are made.
        inner = None if is_outermost and self.is_block else self.children[0].size
        self.size = total if inner is None else min(total, inner)
        self.is_outermost = is_outermost

    @property
    def is_limit(self) -> bool:
        return self.is_outermost and not self.continues_across_epochs

    @property
    def num_positions(self) -> int:
        """Positions to read from. An outermost limit reads past `size` to replace skips."""
        if not self.is_limit:
            return self.size
        return self.children[0].num_positions or _ENDLESS

    def within_child(self, positions: Ints) -> Ints:
        if self.continues_across_epochs:
            return positions
        # A limit of 3 over 5 outputs: position 4 is position 1 of pass 1, so 5 + 1 of the child.
        # Over endless data that is begun again, position 4 is 1 of the child.
        passes, position_in_pass = np.divmod(positions, self.num_positions)
        if self.begins_again:
            return position_in_pass
        return passes * (self.children[0].num_positions or 0) + position_in_pass

    def used(self, position: int) -> list[int]:
        return self.within_child(np.array([position], np.int64)).tolist()

    def signature(self) -> list[Any]:
        return [
            type(self).__name__,
            self.length,
            *(["reset_after_epoch"] if self.begins_again else []),
        ]


class EpochizeDataset(PositionsDataset):
    """Data set whose epochs have `length` outputs; each epoch continues where the last one ended.

    A finite data set is repeated for ever below it. `length` is counted per rank if only maps stand
    above the node (as energon's virtual epochs), else over the whole stream. `num_epochs`
    multiplies it; without `length` it multiplies the data's own length. Every rank gets equally
    many outputs: an epoch of 10 over 4 ranks gives 2 to each, and the 2 that are left come first in
    the next epoch.
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
        for node in binding.nodes[self.node_id :]:
            if hasattr(node, "is_outermost"):
                # No pass ends below this node, as the data continues in the next epoch.
                node.is_outermost = False
        if is_outermost and self.length is not None:
            self.size = self.num_epochs * self.length * binding.world_size
            binding.size_is_per_rank = True

    def signature(self) -> list[Any]:
        return [type(self).__name__]


class ShuffleBufferDataset(PositionsDataset):
    """Mixes outputs within windows of `size`, one window after the other. It holds no samples: an
    output is read where its position says.
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
        self._seed = binding.seed_at(f"{self.tree_path} shuffle {self.window}")

    def within_child(self, positions: Ints) -> Ints:
        if self.size is None:
            return self._mixed(positions, self.window)
        passes, position_in_pass = np.divmod(positions, self.size)
        num_whole = self.size // self.window
        found = np.zeros_like(positions)
        is_whole = position_in_pass < num_whole * self.window
        # Whole windows are numbered through from pass to pass, and so are the last, shorter ones.
        # Size 10, window 4: pass 1 has the whole windows 2 and 3, whose positions 8 to 15 stand for
        # 10 to 17 of the child.
        whole = self._mixed(passes * num_whole * self.window + position_in_pass, self.window)
        found[is_whole] = (whole - passes * num_whole * self.window + passes * self.size)[is_whole]
        if not is_whole.all():
            # The last windows hold 2 outputs here. That of pass 1 mixes the positions 2 and 3 of a
            # numbering of their own, which stand for 18 and 19 of the child.
            rest = self.size - num_whole * self.window
            start = num_whole * self.window
            last = self._mixed(passes * rest + position_in_pass - start, rest)
            found[~is_whole] = (last - passes * rest + start + passes * self.size)[~is_whole]
        return found

    def _mixed(self, positions: Ints, window: int) -> Ints:
        order = ReadingOrder(window, self._seed)
        return positions // window * window + records_at([order], [positions])[0]

    def signature(self) -> list[Any]:
        return [type(self).__name__, self.window]


def _blends_blocks(dataset: SavableDataset[Any]) -> bool:
    """Returns whether the data set has a blend of packs or groups. Their outputs are counted when
    they are made, so none has a position that could be shuffled.
    """
    is_blend = dataset.is_block and hasattr(dataset, "weights")
    return is_blend or any(map(_blends_blocks, dataset.children))
