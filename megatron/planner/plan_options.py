"""pure. Options of the planner: Megatron's names if there is one, and short names for the parallel
layout.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from megatron.packing.batch.layout import Alignment
from megatron.packing.flags import flag_of
from megatron.packing.model.layout_rules import check_layout
from megatron.packing.model.shape import ModelShape
from megatron.packing.rules import Layout, Rule, at_least, check_rules, in_range
from megatron.packing.scheduling.cost import PackCost, layers_pack_cost, part_shares
from megatron.packing.scheduling.fitted_cost import read_fitted_cost
from megatron.packing.scheduling.problem import Scheduler
from megatron.packing.scheduling.registry import SCHEDULERS, get_scheduler
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.stages import StageLayers
from megatron.planner.step_record import StepLayout

DEFAULT_MODEL = ModelShape(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    swiglu=True,
)
DEFAULT_VOCABULARY = 128256
DEFAULT_MODEL_IN_WORDS = (
    "8B (32 layers, hidden 4096, 32 heads, 8 query groups, SwiGLU 14336, vocabulary 128256)"
)
STAGE_OPTIONS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Options about the layers of pipeline stages, which the planner and runs have alike."""
_OF_RUN = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "num_virtual_stages_per_pipeline_rank": "vpp",
    "sequence_parallel": "sequence_parallel",
    **{name: name for name in STAGE_OPTIONS},
}
"""Layout option of a run -> the planner's."""
_FLAGS = {
    "tensor": "--tp",
    "pipeline": "--pp",
    "virtual": "--vpp",
    "context": "--cp",
    "experts": "--ep",
}
"""Size of a `Layout` -> the planner's flag."""
_PICTURES = (".png", ".pdf", ".svg", ".jpg")


_WHOLE_SHAPE = ("num_layers", "hidden_size", "num_attention_heads")


def _incomplete_shape(options: Any) -> dict[str, str]:
    missing = [flag_of(name) for name in _WHOLE_SHAPE if getattr(options, name) is None]
    others = (options.ffn_hidden_size, options.kv_channels, options.num_query_groups)
    is_begun = len(missing) < len(_WHOLE_SHAPE) or any(others) or options.is_gated
    return {"missing": ", ".join(missing)} if missing and is_begun else {}


