"""pure. Who makes a rank's outputs: as many workers as asked for, or the process itself."""

import functools
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from megatron.blending.encoding.seeding import seeded_function_of
from megatron.blending.loading.server import Server
from megatron.blending.loading.stream import Stream
from megatron.blending.loading.worker import MakeServer, Message, Patience, Start, Worker
from megatron.blending.loading.worker_config import WorkerConfig
from megatron.blending.loading.worker_process import ProcessWorker
from megatron.blending.loading.worker_thread import ThreadWorker
from megatron.blending.streams.failures import Failure, FailureLog, Failures
from megatron.blending.streams.node import Binding, SavableDataset

logger = logging.getLogger("megatron.blending")


class LocalWorker:
    """A server in the calling process, which works when it is asked. States of lanes are asked of the server."""

    def __init__(self, make_server: MakeServer, tell: Callable[[Failure], None]) -> None:
        self.server = make_server(tell)
        self._generation = -1

    def start(self, start: Start) -> None:
        self._generation = start.generation
        self.server.start(*start[1:])

    def next(self) -> Message:
        slot, value = self.server.next()
        failures = self.server.failures
        return Message(self._generation, slot, value, {}, failures.num_failed, failures.num_skipped)

    def close(self) -> None:
        pass


class Crew:
    """The workers of a rank, started at once, told to begin anew whenever it is asked for."""

    def __init__(self, stream: Stream, config: WorkerConfig, prefetch_factor: int, log: FailureLog) -> None:
        """`log`: of the samples that fail in any of the workers."""
        self._log = log
        self._workers: list[Any] = []
        self._generation = -1
        self.close = weakref.finalize(self, _close_all, self._workers)
        handling = (config.failure_tolerance, config.global_error_handler)
        if config.num_workers:
            get_root = functools.partial(bind_again, stream.dataset, stream.binding.again())
        else:
            get_root = functools.partial(getattr, stream, "root")
        try:
            for number in range(max(1, config.num_workers)):
                seat = (config.seat_of(number), config.num_seats)
                make = functools.partial(make_server, get_root, stream.num_lanes, seat, handling)
                self._workers.append(self._hire(number, make, config, prefetch_factor))
        except BaseException:
            self.close()
            raise

    def start(self, pass_number: int, slot: int, lanes: dict[int, Any], base: int, since: int) -> None:
        self._generation += 1
        for worker in self._workers:
            worker.start(Start(self._generation, pass_number, slot, lanes, base, since))

    def next(self, worker: int) -> Message:
        while isinstance(given := self._workers[worker].next(), Failure):
            self._log.tell(given)
        return given

    def lane_states(self) -> dict[int, Any] | None:
        """Where the lanes stand that are out of step; None if that came with the messages."""
        first = self._workers[0]
        return first.server.lane_states() if isinstance(first, LocalWorker) else None

    def _hire(self, number: int, make: MakeServer, config: WorkerConfig, ahead: int) -> Worker:
        if config.num_workers == 0:
            return LocalWorker(make, self._log.tell)
        name = f"worker {number} of rank {config.this_rank}"
        patience = Patience(config.slow_worker_seconds, config.worker_timeout_seconds)
        if config.worker_kind == "thread":
            return ThreadWorker(name, make, ahead, patience)
        seed = config.seed + config.seed_offset
        return ProcessWorker(name, make, ahead, patience, config.start_method, self._workers, seed)


def bind_again(dataset: SavableDataset[Any], binding: Binding) -> SavableDataset[Any]:
    """Return the tree as the rank has it: a worker binds it for itself, as what is bound grows large."""
    return dataset.bind(binding.again())


def make_server(
    get_root: Callable[[], SavableDataset[Any]],
    num_lanes: int,
    seat: tuple[int, int],
    handling: tuple[int, Any],
    tell: Callable[[Failure], None],
) -> Server:
    """Make a server where it works."""
    return Server(get_root(), num_lanes, *seat, Failures(*handling, tell))


def check_threads(dataset: SavableDataset[Any]) -> None:
    """ValueError if a function is to be seeded: the generators are those of the process, so that threads would draw
    from one another's, and from the training loop's.
    """
    function = seeded_function_of(dataset)
    if function is not None:
        name = getattr(function, "__qualname__", function)
        raise ValueError(
            f"{name} is marked @stateless(restore_seeds=True), which threads cannot keep apart; "
            "use worker_kind='process', or num_workers=0"
        )
    for child in dataset.children:
        check_threads(child)


def warn_of_shared_lanes(num_lanes: int, config: WorkerConfig) -> None:
    """Say what it costs if several workers run each lane, and the way out."""
    times = config.num_seats // math.gcd(num_lanes, config.num_seats)
    if times > 1 and config.this_rank == 0:
        logger.warning(
            "%d ranks times %d workers do not divide num_lanes=%d: each worker makes %d times what it gives. "
            "Choose their product as a divisor of it; or, where a run begins, num_lanes as a multiple of it",
            *(config.num_ranks, max(1, config.num_workers), num_lanes, times),
        )


def _close_all(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.close()
