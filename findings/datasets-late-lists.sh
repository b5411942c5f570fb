#!/usr/bin/env bash
# datasets 5.2.0: one late list of parts puts quotes around the text of thousands of other turns.
#
# Guess: load_dataset("json") of chats whose last record has content as a list of parts raises, or
#   keeps that list as a list, as it does where the file is small.
# Seen: a file is read in blocks of 10 MB. The first has text, so the column stays text, and the
#   block with the list becomes JSON text as a whole: the list is the text '[{"type": ...}]', and
#   each plain answer beside it, x, is '"x"' with quotes in it. Of 20,001 records one has a list,
#   and 8,166 are changed. Nothing warns. In a file of one block all of them stay as they were.
# Here: before the first step the last records of each source are looked at, too, and a line counts
#   those whose content is such text (megatron/sft/data/record_notes.py).
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
cat >"$scratch/late_lists.py" <<'PYTHON'
import json

import datasets

datasets.disable_progress_bars()


def load(name, num_plain):
    """Chats of 900 bytes with an answer of text, and a last one with a list of parts."""
    def line(question):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "x" * 400}]
        return json.dumps({"messages": turns}) + "\n"

    with open(name, "w") as file:
        file.writelines(line("q" * 400) for _ in range(num_plain))
        file.write(line([{"type": "text", "text": "hi"}]))
    return datasets.load_dataset("json", data_files=name, split="train", cache_dir="cache")


small, large = load("small.jsonl", 3), load("large.jsonl", 20_000)
for name, chats in (("4 records", small), ("20,001 records", large)):
    answers = [chat["messages"][1]["content"] for chat in chats]
    quoted = sum(answer == '"' + "x" * 400 + '"' for answer in answers)
    last = chats[-1]["messages"][0]["content"]
    print(f"{name}: the last question is {last!r}; {quoted:,} answers have quotes around them")
assert small[-1]["messages"][0]["content"] == [{"type": "text", "text": "hi"}]
assert all(chat["messages"][1]["content"] == "x" * 400 for chat in small)
assert last == '[{"type":"text","text":"hi"}]'
assert 5_000 < quoted < 15_000
PYTHON
cd "$scratch"
"$environment/bin/python" late_lists.py
