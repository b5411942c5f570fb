#!/usr/bin/env bash
# transformers 5.24.0: the Trainer's weight decay takes in sinks of gpt-oss and A_log of Qwen3-Next.
#
# Guess: the Trainer decays matrices; vectors such as norms, biases, sinks and decay rates are left
#   alone, as in Megatron-LM.
# Seen: parameters are left out by their names ("bias", "norm"). With weight_decay=0.1 dt_bias is not
#   decayed, and sinks, A_log and the convolution of linear attention are: each step draws the decay
#   rates of all heads towards one, and the sinks' logits towards zero.
# Here: weights of one dimension are not decayed, as in megatron-core.
set -euo pipefail
pins=(torch==2.13.0 transformers==5.24.0 accelerate==1.15.0)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/transformers_decay_of_sinks.py" <<'PYTHON'
import transformers

transformers.logging.set_verbosity_error()
shared = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_experts_per_tok=1,
)
gpt_oss = transformers.GptOssConfig(
    **shared, num_hidden_layers=1, num_local_experts=2, layer_types=["full_attention"]
)
qwen = transformers.Qwen3NextConfig(
    **shared, num_hidden_layers=1, num_experts=2, moe_intermediate_size=16,
    shared_expert_intermediate_size=16, linear_num_value_heads=4, linear_num_key_heads=2,
    linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["linear_attention"],
)
decayed = {}
for model in (transformers.GptOssForCausalLM(gpt_oss), transformers.Qwen3NextForCausalLM(qwen)):
    options = transformers.TrainingArguments(
        output_dir="run", report_to=[], use_cpu=True, weight_decay=0.1
    )
    trainer = transformers.Trainer(model=model, args=options)
    trainer.create_optimizer()
    by_weight = {
        id(weight): group["weight_decay"]
        for group in trainer.optimizer.param_groups for weight in group["params"]
    }
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and "layers.0" in name:
            decayed[name.rpartition("layers.0.")[2]] = by_weight[id(weight)]
print("weight decay of vectors:", decayed)
assert {name for name, decay in decayed.items() if decay} == {"self_attn.sinks", "linear_attn.A_log"}
assert decayed["linear_attn.dt_bias"] == 0.0
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore transformers_decay_of_sinks.py
