"""Which rank this is, without torch.distributed unless it is there."""

import sys
from types import SimpleNamespace

import pytest

from megatron.blending.streams.worker_config import WorkerConfig


def test_alone_without_torch_distributed(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    config = WorkerConfig()
    assert (config.rank, config.world_size, config.num_workers) == (0, 1, 0)
    assert "torch.distributed" not in sys.modules


def test_from_torch_distributed_and_its_group(monkeypatch):
    distributed = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda group: 7 if group is None else group,
        get_world_size=lambda group: 8 if group is None else 4,
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    assert (WorkerConfig().rank, WorkerConfig().world_size) == (7, 8)
    config = WorkerConfig.default_worker_config(2, data_parallel_group=3)
    assert (config.rank, config.world_size, config.num_workers) == (3, 4, 2)
    assert (
        WorkerConfig(rank=0, world_size=2).rank,
        WorkerConfig(rank=0, world_size=2).world_size,
    ) == (0, 2)


def test_a_group_that_comes_with_its_rank_is_not_asked(monkeypatch):
    """Trainers with process groups of their own kind give rank and size beside the group."""
    distributed = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda group: 1 / 0
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    config = WorkerConfig(rank=1, world_size=2, num_workers=3, data_parallel_group="group")
    assert (config.rank, config.world_size, config.num_workers) == (1, 2, 3)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"rank": 2, "world_size": 2}, r"rank must be in range\(2\), but is 2"),
        ({"rank": 0}, "rank and world_size must be given together"),
        ({"num_workers": -1}, "num_workers must be at least 0, but is -1"),
        ({"global_error_handler": 3}, "global_error_handler must be a function, but is 3"),
        ({"start_method": "clone"}, "start_method must be one of"),
    ],
)
def test_refused(options, fault):
    with pytest.raises(ValueError, match=fault):
        WorkerConfig(**options)
