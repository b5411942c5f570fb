#!/usr/bin/env bash
# megatron-core 0.16.1 (0.19.2 alike): layers of experts that are recomputed are kept after their
# backward pass.
#
# Guess: with full recomputation, a layer's input and that input's gradient are freed when the
#   backward pass leaves the layer.
# Seen: each layer's dispatcher keeps the router's shares of the tokens, with the graph behind them,
#   until the next microbatch. It holds the layer's input and the gradient, [tokens, hidden] each:
#   after the backward pass of six layers six inputs' gradients are alive, with dense layers
#   none. Only the dtype of the shares is asked for later.
# Here: the shares are kept without their graph (packing/model/layers/routers.py), and bytes of
#   layers are counted (tests/functional_tests/test_fit.py).
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
cat >"$scratch/megatron_core_recomputed_experts.py" <<'PYTHON'
import gc
import tempfile
import torch
import torch.distributed as dist

store = tempfile.mktemp()
dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
from megatron.core import parallel_state, tensor_parallel

parallel_state.initialize_model_parallel()

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # 0.16.1 asks for the name without Transformer Engine
# megatron-core's generators and autocast are CUDA's; on a CPU its checkpoint needs neither.
tracker = tensor_parallel.random.get_cuda_rng_tracker()
tracker.fork = lambda *_: torch.autograd.profiler.record_function("fork")
tensor_parallel.random._set_cuda_rng_state = lambda *_, **__: None
tensor_parallel.random._get_all_rng_states = lambda: ()
tensor_parallel.random._set_all_rng_states = lambda *_: None
torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
torch.cuda.current_device = lambda: "cpu"

LAYERS, TOKENS, WIDTH = 6, 40, 16


def kept(num_experts):
    """How many gradients of layers' inputs are alive after a step's backward pass."""
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=2, ffn_hidden_size=24,
        num_moe_experts=num_experts, moe_router_topk=2, moe_token_dispatcher_type="allgather",
        use_cpu_initialization=True, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, recompute_granularity="full", recompute_method="uniform",
        recompute_num_layers=1, moe_aux_loss_coeff=0.0, bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    model = GPTModel(
        config, get_gpt_layer_local_spec(num_experts), vocab_size=32, max_sequence_length=TOKENS
    )
    tokens = torch.arange(TOKENS).unsqueeze(0) % 32
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)
    model(tokens, torch.arange(TOKENS).unsqueeze(0), mask, labels=tokens).sum().backward()
    gc.collect()
    of_inputs = {
        x.grad.data_ptr()
        for x in gc.get_objects()
        if isinstance(x, torch.Tensor) and x.is_leaf and tuple(x.shape) == (TOKENS, 1, WIDTH)
        and x.grad is not None
    }
    held = 0
    for layer in model.decoder.layers:
        node = getattr(getattr(layer.mlp, "token_dispatcher", None), "local_probs", None)
        held += node is not None and node.grad_fn is not None
    return len(of_inputs), held


dense, experts = kept(None), kept(4)
print(f"gradients of layers' inputs alive after the backward pass: dense {dense[0]}, experts "
      f"{experts[0]} (dispatchers with a graph: {experts[1]} of {LAYERS})")
assert dense == (0, 0), dense
assert experts == (LAYERS, LAYERS), experts
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore megatron_core_recomputed_experts.py
