"""pure. Reads and writes the folder of a PEFT adapter: adapter_config.json and the header of
adapter_model.safetensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.packing.quoting import shown
from megatron.packing.user_files import Kind, check_types, read_json
from megatron.sft.model.huggingface.files import ADAPTER_CONFIG as CONFIG
from megatron.sft.model.huggingface.files import folder_below
from megatron.sft.model.huggingface.folder import Folder
from megatron.sft.model.huggingface.headers import Stored, read_header
from megatron.sft.model.lora.names import (
    PREFIX,
    STACKED,
    AdapterWeights,
    doubled_patterns,
    whole,
)
from megatron.sft.options.lora import MODULES, LoraConfig

WEIGHTS = "adapter_model.safetensors"
# Keys of adapter_config.json that, unless empty, change what is computed, or what the adapter is
# added to. Such adapters are refused.
_MUST_BE_EMPTY = (
    *(
        "use_dora",
        "use_qalora",
        "use_bdlora",
        "fan_in_fan_out",
        "lora_bias",
    ),
    *(
        "trainable_token_indices",
        "layer_replication",
        "alora_invocation_tokens",
    ),
    *("arrow_config", "kasa_config", "monteclora_config", "velora_config"),
)
_KINDS: Mapping[Kind, str] = {
    int: "r",
    float: "lora_alpha lora_dropout",
    bool: "use_rslora",
    list: "modules_to_save target_parameters",
    (list, str): "target_modules",
}
"""Types of values that are read here."""
_PATTERNS = ("rank_pattern", "alpha_pattern")
"""Keys that give some modules another rank or alpha. Of those without effect a note is made."""
_SIMPLE = re.compile(r"\^?(\w|\\\.|(\.|\\d)[*+]?)+\$?")
"""A pattern that is a name, the end of one, or a name with `.*` or `\\d+` in it. Others are not
evaluated: an expression from a stranger may take for ever.
"""
_MAX_REPEATED = 2
"""Most of `*` and `+` in a pattern that is evaluated."""
_ROUTERS = [f"{name}.weight" for name in ("gate", "mlp.gate", "router", "mlp.router")]
OF_SOME_LAYERS = "adapters of some layers alone are not supported: merge it with peft"
"""Advice for an adapter that lacks layers."""
_STARTS_BESIDE_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")


def open_adapter(
    folder: str | Path, rename: Callable[[str], str] = str, *, flag: str = "--lora-adapter"
) -> Folder:
    """Reads the header of an adapter's weights. Raises ValueError if the file is missing or
    damaged.

    Args:
        rename: function from names in the base model, in any spelling, to those that it has in
            memory, which peft writes (`in_memory` of `names`).
        flag: option that names the folder, for messages; empty for an argument.
    """
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        below = folder_below(Path(folder), (WEIGHTS,))
        hint = f"; {below}" if below else ""
        if path.with_suffix(".bin").is_file():
            hint = (
                "; its adapter_model.bin is a pickle, which can run any code: load and save it "
                "with peft"
            )
        raise ValueError(f"{flag} {folder} must hold {WEIGHTS}, but does not{hint}".lstrip())
    header = read_header(path)
    return Folder(
        Path(folder),
        {
            _renamed(name, rename): Stored(
                path, name, e["dtype"], tuple(e["shape"]), *e["data_offsets"]
            )
            for name, e in header.items()
        },
    )


def _renamed(name: str, rename: Callable[[str], str]) -> str:
    return PREFIX + rename(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else name


def read_adapter_config(folder: str | Path) -> dict[str, Any]:
    """Returns what adapter_config.json holds. Raises ValueError, naming the key, for a value of
    another type than peft writes.
    """
    where = Path(folder) / CONFIG
    try:
        config: dict[str, Any] = read_json(where, any_integer=True)
    except ValueError as failure:
        raise ValueError(f"{where} cannot be read: {failure}") from None
    check_types(config, _KINDS, where)
    return config


def options_of_adapter(folder: str | Path, flag: str = "--lora-adapter") -> dict[str, Any]:
    """Returns the options of LoRA that an adapter decides, by field name; ValueError for one that
    is computed otherwise.

    flag: as for `open_adapter`.
    """
    named = f"{flag} {folder}".lstrip()
    where = Path(folder) / CONFIG
    below = "" if where.is_file() else folder_below(Path(folder), (CONFIG,))
    if below:
        raise ValueError(f"{named} must hold {CONFIG}, but does not; {below}")
    try:
        config = read_adapter_config(folder)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (KeyError, TypeError, ValueError, OverflowError) as failure:
        raise ValueError(
            f"{named} must hold a readable {CONFIG} of PEFT's, but: {failure}"
        ) from None
    for name in config.get("modules_to_save") or []:
        if not isinstance(name, str):
            raise ValueError(f"{where} has modules_to_save with {shown(name)}, but it must be text")
    is_other = {name: bool(config.get(name)) for name in _MUST_BE_EMPTY}
    is_other["peft_type"] = config.get("peft_type") != "LORA"
    is_other["bias"] = config.get("bias", "none") != "none"
    is_other["init_lora_weights"] = config.get("init_lora_weights") not in _STARTS_BESIDE_THE_BASE
    for name in (name for name, is_it in is_other.items() if is_it):
        raise ValueError(
            f"{where} has {name} {shown(config.get(name))}, but only plain LoRA is supported"
        )
    is_doubled = _is_doubled(config)
    for name, effect in _effects(config, folder, flag).items():
        if effect:
            raise ValueError(
                f"{where} has {name} {shown(config[name])}, by which {effect}, but only adapters "
                "with one rank and one alpha are supported; merge it into its model with peft"
            )
    parameters = config.get("target_parameters") or []
    tails = [one.rpartition(".")[2] for one in STACKED]
    known = [name for one in STACKED for name in (f"mlp.{one}", one)] + tails + _ROUTERS
    for parameter in (one for one in parameters if one not in known):
        raise ValueError(
            f"{where} has target_parameters {shown(parameter)}, but only adapters of all layers, "
            f"{' or '.join(known)}, are supported"
        )
    stacked = [name for one in parameters if (name := one.rpartition(".")[2]) in tails]
    modules = {
        name.split(".lora_A.")[0].rsplit(".", 1)[-1]
        for name in open_adapter(folder, flag=flag).tensors
        if "lora_A" in name and not (stacked and ".experts." in name)
    }
    for module in sorted(modules - MODULES):
        raise ValueError(
            f"{where} has an adapter beside {shown(module)}, but only those beside "
            f"{' '.join(sorted(MODULES))} are supported; merge it into its model with peft"
        )
    modules |= set(stacked)
    joined: dict[str, Any] = {"lora_gate_up": "doubled" if is_doubled else "joined"}
    return {
        "lora_rank": rank,
        "lora_alpha": alpha,
        "lora_dropout": _dropout(config, where),
        "lora_rslora": bool(config.get("use_rslora")),
        "lora_target_modules": sorted(modules),
        "lora_experts": _experts_of(folder),
        **(joined if tails[0] in stacked else {}),
        "lora_modules_to_save": _modules_to_save(config),
    }


def notes_on_adapter(folder: str | Path) -> list[str]:
    """Returns a line for each pattern of an adapter that changes none of its modules.

    peft ignores such a pattern. Price: a header is read again.
    """
    config = read_adapter_config(folder)
    return [
        f"{Path(folder) / CONFIG}: {name} {shown(config[name])} has no effect: all adapters "
        f"have r {shown(config.get('r'))} and lora_alpha {shown(config.get('lora_alpha'))}, as "
        "peft ignores names that match no module; if others were meant, mend the names and train "
        "the adapter again"
        for name, effect in _effects(config, folder, "").items()
        if not effect
    ]


def _is_doubled(config: Mapping[str, Any]) -> bool:
    """Returns whether gate and up of experts share an adapter of twice the rank, as peft's
    all-linear has them.
    """
    patterns = doubled_patterns(config["r"], float(config["lora_alpha"]))
    return all(config.get(name) == pattern for name, pattern in patterns.items())


def _effects(config: Mapping[str, Any], folder: str | Path, flag: str) -> dict[str, str]:
    """Returns for each pattern of a config a module that it changes, in words; "" if none."""
    effects: dict[str, str] = {}
    if _is_doubled(config):
        return effects
    for name in _PATTERNS:
        pattern = config.get(name)
        if not pattern:
            continue
        tensors = open_adapter(folder, flag=flag).tensors
        ranks = {
            key.split(".lora_A.")[0].removeprefix(PREFIX): stored.shape[0]
            for key, stored in tensors.items()
            if ".lora_A." in key and stored.shape
        }
        stacks = [module for module in ranks if re.search(r"\.experts(\.base_layer)?$", module)]
        for module in stacks:  # whose rows are those of all experts: the pattern alone shows it
            del ranks[module]
        targets = [str(one) for one in config.get("target_parameters") or []]
        tails = [one.rpartition(".")[2] for one in targets]
        adapted = [one for one in STACKED if one.rpartition(".")[2] in tails] or STACKED
        layers = [module.partition(".experts")[0] for module in stacks]
        parameters = [f"{layer}.{stack}" for layer in layers for stack in adapted]
        # peft matches the name of a parameter: mlp.gate.weight, not mlp.gate.
        routers = tuple(f".{one.removesuffix('.weight')}" for one in targets if one in _ROUTERS)
        ranks = {f"{m}.weight" if m.endswith(routers) else m: r for m, r in ranks.items()}
        if not isinstance(pattern, dict):
            effects[name] = "what it changes is not known"
        elif name == "rank_pattern":  # the weights show it
            others = [module for module, rank in ranks.items() if rank != config.get("r")]
            effects[name] = f"{others[0]} has rank {ranks[others[0]]}" if others else ""
            if not others and parameters:
                effects[name] = _effect(pattern, parameters, "rank", config.get("r"))
        else:
            modules = [*ranks, *parameters]
            effects[name] = _effect(pattern, modules, "alpha", config.get("lora_alpha"))
    return effects


def _effect(pattern: Mapping[str, Any], modules: Iterable[str], what: str, usual: object) -> str:
    """Returns a module that a pattern gives another value of `what` than the usual; "" if none.

    Of the keys that match a module the first one counts, as in peft.
    """
    for module in modules:
        for key, value in pattern.items():
            if not _SIMPLE.fullmatch(key) or len(re.findall("[*+]", key)) > _MAX_REPEATED:
                if value != usual:
                    return f"modules like {shown(key)} may have {what} {shown(value)}"
            elif re.fullmatch(rf"(.*\.)?({key})", module):
                if value != usual:
                    return f"{module} has {what} {shown(value)}"
                break
    return ""


def _modules_to_save(config: Mapping[str, Any]) -> list[str]:
    """Returns the modules that are saved whole. PEFT lists a classifier beside the score of a model
    of scores, though no model has both.
    """
    names = {name.rsplit(".", 1)[-1] for name in config.get("modules_to_save") or []}
    return sorted(names - {"classifier"} if "score" in names else names)


def _dropout(config: Mapping[str, Any], where: Path) -> float:
    """Returns the dropout that an adapter was trained with; the only option here that a user may
    choose otherwise.
    """
    dropout = config.get("lora_dropout") or 0.0
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(
            f"{where} has lora_dropout {shown(dropout)}, but it must be a number from 0 to below 1"
        )
    return float(dropout)


def _experts_of(folder: str | Path) -> str:
    """Returns the experts that have adapters; all where none have."""
    names = "".join(open_adapter(folder).tensors)
    is_routed = re.search(r"\.experts\.", names) is not None
    is_shared = re.search(r"\.shared_experts?\.", names) is not None
    # Gemma 4 has experts beside an MLP, which stands for their shared one; others below it.
    if not is_routed or re.search(r"\.layers\.\d+\.experts\.", names):
        is_shared |= re.search(r"\.mlp\.(gate|up|down)_proj\.", names) is not None
    if is_routed == is_shared:
        return "all"
    if not is_routed:
        return "shared"
    is_dense = re.search(r"\.mlp\.(gate|up|down|gate_up)_proj\.", names) is not None
    return "routed" if is_dense else "routed-only"


def write_adapter_config(
    folder: Path, lora: LoraConfig, weights: AdapterWeights, base: str
) -> None:
    """Writes what PEFT and vLLM read beside the weights. The base is named by the path that it was
    trained from.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if "score" in lora.lora_modules_to_save else "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).resolve()),
        "r": lora.lora_rank,
        "lora_alpha": whole(lora.lora_alpha),
        **weights.patterns(),
        "lora_dropout": lora.lora_dropout,
        "target_modules": weights.target_modules(),
        "exclude_modules": weights.excluded_modules(),
        "target_parameters": weights.target_parameters() or None,
        "modules_to_save": weights.modules_to_save() or None,
        "ensure_weight_tying": weights.tied is not None,
        "use_rslora": lora.lora_rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
