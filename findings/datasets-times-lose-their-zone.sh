#!/usr/bin/env bash
# datasets 5.2.0: a file whose texts all are times is read as times, converted to UTC without saying so.
#
# Guess: a JSON string stays a string.
# Seen: where each text of a column is an ISO time, contents of messages included, the column is
#   timestamp[s]: 2026-11-28T10:00:00+02:00 becomes 08:00:00 without a zone, and a date becomes
#   midnight. Written again by to_json the text is another one. One text of another kind in the
#   first 10 MB keeps the column as text, so a sample of the same data may look right.
# Here: datetimes are written as ISO text, and a line names columns whose times are spelled as
#   tables spell them (megatron/sft/data/record_notes.py).
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
cat >"$scratch/datasets_times_lose_their_zone.py" <<'PYTHON'
import datetime
import json
import datasets

datasets.disable_progress_bars()


def load(name, answers):
    with open(name, "w") as file:
        for text in answers:
            file.write(json.dumps({"messages": [{"role": "assistant", "content": text}]}) + "\n")
    found = datasets.load_dataset("json", data_files=name, split="train", cache_dir="cache")
    return [messages[0]["content"] for messages in found["messages"]]


times = ["2026-11-28T10:00:00+02:00", "2026-11-28"]
alone, beside = load("alone.jsonl", times), load("beside.jsonl", [*times, "soon"])
print("times alone:     ", alone)
print("and another text:", beside)
assert alone == [datetime.datetime(2026, 11, 28, 8), datetime.datetime(2026, 11, 28)]
assert beside == [*times, "soon"]
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore datasets_times_lose_their_zone.py
