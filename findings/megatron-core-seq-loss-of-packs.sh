#!/usr/bin/env bash
# megatron-core 0.16.1: seq_aux_loss takes a pack for one sequence.
#
# Guess: moe_router_load_balancing_type="seq_aux_loss" balances the experts of each sequence, in a
#   packed (THD) batch too: the loss of two sequences in a pack is that of a batch of the two.
# Seen: sequences are told apart by the batch dimension, which is 1 in a pack; the router gets neither
#   cu_seqlens nor a layout. Two sequences that go to two of four experts each, and not to the same
#   ones, have a loss near 2 alone and in a batch, and 1, the least there is, in a pack: nothing is left
#   that would spread them.
# Here: refused beside packs (megatron/packing/plugin_rules.py).
set -euo pipefail
pins=(torch==2.13.0 numpy==2.4.6 packaging==25.0 psutil==7.0.0 megatron-core==0.16.1)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/megatron_core_seq_loss_of_packs.py" <<'PYTHON'
import tempfile
import torch
import torch.distributed as dist

store = tempfile.mktemp()
dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
from megatron.core import parallel_state, tensor_parallel

parallel_state.initialize_model_parallel()

import megatron.core.transformer.moe.router as routers
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils

moe_utils.te_general_gemm = None  # 0.16.1 asks for the name without Transformer Engine
tensor_parallel.random.get_cuda_rng_tracker().fork = lambda *_: torch.no_grad()
torch.cuda.current_device = lambda: "cpu"
torch.manual_seed(0)
config = TransformerConfig(
    num_layers=1, hidden_size=16, num_attention_heads=2, ffn_hidden_size=24, num_moe_experts=4,
    moe_router_topk=2, moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=1.0,
    moe_token_dispatcher_type="allgather", use_cpu_initialization=True, add_bias_linear=False,
    bias_dropout_fusion=False,
)
spec = get_gpt_layer_local_spec(4)
model = GPTModel(config, spec, vocab_size=32, max_sequence_length=16).train()
router = model.decoder.layers[0].mlp.router
losses = []
original = routers.switch_load_balancing_loss_func


def recorded(**arguments):
    loss = original(**arguments)
    losses.append(loss.item())
    return loss


routers.switch_load_balancing_loss_func = recorded
# Tokens of one sequence go to experts 0 and 1, those of the other to 2 and 3.
likes = torch.nn.functional.normalize(router.weight.detach(), dim=1) * 100
first = (likes[0] + likes[1]).expand(4, 1, 16)
second = (likes[2] + likes[3]).expand(4, 1, 16)
router(first), router(second)
router(torch.cat([first, second], dim=1))  # [tokens, sequences, width]: a batch of two
router(torch.cat([first, second], dim=0))  # a pack of two, as THD has it
alone, batch, pack = (losses[0] + losses[1]) / 2, losses[2] / 2, losses[3]
print(f"mean of two sequences alone {alone:.4f}, in a batch {batch:.4f}, in a pack {pack:.4f}")
assert abs(batch - alone) < 1e-5
assert alone > 1.5 and pack < 1.05
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore megatron_core_seq_loss_of_packs.py
