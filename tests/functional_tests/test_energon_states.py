"""States of all ranks in one place, as energon's users save them: gathered and sent over
torch.distributed.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.blending.energon import WorkerConfig, get_savable_loader, get_train_dataset
from tests.functional_tests.ranks import run_ranks


def saved(path: str) -> tuple[Any, list[str]]:
    """Draw five, save on the last rank, and return what the loader goes on with."""
    group = dist.new_group([0, 1, 2])
    loader = get_savable_loader(
        get_train_dataset(path), WorkerConfig(num_workers=0, data_parallel_group=group)
    )
    list(islice(loader, 5))
    states = loader.save_state_global(2)
    return states, [sample["__key__"] for sample in islice(loader, 4)]


def restored(path: str, states: Any) -> list[str]:
    loader = get_savable_loader(get_train_dataset(path), WorkerConfig(num_workers=0))
    loader.restore_state_global(states if dist.get_rank() == 1 else None, src_rank=1)
    return [sample["__key__"] for sample in islice(loader, 6)]


def test_states_of_all_ranks(tmp_path: Path) -> None:
    """Three ranks save on the last; two go on with the same stream, sent by the second."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"n": {n}}}\n' for n in range(50)))
    found = run_ranks(saved, 3, str(path))
    assert [states is None for states, _ in found] == [True, True, False]
    again = run_ranks(restored, 2, str(path), found[2][0])
    stream = [keys[turn] for turn in range(4) for _, keys in found]
    assert [keys[turn] for turn in range(6) for keys in again] == stream
