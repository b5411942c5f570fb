#!/usr/bin/env bash
# datasets 5.2.0: numbers of calls lose their digits when JSON is loaded, 1e-12 becomes 0.0.
#
# Guess: load_dataset("json") keeps each number as JSON has it, a float64, whatever stands beside it.
# Seen: where records have objects of unlike keys, as arguments of unlike tools, the column becomes
#   Json, and numbers in it are rounded to ten places: 12.345678901234567 is 12.3456789012, and
#   1e-12 is 0.0. With the same keys in each record all digits stay. to_json and to_parquet write
#   what was rounded. Nothing warns.
# Here: the trainer reads the JSON itself and keeps all digits; give it the file from before
#   load_dataset (docs/reference/data.md, Records from tables).
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
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/rounded_arguments.py" <<'PYTHON'
import json
from pathlib import Path

import datasets

datasets.disable_progress_bars()
PLACE, RATE = 12.345678901234567, 1e-12


def load(name, *arguments):
    Path(name).write_text("".join(json.dumps({"arguments": one}) + "\n" for one in arguments))
    chats = datasets.load_dataset("json", data_files=name, split="train", cache_dir="cache")
    print(f"{chats.features['arguments']}: {chats[0]['arguments']}")
    return chats[0]["arguments"]


first = {"latitude": PLACE, "rate": RATE}
assert load("alike.jsonl", first, {"latitude": 1.5, "rate": 0.5}) == first
assert load("unlike.jsonl", first, {"city": "Rome"}) == {"latitude": 12.3456789012, "rate": 0.0}
PYTHON
cd "$scratch"
"$environment/bin/python" rounded_arguments.py
