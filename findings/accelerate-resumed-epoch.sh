#!/usr/bin/env bash
# accelerate 1.15.0: an epoch that is resumed as documented trains other samples.
#
# Guess: save_state in the middle of an epoch; later load_state and skip_first_batches give the batches
#   that were left.
# Seen: the order of an epoch is drawn from torch's generator at its start, and load_state brings back
#   the generator of the middle. The resumed epoch has another order, of which the first batches are
#   skipped: some samples are trained again, others never, also where set_seed gets the same number.
#   With it, DataLoaderConfiguration(use_seedable_sampler=True) gives the rest; it is off by default.
# Here: a stream's state is a position, and the order a function of (seed, epoch, index)
#   (megatron/blending/order).
set -euo pipefail
pins=(torch==2.13.0 accelerate==1.15.0)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/accelerate_resumed_epoch.py" <<'PYTHON'
import accelerate
import torch
from accelerate.utils import DataLoaderConfiguration, set_seed


def prepared(seedable):
    set_seed(0)
    runner = accelerate.Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable)
    )
    loader = torch.utils.data.DataLoader(list(range(20)), batch_size=2, shuffle=True)
    return runner, runner.prepare(loader)


def resumed(seedable):
    """The batches that were left after four, and what a resumed run gives."""
    runner, loader = prepared(seedable)
    left = []
    for number, batch in enumerate(loader):
        if number == 3:
            runner.save_state("state")
        if number > 3:
            left += batch.tolist()
    runner, loader = prepared(seedable)
    runner.load_state("state")
    return left, [one for batch in runner.skip_first_batches(loader, 4) for one in batch.tolist()]


left, rest = resumed(False)
lost = sorted(set(left) - set(rest))
print(f"left {left}, resumed {rest}: never trained in this epoch {lost}, "
      f"twice {sorted(set(rest) - set(left))}")
assert len(lost) >= 2 and len(rest) == len(left)
left, rest = resumed(True)
print("with use_seedable_sampler:", rest == left)
assert rest == left
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore accelerate_resumed_epoch.py
