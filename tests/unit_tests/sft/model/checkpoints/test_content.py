"""Which checkpoint a run continues from."""

import inspect
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import common as common_strategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.packing.scheduling.options import SchedulerOptions
from megatron.packing.step.delay import DelayQueue
from megatron.sft.model.checkpoints.content import (
    Wanted,
    _check_same_model,
    _check_same_parts,
    _data_notes,
    _left_out,
    load_checkpoint,
)
from megatron.sft.model.checkpoints.delayed import gather_delayed, restored_queue
from megatron.sft.model.checkpoints.folder import TRACKER, checkpoint_path
from megatron.sft.model.cpu_offload import make_adam_state
from megatron.sft.options.optimizer import ADAM_STATE, OptimizerStateConfig
from megatron.sft.options.packing import PackingConfig
from tests.unit_tests.packing.step.test_delay import delayed as delayed_step


def test_a_checkpoint_of_a_later_megatron_core_is_refused(tmp_path, monkeypatch, one_rank):
    """megatron-core 0.16.1 ends in an AttributeError of its own."""
    monkeypatch.setattr(common_strategy, "TorchCommonLoadStrategy", object, raising=False)
    checkpoint_path(tmp_path, 5).mkdir()
    (tmp_path / TRACKER).write_text("5")
    training: Any = None
    with pytest.raises(
        ValueError, match=r"iter_0000005 was saved under a later megatron-core .* Python 3\.12"
    ):
        load_checkpoint(tmp_path, training, model_options={}, data={}, wanted=Wanted())


@pytest.mark.parametrize(
    ("saved", "now", "said"),
    [
        ({"seed": 1}, {"seed": 1}, []),
        ({"seed": 1, "chat_template": "a"}, {"seed": 1, "chat_template": "a"}, []),
        ({"seed": 1}, {"seed": 1, "chat_template": "a"}, []),  # from before it was recorded
        ({"seed": 1, "chat_template": "a"}, {"seed": 1, "chat_template": "b"}, ["another chat te"]),
        ({"seed": 1, "chat_template": "a"}, {"seed": 1}, ["another chat te"]),
        ({"seed": 1}, {"seed": 2, "chat_template": "a"}, ["on other data"]),
        (
            {"seed": 1},
            {"seed": 1, "train_turns": "last"},
            ["on samples made with other options: train_turns was the default, is last"],
        ),
        (
            {"image_max_pixels": "9", "blend": {"mode": "a"}},
            {"image_max_pixels": "8", "blend": {"mode": "b"}},
            ["image_max_pixels was 9, is 8", "on other data"],
        ),
        (
            {"seed": 1, "chat_template": "a"},
            {"seed": 2, "chat_template": "b"},
            ["another chat te", "on other data"],
        ),
    ],
)
def test_other_data_and_templates_are_noted(saved, now, said):
    """A template that was swapped in mid-run trains prompts that nobody serves, in silence."""
    notes = list(_data_notes(Path("step"), saved, now))
    assert len(notes) == len(said)
    assert all(words in note for words, note in zip(said, notes))


PACKING = PackingConfig(sequence_packing=True)
OFF, ON = SchedulerOptions(), SchedulerOptions(outlier_delay_steps=4)


@pytest.fixture
def delayed():
    """A sequence of 3 tokens on the first rank, one of 5 on the second."""
    states = []
    for length in (3, 5):
        queue = DelayQueue(4)
        queue.finish(delayed_step(length))
        states.append(queue.state_dict())
    return states


def test_without_waiting():
    """A queue where none was asked for would add to logs and checkpoints of all runs."""
    assert restored_queue(PACKING, OFF, (), 0, 2) is None
    assert restored_queue(PackingConfig(), OFF, (), 0, 2) is None
    assert gather_delayed(None) == []
    queue = restored_queue(PACKING, ON, (), 0, 2)
    assert queue is not None
    assert (queue.max_steps, len(queue)) == (4, 0)


@pytest.mark.parametrize(("scheduling", "max_steps"), [(OFF, 0), (ON, 4)])
def test_what_waits_is_taken_over(delayed, scheduling, max_steps):
    """Also by a run that lets nothing wait any more: it would leave out what an earlier one
    drew."""
    for rank, length in enumerate((3, 5)):
        queue = restored_queue(PACKING, scheduling, delayed, rank, 2)
        assert queue is not None
        assert queue.max_steps == max_steps
        assert queue.begin(is_repeated=False).samples.lengths.tolist() == [length]


def test_padded_training_refuses_to_forget_what_waits(delayed):
    """Without packs there is no queue that would give it back."""
    with pytest.raises(
        ValueError, match="holds sequences that wait for a later step; pass --sequence-packing"
    ):
        restored_queue(PackingConfig(), OFF, delayed, 0, 2)


BYTES = {"num_layers": 2, "vocab_size": 264, "tokenizer": "ByteLevelTokenizer 264"}


