"""pure. The planner's options: Megatron's names where Megatron has one, short ones for the layout."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron.packing.layout import Alignment
from megatron.packing.planning.step_record import StepLayout, read_cost
from megatron.packing.scheduling.cost import PackCost, gpt_pack_cost
from megatron.packing.scheduling.problem import Scheduler
from megatron.packing.scheduling.registry import SCHEDULERS
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.widths import ffn_hidden_size
from megatron.sft.flags import flag_of
from megatron.sft.options.packing import imported_scheduler

DEFAULT_MODEL = "8B (32 layers, hidden 4096, 32 heads, 8 query groups, SwiGLU 14336, vocabulary 128256)"
_PICTURES = (".png", ".pdf", ".svg", ".jpg")


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """Lengths."""

    source: str | None = field(default=None, metadata={"positional": True})
    """Lengths, one per line; or chats (.jsonl, .json, .parquet); a mock config, as JSON or its file; the folder of a
    run, which also tells model and layout; a schedule that --dump-schedule wrote."""
    tokenizer_type: Literal["ByteLevelTokenizer", "HuggingFaceTokenizer", "NullTokenizer"] = "ByteLevelTokenizer"
    """For chats."""
    tokenizer_model: str | None = None
    """Folder of a HuggingFace tokenizer."""
    seq_length: int | None = None
    """Most tokens of a sequence (default: no limit)."""
    over_length_policy: Literal["error", "truncate", "drop"] = "error"
    """What happens to a sequence longer than --seq-length or than a pack."""
    skip_bad_samples: bool = False
    """Count and skip records that cannot be read."""
    seed: int = 1234
    """Of the order in which global batches are drawn."""

    def __post_init__(self) -> None:
        if self.source is None:
            raise ValueError(
                "lengths are missing; name a file of lengths or chats, before the options: plan FILE --dp 8"
            )
        if self.seed < 0:
            raise ValueError(f"--seed must be at least 0, but is {self.seed}")
        _positive(self, "seq_length")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model: what a token and a pair of tokens cost. Without any, the run's, or one of 8B parameters."""

    num_layers: int | None = None
    """Transformer layers."""
    hidden_size: int | None = None
    """Width of the model."""
    num_attention_heads: int | None = None
    """Attention heads."""
    num_query_groups: int | None = None
    """Groups of heads that share keys and values (default: as many as heads)."""
    kv_channels: int | None = None
    """Width of a head (default: hidden size / heads)."""
    ffn_hidden_size: int | None = None
    """Width of the MLP (default: 4 times the hidden size, with --swiglu two thirds of that)."""
    swiglu: bool = False
    """SwiGLU instead of GeLU."""
    vocab_size: int | None = None
    """Vocabulary; without it the output layer is left out."""
    num_experts: int | None = None
    """Experts of each MoE layer."""
    moe_router_topk: int = 2
    """Experts that each token goes to."""
    moe_ffn_hidden_size: int | None = None
    """Width of an expert's MLP (default: --ffn-hidden-size)."""
    moe_shared_expert_intermediate_size: int | None = None
    """Width of the experts that every token goes to."""
    pack_cost: str | None = None
    """JSON file of a fitted cost in seconds, {"linear": ..., "quadratic": ..., "fixed": ...}, instead of a shape."""

    def __post_init__(self) -> None:
        _positive(self, "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
        _positive(self, "ffn_hidden_size", "vocab_size", "num_experts", "moe_router_topk", "moe_ffn_hidden_size")
        _positive(self, "moe_shared_expert_intermediate_size")
        shape = {name: getattr(self, name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
        missing = [flag_of(name) for name, value in shape.items() if value is None]
        others = [name for name in ("ffn_hidden_size", "kv_channels", "num_query_groups") if getattr(self, name)]
        if missing and (len(missing) < len(shape) or others or self.swiglu):
            raise ValueError(f"a model's shape also needs {', '.join(missing)}; pass all, or none for the 8B default")
        if self.pack_cost is not None and len(missing) < len(shape):
            raise ValueError("pass either --pack-cost or a model's shape")
        if self.num_attention_heads and self.num_attention_heads % (self.num_query_groups or 1):
            raise ValueError(
                f"--num-attention-heads {self.num_attention_heads} must be a multiple of --num-query-groups "
                f"{self.num_query_groups}"
            )
        if self.hidden_size and self.kv_channels is None and self.hidden_size % (self.num_attention_heads or 1):
            raise ValueError(
                f"--hidden-size {self.hidden_size} must be a multiple of --num-attention-heads "
                f"{self.num_attention_heads}, or pass --kv-channels"
            )
        if self.num_experts is not None and self.moe_router_topk > self.num_experts:
            raise ValueError(
                f"--moe-router-topk {self.moe_router_topk} must be at most --num-experts {self.num_experts}; lower it"
            )

    def described(self) -> str:
        """The model in words."""
        if self.pack_cost is not None:
            return f"cost of {self.pack_cost}"
        experts = f", {self.num_experts} experts, {self.moe_router_topk} per token" if self.num_experts else ""
        if self.num_layers is None:
            return f"{DEFAULT_MODEL}{experts}, the default"
        return f"{self.num_layers} layers, hidden {self.hidden_size}, {self.num_attention_heads} heads{experts}"

    def cost(self) -> PackCost:
        """Of a pack: in FLOPs, or in seconds of one device where it was fitted."""
        if self.pack_cost is not None:
            return read_pack_cost(self.pack_cost)[0]
        default = self.num_layers is None
        hidden, heads = self.hidden_size or 4096, self.num_attention_heads or 32
        swiglu = self.swiglu or default
        ffn = self.ffn_hidden_size or ffn_hidden_size(hidden, swiglu)
        return gpt_pack_cost(
            num_layers=self.num_layers or 32,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=8 if default else self.num_query_groups or heads,
            kv_channels=self.kv_channels or hidden // heads,
            ffn_hidden_size=14336 if default else ffn,
            vocab_size=self.vocab_size or (128256 if default else 0),
            swiglu=swiglu,
            num_experts=self.num_experts,
            moe_router_topk=self.moe_router_topk,
            moe_ffn_hidden_size=self.moe_ffn_hidden_size,
            moe_shared_expert_intermediate_size=self.moe_shared_expert_intermediate_size,
        )


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """Parallel layout and batch."""

    dp: int = 1
    """Data-parallel size."""
    tp: int = 1
    """Tensor-parallel size."""
    pp: int = 1
    """Pipeline-parallel size."""
    vpp: int = 1
    """Virtual pipeline stages of each rank (interleaving)."""
    cp: int = 1
    """Context-parallel size."""
    ep: int = 1
    """Expert-parallel size: beyond --tp times --cp, data-parallel ranks wait for one another at every microbatch."""
    sequence_parallel: bool = False
    """Packs are multiples of what tensor-parallel ranks then share."""
    global_batch_size: int | None = None
    """Sequences of one step (default: 8 times --dp times --pp)."""
    max_seqlen_per_dp_cp_rank: int | None = None
    """Tokens that one rank holds of a pack (default: what the longest sequence needs)."""

    def __post_init__(self) -> None:
        _positive(self, "dp", "tp", "pp", "vpp", "cp", "ep", "global_batch_size", "max_seqlen_per_dp_cp_rank")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"--vpp {self.vpp} needs --pp of at least 2")
        if self.dp * self.tp * self.cp % self.ep:
            raise ValueError(f"--ep {self.ep} must divide --dp x --tp x --cp, {self.dp * self.tp * self.cp}")

    @property
    def batch_size(self) -> int:
        """Sequences of a global batch."""
        return self.global_batch_size or 8 * self.dp * self.pp

    @property
    def alignment(self) -> Alignment:
        """What the layout asks of packs."""
        return Alignment.for_layout(
            context_parallel_size=self.cp, tensor_parallel_size=self.tp, sequence_parallel=self.sequence_parallel
        )

    def capacity(self, longest: int) -> int:
        """Tokens of a pack, whole alignment units; by default what a sequence of `longest` tokens needs."""
        pack = self.alignment.pack
        if self.max_seqlen_per_dp_cp_rank is None:
            return -(-longest // pack) * pack
        capacity = self.max_seqlen_per_dp_cp_rank * self.cp // pack * pack
        if not capacity:
            raise ValueError(
                f"--max-seqlen-per-dp-cp-rank must be at least {-(-pack // self.cp)} in this layout, "
                f"but is {self.max_seqlen_per_dp_cp_rank}"
            )
        return capacity

    def step_layout(self, capacity: int, cost: PackCost, seconds_per_unit: float | None) -> StepLayout:
        """What schedulers need to know of it."""
        multiple = self.pp if self.vpp > 1 else 1
        return StepLayout(
            num_ranks=self.dp,
            capacity=capacity,
            alignment=self.alignment,
            cost=cost,
            microbatch_multiple=multiple,
            model=StepModel(
                num_stages=self.pp,
                num_virtual_stages=self.vpp,
                stage_group=multiple,
                ranks_meet=self.dp > 1 and self.ep > self.tp * self.cp,
            ),
            seconds_per_unit=seconds_per_unit,
        )


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Comparison and pictures."""

    scheduler: tuple[str, ...] = field(default=(), metadata={"repeatable": True})
    """Schedulers to compare: names, or functions of yours as module:function (default: all)."""
    num_batches: int | None = None
    """Global batches to schedule (default: 8, or fewer where they are large)."""
    tflops_per_device: float = 400.0
    """Speed at which a device computes, to tell times in milliseconds; ratios do not depend on it."""
    png: str | None = None
    """File for a picture; needs matplotlib."""
    html: str | None = None
    """File for a page with table, advice and pictures; needs nothing."""

    def __post_init__(self) -> None:
        _positive(self, "num_batches", "tflops_per_device")
        for name in self.names:
            scheduler_of(name)
        if self.png is not None and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--png needs matplotlib; pip install matplotlib, or use --html, which needs nothing")
        if self.png is not None and Path(self.png).suffix.lower() not in _PICTURES:
            raise ValueError(f"--png {self.png}: must end in {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}")
        for name in ("png", "html"):
            value = getattr(self, name)
            if value is not None and not Path(value).resolve().parent.is_dir():
                raise ValueError(f"{flag_of(name)} {value}: no such folder; make it first")
            if value is not None and Path(value).is_dir():
                raise ValueError(f"{flag_of(name)} {value}: is a folder; name a file in it")

    @property
    def names(self) -> tuple[str, ...]:
        """Schedulers to compare."""
        return self.scheduler or tuple(SCHEDULERS)


def scheduler_of(name: str) -> Scheduler:
    """The scheduler that the planner's own flag names."""
    try:
        return imported_scheduler(name)
    except ValueError as error:
        raise ValueError(str(error).replace("--sequence-packing-scheduler", "--scheduler")) from error


def read_pack_cost(path: Path | str) -> tuple[PackCost, dict[str, Any]]:
    """The cost in a file, and what it says of the model, which may be nothing."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"must be a JSON object, but is {found!s:.40}")
        model = found.get("model")
        return read_cost(found), model if isinstance(model, dict) else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"--pack-cost {path}: {error}; give a file of megatron.packing.calibrate") from error


def _positive(options: object, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{flag_of(name)} must be above 0, but is {value}")
