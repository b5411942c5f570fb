"""Every change of `folder_mutations` to a folder of each of several models: the product computes
the loss that transformers computes, or refuses the folder in one line.

    python -m tests.functional_tests.folders --write FILE.md
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException

from examples.benchmarks.provenance import commit
from tests.functional_tests import tensor_mutations
from tests.functional_tests.folder_losses import loss_by_product, loss_by_transformers, prepare
from tests.functional_tests.folder_mutations import CHANGES, EQUAL, LENIENT, REFUSED, Model
from tests.functional_tests.hf_models import (
    _COMMON,
    FAMILY_MODELS,
    read_folder,
    write_model,
)
from tests.functional_tests.ranks import run_ranks

assert tensor_mutations  # it registers more changes
FLAT = (
    "llama3 qwen2 qwen3 mixtral qwen3-moe glm4-moe minimax-m2 gemma2 phi3 gpt-oss qwen3.5 "
    "qwen3.5-moe"
).split()
NESTED = ("gemma3-vision", "mistral3-vision", "qwen3.5-vision")
ADAPTED = ("llama3", "qwen2", "mixtral", *NESTED)
"""Models that get an adapter."""
_TOLERANCE = 2e-5
"""Relative, in float32: the two sum in another order."""


class Outcome(NamedTuple):
    """What became of a changed folder."""

    change: str
    model: str
    right: str
    is_right: bool
    product: str
    """The loss, or the line that refuses the folder."""
    transformers: str
    """The loss, with the number of weights that were made up, or the error."""


def write_nested(name: str, folder: Path) -> None:
    """Writes a tiny model with a vision tower, its tensors random, in several files."""
    import transformers

    text: dict[str, Any] = {**_COMMON, "head_dim": 16, "num_hidden_layers": 2}
    vision: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    more: dict[str, Any] = {}
    if name == "gemma3-vision":
        kind, more = "Gemma3", {"mm_tokens_per_image": 4, "image_token_index": 249}
        text |= {"sliding_window": 8, "query_pre_attn_scalar": 20}
    elif name == "mistral3-vision":
        kind, more = "Mistral3", {"tie_word_embeddings": False, "image_token_index": 249}
        vision |= {"model_type": "pixtral", "head_dim": 16}
        rope = dict(FAMILY_MODELS["ministral3"][1]["rope_parameters"])
        text |= {"model_type": "ministral3", "rope_parameters": rope}
    else:
        kind, more = "Qwen3_5", {"tie_word_embeddings": True, "image_token_id": 249}
        vision = {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
        }
        text |= FAMILY_MODELS["qwen3.5"][1] | {"num_hidden_layers": 4}
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **more)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(folder, max_shard_size="100kB")


def write(name: str, folder: Path) -> None:
    """Writes a model by its name in `FLAT` or `NESTED`."""
    if name in NESTED:
        write_nested(name, folder)
    else:
        write_model(name, folder)


def described(folder: Path) -> Model:
    """Returns the model of a folder as transformers has saved it."""
    config = json.loads((folder / "config.json").read_text())
    tensors = read_folder(folder)
    body = next(n for n in tensors if n.endswith("embed_tokens.weight")).removesuffix(
        "embed_tokens.weight"
    )
    heads = [name for name in tensors if name.endswith("lm_head.weight")]
    head = "language_model.lm_head.weight" if body == "language_model.model." else "lm_head.weight"
    return Model(
        folder, config["model_type"], tensors, not heads, body, heads[0] if heads else head
    )


def outcome(name: str, source: Path, place: Path, change: str) -> Outcome | None:
    """Returns what becomes of a changed copy of a folder; None where the change means nothing."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, place)
    right = CHANGES[change](described(place))
    if not right:
        return None
    try:
        product: Any = loss_by_product(place)
    except ValueError as failure:
        product = str(failure)
    try:
        theirs, made_up = loss_by_transformers(place)
        transformers: Any = theirs if not made_up else f"{len(made_up)} made up"
    except (Exception, CheckpointException) as failure:  # of any library that reads the files
        transformers = f"{type(failure).__name__}: {failure}".splitlines()[0]
    are_equal = (
        isinstance(product, float)
        and isinstance(transformers, float)
        and abs(product - transformers) <= _TOLERANCE * abs(transformers)
    )
    is_refused = isinstance(product, str) and "\n" not in product and str(place) in product
    is_right = {
        EQUAL: are_equal,
        REFUSED: is_refused,
        LENIENT: isinstance(product, float) and not isinstance(transformers, float),
    }[right]
    texts = [str(one).replace(str(place), "FOLDER") for one in (product, transformers)]
    return Outcome(change, name, right, is_right, *texts)


