"""pure. The stream as a training loop sees it: batches of this rank, from workers, to be saved and restored anywhere.

Invariants, for any numbers of ranks and workers before and after:
- output k of the stream is given by rank k % world_size, as its (k // world_size)-th;
- a loader that is restored continues with the output after the last one that was drawn when the state was made.
"""

import functools
import math
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from megatron.blending.dataset import Binding, SavableDataset
from megatron.blending.failures import Failures
from megatron.blending.loader_state import VERSION, State, check_stream, describe_stream, merge_states
from megatron.blending.server import END, Server
from megatron.blending.worker import Message, Patience, ProcessWorker, Start, ThreadWorker, Worker
from megatron.blending.worker_config import WorkerConfig

__all__ = ["Loader", "WorkerConfig", "get_loader", "get_savable_loader"]

T_co = TypeVar("T_co", covariant=True)


def get_loader(
    dataset: SavableDataset[T_co],
    worker_config: WorkerConfig | None = None,
    *,
    prefetch_factor: int = 2,
    pin_memory: bool | None = None,
    **ignored: Any,
) -> "Loader[T_co]":
    """Return an iterable over this rank's batches.

    Of endless data each `for` goes on where the last one stopped; of finite data each is a new pass.
    `worker_config`: by default that of the data sets, else one without workers. `prefetch_factor`: batches that each
    worker makes ahead. `pin_memory`: None where there is CUDA, and workers.
    """
    return Loader(dataset, worker_config, prefetch_factor, pin_memory, is_savable=False, **ignored)


def get_savable_loader(
    dataset: SavableDataset[T_co],
    worker_config: WorkerConfig | None = None,
    *,
    prefetch_factor: int = 2,
    pin_memory: bool | None = None,
    **ignored: Any,
) -> "Loader[T_co]":
    """As `get_loader`, but also of finite data a `for` goes on within the pass where the last one stopped."""
    return Loader(dataset, worker_config, prefetch_factor, pin_memory, is_savable=True, **ignored)


