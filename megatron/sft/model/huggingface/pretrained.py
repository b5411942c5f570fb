"""mcore. Checks --pretrained-checkpoint and --save-hf before any memory is spent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.sft.images.tower import check_tensors
from megatron.sft.images.vision import check_stages, read_vision
from megatron.sft.model.checkpoints.folder import (
    distributed_checkpoint,
    huggingface_source,
    latest_iteration,
)
from megatron.sft.model.checkpoints.unpickling import check_metadata
from megatron.sft.model.huggingface.companions import weights_of
from megatron.sft.model.huggingface.config import config_of
from megatron.sft.model.huggingface.config_file import read_config
from megatron.sft.model.huggingface.folder import check_folder, open_folder
from megatron.sft.model.huggingface.read import MegatronCheckpoint, Pretrained, PretrainedAdapter
from megatron.sft.model.huggingface.score_config import check_scores, is_reward_model
from megatron.sft.model.huggingface.weights import Head
from megatron.sft.model.huggingface.write import check_target
from megatron.sft.model.lora.names import AdapterWeights, names_in_memory
from megatron.sft.model.lora.peft_folder import CONFIG as ADAPTER_CONFIG
from megatron.sft.model.lora.peft_folder import OF_SOME_LAYERS, open_adapter
from megatron.sft.options.config import SFTConfig


def open_pretrained(
    config: SFTConfig, vocab_size: int, pad: int | None = None
) -> Pretrained | MegatronCheckpoint | None:
    """Opens the weights that training starts from. Returns None without --pretrained-checkpoint, or
    if --load has a checkpoint, whose weights are used instead, and the loss has no reference, which
    is the weights that the run started from.

    Reads headers only. Raises ValueError if they do not fit the model, or if --save-hf cannot be
    written.

    pad: padding of the tokenizer, which decides on the token that a reward model scores.
    """
    output = config.output
    if output.save_hf is not None:
        check_target(Path(output.save_hf))
    if config.lora.lora and output.pretrained_checkpoint is None:
        raise ValueError(
            "--lora needs --pretrained-checkpoint, the weights that adapters stand beside; of a "
            "checkpoint, megatron-sft export makes such a folder"
        )
    if huggingface_source(output.pretrained_checkpoint) is None and output.save_hf is not None:
        try:
            config_of(config.model, vocab_size)
        except ValueError as failure:
            raise ValueError(f"--save-hf: {failure}; change them, or drop --save-hf") from None
    if output.pretrained_checkpoint is None:
        return None
    continues = output.load is not None and latest_iteration(output.load) is not None
    needs_start = not continues or config.preference.needs_reference
    # A checkpoint has no base model of adapters, and no frozen tower.
    if not needs_start and not config.lora.lora and not config.images.images:
        return None
    checkpoint = distributed_checkpoint(output.pretrained_checkpoint)
    if checkpoint is not None and config.lora.lora:
        raise ValueError(
            "--lora needs a HuggingFace folder to stand beside, but --pretrained-checkpoint "
            f"{checkpoint} is megatron-core's; megatron-sft export makes one of this "
            "trainer's"
        )
    if checkpoint is not None:
        check_metadata(checkpoint)
        if config.preference.scores_answers:
            raise ValueError(
                "--loss reward needs a HuggingFace folder, but --pretrained-checkpoint "
                f"{checkpoint} is megatron-core's; megatron-sft export makes a folder of it"
            )
        return MegatronCheckpoint(checkpoint)
    folder = open_folder(output.pretrained_checkpoint)
    if config.images.images:
        vision = read_vision(output.pretrained_checkpoint, config.images.image_max_pixels)
        check_stages(vision, config.layers_of_parts)
        check_tensors(folder.path, {n: one.shape for n, one in folder.tensors.items()}, vision)
    model_config = read_config(output.pretrained_checkpoint)
    weights = weights_of(
        config.model,
        model_config,
        folder.tensors,
        _head(config, model_config, pad),
        config.images,
    )
    if weights.head == "none":  # its output layer is left out
        check_folder(folder, weights_of(config.model, model_config, folder.tensors))
    else:
        check_folder(folder, weights)
    if config.lora.lora:
        # For its errors alone: it raises if a target module does not exist in this model.
        list(AdapterWeights(weights, config.lora).all())
    adapter = None
    if config.lora.lora_adapter is not None and needs_start:
        table = weights
        if config.preference.scores_answers:
            table = weights_of(config.model, model_config, folder.tensors, "score")
        adapter = PretrainedAdapter(
            open_adapter(
                config.lora.lora_adapter,
                names_in_memory(model_config, folder.tensors, config.lora),
            ),
            AdapterWeights(table, config.lora),
        )
        check_folder(*adapter, ADAPTER_CONFIG, OF_SOME_LAYERS)
    is_unscored = weights.head == "none" and adapter is None and not continues
    if config.preference.write_scores is not None and is_unscored:
        raise ValueError(
            f"--pretrained-checkpoint {output.pretrained_checkpoint} is a language model, which "
            "has no score to write; give a reward model (--loss reward trains one), or the adapter "
            "of one as --lora-adapter"
        )
    return Pretrained(folder, weights, adapter)


def _head(config: SFTConfig, model_config: Mapping[str, Any], pad: int | None) -> Head:
    """Returns the output layer to read from a folder. Raises ValueError if its model is not of the
    kind that --loss trains.
    """
    where = f"{config.output.pretrained_checkpoint}/config.json"
    is_scored = is_reward_model(model_config)
    if not config.preference.scores_answers:
        if is_scored:
            raise ValueError(
                f"{where} is of a reward model, which has no words to predict, as --loss "
                f"{config.preference.loss} does; pass --loss reward, or the folder of a language "
                "model"
            )
        return "words"
    check_scores(model_config, pad, where)
    return "score" if is_scored else "none"


def note_on_head(pretrained: Pretrained | MegatronCheckpoint | None) -> str:
    """Returns a line for the user on where the score of a reward model comes from."""
    if not isinstance(pretrained, Pretrained):
        return "reward model: a new score, score.weight"
    path = pretrained.folder.path
    if pretrained.adapter is not None:
        path = pretrained.adapter.folder.path
    elif pretrained.weights.head == "none":
        return (
            f"reward model: a new score, score.weight, in place of the output layer of {path}, "
            "which is left out"
        )
    return f"reward model: continues score.weight of {path}"
