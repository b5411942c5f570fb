#!/usr/bin/env bash
# datasets 5.2.0: map turns a later text into a number: '007' becomes 7.
#
# Guess: the column's type is that of the first batch; a row of another type raises, as a float in
#   a column of integers does.
# Seen: a function that returns integers first and text later has its text parsed: '007' is 7. The
#   other way round numbers become text. Only 1.7 among integers raises. In 100 rows it is the
#   same.
# Here: answers are read from the records, before any map.
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
cat >"$scratch/datasets_map_parses_text.py" <<'PYTHON'
import datasets

datasets.disable_progress_bars()


def answers(num_rows, first, later):
    """Returns the last answer: `first` in all rows but the last 50."""
    rows = datasets.Dataset.from_dict({"row": list(range(num_rows))})
    try:
        found = rows.map(lambda one: {"answer": first if one["row"] < num_rows - 50 else later})
        return found[-1]["answer"]
    except Exception as error:
        return type(error).__name__


large = {(first, later): answers(1100, first, later) for first, later in ((7, "007"), ("7", 7), (7, 1.7))}
small = answers(100, 7, "007")
print("1,100 rows:", large, "100 rows:", small)
assert small == large[7, "007"] == 7 and large["7", 7] == "7" and large[7, 1.7] == "ArrowInvalid"
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore datasets_map_parses_text.py
