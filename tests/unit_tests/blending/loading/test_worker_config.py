"""Which rank this is, without torch.distributed unless it is there."""

import random
import sys
from types import SimpleNamespace

import pytest

from megatron.blending.encoding.cooking import Cooker
from megatron.blending.encoding.default_encoder import DefaultTaskEncoder
from megatron.blending.encoding.seeding import stateless, with_seeds
from megatron.blending.loading.load import get_train_dataset
from megatron.blending.loading.loader import get_loader
from megatron.blending.loading.worker_config import WorkerConfig
from megatron.blending.streams.datasets import BatchDataset, MapDataset
from tests.unit_tests.blending.number_streams import leaf


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
    assert (WorkerConfig(rank=0, world_size=2).rank, WorkerConfig(rank=0, world_size=2).world_size) == (0, 2)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"rank": 2, "world_size": 2}, r"rank must be in range\(2\), but is 2"),
        ({"rank": 0}, "rank and world_size must be given together"),
        ({"num_workers": -1}, "num_workers must be at least 0, but is -1"),
        ({"num_lanes": 0}, "num_lanes must be at least 1"),
        ({"worker_kind": "proces"}, "worker_kind must be one of process, thread, .* did you mean 'process'"),
        ({"global_error_handler": 3}, "global_error_handler must be a function, but is 3"),
        ({"start_method": "clone"}, "start_method must be one of"),
    ],
)
def test_refused(options, fault):
    with pytest.raises(ValueError, match=fault):
        WorkerConfig(**options)


@stateless(restore_seeds=True)
def draw(sample):
    return (*sample, random.random())


def test_threads_refuse_functions_that_are_seeded(tmp_path):
    """The generators are those of the process: batches differed from run to run, and the training loop's own random
    numbers with them.
    """
    told = r"draw is marked @stateless\(restore_seeds=True\).*; use worker_kind='process', or num_workers=0"
    tree = BatchDataset(MapDataset(leaf("a", 20), with_seeds(draw)), 4)
    with pytest.raises(ValueError, match=told):
        get_loader(tree, WorkerConfig(num_workers=2, worker_kind="thread"))
    get_loader(tree, WorkerConfig(num_workers=0, worker_kind="thread"))
    get_loader(tree, WorkerConfig(num_workers=2))

    class Cooking(DefaultTaskEncoder):
        cookers = (Cooker(draw),)

    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    cooked = get_train_dataset(tmp_path / "a.jsonl", batch_size=1, task_encoder=Cooking())
    with pytest.raises(ValueError, match=told):
        get_loader(cooked, WorkerConfig(num_workers=1, worker_kind="thread"))
