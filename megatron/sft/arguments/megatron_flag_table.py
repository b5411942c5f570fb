"""pure. Options of Megatron-LM that are not ours, by what becomes of them: accepted, or refused
with advice.

Names are those of its `arguments.py`; a name may be a pattern: `--rl-*`. Each stands for its
negation, too: `--no-rl-x` is found by `--rl-*`.
"""

from __future__ import annotations

from typing import NamedTuple

TOKENIZERS = {
    "SFTTokenizer": "HuggingFaceTokenizer",
    **dict.fromkeys(
        (
            "BertWordPieceCase",
            "BertWordPieceLowerCase",
            "GPT2BPETokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "SentencePieceTokenizer",
            "TikTokenizer",
        ),
        None,
    ),
}
"""Megatron-LM's name of a tokenizer -> its name here; None: a folder of HuggingFace's must be given
instead.
"""


class Accepted(NamedTuple):
    """An option that may be given, and changes nothing."""

    is_default: bool
    """True if it asks for what is done anyway; False if it has no effect here."""
    values: tuple[str, ...] | None
    """Values that it may have, () for an option without a value, None for any."""


WITHOUT_EFFECT = """
--*-dropout-fusion --*-gelu-fusion --*rope-fusion --*-softmax-fusion --*nccl* --*sharp*
--*straggler* --adlr-autoresume* --align-*
--allow-ambiguous-pad-tokens --app-tag-* --apply-query-key-layer-scaling --async-ckpt-*
--async-strategy --attention-softmax-in-fp32 --barrier-with-L1-time --batch-p2p-*
--cache-mla-latents --calc-ft-timeouts --check-for-spiky-loss
--check-weight-hash-across-dp-replicas-interval --ckpt-assume-constant-structure
--ckpt-drop-redundant-extra-state --ckpt-fully-parallel-* --ckpt-load-validate-sharding-integrity
--ckpt-pg-tensors-* --clone-scatter-output-in-embedding --config-logger-dir
--create-all-gather-group --cross-entropy-fusion-impl --data-cache-path
--dataloader-defer-npy-index-mmap --dataloader-fast-cache-load --ddp-* --deallocate-pipeline-outputs
--defer-embedding-wgrad-compute --delay-offload-until-cuda-graph --delay-wgrad-compute
--disable-gloo-process-groups --disable-jit-fuser --disable-msc --disable-symmetric-registration
--dist-ckpt-* --distrib-optim-fully-reshardable-mem-efficient
--distributed-timeout-seconds-after-init --dump-param-to-param-group-map --empty-unused-memory-level
--enable-experimental --enable-full-sharding-in-hsdp --enable-msc --exit-on-missing-checkpoint
--exit-signal-handler-for-* --filter-warnings --flight-recorder-* --fully-parallel-*
--fused-residual-rmsnorm --fused-single-qkv-rope --gpu-sniff-test-interval --high-priority-*
--init-model-with-meta-device --keep-fp8-transpose-cache --lazy-mpu-init --local-rank
--log-*-to-tensorboard --log-device-memory-used --log-energy --log-max-attention-logit
--log-memory-* --log-num-zeros-in-grad --log-params-norm --log-progress --log-straggler
--logging-level --manual-gc* --memory-efficient-layer-norm --memory-snapshot-path --metadata-path
--mid-level-dataset-surplus --mmap-bin-files --moe-deepep-* --moe-hybridep-*
--moe-per-layer-logging --moe-router-fusion --moe-shared-expert-overlap --moe-token-drop-policy
--no-data-sharding --no-position-embedding --no-use-layer-wise-param-layout --null-tokenizer-*
--num-dataset-builder-threads --nvtx-ranges --object-storage-cache-path --one-logger* --onnx-safe
--otel-* --overlap-dispatch-* --overlap-moe-* --overlap-p2p-*
--overlap-param-gather-with-* --persist-layer-norm --pin-cpu-*
--pipeline-model-parallel-comm-backend --record-memory-history --record-shapes
--result-rejected-tracker-filename --reuse-grad-buf-for-mxfp8-param-ag
--run-workload-inspector-server --runtime-time-unit --save-config-filepath --save-tokenizer-assets
--set-level-for-all-loggers --strict-fsdp-dtensor-load --suggested-communication-unit-size
--te-rng-tracker --tensorboard-log-interval --tensorboard-queue-size --throughput-window-size
--timing-log-* --tp-comm-* --train-sync-interval --use-cpu-initialization
--use-fused-weighted-squared-relu --use-gloo-process-groups --use-persistent-ckpt-worker
--use-ring-exchange-p2p --use-same-sampling-seed-across-dp-ranks --use-te --use-te-activation-func
--use-te-rng-tracker --use-transformer-engine-op-fuser --verify-integrity --wgrad-deferral-limit
"""
"""Options that tune, log or store what is done in another way here: a recipe's losses do not depend
on them.
"""

