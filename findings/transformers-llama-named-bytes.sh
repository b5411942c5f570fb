#!/usr/bin/env bash
# transformers 5.20.0: a byte-level tokenizer.json that is named LlamaTokenizerFast loses its spaces.
#
# Guess: AutoTokenizer reads tokenizer.json as it is, whatever class tokenizer_config.json names,
#   as 5.24 does.
# Seen: DeepSeek-V3 and those distilled from it name LlamaTokenizerFast beside a byte-level file.
#   5.20 puts Llama's pre-tokenizer in its place: text has other tokens, spaces are lost, nothing
#   is raised. 5.24 takes the file and says so. vLLM 0.33.0 asks for transformers below 5.21, so a
#   server may read other tokens than the training did.
# Here: --save-hf names the general class for such a file
#   (megatron/sft/model/huggingface/served_files.py).
set -euo pipefail
pins=(transformers==5.20.0 tokenizers==0.23.3)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/transformers_llama_named_bytes.py" <<'PYTHON'
import json
import tokenizers
import transformers

transformers.logging.set_verbosity_error()
text = "1. One\n2. Two"
alone = tokenizers.Tokenizer(tokenizers.models.BPE())
alone.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
alone.decoder = tokenizers.decoders.ByteLevel()
alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
alone.train_from_iterator([text], tokenizers.trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet))
alone.save("tokenizer.json")
with open("config.json", "w") as file:
    json.dump({"model_type": "llama"}, file)
found = {}
for name in ("LlamaTokenizerFast", "PreTrainedTokenizerFast"):
    with open("tokenizer_config.json", "w") as file:
        json.dump({"tokenizer_class": name}, file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(".")
    ids = tokenizer.encode(text, add_special_tokens=False)
    found[name] = tokenizer.decode(ids), ids == alone.encode(text).ids
print(found)
assert found["PreTrainedTokenizerFast"] == (text, True)
assert not found["LlamaTokenizerFast"][1] and found["LlamaTokenizerFast"][0] != text
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore transformers_llama_named_bytes.py
