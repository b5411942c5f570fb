#!/usr/bin/env bash
# transformers 5.24.0: a pack with restarting position_ids is one sequence unless use_cache=False.
#
# Guess: without a mask and with positions that restart at 0, sequences of a pack are separate, at
#   least in train(): nothing reads a cache there.
# Seen: the pack is detected only where no cache is made, and forward makes one by default, in
#   train() too. Logits of the second sequence move with the first one's tokens. use_cache=False,
#   or a cache switched off in the config as Trainer does, separates them to exactly zero. Nothing
#   warns.
# Here: the trainer's attention takes borders, not positions; comparisons with transformers pass
#   use_cache=False (tests/functional_tests/families.py).
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
cat >"$scratch/transformers_cache_joins_packs.py" <<'PYTHON'
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

for name, options in (("Llama", {}), ("Qwen3", {"head_dim": 8})):
    for attention in ("eager", "sdpa"):
        model = tiny_model(name, attention, **options)
        default = influence(model, position_ids=positions)
        without_cache = influence(model, position_ids=positions, use_cache=False)
        print(name, attention, "default", round(default, 3), "use_cache=False", without_cache)
        assert default > 1e-2
        assert without_cache == 0
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore transformers_cache_joins_packs.py