_ALWAYS_SO = """
--accumulate-allreduce-grads-in-fp32 --auto-detect-ckpt-format --calculate-per-token-loss
--check-for-nan-in-loss --check-for-nan-in-loss-and-grad --dataloader-inter-document-masking
--exit-signal-handler --log-throughput --no-bias-dropout-fusion --no-bias-gelu-fusion
--no-create-attention-mask-in-dataloader
--no-masked-softmax-fusion --no-use-tokenizer-model-from-checkpoint-args
--override-opt-param-scheduler --override-opt_param-scheduler --reset-attention-mask
--reset-position-ids --sft --tokenizer-hf-use-fast --use-checkpoint-opt-param-scheduler
--use-dist-ckpt --use-flash-attn --use-mcore-models --variable-seq-lengths
"""
"""Switches of what is always on here."""

ACCEPTED = {
    **dict.fromkeys(_ALWAYS_SO.split(), Accepted(True, ())),
    "--ckpt-format": Accepted(True, ("torch_dist",)),
    "--cuda-graph-impl": Accepted(True, ("none",)),
    "--dataloader-type": Accepted(True, ("single", "external")),
    "--dist-ckpt-format": Accepted(True, ("torch_dist",)),
    "--distributed-backend": Accepted(False, ("nccl", "gloo")),
    "--expert-tensor-parallel-size": Accepted(True, ("1",)),
    "--moe-router-load-balancing-type": Accepted(True, ("aux_loss",)),
    "--num-distributed-optimizer-instances": Accepted(True, ("1",)),
    "--moe-token-dispatcher-type": Accepted(True, ("alltoall",)),
    "--optimizer": Accepted(True, ("adam",)),
    "--rerun-mode": Accepted(True, ("disabled",)),
    "--transformer-impl": Accepted(False, ("local", "transformer_engine")),
    **dict.fromkeys(WITHOUT_EFFECT.split(), Accepted(False, None)),
}

