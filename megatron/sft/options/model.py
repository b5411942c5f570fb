"""pure. Options of the model: its shape, and what a checkpoint shares with the run that loads
it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from megatron.packing.model.options import Architecture
from megatron.packing.rules import Rule, at_least, belong_together, in_range
from megatron.sft.options.rope_scaling import RopeScaling, parse_rope_scaling


def _differing_rope_list(options: ModelConfig) -> dict[str, Any]:
    """Returns the name and length of a list of longrope that has not one number per pair; {} where
    there is none such.
    """
    pairs = int(options.resolved_kv_channels * options.rotary_percent) // 2
    lists = {
        name: len(getattr(options.rope, name))
        for name in ("short_factor", "long_factor")
        if options.rope is not None and options.rope.rope_type == "longrope"
    }
    return next(
        (
            {"name": name, "count": count, "pairs": pairs}
            for name, count in lists.items()
            if count != pairs
        ),
        {},
    )


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
    {"rope_type": "linear", "factor": 2}; of types linear, dynamic, llama3, yarn, longrope
    and proportional."""
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

    rules: ClassVar[tuple[Rule, ...]] = (
        *at_least(1, "seq_length", "rotary_base"),
        *in_range(0, 1, "hidden_dropout", "attention_dropout", "rotary_percent"),
        *at_least(0, "norm_epsilon", "init_method_std"),
        *at_least(0, "moe_aux_loss_coeff", "mtp_loss_scaling_factor"),
        belong_together("group_query_attention", "num_query_groups"),
        Rule(
            when=lambda options: (
                options.max_position_embeddings is not None
                and options.max_position_embeddings < options.seq_length
            ),
            why="{max_position_embeddings} must be at least {seq_length}",
        ),
        Rule(
            when=lambda options: (
                options.query_scale_beta is not None and not options.original_position_embeddings
            ),
            why="{query_scale_beta.flag} needs a {rope_scaling.flag} with "
            "original_max_position_embeddings",
        ),
        Rule(
            when=lambda options: (
                options.rope is not None
                and options.rope.rope_type == "dynamic"
                and options.seq_length > options.rope.original_max_position_embeddings
                and {"original": int(options.rope.original_max_position_embeddings)}
            ),
            why="{seq_length} is above the {original} positions that the model was made for, "
            "beyond which its rope_type 'dynamic' rotates each sequence by its own length",
            way_out="pass {seq_length.flag} {original} or less, or another {rope_scaling.flag}",
        ),
        Rule(
            when=_differing_rope_list,
            why="{rope_scaling.flag} has a {name} of {count} numbers, but {pairs} pairs of a "
            "head's channels are rotated",
            way_out="give one for each",
        ),
        *at_least(1, "recompute_num_layers"),
        *(
            Rule(
                when=lambda options, name=name: (
                    getattr(options, name) is not None and options.recompute_granularity != "full"
                ),
                why=f"{{{name}.flag}} needs {{recompute_granularity.flag}} full",
            )
            for name in ("recompute_method", "recompute_num_layers")
        ),
        Rule(
            when=lambda options: (
                options.mtp_num_layers is not None
                and options.position_embedding_type == "learned_absolute"
            ),
            why="{mtp_num_layers.flag} needs {position_embedding_type.flag} rope, as stages do not "
            "share learned ones",
            way_out="pass it",
        ),
        Rule(
            when=lambda options: (
                options.mtp_num_layers is not None
                and options.recompute_method != "block"
                and (options.recompute_num_layers or 1) > 1
            ),
            why="{recompute_num_layers} must be 1 with {mtp_num_layers.flag}, whose layers "
            "megatron-core recomputes one by one",
            way_out="drop it, or pass {recompute_method.flag} block",
        ),
    )

    @property
    def rope(self) -> RopeScaling | None:
        """What --rope-scaling says; ValueError where it is no scaling."""
        return None if self.rope_scaling is None else parse_rope_scaling(self.rope_scaling)

    @property
    def original_position_embeddings(self) -> float:
        """Positions that --rope-scaling says the model was trained for; 0 where it does not."""
        return 0.0 if self.rope is None else self.rope.original_max_position_embeddings

    def __post_init__(self) -> None:
        _ = self.rope  # raises for a text that is none
        super().__post_init__()

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
