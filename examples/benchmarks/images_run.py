"""mcore. What two processes of `images` measure: steps of the toy model of examples/multimodal,
scheduled by the costs that were fitted before, or by those of tokens alone.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

from megatron.packing import plugin
from megatron.packing.batch.layout import Alignment, PackLayout
from megatron.packing.batch.microbatches import layout_microbatches
from megatron.packing.model.get_batch import packed_seq_params
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.fitted_cost import Point, fit_pack_cost
from megatron.packing.scheduling.payload_cost import PayloadCost
from megatron.packing.step.global_batch import schedule_global_batch
from megatron.packing.step.groups import data_groups
from megatron.packing.step.payloads import PayloadStore
from megatron.packing.step.prefetch import Prefetcher
from megatron.packing.step.settings import PackingOptions
from megatron.sft.model import cpu_support

sys.path.append(str(Path(__file__).parents[1] / "multimodal"))

STEPS, PER_RANK, WIDTH, CAPACITY = 6, 12, 256, 4096
NOTHING = PayloadCost(linear=0.0)
REPEATS = 3


class Source(Iterator[dict[str, Any]]):
    """Random samples of a rank; any of them can be made again by its number."""

    def __init__(self, rank: int) -> None:
        self._numbers = itertools.count(rank, 2)

    def __next__(self) -> dict[str, Any]:
        return self.restore_sample(next(self._numbers))

    def restore_sample(self, number: int) -> dict[str, Any]:
        """Returns sample `number`: six in ten are text, the others have 1 to 5 images."""
        rng = np.random.default_rng(number)
        is_text = rng.random() < 0.6
        words = int(np.clip(np.exp(rng.normal(5.8, 0.9)), 16, 2048)) if is_text else 100
        sides: Any = [] if is_text else 8 * rng.integers(8, 21, (rng.integers(1, 6), 2))
        images = [torch.from_numpy(rng.random((3, *side), np.float32)) for side in sides]
        counts = [int(image[0].numel() // 64) for image in images]
        tokens = np.concatenate((np.full(sum(counts), 256), rng.integers(0, 256, words)))
        sample: dict[str, Any] = {
            "tokens": tokens,
            "loss_mask": np.arange(tokens.size) >= sum(counts),
            "position_ids": np.tile(np.arange(tokens.size), (3, 1)),
        }
        if images:
            sample |= {
                "payloads": {"pixels": images},
                "costs": {"vision": [4 * count for count in counts]},
                "payload_key": number,
            }
        return sample


def process(rank: int, store: str, results: Any) -> None:
    """Runs in each of two processes."""
    torch.set_num_threads(1)
    file_store = dist.FileStore(store, 2)
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=2)
    cpu_support.install()
    parallel_state.initialize_model_parallel()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    fitted = _fitted()
    dist.broadcast_object_list(fitted, src=0)
    results[f"fitted {rank}"] = fitted
    for name, seconds in _trained(rank, groups, *fitted).items():
        results[f"{name} {rank}"] = seconds
    for name, least in (("keys", 0), ("tensors", 1 << 60)):
        results[f"{name} {rank}"] = _moved(rank, groups, least)
    for name, bound in (("no bound", 1 << 60), ("bound of 6 MiB", 6 << 20)):
        results[f"{name} {rank}"] = _waiting(rank, groups, bound)


def _config(payloads: PayloadStore, cost: PackCost | None = None) -> Any:
    import train

    arguments = SimpleNamespace(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1
    )
    config: Any = train.config_of(arguments)  # type: ignore[arg-type]
    config.max_seqlen_per_dp_cp_rank = CAPACITY
    config.sequence_packing_scheduler = "default"
    config.sequence_packing_options = PackingOptions(payloads=payloads, cost=cost)
    return config


def _model(config: Any, groups: Any) -> Any:
    import train

    torch.manual_seed(1)
    gpt = train.model_of(config, groups)
    gpt.tower.tower = train.ToyTower(config.hidden_size, WIDTH)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)


def _seconds(function: Any) -> float:
    """Returns the least CPU time of a few calls."""

    def once() -> float:
        start = time.process_time()
        function()
        return time.process_time() - start

    return min(once() for _ in range(REPEATS))


def _fitted() -> list[Any]:
    """Returns the costs of packs and of images, in seconds of this process."""

    config = _config(PayloadStore())
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with plugin.install(config):
        gpt = unwrap_model(_model(config, groups))
        tower = gpt.tower.tower
    points = []
    for count, length in ((1, 1), (1, 256), (1, 1024), (1, 2048), (4, 512), (8, 256), (2, 2048)):
        layout = PackLayout.of([length] * count, Alignment())
        params = packed_seq_params(layout_microbatches([layout])[0], torch.device("cpu"))
        tokens = torch.zeros(1, count * length, dtype=torch.int64)
        positions = torch.zeros(3, 1, count * length, dtype=torch.int64)

        def step() -> None:
            gpt(
                tokens,  # noqa: B023
                positions,  # noqa: B023
                None,
                labels=tokens,  # noqa: B023
                packed_seq_params=params,  # noqa: B023
            ).sum().backward()

        points.append(Point(num_sequences=count, sequence_length=length, seconds=_seconds(step)))
    sides = (64, 96, 128, 160)
    images = [torch.rand(3, side, side) for side in sides]
    times = [_seconds(lambda one=one: tower([one]).sum().backward()) for one in images]
    patches = np.array([side * side // 16 for side in sides], float)
    factors = np.linalg.lstsq(np.stack((patches, patches**2), 1), np.array(times), rcond=None)[0]
    linear, quadratic = np.maximum(factors, 0).tolist()
    return [
        fit_pack_cost(points[1:], points[0]).cost,
        PayloadCost(linear=linear, quadratic=quadratic),
    ]


def _trained(
    rank: int, groups: Any, cost: PackCost, of_images: PayloadCost
) -> dict[str, list[float]]:
    """Returns CPU seconds of this process in each step, by the way that it was scheduled."""
    import train

    ways: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {}
    for name, its in (("tokens alone", NOTHING), ("true cost", of_images)):
        config = _config(PayloadStore(costs={"vision": its}), cost)
        plugin.install(config)
        ways[name] = _model(config, groups), Source(rank)
    for _ in range(STEPS):  # in turns, so that both find the machine as busy
        for name, (model, loader) in ways.items():
            model.zero_grad_buffer()
            start = time.process_time()
            get_forward_backward_func()(
                forward_step_func=train.forward_step,
                data_iterator=loader,
                model=model,
                num_microbatches=PER_RANK,
                seq_length=1,
                micro_batch_size=1,
            )
            seconds.setdefault(name, []).append(time.process_time() - start)
    plugin.uninstall()
    return seconds


def _store(**options: Any) -> PayloadStore:
    return PayloadStore(costs={"vision": PayloadCost(linear=1e6)}, **options)


def _moved(rank: int, groups: Any, least: int) -> tuple[int, int, int, int]:
    """Returns, over all steps, bytes moved, payloads, tokens moved, and the most bytes held."""
    config, loader = _config(_store(min_bytes_by_key=least)), Source(rank)
    steps = [schedule_global_batch(loader, config, PER_RANK, groups).stats for _ in range(STEPS)]
    return (
        sum(stats.moved_payload_bytes for stats in steps),
        sum(stats.payloads for stats in steps),
        sum(stats.moved_tokens for stats in steps),
        max(stats.payload_bytes for stats in steps),
    )


def _waiting(rank: int, groups: Any, bound: int) -> tuple[int, int]:
    """Returns the most bytes of images that wait with 4 global batches prepared ahead, and the most
    batches that do.
    """
    config, loader = _config(_store()), Source(rank)
    data_groups(groups)
    made: list[int] = []

    def prepare() -> Any:
        batch = schedule_global_batch(loader, config, PER_RANK, groups)
        made.append(batch.stats.payload_bytes)
        return batch

    batches = Prefetcher(
        prepare, 4, size_of=lambda batch: batch.stats.payload_bytes, max_waiting=bound
    )
    most = ahead = 0
    for asked in range(1, STEPS + 1):
        next(batches)
        batches.settle()
        most, ahead = max(most, batches.waiting_bytes), max(ahead, len(made) - asked)
    batches.close()
    return most, ahead
