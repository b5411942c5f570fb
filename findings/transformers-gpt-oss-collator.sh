#!/usr/bin/env bash
# transformers 5.24.0: gpt-oss joins the sequences that DataCollatorWithFlattening packs, in its default attention.
#
# Guess: positions, cu_seq_lens and seq_idx of the library's own collator separate sequences in
#   every model of the library, or raise.
# Seen: GptOss supports eager and flash attention. In eager its mask is built without positions:
#   logits of the second sequence move with the first, with use_cache=False as well, while Qwen3
#   gives exactly zero on the same batch. Nothing warns.
# Here: gpt-oss is trained with borders in every kernel, and compared with transformers on each
#   sequence alone (tests/functional_tests/test_families.py).
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
cat >"$scratch/transformers_gpt_oss_collator.py" <<'PYTHON'
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

collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
batch = collate([{"input_ids": tokens[0].tolist()} for tokens in (first, second)])
arguments = {key: value for key, value in batch.items() if key not in ("input_ids", "labels")}
print("the collator gives", sorted(arguments))
experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
for name, options, is_separate in (("Qwen3", {}, True), ("GptOss", experts, False)):
    model = tiny_model(name, "eager", head_dim=8, **options)
    moved = influence(model, use_cache=False, **arguments)
    print(name, round(moved, 3))
    assert (moved == 0) == is_separate
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore transformers_gpt_oss_collator.py
