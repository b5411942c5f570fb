"""mcore. `megatron-sft export CHECKPOINT FOLDER`: writes a checkpoint as a HuggingFace folder.

It runs in one process, for any parallel layout of the run. The checkpoint is read layer by layer,
so that host memory holds one layer at a time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from megatron.packing.flag_help import Command
from megatron.packing.flags import FlagError, parse_flags
from megatron.packing.rules import Rule, above_zero, check_rules
from megatron.sft.environment import exit_with_message, outlive_output, silence_warnings
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.data import DataConfig
from megatron.sft.options.images import TRAINED, WITHOUT_LANGUAGE_MODEL, ImageConfig
from megatron.sft.options.model import ModelConfig
from megatron.sft.options.output import OutputConfig
from megatron.sft.options.packing import PackingConfig
from megatron.sft.options.parallel import ParallelConfig
from megatron.sft.options.preference import PreferenceConfig
from megatron.sft.options.training import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Checkpoint and target."""

    checkpoint: str | None = field(default=None, metadata={"positional": True})
    """Folder of a run's checkpoints (the newest is taken), or one checkpoint (iter_0000100)."""
    folder: str | None = field(default=None, metadata={"positional": True})
    """Folder to write: config.json, tokenizer and weights, as transformers and vLLM load them."""
    source: str | None = None
    """HuggingFace folder that training started from, of which tensors that were not trained (vision
    towers) are copied (default: where the checkpoint says).
    """
    max_shard_gigabytes: float = 5.0
    """Largest size of one file of weights."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            when=lambda options: options.checkpoint is None or options.folder is None,
            why="two folders are needed: that of the checkpoint, and the one to write",
            way_out="see --help",
        ),
        *above_zero("max_shard_gigabytes"),
    )

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)


def main(arguments: Sequence[str], program: str) -> None:
    """Writes the folder; one line and status 2 if that is not possible."""
    outlive_output()
    about = "Write a checkpoint as a HuggingFace folder, in one process, whatever the run's layout."
    try:
        (options,) = parse_flags(
            (ExportOptions,),
            arguments,
            Command(program=program, about=about, usage="CHECKPOINT FOLDER [options]"),
        )
        silence_warnings(0)
        export(
            options.checkpoint,
            options.folder,
            int(options.max_shard_gigabytes * 1e9),
            options.source,
        )
    except (FlagError, ValueError, OSError) as failure:
        exit_with_message(program, failure)
    print(f"wrote {options.folder}")


def export(
    checkpoint: str | Path,
    folder: str | Path,
    most_bytes_per_file: int,
    source: str | None = None,
) -> None:
    """Writes `folder`, whole or not at all. Raises ValueError if the checkpoint's model belongs to
    no HuggingFace family.
    """
    # Imported here, so that a wrong flag is answered at once: megatron-core takes seconds.
    from megatron.packing.device import CPU
    from megatron.sft.distributed import process_groups
    from megatron.sft.model.build import build_gpt, build_transformer_config
    from megatron.sft.model.checkpoints.content import read_common
    from megatron.sft.model.checkpoints.folder import distributed_checkpoint
    from megatron.sft.model.checkpoints.weights import CheckpointWeights
    from megatron.sft.model.huggingface.companions import COMPANIONS, copy_companions, weights_of
    from megatron.sft.model.huggingface.config_file import read_config
    from megatron.sft.model.huggingface.families.registry import is_multimodal, language_model
    from megatron.sft.model.huggingface.folder import open_folder
    from megatron.sft.model.huggingface.write import check_target, write_folder

    path = distributed_checkpoint(checkpoint)
    if path is None:
        raise ValueError(
            f"{checkpoint} must hold a run's checkpoints, or be one of them, but is neither"
        )
    companions = path / COMPANIONS
    saved_options = read_common(path)["model_options"]
    if saved_options.get("lora"):
        raise ValueError(
            f"{path} holds adapters, beside a base model; start its run again with --load and "
            "--save-hf to write them, and with --lora-merge to write the model"
        )
    if not companions.is_dir():
        raise ValueError(
            f"{path} has no {COMPANIONS}/: its model is of no HuggingFace family, or it was saved "
            "by an older version"
        )
    check_target(Path(folder))
    model_config = read_config(companions)
    if is_multimodal(model_config) and os.path.isdir(saved_options.get("base_folder", "")):
        source = source or saved_options["base_folder"]
    if is_multimodal(model_config) and source is None:
        raise ValueError(
            f"{path} has the trained parts of a {model_config['model_type']} alone; run "
            f"megatron-sft export {path} FOLDER --source START, the folder that training started "
            "from, for the others"
        )
    origin = None if source is None else open_folder(source)
    vocab_size = language_model(model_config).config.number("vocab_size")
    config = _config(saved_options, source)
    with process_groups(config):
        transformer_config = build_transformer_config(config, CPU)
        gpt = build_gpt(config, transformer_config, vocab_size, 0)
        checkpoint_weights = CheckpointWeights(path, gpt, "export another checkpoint")
        write_folder(
            folder,
            [gpt],
            weights_of(
                config.model,
                model_config,
                {} if origin is None else origin.tensors,
                images=config.images,
            ),
            lambda target: copy_companions(companions, target),
            most_bytes_per_file,
            lambda placed: checkpoint_weights.values_of(placed.name),
            origin,
        )


def _config(model_options: dict[str, Any], source: str | None) -> SFTConfig:
    """Returns the config of a single process that builds a checkpoint's model. Values that have no
    effect on the model are placeholders.

    source: HuggingFace folder with the vision tower of a run that has trained it.
    """
    trained = model_options.get(TRAINED, [])
    names = {field.name for field in fields(ModelConfig)}
    return SFTConfig(
        model=ModelConfig(
            **{name: model_options[name] for name in names & model_options.keys()}, seq_length=1
        ),
        parallel=ParallelConfig(),
        packing=PackingConfig(),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(train_iters=1, global_batch_size=1, lr=0.0),
        # Any name: with pretrained weights the model is built without initial ones.
        output=OutputConfig(pretrained_checkpoint=source or "of a checkpoint"),
        images=ImageConfig(
            images=bool(trained),
            tower_lr=1.0 if "tower" in trained else None,
            projector_lr=1.0 if "projector" in trained else None,
            freeze_language_model=WITHOUT_LANGUAGE_MODEL in trained,
        ),
        preference=PreferenceConfig(loss="reward" if model_options.get("score_head") else "sft"),
    )
