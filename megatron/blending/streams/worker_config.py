"""pure. A WorkerConfig says which part of the stream this process takes, and how it is worked
on."""

import copy
import hashlib
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.blending.arguments import check_function, check_one_of, check_whole, shown
from megatron.blending.streams.failures import DEFAULT_TOLERANCE

START_METHODS = ("fork", "spawn", "forkserver")
_WITHOUT_EFFECT = ("restore_error_handler", "worker_debug_path", "worker_log_level")
_LEAST = {
    "rank": -math.inf,
    "world_size": -math.inf,
    "num_workers": 0,
    "seed": -math.inf,
    "seed_offset": -math.inf,
    "failure_tolerance": 0,
}
"""Whole numbers, and the least that each may be."""


@dataclass(frozen=True)
class WorkerConfig:
    """A data-parallel rank and its worker processes.

    The stream of samples is the same for any numbers of ranks and workers.
    """

    rank: int | None = None
    """None: from torch.distributed, if that is imported and initialised, else 0."""
    world_size: int | None = None
    """None: likewise, else 1."""
    num_workers: int = 0
    """0: the calling process does the work, when it asks for a batch."""
    data_parallel_group: Any = None
    """Process group that rank and world size are taken from; None: all processes."""
    seed: int = 0
    """Seed of the order of everything; and, with rank, worker and where it begins, of the random
    numbers that a worker process draws in functions that are not `@stateless(restore_seeds=True)`.
    """
    seed_offset: int = 0
    """Is added to the seed."""
    failure_tolerance: int = DEFAULT_TOLERANCE
    """Failures of a function in a row that are fatal; 0: none is.
    `@stateless(failure_tolerance=...)` wins.
    """
    global_error_handler: Callable[[Exception, Any, Any], None] | None = None
    """Called with (error, sample or list of samples, list of SourceInfo or None) in place of the
    log, for a sample that failed; what it raises is fatal.
    """
    restore_error_handler: Any = None
    worker_debug_path: str | None = None
    worker_log_level: int = 0
    """Options of energon's, like the two after it, without effect: a sample that is read again is
    handled as any other, and what fails is in the log `megatron.blending` of the rank.
    """
    start_method: str | None = None
    """Start method of processes: "fork", "spawn" or "forkserver"; None: fork where there is one."""
    slow_worker_seconds: float = 10.0
    """A worker that gives nothing for so long is named in the log, with where it stands."""
    worker_timeout_seconds: float = 600.0
    """A worker that gives nothing for so long is an error."""

    active_worker_config: ClassVar["WorkerConfig | None"] = None
    """Config of this worker process's loader; in a rank without workers, of the last loader."""
    _worker: ClassVar[int] = 0
    """Number of this process among the workers of its rank."""

    def __post_init__(self) -> None:
        if (self.rank is None) != (self.world_size is None):
            raise ValueError("rank and world_size must be given together, or neither")
        if self.rank is None:
            # Asked only here: a group that comes with its rank may be of a kind that
            # torch.distributed does not know.
            rank, world_size = _distributed(self.data_parallel_group)
            object.__setattr__(self, "rank", rank)
            object.__setattr__(self, "world_size", world_size)
        self._check_numbers()
        if self.global_error_handler is not None:
            check_function("global_error_handler", self.global_error_handler)
        for name in _WITHOUT_EFFECT:
            if getattr(self, name):
                warnings.warn(f"WorkerConfig: {name} has no effect here", stacklevel=3)
        if self.start_method is not None:
            check_one_of("start_method", self.start_method, START_METHODS)

    def _check_numbers(self) -> None:
        for name, least in _LEAST.items():
            check_whole(name, getattr(self, name), least)
        if self.rank not in range(self.num_ranks):
            raise ValueError(f"rank must be in range({self.num_ranks}), but is {self.rank}")
        for name in ("slow_worker_seconds", "worker_timeout_seconds"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name} must be a number above 0, but is {shown(value)}")

    @classmethod
    def default_worker_config(
        cls, num_workers: int = 4, data_parallel_group: object = None
    ) -> "WorkerConfig":
        return cls(num_workers=num_workers, data_parallel_group=data_parallel_group)

    @property
    def this_rank(self) -> int:
        return self.rank or 0

    @property
    def num_ranks(self) -> int:
        return 1 if self.world_size is None else self.world_size

    def global_rank(self) -> int:
        """Returns this rank's number among all processes, not among the data-parallel ranks."""
        if "_global_rank" in vars(self):
            return int(vars(self)["_global_rank"])
        if self.data_parallel_group is None:
            return self.this_rank
        distributed = sys.modules["torch.distributed"]
        return int(distributed.get_global_rank(self.data_parallel_group, self.this_rank))

    def rank_worker_id(self) -> int:
        """Returns this process' number among the workers of its rank; 0 in the rank itself."""
        return WorkerConfig._worker

    def global_worker_id(self, override_local_worker_id: int | None = None) -> int:
        """Returns the number of a worker, by default this one, where each rank's follow the ones of
        the rank before.
        """
        chosen = override_local_worker_id
        return self.this_rank * self.num_workers + (
            self.rank_worker_id() if chosen is None else chosen
        )

    def worker_seed(self, override_local_worker_id: int | None = None) -> int:
        """Returns a number of 32 bits that differs by worker and `seed_offset`, energon's own.

        What is drawn with it depends on the number of workers; that of a function with
        `@stateless(restore_seeds=True)` does not.
        """
        worker = self.global_worker_id(override_local_worker_id)
        worker = worker if self.num_workers else self.this_rank
        digest = hashlib.sha1(f"{worker},{self.seed_offset}".encode()).digest()
        return int.from_bytes(digest[-4:], "big")

    def worker_activate(self, sample_index: int = 0, **_: object) -> None:
        """Makes this the `active_worker_config`; loaders do so by themselves."""
        WorkerConfig.active_worker_config = self

    def worker_deactivate(self) -> None:
        """Makes none the `active_worker_config`."""
        WorkerConfig.active_worker_config = None

    def assert_worker(self) -> None:
        """Returns; any process may iterate."""

    def should_log(self, level: int) -> bool:
        """Returns False: nothing is written to `worker_debug_path`."""
        return False

    def in_worker(self) -> "WorkerConfig":
        """Returns the part for a worker process: no process group, which it could not use."""
        copied = copy.copy(self)
        object.__setattr__(copied, "_global_rank", self.global_rank())
        object.__setattr__(copied, "data_parallel_group", None)
        object.__setattr__(copied, "global_error_handler", None)
        return copied


def check_worker_config(value: object) -> None:
    if not isinstance(value, WorkerConfig):
        raise ValueError(
            f"worker_config must be a WorkerConfig, but is {shown(value)}; write "
            "WorkerConfig(num_workers=...)"
        )


def _distributed(group: object) -> tuple[int, int]:
    """Returns (rank, world size) of torch.distributed, which is not imported for it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(group), distributed.get_world_size(group)