@dataclass(frozen=True, kw_only=True)
class ModelOptions(ModelShape):
    """Model, for the cost of a token and of a pair of tokens (default: the run's, or one of 8B
    parameters).
    """

    vocab_size: int | None = None
    """Vocabulary size; without it the output layer is not counted."""
    loss_share: float = 1.0
    """Share of the tokens that count for the loss; the others need no output layer."""
    pretrained_checkpoint: str | None = None
    """Folder of a HuggingFace model: its config.json gives the shape, its tokenizer reads chats."""
    pack_cost: str | None = None
    """File of megatron-sft calibrate, whose cost in seconds counts instead of a shape's."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *at_least(1, "vocab_size"),
        *in_range(0, 1, "loss_share"),
        Rule(
            when=_incomplete_shape,
            why="a model's shape also needs {missing}",
            way_out="pass all, or none for the 8B default",
        ),
        Rule(
            when=lambda options: options.pack_cost is not None and options.num_layers is not None,
            why="pass either {pack_cost.flag} or a model's shape",
        ),
        Rule(
            when=lambda options: options.pack_cost is not None and options.loss_share != 1,
            why="{loss_share.flag} needs a model's shape, as {pack_cost.flag} was measured",
            way_out="leave one of them out",
        ),
    )

    def shape(self) -> ModelShape:
        """Returns the shape of the model: that of the flags, or of the file of --pack-cost, or of
        the default model.
        """
        if self.pack_cost is not None:
            said = read_fitted_cost(self.pack_cost).model
            names = {
                field.name for field in fields(ModelShape) if type(said.get(field.name)) is int
            }
            found = ModelShape(**{name: said[name] for name in names})
            return (
                found if self.num_experts is None else replace(found, num_experts=self.num_experts)
            )
        if self.num_layers is not None:
            return self
        names = {
            field.name
            for field in fields(ModelShape)
            if field.name.startswith(("num_experts", "moe_"))
        }
        return replace(DEFAULT_MODEL, **{name: getattr(self, name) for name in names})

    @property
    def origin(self) -> str:
        """Source of the shape, for messages; empty if it comes from flags."""
        if self.pack_cost is not None:
            return f" (of --pack-cost {self.pack_cost})"
        return " (the default model's)" if self.num_layers is None else ""

    def described(self) -> str:
        """Returns the model in words."""
        if self.pack_cost is not None:
            return f"cost of {self.pack_cost}"
        experts = (
            f", {self.num_experts} experts, {self.moe_router_topk} per token"
            if self.num_experts
            else ""
        )
        if self.num_layers is None:
            return f"{DEFAULT_MODEL_IN_WORDS}{experts}, the default"
        return (
            f"{self.num_layers} layers, hidden {self.hidden_size}, {self.num_attention_heads} "
            f"heads{experts}"
        )

    def cost(self) -> PackCost:
        """Returns the cost of a pack: in FLOPs, or with --pack-cost in seconds of one device."""
        if self.pack_cost is not None:
            return read_fitted_cost(self.pack_cost).cost
        shape = self.shape()
        assert shape.hidden_size is not None
        cost = layers_pack_cost(
            shape.layer_kinds(),
            hidden_size=shape.hidden_size,
            vocab_size=self._output_rows,
            is_gated=shape.is_gated,
            mtp_num_layers=shape.mtp_num_layers or 0,
        )
        return cost.at_loss_share(self.loss_share)

    def shares(self, stages: StageLayers) -> tuple[float, ...]:
        """Returns the share of each pipeline part in the time of a pack; () if the shape is not
        known.
        """
        shape = self.shape()
        if stages.num_stages == 1 or None in (shape.num_layers, shape.hidden_size):
            return ()
        assert shape.num_layers is not None
        assert shape.hidden_size is not None
        return part_shares(
            shape.layer_kinds(),
            stages.of_parts(shape.num_layers),
            hidden_size=shape.hidden_size,
            vocab_size=self._output_rows,
            is_gated=shape.is_gated,
            mtp_num_layers=shape.mtp_num_layers or 0,
            loss_share=self.loss_share,
        )

    @property
    def _output_rows(self) -> int:
        return self.vocab_size or (DEFAULT_VOCABULARY if self.num_layers is None else 0)


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
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline stage (default: as many as the others)."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline stage (default: as many as the others)."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first pipeline stage, which gets one fewer."""
    account_for_loss_in_pipeline_split: bool = False
    """Count output layer and loss as a layer of the last pipeline stage, which gets one fewer.
    """
    cp: int = 1
    """Context-parallel size."""
    ep: int = 1
    """Expert-parallel size: beyond --tp times --cp, data-parallel ranks wait for one another at
    every microbatch.
    """
    sequence_parallel: bool = False
    """Align packs for sequence parallel."""
    global_batch_size: int | None = None
    """Sequences of one step (default: 8 times --dp times --pp)."""
    max_seqlen_per_dp_cp_rank: int | None = None
    """Tokens of a pack that one rank holds, at most (default: those of the longest sequence)."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *at_least(1, "dp", "tp", "pp", "vpp", "cp", "ep"),
        *at_least(1, "global_batch_size", "max_seqlen_per_dp_cp_rank", *STAGE_OPTIONS[:2]),
        Rule(
            when=lambda options: options.vpp > 1 and options.pp == 1,
            why="{vpp} needs {pp.flag} of at least 2",
        ),
        *(
            Rule(
                when=lambda options, name=name: (
                    getattr(options, name) is not None and options.pp == 1
                ),
                why=f"{{{name}.flag}} needs {{pp.flag}} of at least 2",
            )
            for name in STAGE_OPTIONS[:2]
        ),
        Rule(
            when=lambda options: (
                {"ranks": options.dp * options.tp * options.cp}
                if options.dp * options.tp * options.cp % options.ep
                else {}
            ),
            why="{ep} must divide {dp.flag} x {tp.flag} x {cp.flag}, {ranks}",
        ),
    )

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)

    def check(self, model: ModelOptions) -> None:
        """Raises ValueError for a parallel layout that the model cannot be trained in, with the
        flags and the way out.
        """
        layout, fitted = self.layout, model.pack_cost
        if fitted is not None and "num_experts" not in read_fitted_cost(fitted).model:
            layout = replace(layout, experts=1)  # whether it has experts is not known
        check_layout(model.shape(), layout, model.origin)

    @property
    def layout(self) -> Layout:
        """Sizes of the layout, for rules, under the flags of this program."""
        return Layout(
            tensor=self.tp,
            pipeline=self.pp,
            virtual=self.vpp,
            context=self.cp,
            experts=self.ep,
            sequence_parallel=self.sequence_parallel,
            stages=self.stage_layers,
            flags=_FLAGS,
        )

    @property
    def stage_layers(self) -> StageLayers:
        """Layers of each pipeline stage."""
        return StageLayers(
            num_stages=self.pp,
            num_virtual_stages=self.vpp,
            first=self.decoder_first_pipeline_num_layers,
            last=self.decoder_last_pipeline_num_layers,
            counts_embedding=self.account_for_embedding_in_pipeline_split,
            counts_loss=self.account_for_loss_in_pipeline_split,
        )

    @property
    def batch_size(self) -> int:
        """Sequences of a global batch."""
        return self.global_batch_size or 8 * self.dp * self.pp

    @property
    def alignment(self) -> Alignment:
        """Alignment of sequences and packs in this parallel layout."""
        return Alignment.for_layout(
            context_parallel_size=self.cp,
            tensor_parallel_size=self.tp,
            sequence_parallel=self.sequence_parallel,
        )

    def capacity(self, longest: int) -> int:
        """Returns the capacity of a pack in tokens, a multiple of the alignment. The default is
        room for a sequence of `longest` tokens.
        """
        pack = self.alignment.pack
        if self.max_seqlen_per_dp_cp_rank is None:
            return -(-longest // pack) * pack
        capacity = self.max_seqlen_per_dp_cp_rank * self.cp // pack * pack
        if not capacity:
            raise ValueError(
                f"--max-seqlen-per-dp-cp-rank must be at least {-(-pack // self.cp)} in this "
                f"layout, but is {self.max_seqlen_per_dp_cp_rank}"
            )
        return capacity

    def step_layout(
        self, model: ModelOptions, capacity: int, cost: PackCost, seconds_per_unit: float | None
    ) -> StepLayout:
        """Returns the parallel layout with the facts of the model that schedulers need."""
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
                sync_every_microbatch=self.dp > 1 and self.ep > self.tp * self.cp,
                shares=model.shares(self.stage_layers),
            ),
            seconds_per_unit=seconds_per_unit,
        )


def layout_of_run(options: Mapping[str, Any], num_layers: int | None) -> dict[str, Any]:
    """Returns the fields of `LayoutOptions` that a run's `options` say, all of them or some."""
    layout = {ours: options[n] for n, ours in _OF_RUN.items() if options.get(n) is not None}
    per_chunk = options.get("num_layers_per_virtual_pipeline_stage")
    if num_layers is not None and per_chunk is not None:
        num_counted = num_layers + sum(layout.get(name) is True for name in STAGE_OPTIONS)
        layout["vpp"] = max(num_counted // layout.get("pp", 1) // per_chunk, 1)
    return layout


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Comparison and pictures."""

    scheduler: tuple[str, ...] = field(default=(), metadata={"repeatable": True})
    """Schedulers to compare: names, or functions of yours as module:function (default: all)."""
    num_batches: int | None = None
    """Global batches to schedule (default: 8, or fewer where they are large)."""
    tflops_per_device: float = 400.0
    """Speed of a device, to print times in milliseconds; ratios do not depend on it."""
    png: str | None = None
    """File for a picture; needs matplotlib."""
    html: str | None = None
    """File for a page with table, advice and pictures; needs nothing."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *at_least(1, "num_batches"),
        *at_least(1e-3, "tflops_per_device"),
    )

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)
        for name in self.names:
            scheduler_of(name)
        self._check_png()
        for name in ("png", "html"):
            value = getattr(self, name)
            if value is not None and not Path(value).resolve().parent.is_dir():
                raise ValueError(f"{flag_of(name)} {value}: no such folder; make it first")
            if value is not None and Path(value).is_dir():
                raise ValueError(f"{flag_of(name)} {value}: is a folder; name a file in it")

    def _check_png(self) -> None:
        if self.png is not None and importlib.util.find_spec("matplotlib") is None:
            raise ValueError(
                "--png needs matplotlib; pip install matplotlib, or use --html, which needs nothing"
            )
        if self.png is not None and Path(self.png).suffix.lower() not in _PICTURES:
            raise ValueError(
                f"--png {self.png}: must end in {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Schedulers to compare."""
        return self.scheduler or tuple(SCHEDULERS)


def scheduler_of(name: str) -> Scheduler:
    """Returns a scheduler by its name. Errors name the planner's flag instead of the trainer's."""
    try:
        return get_scheduler(name)
    except ValueError as error:
        raise ValueError(
            str(error).replace("--sequence-packing-scheduler", "--scheduler")
        ) from error
