"""pure. A training loop gets its loader here."""

from typing import Any, TypeVar

from megatron.blending.arguments import check_no_more
from megatron.blending.energon._loading.rank_loader import Loader
from megatron.blending.streams.node import SavableDataset
from megatron.blending.streams.worker_config import WorkerConfig

__all__ = ["Loader", "WorkerConfig", "get_loader", "get_savable_loader"]

T_co = TypeVar("T_co", covariant=True)

# What energon's take besides, for which there is no need here.
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


def get_loader(
    dataset: SavableDataset[T_co],
    worker_config: WorkerConfig | None = None,
    *,
    prefetch_factor: int = 2,
    pin_memory: bool | None = None,
    **ignored: object,
) -> "Loader[T_co]":
    """Returns an iterable over this rank's batches.

    Of endless data each `for` continues where the last one stopped; of finite data each is a new
    pass. `worker_config`: by default that of the data sets, else one without workers.
    `prefetch_factor`: batches that each worker makes ahead. `pin_memory`: None where there is CUDA,
    and workers.
    """
    check_no_more("get_loader", ignored, _ENERGON_ONLY)
    return Loader(dataset, worker_config, prefetch_factor, pin_memory)


def get_savable_loader(
    dataset: SavableDataset[T_co], worker_config: WorkerConfig | None = None, **options: Any
) -> "Loader[T_co]":
    """Returns a loader as `get_loader` does, in which a `for` over finite data continues where the
    last one stopped.
    """
    loader = get_loader(dataset, worker_config, **options)
    loader.is_savable = True
    return loader


SavableDataset.make_loader = staticmethod(get_loader)