class Loader(Generic[T_co]):
    """Iterable and its own iterator. Both kinds can be saved; workers start with the first batch.

    `close()`, or leaving a `with`, stops the workers; the next batch would start them again.
    """

    def __init__(
        self,
        dataset: SavableDataset[T_co],
        worker_config: WorkerConfig | None,
        prefetch_factor: int,
        pin_memory: bool | None,
        *,
        is_savable: bool,
        **ignored: Any,
    ) -> None:
        for name in ignored:
            if name not in _ENERGON_ONLY:
                raise TypeError(f"get_loader has no argument {name!r}")
        if not isinstance(dataset, SavableDataset):
            raise ValueError(f"get_loader takes a data set of megatron.blending, but got {type(dataset).__name__}")
        if prefetch_factor < 1:
            raise ValueError(f"prefetch_factor must be at least 1, but is {prefetch_factor}")
        self.config = worker_config or _found_config(dataset) or WorkerConfig()
        self._dataset = dataset
        self._is_savable = is_savable
        self._prefetch_factor = prefetch_factor
        self._pins = _may_pin(self.config) if pin_memory is None else pin_memory and _may_pin(self.config)
        self._num_lanes = self.config.num_lanes
        self._binding = Binding(self.config.seed + self.config.seed_offset, self.config.num_ranks)
        self._root = dataset.bind(self._binding)
        self._stream: State | None = None
        self._crew: list[Worker] = []
        self._stop: weakref.finalize[Any, Any] | None = None
        self._server: Server | None = None
        self._generation = 0
        self._lanes: dict[str, Any] = {}
        self._heads: dict[int, Message] = {}
        self._counts: dict[int, tuple[int, int]] = {}
        self._is_over = self._has_drawn = self._is_started = False
        self._begin_pass(0, 0)

    def __len__(self) -> int:
        """Batches of one pass on this rank; of endless data, of one pass over it."""
        ranks = self.config.num_ranks
        if self._root.goes_on:
            return (self._root.size or 0) // ranks
        total = len(self._dataset) if self._root.size is None else self._root.size
        return total // ranks + (self.config.this_rank < total % ranks)

    def __iter__(self) -> Iterator[T_co]:
        is_left = self._has_drawn and not self._is_savable and self._is_finite
        if self._is_over or is_left:
            self._next_pass()
        return self

    def __next__(self) -> T_co:
        if self._is_over:
            raise StopIteration
        self._has_drawn = True
        try:
            value = self._draw()
        except StopIteration:
            self._is_over = True
            raise
        except BaseException:
            if self._crew:
                self.close()
            raise
        return self._pinned(value) if self._pins else value

    # Saving. A state is made of ints, strings, lists and dicts (JSON, or torch.load(weights_only=True)).

    def state_dict(self) -> State:
        """Return where this rank stands: a few hundred bytes, about 60 per source, and what open buffers hold."""
        if self._stream is None:
            self._stream = describe_stream(self._root, self._binding.seed, self._binding.nodes)
        if self._server is not None:
            self._lanes = {str(number): state for number, state in self._server.lane_states().items()}
        return {
            "version": VERSION,
            "rank": self.config.this_rank,
            "world_size": self.config.num_ranks,
            "num_lanes": self._num_lanes,
            "pass": self._pass,
            "epoch_start": self._epoch_start,
            "slot": self._slot,
            "is_over": self._is_over,
            "lanes": dict(self._lanes),
            "stream": self._stream,
        }

    def load_state_dict(self, state: State | Sequence[State]) -> None:
        """Continue from a state, or from the states of all ranks, whose number then does not matter; at any time.

        ValueError, naming what differs, if the state is of another stream.
        """
        states = [state] if isinstance(state, dict) else list(state)
        if not states or not all(isinstance(one, dict) and one.get("version") == VERSION for one in states):
            raise ValueError("load_state_dict takes what state_dict or save_state_rank gave, or a list of these")
        merged = merge_states(states, self.config.this_rank, self.config.num_ranks)
        if self._stream is None:
            self._stream = describe_stream(self._root, self._binding.seed, self._binding.nodes)
        check_stream(merged["stream"], self._stream)
        if self._num_lanes != merged["num_lanes"]:
            self.close()
        self._num_lanes = merged["num_lanes"]
        self._begin_pass(merged["pass"], merged["slot"])
        self._epoch_start = merged["epoch_start"]
        self._is_over = merged["is_over"]
        self._lanes = {number: lane for number, lane in merged["lanes"].items() if self._runs(int(number))}

    def save_state_rank(self) -> State:
        """As `state_dict`, under energon's name."""
        return self.state_dict()

    def restore_state_rank(self, state: State | Sequence[State] | None) -> None:
        """As `load_state_dict`, under energon's name; None does nothing."""
        if state is not None:
            self.load_state_dict(state)

    # Counts of what this rank's workers left out, up to the last batch drawn; since the workers started.

    @property
    def num_failed(self) -> int:
        return sum(failed for failed, _ in self._counts.values())

    @property
    def num_skipped(self) -> int:
        return sum(skipped for _, skipped in self._counts.values())

    def close(self) -> None:
        """Stop the workers."""
        if self._server is not None:
            self._lanes = {str(number): state for number, state in self._server.lane_states().items()}
            self._server = None
        if self._stop is not None:
            self._stop()
            self._stop = None
        self._crew, self._heads = [], {}
        self._is_started = False

    def __enter__(self) -> "Loader[T_co]":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    @property
    def _is_finite(self) -> bool:
        return self._root.size is not None and not self._root.goes_on

    def _next_pass(self) -> None:
        if self._is_finite:
            self._begin_pass(self._pass + 1, self.config.this_rank)
            return
        # The stream just goes on: workers are not even told.
        self._epoch_start = self._slot - self.config.this_rank
        self._is_over = False

    def _begin_pass(self, pass_number: int, slot: int) -> None:
        rank, ranks = self.config.this_rank, self.config.num_ranks
        self._pass = pass_number
        self._slot = slot + (rank - slot) % ranks
        self._epoch_start = 0
        self._lanes, self._heads, self._counts = {}, {}, {}
        self._is_over = self._has_drawn = self._is_started = False
        self._server = None

    def _draw(self) -> Any:
        if self._root.goes_on:
            ranks = self.config.num_ranks
            # Every rank gives as many: what does not go evenly belongs to the next epoch.
            if self._slot - self._epoch_start >= (self._root.size or 0) // ranks * ranks:
                raise StopIteration
        if not self._is_started:
            self._start()
        return self._draw_here() if self.config.num_workers == 0 else self._draw_from_crew()

    def _draw_here(self) -> Any:
        assert self._server is not None
        slot, value = self._server.next()
        failures = self._server.failures
        self._counts[0] = failures.num_failed, failures.num_skipped
        if slot == END:
            raise StopIteration
        self._slot = slot + self.config.num_ranks
        return value

    def _draw_from_crew(self) -> Any:
        num_workers, ranks = self.config.num_workers, self.config.num_ranks
        while True:
            worker = self._slot // ranks % num_workers
            message = self._heads.get(worker)
            if message is None:
                message = self._heads[worker] = self._crew[worker].next()
            if message.slot > self._slot:
                # This slot was left empty; at the end all are.
                if all(worker in self._heads and self._heads[worker].slot == END for worker in range(num_workers)):
                    for number, head in self._heads.items():
                        self._take_state(number, head)
                    raise StopIteration
                self._slot += ranks
                continue
            del self._heads[worker]
            self._take_state(worker, message)
            self._slot += ranks
            return message.value

    def _take_state(self, worker: int, message: Message) -> None:
        for number, state in message.lanes.items():
            self._lanes[str(number)] = state
        self._counts[worker] = message.num_failed, message.num_skipped

    def _start(self) -> None:
        lanes = {int(number): state for number, state in self._lanes.items()}
        if self.config.num_workers == 0:
            self._server = self._make_server(0)()
            self._server.start(self._pass, self._slot, lanes)
        else:
            if not self._crew:
                self._crew = self._hire()
                self._stop = weakref.finalize(self, _close_all, self._crew)
            self._generation += 1
            for worker in self._crew:
                worker.start(Start(self._generation, self._pass, self._slot, lanes))
        self._is_started = True

    def _runs(self, lane: int) -> bool:
        seats = [self.config.seat_of(worker) for worker in range(max(1, self.config.num_workers))]
        return any((lane - seat) % math.gcd(self._num_lanes, self.config.num_seats) == 0 for seat in seats)

    def _make_server(self, worker: int) -> "functools.partial[Server]":
        config = self.config
        seat = config.seat_of(worker)
        handling = (config.failure_tolerance, config.global_error_handler)
        seed, ranks = self._binding.seed, config.num_ranks
        return functools.partial(
            make_server, self._dataset, seed, ranks, self._num_lanes, seat, config.num_seats, handling
        )

    def _hire(self) -> list[Worker]:
        config = self.config
        crew: list[Any] = []
        try:
            for number in range(config.num_workers):
                name = f"worker {number} of rank {config.this_rank}"
                patience = Patience(config.slow_worker_seconds, config.worker_timeout_seconds)
                arguments = (name, self._make_server(number), self._prefetch_factor, patience)
                if config.worker_kind == "thread":
                    crew.append(ThreadWorker(*arguments))
                else:
                    crew.append(ProcessWorker(*arguments, config.start_method, crew))
        except BaseException:
            _close_all(crew)
            raise
        return crew

    def _pinned(self, value: Any) -> Any:
        if hasattr(value, "pin_memory"):
            return value.pin_memory()
        from megatron.blending.collate import map_tensors

        return map_tensors(value, lambda tensor: tensor.pin_memory())


def make_server(
    dataset: SavableDataset[Any], seed: int, ranks: int, num_lanes: int, seat: int, num_seats: int, handling: Any
) -> Server:
    """Make a server where it works."""
    return Server(dataset.bind(Binding(seed, ranks)), num_lanes, seat, num_seats, Failures(*handling))


_ENERGON_ONLY = (
    "cache_pool",
    "checkpoint_every_min_n_samples",
    "checkpoint_every_sec",
    "gc_collect_every_n_steps",
    "gc_freeze_at_start",
    "n_checkpoints",
    "watchdog_initial_timeout_seconds",
    "watchdog_timeout_seconds",
    "fail_on_timeout",
)


def _found_config(dataset: SavableDataset[Any]) -> WorkerConfig | None:
    """The first worker_config in a tree, from the root down."""
    if dataset.worker_config is not None:
        return dataset.worker_config
    return next((found for child in dataset.children if (found := _found_config(child)) is not None), None)


def _may_pin(config: WorkerConfig) -> bool:
    torch = sys.modules.get("torch")
    return config.num_workers > 0 and torch is not None and torch.cuda.is_available()


def _close_all(crew: Sequence[Worker]) -> None:
    for worker in crew:
        worker.close()
