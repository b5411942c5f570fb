"""mcore. The loader of a data rank: a blend of image data sets, sample by sample.

It is its own iterator, can be saved, and restores any sample by its key, so that images that
another rank trains travel as keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dataset_helpers import ImageTaskEncoder
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.blending.energon import WorkerConfig, get_savable_loader, get_train_dataset
from megatron.packing.step.groups import is_data_rank


def train_loader(path: Path, groups: ProcessGroupCollection, num_workers: int = 0) -> Any:
    """Returns this rank's loader; None on ranks that load no data.

    Args:
        path: a metadataset, or a folder that energon prepared.
        groups: megatron-core's `tp`, `cp`, `pp` and `dp`.
    """
    if not is_data_rank(groups):
        return None
    config = WorkerConfig(
        rank=groups.dp.rank(), world_size=groups.dp.size(), num_workers=num_workers
    )
    dataset = get_train_dataset(path, worker_config=config, task_encoder=ImageTaskEncoder())
    return get_savable_loader(dataset, worker_config=config)
