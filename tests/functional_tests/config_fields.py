"""Every field of config.json beside transformers: each is changed in each family, and either the
product computes what transformers computes, or it refuses the file in a line.

    python -m tests.functional_tests.config_fields --write FILE.md
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.functional_tests.config_mutations import Mutation, mutations
from tests.functional_tests.config_sides import Computed, ProductSide, TransformersSide
from tests.functional_tests.hf_models import _COMMON, FAMILY_MODELS, MODELS
from tests.functional_tests.ranks import run_ranks

_BASES = (
    *("llama2", "mistral", "mistral-windows", "qwen2", "qwen3", "gemma", "mixtral", "qwen2-moe"),
    *("qwen3-moe", "seed-oss", "smollm3", "ernie4.5", "glm4-moe", "glm4-moe-groups", "phi3"),
    *("granite", "olmo2", "glm4", "gemma2", "gemma3", "olmo3", "exaone4", "ministral3"),
    *("minimax-m2", "qwen3.5", "qwen3.5-moe", "qwen3-next", "gpt-oss"),
)
_VISION = {
    "gemma3": {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "mistral3": {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 28,
        "patch_size": 14,
    },
    "qwen3_5": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 64,
        "num_position_embeddings": 4,
    },
}
_VISION["qwen3_5_moe"] = _VISION["qwen3_5"]
_WRAPPED = {
    "gemma3 in gemma3": ("gemma3", "gemma3"),
    "mistral in mistral3": ("mistral", "mistral3"),
    "ministral3 in mistral3": ("ministral3", "mistral3"),
    "qwen3.5 in qwen3_5": ("qwen3.5", "qwen3_5"),
    "qwen3.5-moe in qwen3_5_moe": ("qwen3.5-moe", "qwen3_5_moe"),
}
"""Case -> the language model, and `model_type` of the multimodal model around it."""
_WITH_EVERY_ROPE = ("llama2", "phi3", "gemma3", "olmo3", "ministral3", "gpt-oss", "qwen3.5")
CASES = (*_BASES, *_WRAPPED)
_TOLERANCE = 1e-9
"""Of logits in float64, relative to the largest; transformers rounds rotary angles to float32 as
the product does.
"""
OUTCOMES = {
    "alike": "computed alike",
    "refused": "refused, where transformers computes something else",
    "refused without need": "refused, though transformers computes what it computed before",
    "not computed": "transformers raises",
    "differs": "computed otherwise",
    "raises": "an error that is no line",
}


class Outcome(NamedTuple):
    """What came of one change."""

    case: str
    title: str
    kind: str
    """One of `OUTCOMES`."""
    note: str = ""


def base_config(case: str) -> dict[str, Any]:
    """Returns the config.json that is changed, as transformers writes it."""
    from transformers import AutoConfig

    name, outer = _WRAPPED.get(case, (case, None))
    kind, changes = (MODELS | FAMILY_MODELS)[name]
    fields = _COMMON | {"tie_word_embeddings": False} | changes
    if outer is None:
        config = AutoConfig.for_model(kind, **fields)
    else:
        text = AutoConfig.for_model(kind, **fields).to_dict()
        config = AutoConfig.for_model(
            outer, text_config=text, vision_config=_VISION[outer], tie_word_embeddings=False
        )
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    # Beside `dtype`, nothing that is neither of the model nor in released files.
    written.pop("_name_or_path", None)
    return written


def audit(case: str, only: str = "") -> list[Outcome]:
    """Returns what came of each change of one model; in a process of one rank.

    only: changes whose title holds this.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        theirs, ours = TransformersSide(), ProductSide()
        config = base_config(case)
        unchanged = _theirs(theirs, folder, config)
        assert isinstance(unchanged, Computed), unchanged
        _compare(theirs, ours, folder, config, Mutation({}, "text"), unchanged)
        known = theirs.reads | theirs.declared(folder) | ours.reads
        changes = mutations(config, known, case in _WITH_EVERY_ROPE)
        chosen = [change for change in changes if only in change.title]
        return [
            Outcome(case, change.title, *_compare(theirs, ours, folder, config, change, unchanged))
            for change in [Mutation({}, "text"), *chosen]
        ]


def _theirs(side: TransformersSide, folder: Path, config: dict[str, Any]) -> Computed | str:
    (folder / "config.json").write_text(json.dumps(config))
    try:
        side.write_weights(folder)
        return side.compute(folder)
    except Exception as failure:  # whatever it raises is its own affair
        return f"{type(failure).__name__}: {failure}".splitlines()[0][:160]


def _compare(
    theirs: TransformersSide,
    ours: ProductSide,
    folder: Path,
    config: dict[str, Any],
    change: Mutation,
    unchanged: Computed,
) -> tuple[str, str]:
    expected = _theirs(theirs, folder, change.apply(config))
    if isinstance(expected, str):
        return "not computed", expected
    try:
        found = ours.compute(folder)
    except ValueError as failure:
        line = str(failure).replace(str(folder), "FOLDER")
        if "\n" in line:
            return "raises", line
        is_same = _differences(unchanged, expected) is None
        return "refused without need" if is_same else "refused", line
    except Exception as failure:
        return "raises", f"{type(failure).__name__}: {failure}"[:300]
    difference = _differences(found, expected)
    return ("alike", "") if difference is None else ("differs", difference)


def _differences(found: Computed, expected: Computed) -> str | None:
    """Returns what differs between two sides; None if nothing does."""
    if found.differs_in_training != expected.differs_in_training:
        sides = [side.differs_in_training for side in (found, expected)]
        return f"training differs from inference: {sides[0]}, in transformers {sides[1]}"
    if any(one.shape != other.shape for one, other in zip(found.logits, expected.logits)):
        return "sizes of logits"
    apart = max(
        ((one - other).abs().max() / other.abs().max().clamp(min=1e-6)).item()
        for one, other in zip(found.logits, expected.logits, strict=True)
    )
    return None if apart <= _TOLERANCE else f"logits by {apart:.1e}"


def unread_fields(case: str) -> Iterator[str]:
    """Yields the fields that transformers' model reads of the config, and the product does not."""
    raise NotImplementedError


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--change", default="", help="changes whose title holds this")
    parser.add_argument("--write", type=Path, help="page to write")
    options = parser.parse_args()
    started = time.monotonic()
    outcomes: list[Outcome] = []
    for case in CASES:
        if options.only not in case:
            continue
        found = run_ranks(audit, 1, case, options.change, timeout_seconds=1800)[0]
        outcomes += found
        counts = Counter(outcome.kind for outcome in found)
        print(case, dict(counts), f"{time.monotonic() - started:.0f} s", flush=True)
        for outcome in found:
            if outcome.kind in ("differs", "raises"):
                print("   ", *outcome[1:], sep=" | ", flush=True)
        Path(f"/tmp/config/out-{case.replace(' ', '_')}.jsonl").write_text(
            "\n".join(json.dumps(o) for o in found)
        )


if __name__ == "__main__":
    main()
