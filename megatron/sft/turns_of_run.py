"""mcore. The turns of conversations that a run trains: as its checkpoint was trained, unless
--train-turns says otherwise.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.sft.model.checkpoint import read_common
from megatron.sft.model.checkpoint_folder import checkpoint_path, latest_iteration
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.data import TrainTurns


def with_turns_of_checkpoint(config: SFTConfig) -> SFTConfig:
    """Returns the options with the --train-turns of the checkpoint of --load, where they name none.

    A checkpoint that says nothing was trained with all turns in one rendering.
    """
    folder = config.output.load
    is_given = config.data.train_turns is not None or config.data.mock_data
    if folder is None or is_given or config.output.finetune:
        return config
    iteration = config.output.ckpt_step or latest_iteration(folder)
    if iteration is None:
        return config
    try:
        data = read_common(checkpoint_path(folder, iteration)).get("data", {})
    except Exception:  # a damaged file, of any kind: loading says what is wrong with it
        return config
    return replace(config, data=replace(config.data, train_turns=data.get("train_turns", "all")))


def told_of_turns(config: SFTConfig, turns: TrainTurns) -> str:
    """Returns the line that says which turns of conversations are trained."""
    what = {
        "served": "each of the assistant's turns behind what it is generated from",
        "last": "the assistant's last turn of each conversation",
        "all": "all of the assistant's turns in one rendering",
    }[turns]
    why = "" if config.data.train_turns else ", as the chat template renders turns again"
    return f"training {what} (--train-turns {turns}{why})"
