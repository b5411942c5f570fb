#!/usr/bin/env bash
# transformers 5.24.0: tie_word_embeddings in the text_config of Gemma 3 has no effect.
#
# Guess: the head belongs to the text model, so text_config's tie_word_embeddings decides, or both do.
# Seen: only the one beside text_config does. {"text_config": {"tie_word_embeddings": false}} is tied,
#   as is the default; {"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}} is
#   not. Gemma3ForCausalLM of the same text_config alone goes by it: a text model that is taken out of
#   an image model, or put into one, changes its head.
# Here: read as transformers reads it, for each family
#   (megatron/sft/model/huggingface/families/registry.py).
set -euo pipefail
pins=(torch==2.13.0 transformers==5.24.0)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/transformers_ties_of_text_config.py" <<'PYTHON'
import json
import os
import transformers

transformers.logging.set_verbosity_error()
text = dict(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, sliding_window=8,
)
vision = dict(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    image_size=28, patch_size=14,
)
tokens = dict(mm_tokens_per_image=4, image_token_index=60, boi_token_index=61, eoi_token_index=62)
os.makedirs("model")


def is_tied(beside, within, of_text_alone=False):
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **tokens).to_dict()
    config.pop("tie_word_embeddings", None)
    if beside is not None:
        config["tie_word_embeddings"] = beside
    config["text_config"]["tie_word_embeddings"] = within
    with open("model/config.json", "w") as file:
        json.dump(config["text_config"] if of_text_alone else config, file, default=str)
    read = transformers.AutoConfig.from_pretrained("model")
    kind = "AutoModelForCausalLM" if of_text_alone else "AutoModelForImageTextToText"
    model = getattr(transformers, kind).from_config(read)
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


seen = {
    "beside none, within false": is_tied(None, False),
    "beside true, within false": is_tied(True, False),
    "beside false, within true": is_tied(False, True),
    "the text model alone, false": is_tied(None, False, of_text_alone=True),
}
print("tied:", seen)
assert list(seen.values()) == [True, True, False, False]
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore transformers_ties_of_text_config.py
