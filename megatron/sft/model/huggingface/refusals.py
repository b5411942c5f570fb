"""pure. Refuses folders of models and adapters as a run refuses them, for commands that do not
train: `inspect` and `chat`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.sft.model.huggingface.companions import weights_of
from megatron.sft.model.huggingface.config import options_of
from megatron.sft.model.huggingface.config_file import read_config
from megatron.sft.model.huggingface.families.registry import language_model
from megatron.sft.model.huggingface.files import ADAPTER_CONFIG
from megatron.sft.model.huggingface.folder import Folder, check_folder, open_folder
from megatron.sft.model.huggingface.weights import Weights
from megatron.sft.model.lora.names import AdapterWeights, names_in_memory
from megatron.sft.model.lora.peft_folder import (
    OF_SOME_LAYERS,
    open_adapter,
    options_of_adapter,
    read_adapter_config,
)
from megatron.sft.options.lora import LoraConfig
from megatron.sft.options.model import ModelConfig


def check_weights(folder: Path, config: Mapping[str, Any], held: Folder) -> Weights:
    """Returns the table of a model's tensors. Raises ValueError if a run would refuse the folder as
    --pretrained-checkpoint, for its config.json or its weights.
    """
    options = options_of(config, str(folder / "config.json"))
    names = {field.name for field in fields(ModelConfig)} & options.keys()
    model = ModelConfig(**{name: options[name] for name in names}, seq_length=1)
    weights = weights_of(model, config, held.tensors)
    check_folder(held, weights)
    return weights


def check_served(folder: Path, adapter: Path | None = None) -> None:
    """Raises ValueError if a run would refuse the folder of a model, or an adapter for it. Of a
    family that is not trained here only the files are checked: transformers may know it.
    """
    config, held = read_config(folder), open_folder(folder)
    try:
        language_model(config)
    except ValueError:
        if adapter is not None:
            read_adapter_config(adapter)
            open_adapter(adapter, flag="")
        return
    weights = check_weights(folder, config, held)
    if adapter is None:
        return
    lora = LoraConfig(lora=True, **options_of_adapter(adapter, flag=""))
    opened = open_adapter(adapter, names_in_memory(config, held.tensors, lora), flag="")
    check_folder(opened, AdapterWeights(weights, lora), ADAPTER_CONFIG, OF_SOME_LAYERS)
