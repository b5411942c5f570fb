"""pure. Options of the model: its shape, and what a checkpoint shares with the run that loads
it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from megatron.packing.flags import check_range, flag_of
from megatron.packing.model.options import Architecture
from megatron.sft.options.rope_scaling import parse_rope_scaling


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Architecture):
    """Model."""

    seq_length: int
    """Most tokens of one sequence."""
    max_position_embeddings: int | None = None
    """Positions that learned embeddings know (default: --seq-length)."""
    norm_epsilon: float = 1e-5
    """Added to the variance in norms."""
    scale_embeddings: bool = False
    """Multiply embeddings by the square root of the hidden size."""
    rotary_base: float = field(
        default=10000.0, metadata={"idle_without": "position_embedding_type=rope"}
    )
    """Base period of rotary embeddings."""
    rope_scaling: str | None = field(
        default=None, metadata={"idle_without": "position_embedding_type=rope"}
    )
    """Rotary embeddings for longer contexts, as in a HuggingFace config.json, such as
    {"rope_type": "linear", "factor": 2}; of types linear, llama3 and yarn."""
    rotary_percent: float = field(
        default=1.0, metadata={"idle_without": "position_embedding_type=rope"}
    )
    """Share of a head's channels that are rotated."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own."""
    mask_vocab_padding: bool = False
    """Keep the padding of the vocabulary out of the softmax, as if it were not there."""
    hidden_dropout: float = 0.0
    """Dropout after attention and MLP."""
    attention_dropout: float = 0.0
    """Dropout of attention weights; needs Transformer Engine."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Layers that --recompute-granularity full recomputes: all, in runs of --recompute-num-layers,
    or that many of each stage (default: uniform).
    """
    recompute_num_layers: int | None = None
    """Layers that --recompute-method speaks of (default: 1)."""
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    """Transformer Engine attention backend; ignored without it."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = field(
        default=None, metadata={"idle_without": "num_experts"}
    )
    """Precision of the router's logits (default: the model's)."""
    moe_aux_loss_coeff: float = field(default=0.0, metadata={"idle_without": "num_experts"})
    """Weight of the router's load-balancing loss."""
    mtp_loss_scaling_factor: float = field(default=0.1, metadata={"idle_without": "mtp_num_layers"})
    """Weight of the loss of --mtp-num-layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 1, None, "seq_length", "rotary_base")
        check_range(self, 0, 1, "hidden_dropout", "attention_dropout", "rotary_percent")
        check_range(
            self,
            0,
            None,
            "norm_epsilon",
            "init_method_std",
            "moe_aux_loss_coeff",
            "mtp_loss_scaling_factor",
        )
        if self.group_query_attention != (self.num_query_groups is not None):
            raise ValueError(
                "--group-query-attention and --num-query-groups belong together; pass both or none"
            )
        self._check_positions()
        check_range(self, 1, None, "recompute_num_layers")
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(self, name) is not None and self.recompute_granularity != "full":
                raise ValueError(f"{flag_of(name)} needs --recompute-granularity full")
        if self.mtp_num_layers is not None:
            self._check_further_layers()

    def _check_positions(self) -> None:
        if (
            self.max_position_embeddings is not None
            and self.max_position_embeddings < self.seq_length
        ):
            raise ValueError(
                f"--max-position-embeddings {self.max_position_embeddings} must be at least "
                f"--seq-length {self.seq_length}"
            )
        scaling = None if self.rope_scaling is None else parse_rope_scaling(self.rope_scaling)
        if self.query_scale_beta is not None and not (
            scaling and scaling.original_max_position_embeddings
        ):
            raise ValueError(
                "--query-scale-beta needs a --rope-scaling with original_max_position_embeddings"
            )

    def _check_further_layers(self) -> None:
        """Checks what layers of multi-token prediction need."""
        if self.position_embedding_type == "learned_absolute":
            raise ValueError(
                "--mtp-num-layers needs --position-embedding-type rope; stages do not share "
                "learned ones"
            )
        if self.recompute_method != "block" and (self.recompute_num_layers or 1) > 1:
            raise ValueError(
                f"--recompute-num-layers {self.recompute_num_layers} must be 1 with "
                "--mtp-num-layers, whose layers megatron-core recomputes one by one; drop it, or "
                "pass --recompute-method block"
            )
        if self.num_experts is not None and self.moe_aux_loss_coeff:
            raise ValueError(
                "--moe-aux-loss-coeff must be 0 with --mtp-num-layers, but is "
                f"{self.moe_aux_loss_coeff}: megatron-core's layers of multi-token prediction "
                "would balance padding, too"
            )

    def identity(self) -> dict[str, Any]:
        """Returns what a checkpoint must share with the run that loads it, defaults resolved."""
        learned = self.position_embedding_type == "learned_absolute"
        resolved = {
            "ffn_hidden_size": self.resolved_ffn_hidden_size,
            "kv_channels": self.resolved_kv_channels,
            "max_position_embeddings": (self.max_position_embeddings or self.seq_length)
            if learned
            else None,
        }
        changeable = {
            "seq_length",
            "hidden_dropout",
            "attention_dropout",
            "recompute_granularity",
            "recompute_modules",
            "recompute_method",
            "recompute_num_layers",
            "attention_backend",
            "moe_router_dtype",
            "moe_aux_loss_coeff",
            "mtp_loss_scaling_factor",
        }
        return {
            name: value
            for name, value in (asdict(self) | resolved).items()
            if name not in changeable
        }
