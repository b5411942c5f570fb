#!/usr/bin/env bash
# transformers 5.24.0 (tokenizers 0.23.3): a tokenizer that has once truncated saves that into
# tokenizer.json.
#
# Guess: truncation and padding are arguments of a call; save_pretrained writes the tokenizer as it
#   was loaded.
# Seen: a call with truncation=True, max_length=4, padding="max_length", as a collator makes it, stays
#   in the tokenizer, and tokenizer.json has it. AutoTokenizer resets it; who reads the file by
#   `tokenizers` (Rust servers, data tools) gets 4 tokens of each text, or pads to 4, without a word.
# Here: `--save-hf` copies the tokenizer's files; a file that truncates is read without
#   (megatron/sft/data/tokenizer_folder.py).
set -euo pipefail
pins=(transformers==5.24.0 tokenizers==0.23.3)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/transformers_saved_truncation.py" <<'PYTHON'
import json
import tokenizers
import transformers

transformers.logging.set_verbosity_error()
text = "hello the sea and the sun"
alone = tokenizers.Tokenizer(tokenizers.models.BPE())
alone.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=280, initial_alphabet=alphabet, special_tokens=["<pad>"]
)
alone.train_from_iterator([text], trainer)
length = len(alone.encode(text).ids)
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=alone, pad_token="<pad>")
tokenizer([text] * 2, truncation=True, max_length=4, padding="max_length")
tokenizer.save_pretrained("saved")
with open("saved/tokenizer.json") as file:
    kept = json.load(file)
raw = tokenizers.Tokenizer.from_file("saved/tokenizer.json")
again = transformers.AutoTokenizer.from_pretrained("saved")
print(f"{length} tokens; of the saved file: tokenizers {len(raw.encode(text).ids)}, AutoTokenizer "
      f"{len(again.encode(text))}; truncation {kept['truncation']}")
assert length > 4 and len(raw.encode(text).ids) == 4 and len(again.encode(text)) == length
assert kept["truncation"]["max_length"] == 4 and kept["padding"] is not None
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore transformers_saved_truncation.py
