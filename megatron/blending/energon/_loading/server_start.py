"""pure. Makes the server of each worker, in the process that the worker runs in."""

import functools
from collections.abc import Callable
from typing import Any

from megatron.blending.energon._loading.lanes import lanes_of
from megatron.blending.energon._loading.server import Server
from megatron.blending.energon._loading.stream import Stream
from megatron.blending.loading.messages import MakeServer
from megatron.blending.streams.failures import Failure, Failures
from megatron.blending.streams.node import Binding, SavableDataset
from megatron.blending.streams.worker_config import WorkerConfig


def server_of(stream: Stream, config: WorkerConfig, worker: int) -> MakeServer:
    """Returns the function that makes the server of a worker. A worker process binds the tree
    itself: a bound tree is large to send.
    """
    part = (worker, max(1, config.num_workers), config.num_ranks)
    handling = (config.failure_tolerance, config.global_error_handler)
    if config.num_workers:
        tree: Any = functools.partial(bind_again, stream.dataset, stream.binding.clone())
        return functools.partial(_server, tree, part, handling, config.in_worker())
    tree = functools.partial(getattr, stream, "root")
    return functools.partial(_server, tree, part, handling, config)


def bind_again(dataset: SavableDataset[Any], binding: Binding) -> SavableDataset[Any]:
    """Returns the tree bound as on the rank."""
    return dataset.bind(binding.clone())


def _server(
    tree: Callable[[], SavableDataset[Any]],
    part: tuple[int, int, int],
    handling: tuple[int, Any],
    config: WorkerConfig,
    report: Callable[[Failure], None],
) -> Server:
    """Returns a server, in the process that it works in. `config` is the WorkerConfig that user
    code finds there.
    """
    WorkerConfig.active_worker_config, WorkerConfig._worker = config, part[0]
    return Server(lanes_of(tree()), *part, Failures(*handling, report))
