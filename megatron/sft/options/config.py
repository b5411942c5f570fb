"""pure. All options of a run, with Megatron's names and meanings. Contradictions between groups are
found here, before anything is built.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from megatron.packing.batch.layout import Alignment
from megatron.packing.flags import FlagError, flag_of
from megatron.packing.model.parts import check_parts
from megatron.packing.model.shape import Split, check_splits
from megatron.packing.scheduling.options import SchedulerOptions
from megatron.sft.options.data import DataConfig
from megatron.sft.options.kernels import KernelConfig
from megatron.sft.options.lora import LoraConfig
from megatron.sft.options.model import ModelConfig
from megatron.sft.options.optimizer import OptimizerStateConfig
from megatron.sft.options.output import OutputConfig
from megatron.sft.options.packing import PackingConfig
from megatron.sft.options.parallel import ParallelConfig
from megatron.sft.options.training import TrainingConfig

GROUPS = (
    ModelConfig,
    ParallelConfig,
    PackingConfig,
    SchedulerOptions,
    DataConfig,
    TrainingConfig,
    OptimizerStateConfig,
    KernelConfig,
    LoraConfig,
    OutputConfig,
)
"""The parts of `SFTConfig`, in the order of --help."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """All options of a run."""

    model: ModelConfig
    parallel: ParallelConfig
    packing: PackingConfig
    scheduling: SchedulerOptions = field(default_factory=SchedulerOptions)
    data: DataConfig
    training: TrainingConfig
    optimizer: OptimizerStateConfig = field(default_factory=OptimizerStateConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    output: OutputConfig

    @classmethod
    def of(cls, parts: Sequence[Any]) -> SFTConfig:
        """Returns the options with one instance of each of `GROUPS`, in order. `check` must be
        called afterwards.
        """
        return cls(**dict(zip((field.name for field in fields(cls)), parts)))

    @property
    def alignment(self) -> Alignment:
        """Alignment of sequences and packs in the parallel layout."""
        return Alignment.for_layout(
            context_parallel_size=self.parallel.context_parallel_size,
            tensor_parallel_size=self.parallel.tensor_model_parallel_size,
            sequence_parallel=self.parallel.sequence_parallel,
        )

    @property
    def smallest_capacity_per_rank(self) -> int:
        """Smallest capacity of a pack, in tokens per rank: one sequence of --seq-length."""
        padded = int(self.alignment.padded_length(np.int64(self.model.seq_length)))
        return (
            -(-padded // self.alignment.pack)
            * self.alignment.pack
            // self.parallel.context_parallel_size
        )

    @property
    def capacity_per_rank(self) -> int:
        """Capacity of a pack, in tokens per rank."""
        return self.packing.max_seqlen_per_dp_cp_rank or self.smallest_capacity_per_rank

    @property
    def shards_optimizer(self) -> bool:
        """True with --use-distributed-optimizer, and for adapters with --bf16: megatron-core's
        other optimizer cannot save the state of float32 parameters beside bfloat16 ones.
        """
        return self.parallel.use_distributed_optimizer or (self.lora.lora and self.training.bf16)

    @property
    def num_virtual_stages(self) -> int | None:
        """Virtual pipeline stages on each rank; None without interleaving."""
        parallel = self.parallel
        per_chunk = parallel.num_layers_per_virtual_pipeline_stage
        if per_chunk is None:
            return parallel.num_virtual_stages_per_pipeline_rank
        counted = parallel.stage_layers(1).num_counted(self.model.num_layers)
        return counted // parallel.pipeline_model_parallel_size // per_chunk

    @property
    def layers_of_parts(self) -> tuple[int, ...]:
        """Layers of each virtual stage of each pipeline stage, in the order of the layers."""
        return self.parallel.stage_layers(self.num_virtual_stages or 1).of_parts(
            self.model.num_layers
        )

    def check(self, world_size: int) -> None:
        """Raises FlagError for options that contradict one another or the number of processes."""
        try:
            data_parallel_size = self.parallel.data_parallel_size(world_size)
            self._check_batch(data_parallel_size)
            self._check_scheduling()
            self._check_model()
            self._check_rank_order()
            self._check_context()
            self._check_evaluations()
            self._check_lora()
            self._check_optimizer_state()
            self._check_kernels()
        except ValueError as failure:
            raise FlagError(str(failure)) from None

    def _check_batch(self, data_parallel_size: int) -> None:
        if self.training.train_epochs is not None and self.data.mock_data:
            raise ValueError(
                "--train-epochs needs --data-path, as --mock-data never ends; pass --train-iters"
            )
        per_draw = data_parallel_size * self.training.micro_batch_size
        if self.training.global_batch_size % per_draw:
            raise ValueError(
                f"--global-batch-size {self.training.global_batch_size} must be a multiple of "
                f"--micro-batch-size {self.training.micro_batch_size} times the data-parallel size "
                f"{data_parallel_size}"
            )
        num_microbatches = self.training.global_batch_size // per_draw
        stages = self.parallel.pipeline_model_parallel_size
        if (
            not self.packing.sequence_packing
            and self.num_virtual_stages
            and num_microbatches % stages
        ):
            raise ValueError(
                f"an interleaved pipeline of {stages} stages needs a multiple of {stages} "
                f"microbatches, but --global-batch-size {self.training.global_batch_size} makes "
                f"{num_microbatches}"
            )

    def _check_scheduling(self) -> None:
        is_fixed = self.packing.sequence_packing_scheduler == "empty"
        if self.scheduling.outlier_delay_steps and is_fixed:
            raise ValueError(
                "--outlier-delay-steps needs a scheduler that mixes what was loaded; pass "
                "--sequence-packing-scheduler default"
            )

    def _check_model(self) -> None:
        model, parallel = self.model, self.parallel
        tensor, experts = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
        self._check_experts()
        check_splits(
            model,
            stages=parallel.stage_layers(self.num_virtual_stages or 1),
            stages_flag="--pipeline-model-parallel-size",
            virtual=parallel.virtual_split,
            tensor=Split("--tensor-model-parallel-size", tensor),
            experts=Split("--expert-model-parallel-size", experts),
            sequence_parallel=parallel.sequence_parallel,
        )
        check_parts(model, layout=parallel.layout)
        run = (model.recompute_num_layers or 1) if model.recompute_method != "block" else 1
        uneven = [layers for layers in self.layers_of_parts if layers % run]
        if uneven:
            raise ValueError(
                f"--recompute-num-layers {run} must divide the layers of a stage, {uneven[0]}; "
                "lower it, or pass --recompute-method block"
            )
        if model.mtp_num_layers is not None and not self.layers_of_parts[-1]:
            raise ValueError(
                "--mtp-num-layers needs a layer on the last pipeline stage, which is the kind of "
                "layer it is; drop --account-for-loss-in-pipeline-split"
            )
        if len(parallel.cp_comm_type) not in (1, model.num_layers):
            raise ValueError(
                "--cp-comm-type must be one value, or one for each of --num-layers "
                f"{model.num_layers}"
            )
        if self.num_virtual_stages == 1:
            raise ValueError(
                "--num-layers-per-virtual-pipeline-stage leaves one virtual stage per rank; lower "
                "it or drop it"
            )

    def _check_experts(self) -> None:
        model, parallel = self.model, self.parallel
        tensor, experts = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
        if experts > 1 and model.num_experts is None:
            raise ValueError(f"--expert-model-parallel-size {experts} needs --num-experts")
        is_constant = model.moe_router_topk == 1 and not model.moe_router_pre_softmax
        if (
            model.num_experts is not None
            and is_constant
            and self.output.pretrained_checkpoint is None
        ):
            raise ValueError(
                "--moe-router-topk 1 needs --moe-router-pre-softmax: the share of one expert among "
                "the chosen is constant, and would not train the router"
            )
        if model.num_experts is not None and tensor > 1 and experts == 1:
            also = "" if parallel.sequence_parallel else " and --sequence-parallel"
            raise ValueError(
                f"--num-experts with --tensor-model-parallel-size {tensor} needs "
                f"--expert-model-parallel-size above 1{also}: megatron-core would not sum the "
                "gradients of whole experts over tensor-parallel ranks"
            )

    def _check_rank_order(self) -> None:
        parallel = self.parallel
        tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        experts = tensor if self.model.num_experts is None else parallel.expert_model_parallel_size
        if (
            parallel.use_tp_pp_dp_mapping
            and parallel.pipeline_model_parallel_size > 1
            and experts != tensor * context
        ):
            raise ValueError(
                "--use-tp-pp-dp-mapping with a pipeline needs --context-parallel-size 1, and with "
                "--num-experts an --expert-model-parallel-size of tensor times context parallel "
                "size: megatron-core cannot group others"
            )

    def _check_context(self) -> None:
        self._check_dump()
        seq_length = self.model.seq_length
        if (
            self.packing.sequence_packing
            and self.capacity_per_rank < self.smallest_capacity_per_rank
        ):
            raise ValueError(
                f"--max-seqlen-per-dp-cp-rank {self.capacity_per_rank} must hold a sequence of "
                f"--seq-length {seq_length} in this parallel layout; raise it to "
                f"{self.smallest_capacity_per_rank}"
            )
        if not self.packing.sequence_packing and seq_length % self.alignment.pack:
            raise ValueError(
                f"--seq-length {seq_length} must be a multiple of {self.alignment.pack} in this "
                "parallel layout without packing"
            )

    def _check_dump(self) -> None:
        last = self.training.train_iters or math.inf  # by --train-epochs: not known yet
        beyond = [step for step in self.output.dump_schedule if step > last]
        if beyond:
            raise ValueError(
                f"--dump-schedule {beyond[0]} must be at most --train-iters "
                f"{self.training.train_iters}, the last step"
            )

    def for_records(self, num_records: int) -> SFTConfig:
        """Returns the options for training data of `num_records` records; see
        `TrainingConfig.for_records`.
        """
        config = replace(self, training=self.training.for_records(num_records))
        config._check_context()
        return config

    def _check_evaluations(self) -> None:
        if self.training.sample_prompts is not None and self.data.mock_data:
            raise ValueError("--sample-prompts needs words; pass --data-path, not --mock-data")

    def _check_lora(self) -> None:
        model, tensor = self.model, self.parallel.tensor_model_parallel_size
        if self.lora.lora and model.mtp_num_layers is not None:
            raise ValueError(
                "--lora must not be used with --mtp-num-layers, whose layers have no adapters; "
                "drop one"
            )
        if self.lora.lora and 0 in self.layers_of_parts:
            raise ValueError(
                "--lora needs a layer on every pipeline stage; embedding or loss has one alone: "
                "drop --account-for-embedding-in-pipeline-split and "
                "--account-for-loss-in-pipeline-split"
            )
        if self.lora.lora:
            self.lora.check_layout(tensor, model.num_query_groups or model.num_attention_heads or 1)

    def _check_optimizer_state(self) -> None:
        if not self.optimizer.use_precision_aware_optimizer:
            return
        if self.lora.lora:
            raise ValueError(
                "--use-precision-aware-optimizer saves little with --lora, and was not checked "
                "with it; drop one"
            )
        if not self.parallel.use_distributed_optimizer:
            raise ValueError(
                "--use-precision-aware-optimizer needs --use-distributed-optimizer; pass it"
            )

    def _check_kernels(self) -> None:
        if self.training.keep_logits and self.model.final_logit_softcapping is not None:
            raise ValueError("--keep-logits does not work with --final-logit-softcapping; drop it")
        for name, why in self.refused_kernels().items():
            if getattr(self.kernels, name):
                raise ValueError(f"{flag_of(name)} {why}")

    def refused_kernels(self) -> dict[str, str]:
        """Returns why the fused kernels that do not compute this model do not, by their option."""
        why = self.model.refused_kernels()
        if self.training.logits_of_masked_tokens:
            why.setdefault(
                "cross_entropy_loss_fusion", "and --logits-of-masked-tokens exclude one another"
            )
        if self.lora.lora:
            why["gradient_accumulation_fusion"] = (
                "is of weights that --lora does not train; drop it"
            )
        return why

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for logs and checkpoints."""
        return json.loads(json.dumps(asdict(self)))
