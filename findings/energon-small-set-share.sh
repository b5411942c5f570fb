#!/usr/bin/env bash
# megatron-energon 7.4.1: a small data set loses its share of a blend as ranks are added.
#
# Guess: weights of 0.5 and 0.5 give half of the samples each, on any number of ranks, since small
#   sets repeat.
# Seen: each rank has a fixed range of the small set, and ranks beyond its number of samples have
#   none and draw all from the other: 20 samples of weight 0.5 are 0.51 of what 1, 8 and 16 ranks
#   read, 0.30 on 32, 0.16 on 64. Workers count as ranks do. Nothing warns.
# Here: a blend has one order for all ranks, so a share does not depend on their number
#   (docs/explanation/blending.md).
set -euo pipefail
pins=(torch==2.13.0 megatron-energon==7.4.1 numpy==2.4.6)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/energon_small_set_share.py" <<'PYTHON'
import collections
import json
from pathlib import Path

from megatron.energon import (
    Cooker, DefaultTaskEncoder, TextSample, WorkerConfig, basic_sample_keys, get_loader,
    get_train_dataset, stateless,
)
from megatron.energon.flavors import CrudeJsonlDatasetFactory

for name, count in (("small", 20), ("large", 4000)):
    path = Path(f"{name}.jsonl")
    path.write_text((json.dumps({"text": name}) + "\n") * count)
    CrudeJsonlDatasetFactory.prepare_dataset(path)
Path("blend.yaml").write_text(
    "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
    "      - {weight: 0.5, path: small.jsonl}\n      - {weight: 0.5, path: large.jsonl}\n"
)


@stateless
def cook(sample):
    return TextSample(**basic_sample_keys(sample), text=sample["json"]["text"])


class Encoder(DefaultTaskEncoder):
    cookers = [Cooker(cook)]


shares = {}
for world_size in (1, 16, 32, 64):
    counts = collections.Counter()
    for rank in range(world_size):
        ranks = WorkerConfig(rank=rank, world_size=world_size, num_workers=0)
        dataset = get_train_dataset(
            "blend.yaml", worker_config=ranks, batch_size=None, task_encoder=Encoder(),
            shuffle_buffer_size=None, max_samples_per_sequence=None,
        )
        samples = iter(get_loader(dataset))
        counts.update(next(samples).text for _ in range(1600 // world_size))
    shares[world_size] = counts["small"] / counts.total()
    print("ranks", world_size, "share of the small set", round(shares[world_size], 3), flush=True)
assert 0.45 < shares[1] < 0.55
assert 0.45 < shares[16] < 0.55
assert shares[32] < 0.36
assert shares[64] < 0.2
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore energon_small_set_share.py
