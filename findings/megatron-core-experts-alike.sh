#!/usr/bin/env bash
# megatron-core 0.16.1: experts of different expert-parallel ranks begin as copies on a CPU.
#
# Guess: use_cpu_initialization gives two expert-parallel ranks the four experts that one rank has, as
#   it gives tensor-parallel ranks the shards of one weight.
# Seen: each rank draws its own experts from torch's generator, which has one seed on all ranks so that
#   shards fit together: experts 0 and 2 are the same bits, 1 and 3, too. Of 4 experts 2 are distinct,
#   of 128 on 8 ranks 16.
# Here: ranks above 0 draw theirs again (draw_own_experts of
#   megatron/packing/model/layers/experts.py).
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
cat >"$scratch/megatron_core_experts_alike.py" <<'PYTHON'
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as processes


def rank_main(rank, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29641")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # 0.16.1 asks for the name without Transformer Engine
    torch.cuda.Stream = lambda *_, **__: None
    torch.cuda.current_device = lambda: "cpu"
    for ranks in (1, 2):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
        torch.manual_seed(7)  # the same on all ranks, as for tensor-parallel shards
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=12,
            num_moe_experts=4, moe_router_topk=2, moe_token_dispatcher_type="alltoall",
            use_cpu_initialization=True, add_bias_linear=False, bias_dropout_fusion=False,
            expert_model_parallel_size=ranks,
        )
        spec = get_gpt_layer_local_spec(4)
        model = GPTModel(config, spec, vocab_size=16, max_sequence_length=8)
        experts = model.decoder.layers[0].mlp.experts.local_experts
        for number, expert in enumerate(experts):
            # Expert of the model: two ranks of two experts have 0, 1 and 2, 3.
            results[ranks, rank * len(experts) * (ranks - 1) + number] = (
                expert.linear_fc1.weight.flatten()[:3].tolist()
            )
    dist.barrier()


if __name__ == "__main__":
    with processes.Manager() as manager:
        results = manager.dict()
        processes.spawn(rank_main, (results,), nprocs=2)
        results = dict(results)
    distinct = {
        ranks: len({tuple(results[ranks, expert]) for expert in range(4)}) for ranks in (1, 2)
    }
    print("distinct experts of 4, by expert-parallel ranks:", distinct)
    assert distinct == {1: 4, 2: 2}
    assert results[2, 0] == results[2, 2] == results[1, 0]
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore megatron_core_experts_alike.py
