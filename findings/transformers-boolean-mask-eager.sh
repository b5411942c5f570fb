#!/usr/bin/env bash
# transformers 5.24.0, eager attention: a boolean 4-D mask is added to the scores, so it masks nothing.
#
# Guess: True means attend and False means do not, in eager attention as in sdpa.
# Seen: sdpa reads the mask so. Eager attention adds it: allowed pairs get one more, others stay;
#   the second sequence sees the first, and tokens see later ones. Nothing warns. A mask of 0 and
#   the smallest number of the dtype works in both.
# Here: masks are never passed to transformers in comparisons
#   (tests/functional_tests/families.py).
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
cat >"$scratch/transformers_boolean_mask_eager.py" <<'PYTHON'
import torch
import transformers

transformers.logging.set_verbosity_error()
torch.manual_seed(0)


def tiny_model(name, attention, **options):
    """Returns a random model of two layers in training mode."""
    config = getattr(transformers, name + "Config")(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, **options,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
    return model.train()


first, other, second = (torch.randint(1, 60, (1, length)) for length in (9, 9, 7))


def influence(model, **arguments):
    """Returns how much logits of the second sequence move with the tokens of the first one."""
    with torch.no_grad():
        logits = [
            model(torch.cat([tokens, second], 1), **arguments).logits[:, 9:]
            for tokens in (first, other)
        ]
    return (logits[0] - logits[1]).abs().max().item()


positions = torch.cat([torch.arange(9), torch.arange(7)])[None]

allowed = torch.block_diag(torch.ones(9, 9), torch.ones(7, 7)).tril().bool()[None, None]
additive = torch.zeros(1, 1, 16, 16).masked_fill(~allowed, torch.finfo(torch.float32).min)
for attention, is_separate in (("sdpa", True), ("eager", False)):
    model = tiny_model("Llama", attention)
    arguments = {"position_ids": positions, "use_cache": False}
    boolean = influence(model, attention_mask=allowed, **arguments)
    numbers = influence(model, attention_mask=additive, **arguments)
    print(attention, "boolean", round(boolean, 3), "additive", numbers)
    assert (boolean == 0) == is_separate
    assert numbers == 0
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore transformers_boolean_mask_eager.py
