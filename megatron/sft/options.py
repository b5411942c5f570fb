"""pure. The options of pretrain_sft.py, in groups, with Megatron's names and meanings; each group refuses what cannot
be.
"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Literal

from megatron.blending.metadatasets.paths import is_metadataset
from megatron.packing.scheduling.fitted_cost import FittedCost, read_fitted_cost
from megatron.packing.scheduling.schedulers import get_scheduler


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model."""

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the model."""
    num_attention_heads: int
    """Attention heads."""
    seq_length: int
    """Most tokens of one sequence; without packing, what each sequence is padded to."""
    max_position_embeddings: int | None = None
    """Positions that learned embeddings know (default: --seq-length)."""
    ffn_hidden_size: int | None = None
    """Width of the MLP (default: 4 times the hidden size, with --swiglu two thirds of that)."""
    kv_channels: int | None = None
    """Width of a head (default: hidden size / heads)."""
    group_query_attention: bool = False
    """Share keys and values between heads; see --num-query-groups."""
    num_query_groups: int | None = None
    """Groups of heads that share keys and values."""
    swiglu: bool = False
    """SwiGLU instead of GeLU."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of norm."""
    norm_epsilon: float = 1e-5
    """Added to the variance in norms."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """Kind of position embedding."""
    rotary_base: int = 10000
    """Base period of rotary embeddings."""
    rotary_percent: float = 1.0
    """Share of a head's channels that are rotated."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own."""
    disable_bias_linear: bool = False
    """No biases in linear layers."""
    add_qkv_bias: bool = False
    """Biases in the QKV projection all the same."""
    qk_layernorm: bool = False
    """Norms of queries and keys."""
    hidden_dropout: float = 0.0
    """Dropout after attention and MLP."""
    attention_dropout: float = 0.0
    """Dropout of attention weights; needs Transformer Engine."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this; the same for every layout whose tensor-parallel size divides
    it.
    """
    num_experts: int | None = None
    """Experts of each MoE layer."""
    moe_router_topk: int = 2
    """Experts that each token goes to."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts, before the choice of the best, instead of over the chosen ones."""
    moe_ffn_hidden_size: int | None = None
    """Width of an expert's MLP (default: --ffn-hidden-size)."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the router's load-balancing loss."""
    mtp_num_layers: int | None = None
    """Layers of multi-token prediction."""
    mtp_loss_scaling_factor: float = 0.1
    """Weight of their loss."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: whole layers, or the core attention only."""

    def __post_init__(self) -> None:
        _in_range(self, 1, None, "num_layers", "hidden_size", "num_attention_heads", "seq_length", "moe_router_topk")
        _in_range(self, 1, None, "ffn_hidden_size", "kv_channels", "num_query_groups", "num_experts", "mtp_num_layers")
        _in_range(self, 1, None, "moe_ffn_hidden_size", "make_vocab_size_divisible_by", "rotary_base")
        _in_range(self, 0, 1, "hidden_dropout", "attention_dropout", "rotary_percent")
        _in_range(self, 0, None, "norm_epsilon", "init_method_std", "moe_aux_loss_coeff", "mtp_loss_scaling_factor")
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"--hidden-size {self.hidden_size} must be a multiple of --num-attention-heads "
                f"{self.num_attention_heads}, or pass --kv-channels"
            )
        if self.group_query_attention != (self.num_query_groups is not None):
            raise ValueError("--group-query-attention and --num-query-groups belong together; pass both or none")
        if self.num_query_groups is not None and self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"--num-attention-heads {self.num_attention_heads} must be a multiple of --num-query-groups "
                f"{self.num_query_groups}"
            )
        if self.max_position_embeddings is not None and self.max_position_embeddings < self.seq_length:
            raise ValueError(
                f"--max-position-embeddings {self.max_position_embeddings} must be at least "
                f"--seq-length {self.seq_length}"
            )
        if self.mtp_num_layers is not None and self.position_embedding_type == "learned_absolute":
            raise ValueError("--mtp-num-layers needs --position-embedding-type rope; stages do not share learned ones")
        if self.num_experts is not None and not self.disable_bias_linear:
            raise ValueError("--num-experts needs --disable-bias-linear: megatron-core's experts fail with biases")
        if self.num_experts is not None and self.moe_router_topk > self.num_experts:
            raise ValueError(
                f"--moe-router-topk {self.moe_router_topk} must be at most --num-experts {self.num_experts}"
            )
        if self.num_experts is not None and self.moe_router_topk == 1 and not self.moe_router_pre_softmax:
            raise ValueError(
                "--moe-router-topk 1 needs --moe-router-pre-softmax: a softmax over one expert is constant"
            )
        if self.num_experts is not None and self.mtp_num_layers is not None and self.moe_aux_loss_coeff:
            raise ValueError(
                f"--moe-aux-loss-coeff must be 0 with --mtp-num-layers, but is {self.moe_aux_loss_coeff}: "
                "megatron-core's layers of multi-token prediction would balance padding, too"
            )

    @property
    def resolved_kv_channels(self) -> int:
        """Width of a head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def resolved_ffn_hidden_size(self) -> int:
        """Width of the MLP; Megatron's rule for SwiGLU, a multiple of 64."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int(4 * self.hidden_size * 2 / 3) // 64 * 64 or 64 if self.swiglu else 4 * self.hidden_size

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that loads it, defaults resolved."""
        learned = self.position_embedding_type == "learned_absolute"
        resolved = {
            "ffn_hidden_size": self.resolved_ffn_hidden_size,
            "kv_channels": self.resolved_kv_channels,
            "max_position_embeddings": (self.max_position_embeddings or self.seq_length) if learned else None,
        }
        changeable = {
            "seq_length",
            "hidden_dropout",
            "attention_dropout",
            "recompute_granularity",
            "moe_aux_loss_coeff",
            "mtp_loss_scaling_factor",
        }
        return {name: value for name, value in (asdict(self) | resolved).items() if name not in changeable}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallel layout."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's weights."""
    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Interleave the pipeline: layers of each virtual stage."""
    context_parallel_size: int = 1
    """Ranks that share each sequence."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts."""
    sequence_parallel: bool = False
    """Share norms and dropout over the sequence, among tensor-parallel ranks."""
    use_tp_pp_dp_mapping: bool = False
    """Order ranks tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp."""
    use_distributed_optimizer: bool = False
    """Share the optimizer's state over data parallel."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass runs."""
    overlap_param_gather: bool = False
    """Gather parameters while the forward pass runs; needs --use-distributed-optimizer and --overlap-grad-reduce."""
    distributed_timeout_minutes: float = 10.0
    """After which a collective that some rank does not reach fails."""

    def __post_init__(self) -> None:
        _in_range(self, 1, None, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        _in_range(self, 1, None, "expert_model_parallel_size", "num_layers_per_virtual_pipeline_stage")
        _in_range(self, 0.01, None, "distributed_timeout_minutes")
        if self.num_layers_per_virtual_pipeline_stage is not None and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                "--num-layers-per-virtual-pipeline-stage needs --pipeline-model-parallel-size of at least 2"
            )
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError("--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce")

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas of the model; ValueError where the world does not divide."""
        model = self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        if world_size % model:
            raise ValueError(
                f"the number of processes, {world_size}, must be a multiple of tensor x pipeline x context parallel "
                f"size, {self.tensor_model_parallel_size} x {self.pipeline_model_parallel_size} x "
                f"{self.context_parallel_size} = {model}; start torchrun with --nproc-per-node {model}, or change them"
            )
        experts = self.expert_model_parallel_size * self.pipeline_model_parallel_size
        if world_size % experts:
            raise ValueError(
                f"the number of processes, {world_size}, must be a multiple of --expert-model-parallel-size times "
                f"--pipeline-model-parallel-size, {experts}; lower them or start more processes"
            )
        return world_size // model


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """Sequence packing."""

    sequence_packing: bool = False
    """Pack sequences into microbatches without padding between them (THD)."""
    sequence_packing_scheduler: str | None = None
    """How sequences are given to ranks and microbatches: default, empty, dp_balanced, or a function of yours as
    module:function (default: default, the least modelled step time)."""
    max_seqlen_per_dp_cp_rank: int | None = None
    """Tokens that one rank holds of a pack (default: --seq-length / --context-parallel-size)."""
    over_length_policy: Literal["error", "truncate", "drop"] = "error"
    """What happens to a sample longer than --seq-length."""
    pack_cost: str | None = None
    """File of python -m megatron.packing.calibrate: schedule by measured times, and predict the step's (default: by
    FLOPs)."""
    outlier_delay_steps: int = 0
    """Steps that a sequence may wait for others of its kind if it alone costs more than a fair share of a step
    (default: 0, none waits)."""

    def __post_init__(self) -> None:
        for name in ("sequence_packing_scheduler", "max_seqlen_per_dp_cp_rank", "pack_cost"):
            if getattr(self, name) is not None and not self.sequence_packing:
                raise ValueError(f"{_flag(name)} needs --sequence-packing")
        if self.outlier_delay_steps and not self.sequence_packing:
            raise ValueError("--outlier-delay-steps needs --sequence-packing")
        if self.outlier_delay_steps and self.sequence_packing_scheduler == "empty":
            raise ValueError(
                "--outlier-delay-steps needs a scheduler that mixes what was drawn; pass "
                "--sequence-packing-scheduler default"
            )
        _in_range(self, 1, None, "max_seqlen_per_dp_cp_rank")
        _in_range(self, 0, None, "outlier_delay_steps")
        if self.sequence_packing_scheduler is not None:
            get_scheduler(self.sequence_packing_scheduler)
        _ = self.fitted_cost

    @cached_property
    def fitted_cost(self) -> FittedCost | None:
        """What the file of --pack-cost says, read once; None without it."""
        return None if self.pack_cost is None else read_fitted_cost(self.pack_cost)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data."""

    data_path: tuple[str, ...] = ()
    """What to train on: files (.jsonl, .json, .parquet) of chats, instructions or text, token files (.bin/.idx) and
    prepared WebDataset folders, one after the other; or a metadataset (.yaml), which blends them."""
    blend_mode: Literal["exact", "random"] = "exact"
    """Proportions of a metadataset's sources: at every moment within a sample of the weights, or drawn at random."""
    blend_weight_schedule: str | None = None
    """Weights that change over steps, in place of the metadataset's: JSON, or a path to it, such as
    {"kind": "linear", "points": [[0, [5, 3]], [1000, [1, 1]]]}."""
    blend_weights_by: Literal["samples", "tokens"] = "samples"
    """What the weights of a metadataset are shares of; mean lengths are taken from 64 samples of each source."""
    valid_data_path: tuple[str, ...] = ()
    """What to evaluate on, instead of a part of --data-path; of a metadataset or folder, its split val."""
    split: str = "969,30,1"
    """Shares of --data-path for training, validation and test, where it has no splits val or test of its own."""
    mock_data: bool = False
    """Train on made-up tokens."""
    sft_mock_dataset_config_json: str | None = None
    """Lengths of made-up samples: JSON, or a path to it."""
    tokenizer_type: Literal["ByteLevelTokenizer", "HuggingFaceTokenizer", "NullTokenizer"] = "ByteLevelTokenizer"
    """Byte-level needs no files."""
    tokenizer_model: str | None = None
    """Folder of a HuggingFace tokenizer."""
    vocab_size: int | None = None
    """Vocabulary of NullTokenizer, and of mock data (default there: 1024)."""
    skip_bad_samples: bool = False
    """Log, count and skip samples that cannot be read, instead of ending with an error."""
    max_bad_samples_in_a_row: int = 100
    """How many of a source, one after the other, --skip-bad-samples skips on a rank before it is an error; 0: any."""
    allow_changed_data: bool = False
    """Continue a checkpoint with a blend of other sources, weights or mode; the position in it is kept."""

    def __post_init__(self) -> None:
        if self.mock_data == bool(self.data_path):
            raise ValueError("pass either --data-path FILE or --mock-data" + (", not both" if self.mock_data else ""))
        if self.sft_mock_dataset_config_json is not None and not self.mock_data:
            raise ValueError("--sft-mock-dataset-config-json needs --mock-data")
        if self.mock_data and self.valid_data_path:
            raise ValueError("--valid-data-path needs --data-path, but --mock-data is given")
        blends = [path for path in self.data_path if is_metadataset(path)]
        if blends and len(self.data_path) > 1:
            raise ValueError(f"--data-path {blends[0]} must be the only one; name the others in it")
        for name in ("blend_mode", "blend_weights_by", "blend_weight_schedule"):
            if not blends and getattr(self, name) != getattr(DataConfig, name):
                raise ValueError(f"{_flag(name)} needs a metadataset (.yaml) as --data-path")
        _in_range(self, 1, None, "vocab_size")
        _in_range(self, 0, None, "max_bad_samples_in_a_row")
        _ = self.split_shares

    @property
    def split_shares(self) -> tuple[float, float, float]:
        """Shares of training, validation and test; they sum to one."""
        try:
            shares = [float(part) for part in self.split.split(",")]
        except ValueError:
            shares = []
        if not 1 <= len(shares) <= 3 or not all(0 <= share < math.inf for share in shares) or not shares[0] > 0:
            raise ValueError(f"--split must be up to three shares such as 969,30,1, but is {self.split!r}")
        shares += [0.0] * (3 - len(shares))
        return shares[0] / sum(shares), shares[1] / sum(shares), shares[2] / sum(shares)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Training."""

    train_iters: int
    """Steps to train for."""
    global_batch_size: int
    """Sequences of one step."""
    lr: float
    """Highest learning rate."""
    micro_batch_size: int = 1
    """Sequences of a microbatch without packing; with packing, samples drawn at a time."""
    min_lr: float = 0.0
    """Lowest learning rate."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "linear"
    """How the learning rate falls."""
    lr_decay_iters: int | None = None
    """Steps until it is lowest (default: --train-iters)."""
    lr_warmup_iters: int = 0
    """Steps in which it rises from zero."""
    weight_decay: float = 0.01
    """Of weight matrices."""
    clip_grad: float = 1.0
    """Largest norm of the gradients; 0: no limit."""
    adam_beta1: float = 0.9
    """Adam's first decay."""
    adam_beta2: float = 0.999
    """Adam's second decay."""
    adam_eps: float = 1e-8
    """Adam's epsilon."""
    bf16: bool = False
    """Compute in bfloat16, with float32 main parameters."""
    seed: int = 1234
    """Of weights, order of data, dropout."""
    eval_interval: int = 1000
    """Steps between evaluations."""
    eval_iters: int = 100
    """Global batches of an evaluation; 0: none."""

    def __post_init__(self) -> None:
        _in_range(self, 1, None, "train_iters", "global_batch_size", "micro_batch_size", "eval_interval")
        _in_range(self, 1, None, "lr_decay_iters")
        _in_range(self, 0, None, "lr", "weight_decay", "clip_grad", "adam_eps", "eval_iters", "seed")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} must be from 0 to below 1, but is {getattr(self, name)}")
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"--min-lr {self.min_lr} must be from 0 to --lr {self.lr}")
        if not 0 <= self.lr_warmup_iters < (self.lr_decay_iters or self.train_iters):
            raise ValueError(
                f"--lr-warmup-iters {self.lr_warmup_iters} must be less than the steps of decay, "
                f"{self.lr_decay_iters or self.train_iters}; lower it or raise --lr-decay-iters"
            )


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Checkpoints and logs."""

    save: str | None = None
    """Folder for checkpoints."""
    load: str | None = None
    """Folder of checkpoints to continue from; where it has none, training starts anew."""
    save_interval: int | None = None
    """Steps between checkpoints (default: only at the end)."""
    log_interval: int = 1
    """Steps between log lines."""
    run_dir: str | None = None
    """Folder of metrics.jsonl and packs.jsonl (default: --save, else runs/TIME)."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard."""
    dump_schedule: tuple[int, ...] = field(default=(), metadata={"repeatable": True})
    """Steps whose packs are written to schedule_STEP.json in the run's folder, and drawn beside it."""

    def __post_init__(self) -> None:
        _in_range(self, 1, None, "log_interval", "save_interval")
        if self.tensorboard_dir is not None and find_spec("tensorboard") is None:
            raise ValueError("--tensorboard-dir needs the package tensorboard; do pip install tensorboard")
        if self.save_interval is not None and self.save is None:
            raise ValueError("--save-interval needs --save")
        if any(step < 1 for step in self.dump_schedule):
            raise ValueError(
                f"--dump-schedule must be steps, the first of which is 1, but is {min(self.dump_schedule)}"
            )


def _in_range(config: Any, low: float, high: float | None, *names: str) -> None:
    """Raise ValueError unless each of these options is absent, or finite and from `low` to `high`."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not low <= value <= (sys.float_info.max if high is None else high):
            limits = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ValueError(f"{_flag(name)} must be {limits}, but is {value}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
