"""pure. Nodes that hold samples back have this in common: an output takes as many of the child's as
it turns out.
"""

from functools import cached_property
from typing import Any

import numpy as np

from megatron.blending.streams.holder import Holder
from megatron.blending.streams.holding import BufferedDataset, HoldingPlan
from megatron.blending.streams.node import Binding, Block, Ints, SavableDataset
from megatron.blending.streams.worker_config import WorkerConfig

_MAX_CONSECUTIVE = 128


class BufferDataset(BufferedDataset):
    """Its outputs take as many of the child's as it turns out. Each shard holds samples of its
    own."""

    def __init__(
        self, dataset: SavableDataset[Any], num_held: int, worker_config: WorkerConfig | None
    ) -> None:
        super().__init__(dataset, worker_config)
        self.num_held = num_held

    @property
    def num_buffered(self) -> int:
        """It is about how many samples a shard holds back."""
        return self.num_held

    @property
    def num_consecutive(self) -> int:
        """It is how many consecutive outputs of the child belong to one shard: neighbours, for the
        sake of reading, where there is no end; of finite data each shard must get its share.
        """
        return min(self.num_held, _MAX_CONSECUTIVE) if self.children[0].size is None else 1

    @cached_property
    def samples_per_output(self) -> int:
        return self.num_consecutive * self.children[0].samples_per_output

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        self.size = self.children[0].size

    def plan(self, positions: Ints, block: Block) -> HoldingPlan:
        several = self.num_consecutive
        return HoldingPlan(self, positions * several, np.full_like(positions, several), block)

    def used(self, position: int, drawn: dict[int, int]) -> list[int]:
        return [drawn.get(self.number, 0)]

    def signature(self) -> list[Any]:
        return [type(self).__name__, self.num_held]


class BufferState(Holder):
    """It holds samples back in a shard. Those of a state are made again when the next output is."""

    _saved: Any = None

    def held(self) -> object:
        return self.packed() if self._saved is None else self._saved

    def restore_held(self, held: object) -> None:
        self._saved = held

    def remake(self) -> None:
        """Make again what a state said is held back."""
        saved, self._saved = self._saved, None
        if saved is not None:
            try:
                self.unpack(saved)
            except (TypeError, ValueError, LookupError, OverflowError) as error:
                raise ValueError(
                    f"what a shard of the saved state holds back cannot be made again: {error}"
                ) from error

    def packed(self) -> object:
        """Return the origins of what is held back, and in which groups it is."""
        raise NotImplementedError

    def unpack(self, held: object) -> None:
        raise NotImplementedError
