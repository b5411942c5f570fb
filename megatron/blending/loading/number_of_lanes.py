"""pure. How many lanes a stream has: few enough that they stay together, and as many as workers will ask for."""

from typing import Any

from megatron.blending.loading.loader_state import leaves_of
from megatron.blending.streams.node import Binding, SavableDataset
from megatron.blending.streams.sample_buffer import BufferDataset

_NUMBERS_OF_LANES = (1, 2, 4, 8, 16, 32, 64, 192, 320, 960)
_LEAST_OF_LANE = 64
_LEAST_UNHELD = 8
_LEAST_HELD_TIMES = 8
_MOST_HELD = 2**16


def lanes_of(root: SavableDataset[Any], binding: Binding, num_lanes: int | None) -> int:
    """Return how many lanes a stream has, from its data and `num_lanes` alone.

    None: the most of 1, 2, 4, ... 64, 192, 320, 960 that leave each lane 64 samples of an epoch of all sources, and
    eight times what it holds back; for lanes that leave out or hold back drift apart, and few samples for each mean
    that an epoch is read far into the next ones before all of it was. 8 where nothing is held back, however small the
    data, as workers that share a lane make all of it. Of finite batches each lane has 64, for it may end with a short
    one. All lanes together hold at most 65,536 samples back, which are part of a state. A pass over finite data reads
    each sample once with any number. They are powers of two, or multiples of 64, as numbers of ranks times workers
    mostly are: fewer lanes than 960 are then seldom shared by more.

    Where finite data is packed there are fewer, for each lane holds back what it cannot fill: a divisor that leaves
    each four buffers or more, if there is one.
    """
    holding = [node for node in binding.nodes if isinstance(node, BufferDataset)]
    most = [node.size // (4 * node.num_held) for node in holding if node.size is not None]
    if num_lanes is None:
        if holding:
            most.append(_MOST_HELD // sum(node.num_under_way for node in holding))
        if root.size is not None and not root.goes_on and root.samples_per_output > 1:
            most.append(max(_LEAST_UNHELD, root.size // _LEAST_OF_LANE))
        if root.size is None or root.goes_on:
            most.append(max(_LEAST_UNHELD, sum(map(len, leaves_of(root))) // _LEAST_OF_LANE))
            most += [len(node.children[0]) // (_LEAST_HELD_TIMES * node.num_under_way) for node in holding]
        return max(lanes for lanes in _NUMBERS_OF_LANES if lanes <= max(1, min(most, default=_NUMBERS_OF_LANES[-1])))
    least = max(1, min(most, default=num_lanes))
    return max(lanes for lanes in range(1, num_lanes + 1) if num_lanes % lanes == 0 and lanes <= least)
