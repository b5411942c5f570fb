#!/usr/bin/env bash
# transformers 5.24.0: positions that restart keep packed sequences apart only without a mask and
# without a cache.
#
# Guess: `position_ids` 0 1 2 0 1, as DataCollatorWithFlattening writes them, make two sequences of
#        a row in every forward pass, and an attention mask of ones beside them changes nothing.
# Seen:  So it is with use_cache=False and attention_mask=None alone. With a mask of ones, and in a
#        call of the model as it is made by from_pretrained or from_config (use_cache is True), the
#        second sequence attends to the first, and no warning says so. Positions that skip ahead
#        (0 1 2 5 6) make two sequences as well.
# Here:  megatron/packing/batch/bounds.py begins a sequence wherever positions do not rise, with and
#        without a mask of ones; positions that skip ahead stay one sequence.
set -euo pipefail

environment="${FINDINGS_CACHE:-$(mktemp -d)}/transformers-5.24.0-torch-2.13.0"
if [ ! -x "$environment/bin/python" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet 'transformers==5.24.0' 'torch==2.13.0'
fi
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"

HF_HUB_OFFLINE=1 "$environment/bin/python" - <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)
row, second = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[8, 9]])
restarting, skipping = torch.tensor([[0, 1, 2, 0, 1]]), torch.tensor([[0, 1, 2, 5, 6]])
ones = torch.ones_like(row)
expected = {
    "restarting, no mask, no cache": True,
    "restarting, no mask, cache by default": False,
    "restarting, mask of ones, no cache": False,
    "skipping, no mask, no cache": True,
    "skipping, mask of ones, no cache": False,
}
differs = False
for attention in ("sdpa", "eager"):
    config._attn_implementation = attention
    model = LlamaForCausalLM(config).eval()

    def logits(tokens, positions, **options):
        with torch.no_grad():
            return model(tokens, position_ids=positions, **options).logits[0, -2:]

    def is_alone(positions, **options):
        alone = logits(second, positions[:, -2:], use_cache=False)
        return torch.allclose(logits(row, positions, **options), alone, atol=1e-5)

    seen = dict(
        zip(
            expected,
            (
                is_alone(restarting, use_cache=False),
                is_alone(restarting),
                is_alone(restarting, use_cache=False, attention_mask=ones),
                is_alone(skipping, use_cache=False),
                is_alone(skipping, use_cache=False, attention_mask=ones),
            ),
        )
    )
    for case, alone in seen.items():
        print(f"{attention}: {case}: the second sequence is {'alone' if alone else 'not alone'}")
    differs |= seen != expected
raise SystemExit(1 if differs else 0)
PYTHON
