#!/usr/bin/env bash
# datasets 5.2.0: to_json writes ten decimals of a float, and times as milliseconds.
#
# Guess: Dataset.to_json keeps the numbers of the table, as to_parquet does; json.dumps would.
# Seen: pandas writes them with ten decimals. 1/3 loses six digits, 1e-12 becomes 0.0, log-probabilities
#   of a reference model and arguments of calls alike, and a time becomes an integer of milliseconds.
#   Integers keep their digits. Nothing warns.
# Here: nothing can be seen in the file: use to_parquet, which is read as it is
#   (examples/benchmarks/results/tables.md).
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
cat >"$scratch/datasets_writes_ten_digits.py" <<'PYTHON'
import datetime
import json
import datasets

datasets.disable_progress_bars()
row = {"third": 1 / 3, "small": 1e-12, "whole": 2**62 + 1,
       "time": datetime.datetime(2024, 1, 2, 3, 4, 5, 123456)}
table = datasets.Dataset.from_list([row])
table.to_json("rows.jsonl")
table.to_parquet("rows.parquet")
with open("rows.jsonl") as file:
    written = json.loads(file.readline())
kept = datasets.load_dataset("parquet", data_files="rows.parquet", split="train", cache_dir="cache")[0]
print("to_json:", written)
assert written == {"third": 0.3333333333, "small": 0.0, "whole": 2**62 + 1, "time": 1704164645123}
assert kept == row
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore datasets_writes_ten_digits.py