def adapter_outcomes(name: str, folder: Path) -> list[Outcome]:
    """Returns what becomes of an adapter as peft writes it, alone and beside the weights."""
    import peft
    import transformers

    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(folder)
    torch.manual_seed(2)
    pattern = r"(?!.*(vision|visual)).*\.(q_proj|v_proj|up_proj)"
    options = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=pattern)
    adapted = peft.get_peft_model(model, options)
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_" in parameter_name:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    adapter = folder.with_name("adapter")
    adapted.save_pretrained(str(adapter))
    beside = folder.with_name("beside")
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(folder, beside)
    shutil.copytree(adapter, beside, dirs_exist_ok=True)
    # transformers adds the one that is beside the weights by itself
    cases = {"adapter_of_peft": (folder, adapter), "adapter_beside_is_trained": (beside, None)}
    found = []
    for change, (place, theirs_adapter) in cases.items():
        ours = loss_by_product(place, theirs_adapter or place)
        theirs, _ = loss_by_transformers(place, theirs_adapter)
        is_right = abs(ours - theirs) <= _TOLERANCE * abs(theirs)
        found.append(Outcome(change, name, EQUAL, is_right, str(ours), str(theirs)))
    return found


def outcomes(
    names: Sequence[str], changes: Sequence[str], with_adapters: bool = False
) -> list[Outcome]:
    """Returns what becomes of each change to each model; in a process with groups of its own."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, name in enumerate(names):
            source = Path(scratch) / name
            write(name, source)
            if not number:
                prepare(source)
            each = (outcome(name, source, Path(scratch) / "folder", change) for change in changes)
            found += [one for one in each if one is not None]
            if with_adapters and name in ADAPTED:
                found += adapter_outcomes(name, source)
    return found


def page(found: Sequence[Outcome], seconds: float) -> str:
    """Returns Markdown: a table of changes and models, and the lines that refuse folders."""
    names = list(dict.fromkeys(one.model for one in found))
    by_place = {(one.change, one.model): one for one in found}
    wrong = [one for one in found if not one.is_right]
    packages = ", ".join(f"{n} {version(n)}" for n in ("torch", "megatron-core", "transformers"))
    num_equal, num_refused = (sum(one.right == kind for one in found) for kind in (EQUAL, REFUSED))
    lines = [
        "# Changed folders beside transformers",
        "",
        f"{date.today()}, commit {commit()}, CPU, Python "
        f"{platform.python_version()}, {packages}, {seconds:.0f} s",
        "",
        "```",
        "make folder-mutations",
        "```",
        "",
        f"{len(found)} changed folders of {len(names)} tiny models: {num_equal} are read and have "
        f"transformers' loss (relative difference at most {_TOLERANCE:g} in float32), "
        f"{num_refused} are refused in one line, {len(wrong)} are not as they must be.",
        "",
        "`=`: transformers' loss. `r`: refused, though transformers reads it. `R`: refused, where "
        "transformers fails, too, or makes weights up. `+`: read, though transformers fails. `!`: "
        "wrong.",
        "",
        f"| change | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for change in dict.fromkeys(one.change for one in found):
        cells = [_cell(by_place.get((change, name))) for name in names]
        lines.append(f"| {change.replace('_', ' ')} | {' | '.join(cells)} |")
    lines += ["", "## Lines that refuse folders", ""]
    for change in dict.fromkeys(one.change for one in found if one.right == REFUSED):
        one = next(one for one in found if one.change == change and one.right == REFUSED)
        lines.append(f"- {change.replace('_', ' ')} ({one.model}): {one.product}")
    return "\n".join(lines) + "\n"


def _cell(one: Outcome | None) -> str:
    if one is None:
        return ""
    if not one.is_right:
        return "!"
    if one.right == REFUSED:
        return "r" if one.transformers.replace(".", "", 1).isdigit() else "R"
    return "=" if one.right == EQUAL else "+"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[*FLAT, *NESTED])
    parser.add_argument("--changes", nargs="*", default=[*CHANGES])
    parser.add_argument("--write", type=Path, help="page to write")
    options = parser.parse_args()
    started = time.monotonic()
    (found,) = run_ranks(outcomes, 1, options.models, options.changes, True, timeout_seconds=3600.0)
    if options.write is not None:
        options.write.write_text(page(found, time.monotonic() - started))
    wrong = [one for one in found if not one.is_right]
    for one in wrong:
        print(one, file=sys.stderr)
    sys.exit(f"{len(wrong)} of {len(found)} are not as they must be" if wrong else 0)


if __name__ == "__main__":
    main()
