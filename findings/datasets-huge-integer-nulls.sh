#!/usr/bin/env bash
# datasets 5.2.0: one integer of 2^64 fills all objects of a file with nulls, and rounds its column.
#
# Guess: an integer that 64 bits do not hold is refused, or kept as text or float in its row.
# Seen: objects of unlike keys are kept as they are since datasets 5 (JSON columns). With one
#   integer above 2^63 in any column another reader takes the file: each object gets the keys of
#   all others with null, and the integer's column becomes float, so that 2^53 + 1 of another row
#   is rounded, too.
# Here: records are read from the file itself; nulls in calls of a table are counted in a line
#   (megatron/sft/data/record_notes.py).
set -euo pipefail
pins=(datasets==5.2.0 pyarrow==26.0.1)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/datasets_huge_integer_nulls.py" <<'PYTHON'
import json
import datasets

datasets.disable_progress_bars()


def load(name, large):
    rows = [{"id": 2**53 + 1, "call": {"city": "Paris"}}, {"id": large, "call": {"days": 2}}]
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return datasets.load_dataset("json", data_files=name, split="train", cache_dir="cache")[:]


small, large = load("small.jsonl", 7), load("large.jsonl", 2**64 + 1)
print("with 7:       ", small)
print("with 2^64 + 1:", large)
assert small["id"] == [2**53 + 1, 7]
assert large["id"] == [2.0**53, 2.0**64]
assert large["call"] == [{"city": "Paris", "days": None}, {"city": None, "days": 2}]
assert small["call"] == [{"city": "Paris"}, {"days": 2}]
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore datasets_huge_integer_nulls.py