@pytest.mark.parametrize(
    ("saved", "now", "told"),
    [
        (
            BYTES,
            {**BYTES, "tokenizer": "3f2a"},
            "(the tokenizer was ByteLevelTokenizer 264, is 3f2a)",
        ),
        (BYTES, {**BYTES, "vocab_size": 300}, "(the vocabulary was 264, is 300)"),
        (BYTES, {**BYTES, "num_layers": 3}, "(--num-layers was 2, is 3)"),
        (
            BYTES,
            {**BYTES, "lora_delta_net_modules": ["in_proj_a", "out_proj"]},
            "(--lora-target-modules of delta nets was none, is in_proj_a out_proj)",
        ),
        (
            BYTES,
            {**BYTES, "reference": "3f2a", "reference_source": "--pretrained-checkpoint a"},
            "(the reference was none, as its --loss had none, is --pretrained-checkpoint a); give "
            "the same options, or start from its weights with --pretrained-checkpoint ",
        ),
        (
            {**BYTES, "reference": "77", "reference_source": "--pretrained-checkpoint a"},
            {**BYTES, "reference": "3f2a", "reference_source": "--pretrained-checkpoint b"},
            "(the reference was --pretrained-checkpoint a, is --pretrained-checkpoint b)",
        ),
        (
            {**BYTES, "reference": "77", "reference_source": "--pretrained-checkpoint a"},
            {**BYTES, "reference": "3f2a", "reference_source": "--pretrained-checkpoint a"},
            "(the reference was other files in --pretrained-checkpoint a, which have changed since",
        ),
        (
            {**BYTES, "base": "77", "base_folder": "a"},
            {**BYTES, "base": "3f2a", "base_folder": "b"},
            "(the base model was a, is b)",
        ),
        (  # it has moved
            {**BYTES, "base": "77", "base_folder": "a"},
            {**BYTES, "base": "77", "base_folder": "b"},
            None,
        ),
        ({**BYTES, "reference": "3f2a"}, BYTES, None),
        (
            BYTES,
            {"num_layers": 2, "vocab_size": 264},
            None,
        ),  # of mock data, which have no tokenizer
        ({"num_layers": 2}, BYTES, None),  # as older versions saved it
    ],
)
def test_a_checkpoint_of_another_tokenizer_is_refused(tmp_path, saved, now, told):
    """It would go on at the loss of random weights, in the same shapes."""
    if told is None:
        _check_same_model(tmp_path, saved, now)
        return
    with pytest.raises(
        ValueError, match=r"is of (another model|a run with another reference) \("
    ) as refused:
        _check_same_model(tmp_path, saved, now)
    assert told in str(refused.value)


def test_another_kind_of_expert_parallel_is_refused_in_a_line():
    """megatron-core ends in a KeyError that lists every tensor of the checkpoint."""
    one, two = (SimpleNamespace(chained_optimizers=[None] * number) for number in (1, 2))
    together: dict[str, Any] = {"optimizer": {"param_state": {}}}
    apart: dict[str, Any] = {"optimizer": {0: {}, 1: {}}}
    for common, optimizer in ((together, one), (apart, two), ({}, one), ({}, SimpleNamespace())):
        _check_same_parts(Path("saved"), common, optimizer)
    with pytest.raises(ValueError, match="model-parallel-size above 1; raise it, or pass --no-"):
        _check_same_parts(Path("saved"), apart, one)
    with pytest.raises(ValueError, match="model-parallel-size 1; lower it, or pass --no-load-opt"):
        _check_same_parts(Path("saved"), together, two)


@pytest.mark.parametrize("has_adapter", [False, True])
def test_only_a_base_model_is_left_out(has_adapter):
    """A layer that is frozen without adapters is in no other file: a run that continues would have
    its random start.
    """
    model = torch.nn.ModuleDict({"frozen": torch.nn.Linear(2, 2), "trained": torch.nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    if has_adapter:
        model["trained"].register_module("adapter", torch.nn.Linear(2, 1))
    expected = {"frozen.weight", "frozen.bias"} if has_adapter else set()
    assert _left_out(model) == expected


def test_adams_state_is_declared_once():
    """Loading, the estimates and the options' precisions follow from it; it is what torch's Adam
    makes, and what megatron-core's sharded optimizer saves.
    """
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    adam = torch.optim.Adam([parameter])
    adam.step()
    made = {name: type(value) for name, value in adam.state[parameter].items()}
    held = adam.state[parameter]["exp_avg"]
    make_adam_state(adam)
    assert adam.state[parameter]["exp_avg"] is held
    adam.state.clear()
    make_adam_state(adam)
    assert {name: type(value) for name, value in adam.state[parameter].items()} == made
    assert set(made) == {"step", *ADAM_STATE}
    kinds = ", ".join(f'"{name}"' for name in ("param", *ADAM_STATE))
    assert f"for key in ({kinds})" in inspect.getsource(DistributedOptimizer)
    names = {one.name for one in fields(OptimizerStateConfig)}
    assert {f"{name}_dtype" for name in ADAM_STATE} <= names
    users = [
        path.name
        for path in (Path(__file__).parents[5] / "megatron").rglob("*.py")
        if any(name in path.read_text() for name in ADAM_STATE)
    ]
    # of options, and as Transformer Engine's optimizer is called
    assert sorted(users) == ["optimizer.py", "optimizers.py"]
