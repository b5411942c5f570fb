"""mcore. Content of a checkpoint, and loading it into a run.

megatron-core's distributed checkpoints store whole tensors, so that a run may continue in another
parallel layout. Before anything is read, the size and the checksum of each file are compared with
those that were saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import common as common_strategy
from megatron.core.utils import unwrap_model

from megatron.packing.device import Device
from megatron.packing.flags import flag_of
from megatron.packing.model.names import is_of_adapter
from megatron.packing.model.parts import known_parts
from megatron.packing.quoting import shortened
from megatron.sft.data.sample_set import blend_changes, match_saved_form
from megatron.sft.images.model import IS_FROZEN_LANGUAGE_MODEL
from megatron.sft.images.vision import PARAMETERS
from megatron.sft.model.build import Training
from megatron.sft.model.checkpoints.files import CheckpointError, check_sound, read_or_refused
from megatron.sft.model.checkpoints.folder import checkpoint_path, latest_iteration
from megatron.sft.model.checkpoints.shares import read_pieces_in_place, share_out
from megatron.sft.model.checkpoints.unpickling import check_metadata, only_weights
from megatron.sft.model.cpu_offload import make_adam_state
from megatron.sft.options.images import TRAINED
from megatron.sft.options.lora import key_of_part
from megatron.sft.options.model import ModelConfig

METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
"""Makes megatron-core save the optimizer's state as one tensor per parameter, in any layout."""
# Checkpoints from before an option existed do not record it. Their runs had its default.
_DEFAULTS_OF_OLD = {
    field.name: field.default for field in fields(ModelConfig) if field.default is not MISSING
} | {"lora": False, "lora_experts": "all", "lora_gate_up": "files", TRAINED: []}

_SOURCES = {"base": "base_folder", "reference": "reference_source"}
"""Option with a fingerprint of files -> the option that says where they are."""
_NO_REFERENCE = "none, as its --loss had none"


class Progress(NamedTuple):
    """Progress of a run."""

    iteration: int
    consumed_samples: int
    evaluation_due: bool
    """True if the run was stopped after this step and before the evaluation that belongs to it."""
    best_loss: float | None = None
    """Lowest validation loss so far."""
    evaluations_since_best: int = 0
    best_iteration: int | None = None
    """Step after which `best_loss` was measured."""
    evaluated: str | None = None
    """Identity of the validation data of `best_loss`: losses of other data are not compared with
    it. None in older checkpoints.
    """
    waiting: Sequence[dict[str, Any]] = ()
    """Samples that were consumed but delayed to a later step: `DelayQueue.state_dict` of each
    data-parallel rank. Empty if there are none.
    """


class Wanted(NamedTuple):
    """Parts of a checkpoint that a run loads."""

    iteration: int | None = None
    """None for the newest checkpoint."""
    optimizer: bool = True
    random_states: bool = True
    progress: bool = True
    """True to continue at the checkpoint's position in the data and in the learning rate schedule.
    If False, the data may be other data.
    """
    changed_blend: bool = False
    """True to continue at that position even if the blend has changed."""


def whole_parameters(training: Training) -> None:
    """Gathers the parameters of the last step on every rank; collective."""
    for chunk in training.model:
        # With overlap the gather runs in the next forward pass: until then the shards of other
        # ranks are those of the step before.
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def state_to_save(
    training: Training, progress: Progress, model_options: dict[str, Any], data: dict[str, Any]
) -> dict[str, Any]:
    """Returns this rank's share of a checkpoint, without a copy of tensors; collective."""
    whole_parameters(training)
    state = _sharded_state(training, is_loading=False)
    share_out(state)
    state["progress"] = {
        name: value for name, value in progress._asdict().items() if name != "waiting" or value
    }
    state["model_options"] = model_options
    state["data"] = data
    state["scheduler"] = training.scheduler.state_dict()
    return state


_ORDER = {"seed", "fingerprint", "blend"}
"""Facts about data that decide which record comes when; the others decide what it becomes."""
_OF_OPTIMIZER = {"use_distributed_optimizer", "bf16"}
"""Options that decide which state the optimizer has, and nothing of the weights."""


