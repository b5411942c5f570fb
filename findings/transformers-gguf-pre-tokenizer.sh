#!/usr/bin/env bash
# transformers 5.24.0 with gguf 0.19.0: a tokenizer read from a GGUF file.
#
# Guess: `tokenizer.ggml.pre` names the pattern that text is split by before merges, as in llama.cpp;
#   a name that the reader does not know is refused, or warned of.
# Seen: 23 names are known (llama-bpe, qwen2, tekken, gpt-4o and others). Any other, also one that
#   means nothing, is read as GPT-2's pattern without a word: smollm (single digits first),
#   deepseek-v3, starcoder, glm4. A SmolLM2 then has two line breaks where its training had one
#   blank line, before each "1." of a list. Text decodes the same, and `save_pretrained` writes the
#   wrong pattern into tokenizer.json.
# Here: examples/released_finetune/convert.py puts the pattern of the release into the
#   tokenizer.json that it writes, and ends where the file names another.
set -euo pipefail
pins=(torch==2.13.0 transformers==5.24.0 gguf==0.19.0)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
"$environment/bin/python" - "$scratch" <<'PYTHON'
import sys

import gguf
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

transformers.logging.set_verbosity_error()
TEXT = "x\n\n1. y"
words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
vocabulary = {word: number for number, word in enumerate(words)}


def write(name: str) -> str:
    """A GGUF file with the tokenizer alone, and the name of its pattern."""
    path = f"{sys.argv[1]}/{name}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# What smollm names: single digits, then GPT-2's pattern.
right = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
right.decoder = decoders.ByteLevel()
right.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
wanted = right.encode(TEXT).tokens
print(f"{'as smollm splits':26} {wanted}")
seen = {}
for name in ("gpt-2", "llama-bpe", "smollm", "deepseek-v3", "no-such-pattern"):
    write(name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1], gguf_file=f"{name}.gguf")
    seen[name] = tokenizer.tokenize(TEXT)
    print(f"{'read from ' + name:26} {seen[name]}")
others = [seen[name] for name in ("smollm", "deepseek-v3", "no-such-pattern")]
if not (seen["llama-bpe"] == wanted != seen["gpt-2"] and others == [seen["gpt-2"]] * 3):
    sys.exit("otherwise than stated: another name than llama-bpe changes the tokens")
PYTHON
