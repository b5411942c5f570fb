#!/usr/bin/env bash
# transformers 5.24.0 (sentencepiece 0.2.3): LlamaTokenizer takes the pieces of a tokenizer.model, and
# not its rules.
#
# Guess: from_pretrained of a folder with a SentencePiece model (BPE, byte fallback) gives the ids of
#   SentencePiece; its normalizer and whitespace rules are part of the file.
# Seen: only pieces and merges are read, with Llama 2's rules in place of the file's. A model trained
#   with SentencePiece's defaults (NFKC, spaces joined) has other tokens wherever text has two spaces,
#   a line break, or a character that NFKC replaces. One trained with Llama's own settings has one
#   space too few where a text begins with a space. Nothing warns.
# Here: a folder without tokenizer.json is read as transformers reads it; convert it once, and compare.
set -euo pipefail
pins=(transformers==5.24.0 tokenizers==0.23.3 sentencepiece==0.2.3 protobuf==7.36.2)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/transformers_sentencepiece_rules.py" <<'PYTHON'
import json
import os
import sentencepiece
import transformers

transformers.logging.set_verbosity_error()
with open("text.txt", "w") as file:
    for number in range(600):
        file.write(f"hello world this is text {number * 37} about the sea and the sun\n")
texts = ["hello world", "hello  world", " hello", "the sun\nthe sea", "\u00bd the sea"]
defaults = dict(model_type="bpe", byte_fallback=True, split_digits=True, vocab_size=330)
as_llama = dict(normalization_rule_name="identity", remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True)
same = {}
for name, more in (("defaults", {}), ("llama", as_llama)):
    os.makedirs(name)
    sentencepiece.SentencePieceTrainer.train(
        input="text.txt", model_prefix=f"{name}/tokenizer", minloglevel=2, **defaults, **more
    )
    for file_name, entries in (
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "legacy": False}),
        ("config.json", {"model_type": "llama"}),
    ):
        with open(f"{name}/{file_name}", "w") as file:
            json.dump(entries, file)
    alone = sentencepiece.SentencePieceProcessor(model_file=f"{name}/tokenizer.model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    same[name] = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        same[name].append(ids == alone.encode(text))
        if not same[name][-1]:
            pieces = [alone.id_to_piece(number) for number in alone.encode(text)]
            print(f"{name}, {text!r}: SentencePiece {pieces[:6]}, transformers "
                  f"{tokenizer.convert_ids_to_tokens(ids)[:6]}")
print("the same ids:", same)
assert same["defaults"] == [True, False, True, False, False], same
assert same["llama"] == [True, True, False, True, True], same
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore transformers_sentencepiece_rules.py