def load_checkpoint(
    folder: str | Path,
    training: Training,
    model_options: dict[str, Any],
    data: dict[str, Any],
    wanted: Wanted,
) -> Progress | None:
    """Loads the checkpoint in `folder` into `training`, and returns its progress. Returns None and
    changes nothing if there is none. Collective.

    Adam's constants, the learning rate and its schedule are those of this run's options, at the
    checkpoint's step. Data other than the checkpoint's are used, with a note. Random states
    (dropout) continue only in the same parallel layout.

    Raises CheckpointError if a file is missing or was changed after it was saved, or if the
    checkpoint has another model, another blend (unless `wanted.changed_blend`) or is from a later
    megatron-core.
    Raises ValueError if it has pickled objects that could run code.
    """
    iteration = latest_iteration(folder)
    if iteration is None:
        return None
    iteration = wanted.iteration or iteration
    path = checkpoint_path(folder, iteration)
    check_sound(folder, iteration)
    with read_or_refused(folder, iteration):
        common = read_common(path)
    if not wanted.optimizer:
        model_options = {
            name: value for name, value in model_options.items() if name not in _OF_OPTIMIZER
        }
    _check_same_model(path, common["model_options"], model_options)
    if wanted.progress:
        now = match_saved_form(common["data"], data)
        _check_same_blend(path, common["data"], now, wanted.changed_blend)
    if wanted.optimizer:
        _check_same_parts(path, common, training.optimizer)
    with read_or_refused(folder, iteration), only_weights(path / "*.distcp"):
        same_layout = _parallel_sizes() == common["layout"]
        state = _load_state(
            path, training, wanted._replace(random_states=wanted.random_states and same_layout)
        )
    return Progress(**state["progress"])


def read_common(path: Path) -> dict[str, Any]:
    """Returns the values of a checkpoint that are not tensors. Raises ValueError if it is from a
    later megatron-core, or if one of its pickles could run code.
    """
    _check_readable(path)
    check_metadata(path)
    common_file = path / "common.pt"
    with only_weights(common_file if common_file.exists() else path / "*.distcp"):
        return dist_checkpointing.load_common_state_dict(str(path))


def _check_readable(path: Path) -> None:
    # megatron-core 0.16 has a file of its own (common.pt) for values that are not tensors, and this
    # class to read it. 0.19 keeps them in the .distcp files, and reads both kinds.
    if hasattr(common_strategy, "TorchCommonLoadStrategy") and not (path / "common.pt").exists():
        raise CheckpointError(
            f"{path} was saved under a later megatron-core than this one; continue it on Python "
            "3.12 or later"
        )


def _check_same_model(path: Path, saved: dict[str, Any], model_options: dict[str, Any]) -> None:
    without_adapters: dict[str, list[str]] = {key_of_part(part.name): [] for part in known_parts()}
    no_reference = {"reference": _NO_REFERENCE}
    saved = _DEFAULTS_OF_OLD | without_adapters | no_reference | saved
    names = {"vocab_size": "the vocabulary", "tokenizer": "the tokenizer"}
    names[TRAINED] = "what is trained of tower, projector and language model"
    names |= {key_of_part(p.name): f"--lora-target-modules of {p.title}" for p in known_parts()}
    differing = {
        name: _changed_files(name, saved, model_options)
        if name in _SOURCES
        else f"{names.get(name, flag_of(name))} was {_named(saved[name])}, is {_named(value)}"
        for name, value in model_options.items()
        # .get: old checkpoints do not record the vocabulary. The base model may have moved.
        if saved.get(name, value) != value and name not in _SOURCES.values()
    }
    if not differing:
        return
    what, way_out = "is of another model", "another --load"
    if differing.keys() <= _OF_OPTIMIZER:
        what = "has another state of the optimizer"
        way_out = "pass --no-load-optim, which starts that again"
    if differing.keys() == {"reference"}:
        what = "is of a run with another reference"
        if saved["reference"] == _NO_REFERENCE:
            way_out = f"start from its weights with --pretrained-checkpoint {path.parent}"
    raise CheckpointError(
        f"{path} {what} ({'; '.join(differing.values())}); give the same options, or {way_out}"
    )


