"""pure. All options of a run, with Megatron's names and meanings. Contradictions between groups are
found here, before anything is built.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Any

import numpy as np

from megatron.packing.batch.layout import Alignment
from megatron.packing.flags import FlagError, flag_of
from megatron.packing.model.activation_options import ActivationOptions
from megatron.packing.model.layout_rules import check_layout
from megatron.packing.model.options import refused_kernels
from megatron.packing.model.parts import fewest_groups
from megatron.packing.rules import Layout, check_rules
from megatron.packing.scheduling.options import SchedulerOptions
from megatron.sft.options.data import DataConfig
from megatron.sft.options.images import ImageConfig
from megatron.sft.options.kernels import KernelConfig
from megatron.sft.options.lora import LoraConfig
from megatron.sft.options.model import ModelConfig
from megatron.sft.options.optimizer import OptimizerStateConfig
from megatron.sft.options.output import OutputConfig
from megatron.sft.options.packing import PackingConfig
from megatron.sft.options.parallel import ParallelConfig
from megatron.sft.options.preference import PreferenceConfig
from megatron.sft.options.run_rules import KERNEL_RULES, LENGTH_RULES, RUN_RULES
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
    ActivationOptions,
    LoraConfig,
    ImageConfig,
    PreferenceConfig,
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
    activations: ActivationOptions = field(default_factory=ActivationOptions)
    lora: LoraConfig = field(default_factory=LoraConfig)
    images: ImageConfig = field(default_factory=ImageConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
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
        """Capacity of a pack, in tokens per rank; by default it holds two answers to a prompt in
        preference tuning.
        """
        paths = 2 if self.preference.is_on else 1
        return self.packing.max_seqlen_per_dp_cp_rank or paths * self.smallest_capacity_per_rank

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

    @property
    def options(self) -> OptionsByName:
        """All options, for rules."""
        return OptionsByName(self)

    @property
    def layout(self) -> Layout:
        """The parallel layout, for rules."""
        return self.parallel.layout(self.num_virtual_stages or 1)

    def check(self, world_size: int) -> None:
        """Raises FlagError for options that contradict one another or the number of processes."""
        try:
            data_parallel_size = self.parallel.data_parallel_size(world_size)
            check_layout(self.model, self.layout)
            check_rules(
                RUN_RULES, options=self.options, run=self, data_parallel_size=data_parallel_size
            )
            if self.lora.lora:
                model, tensor = self.model, self.parallel.tensor_model_parallel_size
                self.lora.check_layout(tensor, fewest_groups(model))
            for name, why in self.refused_kernels().items():
                if getattr(self.kernels, name):
                    raise ValueError(f"{flag_of(name)} {why}")
        except ValueError as failure:
            raise FlagError(str(failure)) from None

    def for_records(self, num_records: int) -> SFTConfig:
        """Returns the options for training data of `num_records` records; see
        `TrainingConfig.for_records`.
        """
        config = replace(self, training=self.training.for_records(num_records))
        check_rules(LENGTH_RULES, options=config.options, run=config)
        return config

    def refused_kernels(self) -> dict[str, str]:
        """Returns why the fused kernels that do not compute this model do not, by their option."""
        return refused_kernels(KERNEL_RULES, self.options)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for logs and checkpoints."""
        return json.loads(json.dumps(asdict(self)))


class OptionsByName:
    """All options of a run by name, whatever group they are of: a fact of rules."""

    def __init__(self, config: SFTConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        group = _group_names().get(name)
        if group is None:
            raise AttributeError(name)
        return getattr(getattr(self._config, group), name)


@cache
def _group_names() -> dict[str, str]:
    """Returns the name that `SFTConfig` has for the group of each option."""
    groups = zip((one.name for one in fields(SFTConfig)), GROUPS)
    return {option.name: name for name, group in groups for option in fields(group)}
