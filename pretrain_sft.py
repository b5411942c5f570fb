"""Fine-tune a GPT on sequences of any lengths: torchrun --nproc-per-node 2 pretrain_sft.py --help"""

from __future__ import annotations

import faulthandler
import signal
import sys
import time
from pathlib import Path

from megatron.sft.config import SFTConfig, parse_config
from megatron.sft.environment import quiet, world_from_environment
from megatron.sft.flags import FlagError, exit_with


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # kill -USR1 shows where a rank stands
    rank, world_size = world_from_environment()
    try:
        config = parse_config(sys.argv[1:], world_size)
    except FlagError as failure:
        exit_with(str(failure), rank)
    quiet(rank)
    run(config, rank)


def run(config: SFTConfig, rank: int) -> None:
    # Imported here, so that a wrong flag is answered at once: megatron-core takes seconds.
    from megatron.packing.lengths import GlobalBatchError
    from megatron.sft.data import build_datasets
    from megatron.sft.distributed import process_groups
    from megatron.sft.report import report
    from megatron.sft.train import Trainer, make_folders

    run_dir = Path(config.output.run_dir or config.output.save or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        make_folders(config.output.save, str(run_dir))
        datasets = build_datasets(config)
        with process_groups(config) as device:
            trainer = Trainer(config, datasets, device, run_dir)
            trainer.train()
    except (ValueError, GlobalBatchError) as failure:
        exit_with(str(failure), rank)
    if rank == 0 and trainer.progress.iteration:
        report(run_dir)


if __name__ == "__main__":
    main()