_REFUSED = {
    "pass --use-distributed-optimizer": """
        *-num-weight-shards --data-parallel-sharding-strategy --expert-gtp-* --fsdp-* --gtp-*
        --megatron-fsdp-* --outer-dp-sharding-strategy --torch-fsdp2-* --use-custom-fsdp
        --use-layer-wise-distributed-optimizer --use-megatron-fsdp --use-torch-fsdp2
    """,
    "pass --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers": """
        --pipeline-model-parallel-layout
    """,
    "models of this kind are not computed; use another": """
        --activation-func-fp8-* --apply-residual-connection-post-layernorm
        --fp32-residual-connection --layernorm-zero-centered-gamma --moe-mlp-glu-* --mrope-section
        --mtp-detach-heads --mtp-grad-scale-func --mtp-h* --mtp-standalone --mtp-use-repeated-layer
        --openai-gelu --qk-clip* --qk-l2-norm --relative-attention-* --rotary-scaling-factor
        --rotary-seq-len-* --yarn-*
    """,
    "pass --recompute-granularity": """
        --activation-offload-fraction --checkpoint-activations --cpu-offloading*
        --distribute-saved-activations --min-offloaded-tensor-size
    """,
    "the optimizer is Adam; drop it": """
        --adaptive-muon-* --lion-* --muon-* --optimizer-cuda-graph --sgd-momentum --soap-*
        --store-param-remainders
    """,
    "vectors and biases have no weight decay; drop it": "--apply-wd-to-qk-layernorm "
    "--no-weight-decay-cond-type",
    "runs only train; drop it": """
        --batch-invariant-* --decode-only-cuda-graphs --enable-chunked-prefill --flash-decode
        --inference-* --max-tokens-to-oom --mlp-chunks-for-prefill --num-speculative-tokens
        --refit-method --return-log-probs --skip-prompt-log-probs --skip-train --test-mode
        --use-flashinfer-fused-rope --use-inference-optimized-layers --use-legacy-static-engine
    """,
    "pass --micro-batch-size": "--batch-size",
    "only GPT models are trained; use Megatron-LM": """
        --bert-* --biencoder-* --block-data-path --classes-fraction --data-per-class-fraction
        --decoder-num-layers --decoder-seq-length --dino-* --embedding-path --encoder-*
        --evidence-data-path --ict-* --img-* --indexer-* --iter-per-epoch --mask-factor --mask-prob
        --mask-type --num-channels --num-classes --output-bert-embeddings --patch-dim
        --query-in-block-prob --retriever-* --sample-rate --short-seq-prob --swin-*
        --titles-data-path --use-one-sent-docs --vision-*
    """,
    "it is not offered here; drop it": """
        --ckpt-convert-* --data-parallel-random-init --decoupled-weight-decay --error-injection-*
        --exit-signal --fake-process-group --freeze-all-layers --grad-norm-skip-threshold
        --head-lr-mult --iterations-to-skip --load-main-params-from-ckpt --moe-enable-routing-replay
        --moe-paged-* --moe-routing-trace-* --phase-transition-iterations --save-*-interval
        --use-gigatoken
    """,
    "packs differ in length from step to step; drop it": "--cuda-graph-* --enable-cuda-graph "
    "--external-cuda-graph",
    "there is one learning rate; drop it": "--decoupled-lr --decoupled-min-lr",
    "a run has one --global-batch-size; drop it": """
        --decrease-batch-size-if-needed --rampup-batch-size --step-batch-size-schedule
    """,
    "only attention and MLP layers are computed; use another model": """
        --dsa-* --enable-mhc-* --experimental-attention-variant* --gdp-* --hetero* --hybrid-*
        --is-hybrid-model --linear-attention-type --mamba-* --mhc-* --spec --use-mamba-*
    """,
    "pass --context-parallel-size; packs are balanced without it": """
        --dynamic-context-parallel --hybrid-context-parallel --min-dynamic-context-parallel-size
    """,
    "weights come from --pretrained-checkpoint; drop it": """
        --embedding-init-* --init-method --init-method-xavier-uniform --moe-upcycling-*
        --moe-use-upcycling --perform-initialization
    """,
    "restarts are torchrun's: pass it --max-restarts": """
        --enable-ft-package --ft-* --inprocess-* --non-persistent-* --replication*
    """,
    "it is not trained here; use Megatron-LM's post-training": """
        --enable-gpt-oss --export-* --finetune-data-* --finetune-hf-dataset --flex-* --flextron*
        --freeze-base-for-mtp --modelopt-enabled --qad-train-target
    """,
    "there is one --weight-decay; drop it": """
        --end-weight-decay --start-weight-decay --wd-incr-steps --weight-decay-incr-style
    """,
    "the data say which tokens count; drop it": "--eod-mask-loss",
    "--eval-iters and --eval-interval say what is held out and when; drop it": """
        --eval-*-batch-size --full-validation --multiple-validation-sets --start-eval-at-iter
        --validation-set-names
    """,
    "its buffers are of one length, and microbatches are not; drop it": "--tp-comm-overlap",
    "pass --optimizer-cpu-offload": "--use-torch-optimizer-for-cpu-offload",
    "put the text into the data as it should be learned": "--fim-*",
    "pass --bf16": """
        --first-last-layers-bf16 --fp16 --fp4* --fp8* --hysteresis --initial-loss-scale --kitchen-*
        --loss-scale* --min-loss-scale --num-layers-at-*-in-bf16 --quant-recipe
        --te-precision-config-file --use-kitchen*
    """,
    "the loss is float32; drop it": "--fp16-lm-cross-entropy --output-logit-dtype",
    "gradients are summed in float32; drop it": "--grad-reduce-in-bf16",
    "the model learns from given answers only, as --loss dpo does; use Megatron-LM": """
        --grpo-* --langrl-* --perform-rl-step --rl-*
    """,
    "pass --context-parallel-size": "--hierarchical-context-parallel-sizes",
    "pass --kv-lora-rank, which turns it on": "--multi-latent-attention",
    "latent attention is computed as it is; drop it": "--mla-*",
    "pass --rope-scaling and --softmax-scale": "--mscale*",
    "the answers in the data are what is learned; drop it": "--logits-load-* --logits-save-*",
    "the learning rate is warmed up from 0; drop it": "--lr-warmup-init",
    "pass --lr-wsd-decay-iters": "--lr-wsd-decay-samples",
    "pass --tokenizer-model with a HuggingFace folder": """
        --merge-file --special-tokens --tiktoken-* --tokenizer-sentencepiece-* --vocab-extra-ids
        --vocab-file
    """,
    "pass --tensor-model-parallel-size": "--model-parallel-size",
    "tokens go by all-to-all; drop it": "--moe-enable-deepep --moe-flex-*",
    "no token is dropped; drop it": """
        --moe-expert-capacity-factor --moe-expert-rank-capacity-factor --moe-pad-*
        --moe-token-dropping
    """,
    "routers of this kind are not computed; use another model": """
        --moe-input-jitter-eps --moe-latent-size --moe-router-bias-* --moe-router-padding-*
        --moe-router-quantile-* --moe-router-topk-limited-*
    """,
    "experts are chosen by the router; drop it": "--moe-router-force-*",
    "experts are balanced by --moe-aux-loss-coeff alone; drop it": "--moe-z-loss-coeff",
    "pass --keep-checkpoints": "--most-recent-k",
    "weights are scaled as the model says; drop it": "--mup-* --use-mup",
    "pass --skip-nan-steps N to leave some steps out": "--no-check-for-nan-in-loss-and-grad",
    "checkpoints are whole; drop it": "--no-save-optim --no-save-rng",
    "pass --num-virtual-stages-per-pipeline-rank": "--virtual-pipeline-model-parallel-size",
    "pass --ckpt-step": "--override-ckpt-iteration",
    "packs are padded as the layout needs it; drop it": "--pad-packed-seq-alignment",
    "the vocabulary is padded as the layout needs it; drop it": "--pad-vocab-size "
    "--padded-vocab-size",
    "pass --data-path": "--per-dataset-sequences-path",
    "run nsys or py-spy around it, and drop it": """
        --profile* --pytorch-profiler-* --use-nsys-profiler --use-pytorch-profiler
    """,
    "pass --rope-scaling with the JSON of a HuggingFace config.json": "--rope-scaling-factor "
    "--use-rope-scaling",
    "pass --position-embedding-type rope": "--rope-type",
    "pass --chat-template FILE, unless the tokenizer's own template is meant": """
        --sft-tokenizer-prompt-format --tokenizer-prompt-format
    """,
    "pass --swiglu or --geglu, or neither for GELU; or use another model": "--squared-relu",
    "pass --split, or leave the test out": "--test-data-path",
    "a pack has as many sequences as fit; drop it": "--thd-max-packed-sequences",
    "the tail of a pack is a segment of its own; drop it": "--thd-tail-padding-policy",
    "the chat template has them; drop it": """
        --tokenizer-hf-include-special-tokens --tokenizer-hf-no-include-special-tokens
    """,
    "tokenizers are read as fast ones; drop it": "--tokenizer-hf-no-use-fast",
    "code of a model's folder is never run; drop it": "--trust-remote-code",
    "give the model's options; those of a HuggingFace folder are read from it": """
        --use-checkpoint-args --use-mp-args-from-checkpoint-args
        --use-tokenizer-model-from-checkpoint-args
    """,
    "leave out --sequence-packing and its scheduler: then rows are "
    "padded": "--varlen-sbhd-validation",
    "pass --lr-warmup-iters": "--warmup",
    "pass --config": "--yaml-cfg",
}
"""Advice on what to do instead -> options."""

REFUSED = {name: way for way, names in _REFUSED.items() for name in names.split()}
PATTERNS = (*WITHOUT_EFFECT.split(), *REFUSED)
"""Names and patterns in the order in which they are tried."""
