"""pure. Reads options from the folders of --pretrained-checkpoint and --lora-adapter, and checks
that given options do not contradict them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.packing.flags import flag_of
from megatron.packing.quoting import shown
from megatron.sft.model.checkpoints.folder import distributed_checkpoint
from megatron.sft.model.huggingface.config import options_of, with_rope_scaling
from megatron.sft.model.huggingface.config_file import read_config
from megatron.sft.model.huggingface.families.registry import language_model
from megatron.sft.model.huggingface.files import refuse_adapter
from megatron.sft.model.lora.peft_folder import CONFIG as ADAPTER_CONFIG
from megatron.sft.model.lora.peft_folder import options_of_adapter
from megatron.sft.options.hub_names import check_hub_names
from megatron.sft.options.rope_scaling import parse_rope_scaling


def implied_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that the folders of --pretrained-checkpoint and --lora-adapter decide,
    and defaults for their model. Returns {} without such a folder.

    Raises ValueError if a given option contradicts a folder, or if the model cannot be computed
    exactly.

    given: options of the user, by field name.
    """
    check_hub_names(given)
    of_adapter: dict[str, Any] = {}
    dropout: dict[str, Any] = {}
    if given.get("lora_adapter") is not None:
        of_adapter = options_of_adapter(given["lora_adapter"])
        dropout = {"lora_dropout": of_adapter.pop("lora_dropout")}
        _check_given(given, of_adapter, str(Path(given["lora_adapter"]) / ADAPTER_CONFIG))
    folder = given.get("pretrained_checkpoint")
    if folder is None:
        return dropout | of_adapter
    if distributed_checkpoint(folder) is not None:
        # Options in megatron-core's checkpoints are pickles, which could run code: not read.
        return dropout | of_adapter
    refuse_adapter(folder, given.get("lora_adapter"))
    config, where = read_config(folder), str(Path(folder) / "config.json")
    decided = options_of(config, where)
    scaling = given.get("rope_scaling")
    if scaling is not None and with_rope_scaling(config, scaling) is not None:
        # Plain rotary embeddings may be stretched for longer contexts.
        decided["rope_scaling"] = parse_rope_scaling(scaling).to_json()
    _check_given(given, decided, where)
    family, text, _ = language_model(config, where)
    own_tokenizer = given.get("tokenizer_type", "HuggingFaceTokenizer") != "HuggingFaceTokenizer"
    defaults = {
        "tokenizer_model": None if own_tokenizer else folder,
        "attention_dropout": text.get("attention_dropout", 0.0)
        if family.reads_attention_dropout
        else 0.0,
        "mask_vocab_padding": True,
        **family.run_defaults,
    }
    return defaults | decided | dropout | of_adapter


def check_training(given: Mapping[str, Any]) -> None:
    """Raises ValueError where the config.json of --pretrained-checkpoint asks for what training
    here has no equal of, unless the user says what to train with.

    given: options of the user, by field name.
    """
    folder = given.get("pretrained_checkpoint")
    if folder is None or distributed_checkpoint(folder) is not None:
        return
    where = str(Path(folder) / "config.json")
    family, text, _ = language_model(read_config(folder), where)
    name = family.residual_dropout
    if name is not None and text.get(name) and "hidden_dropout" not in given:
        raise ValueError(
            f"{where} has {name} {shown(text.get(name))}, which transformers applies in training, "
            "but the product does not; pass --hidden-dropout, 0 for none"
        )
    weight = text.get("router_aux_loss_coef", 0.001)
    has_loss = family.has_router_loss and bool(text.get("output_router_logits"))
    if has_loss and weight and "moe_aux_loss_coeff" not in given:
        raise ValueError(
            f"{where} has output_router_logits true, with which transformers adds a load-balancing "
            f"loss of all layers together, times {shown(weight)}; pass --moe-aux-loss-coeff, the "
            "weight of a loss of each layer, 0 for none"
        )


def _check_given(given: Mapping[str, Any], decided: Mapping[str, Any], where: str) -> None:
    for name, value in decided.items():
        if name in given and _comparable(name, given[name]) != value:
            raise ValueError(
                f"{flag_of(name)} {given[name]} contradicts {where}, which says {value}; drop the "
                "option, it is read from there"
            )


def _comparable(name: str, value: Any) -> Any:
    if name == "rope_scaling":
        return parse_rope_scaling(value).to_json()
    return sorted(value) if isinstance(value, tuple) and name.startswith("lora_") else value