def _changed_files(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns words about weights that a checkpoint knows by a fingerprint of their files: where
    they were, and where they are.
    """
    what = {"base": "the base model", "reference": "the reference"}[name]
    here = now[_SOURCES[name]]
    if saved[name] == _NO_REFERENCE:
        return f"the reference was {_NO_REFERENCE}, is {here}"
    before = saved.get(_SOURCES[name], "another one")
    if before == here:
        return f"{what} was other files in {here}, which have changed since"
    return f"{what} was {before}, is {here}"


def _named(value: Any) -> str:
    """Returns a value as the command line has it: `["q_proj", "v_proj"] -> "q_proj v_proj"`."""
    return (" ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def _check_same_blend(
    path: Path, saved: Mapping[str, Any], data: Mapping[str, Any], allow_changed_data: bool
) -> None:
    changes = blend_changes(saved, data)
    if changes and not allow_changed_data:
        raise CheckpointError(
            f"{path} is of another blend ({'; '.join(changes)}), where its position means other "
            "records; give the same one, another --load, or --allow-changed-data"
        )
    if dist.get_rank() == 0:
        for line in _data_notes(path, saved, data):
            print(line, flush=True)


def _data_notes(path: Path, saved: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[str]:
    """Yields what the user reads about other data, or another chat template, than the
    checkpoint's.
    """
    # Checkpoints from before it was recorded do not have the template.
    saved = {"chat_template": data.get("chat_template"), **saved}
    now = {"chat_template": None, **data}
    if saved["chat_template"] != now["chat_template"]:
        yield f"note: {path} was trained with another chat template; serve the model with this one"
    changed = {
        name
        for name in (saved.keys() | now.keys()) - {"chat_template"}
        if saved.get(name) != now.get(name)
    }
    if options := sorted(changed - _ORDER):
        default = "the default"  # is not recorded
        values = ", ".join(
            f"{one} was {saved.get(one, default)}, is {now.get(one, default)}" for one in options
        )
        yield f"note: {path} was trained on samples made with other options: {shortened(values)}"
    if changed & _ORDER:
        yield (
            f"note: {path} was trained on other data, or in another order; its position in them is "
            "kept, so that this epoch skips some records and repeats others (--finetune starts at "
            "their first, with the weights alone)"
        )


def _check_same_parts(path: Path, common: dict[str, Any], optimizer: Any) -> None:
    """Raises CheckpointError if the optimizer's state is divided in another way. megatron-core has
    two optimizers, with states under two keys, if experts are spread over ranks, and one otherwise.
    """
    saved = sum(isinstance(key, int) for key in common.get("optimizer", {})) or 1
    if saved != len(getattr(optimizer, "chained_optimizers", [optimizer])):
        was, way = ("above 1", "raise it") if saved > 1 else ("1", "lower it")
        raise CheckpointError(
            f"{path} has the optimizer's state of a run with --expert-model-parallel-size {was}; "
            f"{way}, or pass --no-load-optim"
        )


def _load_state(path: Path, training: Training, wanted: Wanted) -> dict[str, Any]:
    """Fills `training`, and returns all that was loaded. The optimizer keeps this run's options."""
    of_options = ("max_lr", "min_lr", "betas", "eps")
    groups = [
        {name: group[name] for name in of_options if name in group}
        for group in training.optimizer.param_groups
    ]
    with torch.no_grad():
        if wanted.optimizer:
            for part in getattr(training.optimizer, "chained_optimizers", [training.optimizer]):
                make_adam_state(part.optimizer)
        template = _sharded_state(training, is_loading=True, with_optimizer=wanted.optimizer)
        read_pieces_in_place(template)
        if not wanted.random_states:
            del template["random_states"]
        # Not validated: that each tensor is asked for by its first replica.
        state = dist_checkpointing.load(template, str(path), validate_access_integrity=False)
        for number, chunk in enumerate(training.model):
            gpt = unwrap_model(chunk)
            missing, unknown = gpt.load_state_dict(state[f"model{number}"], strict=False)
            assert not unknown, unknown
            assert set(missing) <= _left_out(gpt), missing
        if wanted.optimizer:
            training.optimizer.load_state_dict(state["optimizer"])
        else:
            training.optimizer.reload_model_params()
        for group, options in zip(training.optimizer.param_groups, groups):
            group.update(options)
        if wanted.progress:
            training.scheduler.load_state_dict(state["scheduler"])
    if wanted.random_states:
        _restore_random_states(state["random_states"], training.device)
    return state


def _sharded_state(
    training: Training, is_loading: bool, with_optimizer: bool = True
) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for number, chunk in enumerate(training.model):
        gpt = unwrap_model(chunk)
        whole, left_out = gpt.sharded_state_dict(metadata=METADATA), _left_out(gpt)
        state[f"model{number}"] = {
            name: entry for name, entry in whole.items() if name not in left_out
        }
    if with_optimizer:
        optimizer = training.optimizer
        state["optimizer"] = optimizer.sharded_state_dict(
            dict(state), is_loading=is_loading, metadata=METADATA
        )
    state["layout"] = _parallel_sizes()
    state["random_states"] = ShardedObject(
        "random_states",
        _random_states(training.device),
        (dist.get_world_size(),),
        (dist.get_rank(),),
        replica_id=0,
    )
    return state


def _left_out(gpt: torch.nn.Module) -> set[str]:
    """Returns the parameters that a checkpoint leaves out, which are in the folder that training
    started from: a frozen vision tower, the language model frozen beside one and, under LoRA, the
    base model. Other parameters that are not trained are nowhere else.
    """
    parameters = dict(gpt.named_parameters())
    has_adapters = any(map(is_of_adapter, parameters))
    return {
        name
        for name, parameter in parameters.items()
        if not parameter.requires_grad
        and (
            has_adapters
            or name.startswith(PARAMETERS)
            or hasattr(parameter, IS_FROZEN_LANGUAGE_MODEL)
        )
    }


def _parallel_sizes() -> list[int]:
    """Returns the parallel layout of this run: sizes of tensor, pipeline, context and data."""
    return [
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    ]


def _random_states(device: Device) -> dict[str, Any]:
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if device.is_gpu else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _restore_random_states(states: dict[str, Any], device: Device) -> None:
    torch.set_rng_state(states["cpu"])
    if (states["cuda"] is None) == device.is_gpu:
        # Saved on CPU and loaded on a GPU, or the reverse: generators of one kind of device cannot
        # take the states of the other.
        return
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
