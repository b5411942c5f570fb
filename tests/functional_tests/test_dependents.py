"""Who depends on me: a mechanism that nobody has heard of is built, counted, saved, exported and
refused by all who ask for a layer's parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron.packing.flags import FlagError
from megatron.packing.layers import EACH_LAYER, Parameter, Part, Work
from megatron.packing.model import parts
from megatron.packing.plugin_checks import check_config
from megatron.packing.rules import Rule
from megatron.packing.step.trees import why_paths_stay_apart
from megatron.planner.plan_options import LayoutOptions, ModelOptions
from megatron.sft.arguments.parse import parse_config
from megatron.sft.distributed import make_groups
from megatron.sft.fit.counter import ByteCounter
from megatron.sft.fit.estimate import Request, estimates
from megatron.sft.fit.stages import at_depth, depths_of, stages_of
from megatron.sft.fit.step import run_step
from megatron.sft.model import cpu_support, mcore_fixes
from megatron.sft.model.checkpoints.content import Progress, state_to_save
from megatron.sft.model.huggingface.families.llama import LLAMA
from megatron.sft.model.huggingface.rows import Row
from megatron.sft.model.huggingface.weights import Weights
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.model import ModelConfig
from tests.functional_tests.fit_check import COMMON, DATA, LORA, PACKED, ROPE, VOCAB_SIZE
from tests.functional_tests.ranks import run_ranks
from tests.unit_tests.packing.plugged import make_config

ROWS = "decoder.layers.0.self_attention.rows"


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """Options of the mechanism."""

    scale_freq: tuple[int, ...] = field(default=(), metadata=EACH_LAYER)
    """1 for each layer that scales in place of attention."""
    scale_rows: int = 3
    """Rows that are summed."""


@dataclass(frozen=True, kw_only=True)
class Scale(Part):
    """Multiplies hidden states by a sum of rows."""

    scale_rows: int = 3

    name: ClassVar[str] = "scale"
    title: ClassVar[str] = "scales"
    layers_option: ClassVar[str] = "scale_freq"
    why_paths_apart: ClassVar[str] = "scales know no trees"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("scale.rows", "self_attention.rows", "whole", ("scale_rows", "hidden")),
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            when=lambda options, layout: layout.context > 1,
            why="{scale_freq.flag} needs {context.flag} 1, but it is {context.value}",
            way_out="lower it",
        ),
    )

    def sizes(self) -> dict[str, int]:
        return {"scale_rows": self.scale_rows}

    def work(self, hidden_size: int) -> Work:
        return Work(self.scale_rows * hidden_size, self.scale_rows * hidden_size)

    @staticmethod
    def module() -> type:
        return ScaleModule


class ScaleModule(MegatronModule):
    """What a layer has in place of attention."""

    def __init__(self, config: Any, layer_number: int, **others: Any) -> None:
        super().__init__(config=config)
        self.rows = torch.nn.Parameter(torch.rand(3, config.hidden_size))

    def forward(self, hidden: Tensor, mask: Tensor | None = None, **others: Any) -> Any:
        return hidden * self.rows.sum(0), None


@dataclass(frozen=True, kw_only=True)
class ScaledModel(ScaleOptions, ModelConfig):
    """The trainer's options with those of the mechanism."""


@dataclass(frozen=True, kw_only=True)
class PlannedModel(ScaleOptions, ModelOptions):
    """The planner's."""


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PARTS", (*parts.PARTS, Scale))


def scaled(flags: str = "", num_layers: int = 2, freq: tuple[int, ...] = (1, 0)) -> SFTConfig:
    config = parse_config(f"--num-layers {num_layers} {COMMON} {PACKED} {ROPE} {flags}".split(), 1)
    options = {one.name: getattr(config.model, one.name) for one in fields(config.model)}
    return replace(config, model=ScaledModel(**options, scale_freq=freq))


def trained(flags: str) -> tuple[set[str], set[str]]:
    """A step for real: what a checkpoint has of the model, and the parts of memory."""
    config, counter = scaled(flags), ByteCounter()
    mcore_fixes.install()
    cpu_support.install()
    make_groups(config)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    training = run_step(config, VOCAB_SIZE, DATA, counter, num_steps=1)
    saved = state_to_save(training, Progress(1, 24, False), {}, {})
    return set(saved["model0"]), {part for phase in counter.phases for part in phase.at_peak}


def test_it_is_built_saved_and_left_out_beside_adapters() -> None:
    """Its weights would be lost with the checkpoint, or be taken for attention's."""
    [(saved, memory)] = run_ranks(trained, 1, "")
    assert ROWS in saved
    assert "decoder.layers.0.self_attention.linear_qkv.weight" not in saved
    assert {"scales", "attention"} <= memory
    [(saved, _)] = run_ranks(trained, 1, LORA)
    assert ROWS not in saved
    assert "decoder.layers.1.self_attention.linear_qkv.adapter.lora_B" in saved
    config = scaled(LORA)
    assert config.lora.identity(parts=["scale"])["lora_scale_modules"] == []


def test_it_is_exported_under_a_familys_names() -> None:
    """A family that has it names it; of a layer with it nothing of attention is read or written."""
    family = replace(LLAMA, rows=(Row.of(Scale.parameters[0], ("scale.rows",)),))
    weights = Weights(scaled().model, VOCAB_SIZE, family)
    (part,) = weights.of_parameter(ROWS).parts
    assert (part.name, part.shape) == ("model.layers.0.scale.rows", (3, 32))
    names = [part.name for weight in weights.all() for part in weight.parts]
    assert part.name in names
    assert [name for name in names if "q_proj" in name] == [
        "model.layers.1.self_attn.q_proj.weight"
    ]


def test_it_is_estimated() -> None:
    """Layers in turn are traced in turn, not as if each were the first."""
    (found,) = estimates(Request(config=scaled("--bf16"), vocab_size=VOCAB_SIZE, world_size=1))
    assert {"scales", "attention"} <= {part.name for part in found.passes}
    deep = scaled(num_layers=12, freq=(0, 0, 1) * 4)
    (stage,) = stages_of(deep, 1)
    assert depths_of(deep, stage) == ()  # four periods are not enough to extrapolate from
    deep = scaled(num_layers=15, freq=(0, 0, 1) * 5)
    assert depths_of(deep, stage) == (3, 6, 9, 12)
    shallow: Any = at_depth(deep, 6).model
    assert shallow.scale_freq == (0, 0, 1, 0, 0, 1)


def test_it_is_planned_and_refused_by_all() -> None:
    """In the same words, whoever asks first."""
    kinds = scaled().model.layer_kinds()
    assert kinds[0].mixer == Scale()
    assert kinds[0].mixer_work(32) == Work(96, 96)
    assert why_paths_stay_apart(SimpleNamespace(layer_kinds=kinds)) == "scales know no trees"
    words = "--scale-freq needs {} 1, but it is 2; lower it"
    run = scaled()
    wide = replace(run, parallel=replace(run.parallel, context_parallel_size=2))
    with pytest.raises(FlagError, match=words.format("--context-parallel-size")):
        wide.check(2)
    model = PlannedModel(num_layers=2, hidden_size=8, num_attention_heads=2, scale_freq=(1, 0))
    with pytest.raises(ValueError, match=words.format("--cp")):
        LayoutOptions(cp=2).check(model)
    config = make_config(context_parallel_size=2, scale_freq=[1, 0])
    config.sequence_packing_scheduler = "default"
    with pytest.raises(ValueError, match=words.format("--context-parallel-size")):
        check_config(config)
