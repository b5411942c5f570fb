#!/usr/bin/env bash
# transformers 5.24.0 (tokenizers 0.23.3): AutoTokenizer gives other tokens than the folder's tokenizer.json.
#
# Guess: AutoTokenizer encodes text in the ids of the folder's tokenizer.json, as transformers 4 did. It is the whole
#        tokenizer: normalizer, pre-tokenizer, vocabulary, merges.
# Seen:  For classes of a model's own (here GPT2Tokenizer, which SmolLM2 and StarCoder2 name) it takes vocabulary and merges
#        from the file and everything else from the class. A number, or a numbered list, becomes other tokens. The text
#        decodes alike. With tokenizer_class PreTrainedTokenizerFast the ids are those of the file, except for
#        model_type qwen2, where no tokenizer_class changes the class.
# Here:  megatron/sft/data/tokenizer_folder.py puts the file's parts in place of the class's, says so, and exports name the
#        general class.
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
cd "$scratch"
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$environment/bin/python" - <<'PYTHON'
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

TEXT = "\n\n1. One, 2026"


def write(folder, kind, model_type):
    """Writes a tokenizer that takes digits one by one, as SmolLM2's does; whole numbers for qwen2,
    whose class takes digits one by one.
    """
    bpe = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=model_type != "qwen2")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(["\n\n1. One\n\n2. Two 2026"] * 9, trainer)
    Path(folder).mkdir()
    bpe.save(f"{folder}/tokenizer.json")
    Path(folder, "config.json").write_text(json.dumps({"model_type": model_type}))
    Path(folder, "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, "eos_token": "<end>"}))


is_as_stated = True
for kind, model_type, is_of_file in (
    ("GPT2Tokenizer", "llama", False),
    ("PreTrainedTokenizerFast", "llama", True),
    ("GPT2Tokenizer", "olmo2", True),
    ("PreTrainedTokenizerFast", "qwen2", False),
):
    folder = f"{kind}-{model_type}"
    write(folder, kind, model_type)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    by_class = tokenizer.encode(TEXT, add_special_tokens=False)
    of_file = Tokenizer.from_file(f"{folder}/tokenizer.json").encode(TEXT)
    print(f"{folder}: read as {type(tokenizer).__name__}")
    print(f"    file  {of_file.tokens}")
    print(f"    auto  {tokenizer.convert_ids_to_tokens(by_class)}")
    is_as_stated &= (by_class == of_file.ids) is is_of_file
    is_as_stated &= tokenizer.decode(by_class) == TEXT
raise SystemExit(0 if is_as_stated else "otherwise than stated")
PYTHON
