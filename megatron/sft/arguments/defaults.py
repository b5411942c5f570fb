"""pure. Defaults for a run that starts from a released model: learning rate, sequence length, batch
size, steps. They are printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.packing.flags import flag_of
from megatron.sft.model.checkpoints.folder import distributed_checkpoint
from megatron.sft.model.huggingface.config import options_of
from megatron.sft.model.huggingface.config_file import read_config
from megatron.sft.options.rope_scaling import RopeScaling, parse_rope_scaling

MAX_SEQ_LENGTH = 8192
"""Maximum default of --seq-length. Many models allow more, but it would cost a first run memory."""
GLOBAL_BATCH_SIZE = 32
LEARNING_RATES = {False: 1e-5, True: 1e-4}
"""True for LoRA -> peak learning rate. Adapters start from zero, and need about ten times more."""
_PAIRED = {False: 1e-6, True: 1e-5}
PREFERENCE_RATES = {
    "dpo": _PAIRED,
    "simpo": _PAIRED,
    "cpo": _PAIRED,
    "kto": _PAIRED,
    "orpo": {False: 8e-6, True: 5e-5},
    "reward": LEARNING_RATES,
}
"""--loss -> the same for preference tuning, which those of supervised fine-tuning would ruin."""
WARMUP_FRACTION = 0.03
_STEPS = ("train_iters", "train_samples", "train_epochs")
_WARMUP = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")


def positions_of(folder: str | None) -> int | None:
    """Returns the number of positions that a HuggingFace model was made for; None if it is not in
    its config.json.
    """
    if folder is None or distributed_checkpoint(folder) is not None:
        return None
    config = read_config(folder)
    text = config.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, dict) else config
    found = inner.get("max_position_embeddings")
    return found if type(found) is int and found > 0 else None


def _default_length(folder: str) -> int:
    """Returns the default of --seq-length: no more than `MAX_SEQ_LENGTH`, than the model's
    positions, and than those of longrope's list for short sequences, which most were trained with.
    """
    lengths = [MAX_SEQ_LENGTH, positions_of(folder) or MAX_SEQ_LENGTH]
    where = str(Path(folder) / "config.json")
    scaling = options_of(read_config(folder), where)["rope_scaling"]
    if scaling is not None and (rope := parse_rope_scaling(scaling)).rope_type == "longrope":
        lengths.append(int(rope.original_max_position_embeddings))
    return min(lengths)


def chosen_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults for options that are not among `given`, by field name; {} without a
    HuggingFace folder to start from.
    """
    folder = given.get("pretrained_checkpoint")
    if folder is None or distributed_checkpoint(folder) is not None:
        return {}
    chosen: dict[str, Any] = {}
    if "lr" not in given:
        rates = PREFERENCE_RATES.get(str(given.get("loss")), LEARNING_RATES)
        chosen["lr"] = rates[bool(given.get("lora"))]
        if not given.keys() & set(_WARMUP):
            chosen["lr_warmup_fraction"] = WARMUP_FRACTION
    if "seq_length" not in given:
        chosen["seq_length"] = _default_length(folder)
    if "global_batch_size" not in given:
        chosen["global_batch_size"] = GLOBAL_BATCH_SIZE
    if not given.keys() & {"fit_to_memory", "recompute_granularity"}:
        chosen["fit_to_memory"] = "found"
    if not given.keys() & set(_STEPS) and not given.get("mock_data"):
        chosen["train_epochs"] = 1.0
    return chosen


def preference_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what --loss implies: packing, and no dropout in the policy, whose reference has none
    either (a model's or an adapter's folder may state one).
    """
    if given.get("loss", "sft") == "sft":
        return {}
    no_dropout = dict.fromkeys(("hidden_dropout", "attention_dropout", "lora_dropout"), 0.0)
    implied: dict[str, Any] = {"sequence_packing": True, **no_dropout}
    is_new = given.get("lora_adapter") is None  # whose folder says it
    if given["loss"] == "reward" and given.get("lora") and is_new:
        implied["lora_modules_to_save"] = ("score",)
    return implied


def choice_notes(given: Mapping[str, Any]) -> list[str]:
    """Returns lines for the log: the chosen defaults, and a note if --seq-length exceeds the
    model's positions.
    """
    chosen = chosen_options(given)
    notes = []
    chosen.pop("fit_to_memory", None)  # has a line of its own where it changes something
    if chosen:
        listed = " ".join(f"{flag_of(name)} {value:g}" for name, value in chosen.items())
        notes.append(f"chosen, as they are not given: {listed}")
    asked = (given.get(name) for name in ("seq_length", "pretrained_checkpoint", "rope_scaling"))
    return [*notes, *positions_notes(*asked)]


def positions_notes(
    seq_length: int | None, folder: str | None, rope_scaling: str | None
) -> Iterator[str]:
    """Yields a line if sequences have more positions than the model in `folder` was made for, with
    the option that stretches plain rotary embeddings.

    rope_scaling: of the run; None where the user gave none.
    """
    positions = positions_of(folder)
    if folder is None or positions is None or seq_length is None or seq_length <= positions:
        return
    where = str(Path(folder) / "config.json")
    decided = options_of(read_config(folder), where)
    if rope_scaling not in (None, decided["rope_scaling"]):
        return  # the user has stretched them
    way_out = ""
    if decided.get("position_embedding_type") == "rope" and decided["rope_scaling"] is None:
        stretched = RopeScaling(
            "yarn", round(seq_length / positions, 3), float(positions)
        ).to_json()
        way_out = f"; pass --rope-scaling '{stretched}'"
    yield (
        f"note: --seq-length {seq_length} exceeds max_position_embeddings {positions} of {where}; "
        f"later positions were never trained{way_out}"
    )
