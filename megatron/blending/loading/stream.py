"""pure. A data set as the one stream that all ranks share: bound to a seed, compared with a saved one, changed."""

import logging
from collections.abc import Sequence
from typing import Any

from megatron.blending.loading.compact import compact
from megatron.blending.loading.loader_state import (
    State,
    check_stream,
    describe_stream,
    is_below_buffers,
    leaf_positions,
    position_of_blend,
    remapped,
    total_drawn,
)
from megatron.blending.loading.number_of_lanes import lanes_of
from megatron.blending.loading.worker_config import WorkerConfig
from megatron.blending.streams.node import Binding, SavableDataset

logger = logging.getLogger("megatron.blending")


class Stream:
    """`root`: the tree as it is bound now, by `binding`. Lanes: their number is the data's, or the state's."""

    def __init__(self, dataset: SavableDataset[Any], config: WorkerConfig) -> None:
        self.dataset = dataset
        self._seed = config.seed + config.seed_offset
        self._num_ranks = config.num_ranks
        self._description: str | None = None
        self._bind({}, {}, [])
        self.num_lanes = lanes_of(self.root, self.binding, config.num_lanes)

    @property
    def is_finite(self) -> bool:
        return self.root.size is not None and not self.root.goes_on

    def described(self) -> str:
        """What tells this stream from others, as a short text."""
        if self._description is None:
            self._description = compact(describe_stream(self.root, self.binding))
        return self._description

    def leaf_positions(self, turn: int, lanes: dict[str, Any]) -> list[int]:
        """How many records of each source the outputs before `turn` were made of, where lanes stand as given."""
        at = min(turn, self.root.size or 0) if self.is_finite else turn
        return leaf_positions(self.root, at, total_drawn(lanes, self.num_lanes, self.binding))

    def check(self, saved: State) -> None:
        """ValueError that names the first difference between a saved stream and this one."""
        check_stream(saved, describe_stream(self.root, self.binding))

    def continue_as(self, saved: State, num_lanes: int) -> None:
        """Become the saved stream, which is one of the same data: with its orders, and the weights it was given."""
        places = {row[3]: row for row in saved["sources"]}
        salts, bases = ({place: row[column] for place, row in places.items()} for column in (4, 5))
        self._bind(salts, bases, [tuple(change) for change in saved["changes"]])
        self.num_lanes = num_lanes

    def continue_by_name(self, state: State, difference: str) -> None:
        """Become a stream whose sources begin where those of their names stood in a state of another stream."""
        if self.is_finite:
            raise ValueError(f"on_change='remap' is for endless data, but this is finite: begin it anew. {difference}")
        salts, bases, told = remapped(state, describe_stream(self.root, self.binding))
        logger.warning("%s. Continuing all the same: %s", difference.split(";")[0], told)
        self._bind(salts, bases, [])

    def change_weights(self, weights: Sequence[float], blend: str, turn: int, lanes: dict[str, Any]) -> None:
        """From output `turn` on, give the children of the blend at a place other weights. ValueError if that is not the
        same for all ranks: where samples are held back, each knows only how many it drew itself.
        """
        if self._num_ranks > 1 and is_below_buffers(self.root, blend):
            raise ValueError(
                "weights below packing_buffer_size or batch groups cannot be changed on several ranks, "
                "none of which knows how far the others have read; plan the change (weight_schedule)"
            )
        drawn = total_drawn(lanes, self.num_lanes, self.binding)
        position = position_of_blend(self.root, blend, turn, drawn)
        change = (blend, position, [float(weight) for weight in weights])
        self._bind(self.binding.salts, self.binding.bases, [*self.binding.changes, change])

    def _bind(self, salts: dict[str, str], bases: dict[str, int], changes: list[Any]) -> None:
        binding = Binding(self._seed, self._num_ranks, salts=salts, bases=bases, changes=changes)
        self.root = self.dataset.bind(binding)
        self.binding = binding
        self._description = None
