"""Every field of config.json beside transformers: each is changed in each family, and either the
product computes what transformers computes, or it refuses the file in a line.

    python -m tests.functional_tests.config_fields --write FILE.md
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from tests.functional_tests.config_mutations import Mutation, mutations
from tests.functional_tests.config_sides import Computed, ProductSide, TransformersSide
from tests.functional_tests.hf_models import _COMMON, FAMILY_MODELS, MODELS
from tests.functional_tests.ranks import run_ranks

_BASES = (
    *("llama2", "mistral", "mistral-windows", "qwen2", "qwen3", "gemma", "mixtral", "qwen2-moe"),
    *("qwen3-moe", "seed-oss", "smollm3", "ernie4.5", "glm4-moe", "glm4-moe-groups", "phi3"),
    *("granite", "olmo2", "glm4", "gemma2", "gemma3", "olmo3", "exaone4", "ministral3"),
    *("minimax-m2", "qwen3.5", "qwen3.5-moe", "qwen3-next", "gpt-oss", "phi3-long"),
    *("deepseek-v3", "deepseek-v2", "glm4-moe-lite"),
    *("gemma4", "gemma4-moe", "gemma4-unified"),
)
VISION: dict[str, dict[str, Any]] = {
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
VISION["gemma4"] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
VISION["gemma4_unified"] = {
    "mm_embed_dim": 16,
    "mm_posemb_size": 8,
    "output_proj_dims": 64,
    "patch_size": 4,
}
VISION["qwen3_5_moe"] = VISION["qwen3_5"]
VISION["qwen3_vl"] = VISION["qwen3_5"] | {"deepstack_visual_indexes": [0]}
VISION["qwen3_vl_moe"] = VISION["qwen3_vl"]
VISION["qwen2_5_vl"] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
}
_WRAPPED = {
    "gemma3 in gemma3": ("gemma3", "gemma3"),
    "mistral in mistral3": ("mistral", "mistral3"),
    "ministral3 in mistral3": ("ministral3", "mistral3"),
    "qwen3.5 in qwen3_5": ("qwen3.5", "qwen3_5"),
    "qwen3.5-moe in qwen3_5_moe": ("qwen3.5-moe", "qwen3_5_moe"),
    "mistral4 in mistral3": ("mistral4", "mistral3"),
    "qwen2.5-vl in qwen2_5_vl": ("qwen2.5-vl", "qwen2_5_vl"),
    "gemma4-moe in gemma4": ("gemma4-moe", "gemma4"),
    "gemma4-unified in gemma4_unified": ("gemma4-unified", "gemma4_unified"),
    "qwen3-vl in qwen3_vl": ("qwen3-vl", "qwen3_vl"),
    "qwen3-vl-moe in qwen3_vl_moe": ("qwen3-vl-moe", "qwen3_vl_moe"),
}
"""Case -> the language model, and `model_type` of the multimodal model around it."""
_WITH_EVERY_ROPE = ("llama2", "phi3", "gemma3", "olmo3", "ministral3", "gpt-oss", "qwen3.5")
CASES = (*_BASES, *_WRAPPED)
_TOLERANCE = 1e-9
"""Of logits in float64, relative to the largest; transformers rounds rotary angles to float32 as
the product does.
"""
UNREAD = {
    "initializer_range": "of new weights",
    "init_std": "of new weights",
    "initializer_factor": "of new weights",
    "gradient_checkpointing": "memory, not numbers",
    "transformers_weights": "a file of weights; read with the files of the folder",
    "fusion_config": "kernels of transformers",
    "pad_token_id": "the embedding of this token gets no gradient in transformers, and one here",
    "max_position_embeddings": "a limit of generation, and the length that ropes are for",
    "layer_types": "read where a family has kinds of layers",
    "sliding_window": "read where use_sliding_window is on",
    "sliding_window_pattern": "read where layer_types is missing",
    "use_double_wide_mlp": "read where num_kv_shared_layers is above 0, which is refused",
    "n_group": "read where a router limits groups of experts",
    "topk_group": "read where n_group is above 1",
    "vocab_size_per_layer_input": "read where hidden_size_per_layer_input is above 0, which is "
    "refused",
    "num_experts": "one of two names, of which the product reads the one that counts",
    "num_local_experts": "one of two names, of which the product reads the one that counts",
    "dtype": "of weights in files; given to both sides",
    "text_config": "opened by both sides",
}
"""Fields that transformers reads and the product does not, or not of every file -> why."""
_OF_IMAGES = {
    *("vision_config", "image_size", "image_token_id", "mm_tokens_per_image", "num_channels"),
    *("patch_size", "vision_use_head", "multimodal_projector_bias", "projector_hidden_act"),
    *("spatial_merge_size", "vision_feature_layer", "depth", "in_channels", "num_heads"),
    *("num_position_embeddings", "out_hidden_size", "temporal_patch_size", "layer_norm_eps"),
    *("hidden_act", "deepstack_visual_indexes", "fullatt_block_indexes", "window_size"),
    *("audio_config", "audio_token_id", "video_token_id", "mm_embed_dim", "mm_posemb_size"),
    *("output_proj_dims", "position_embedding_size", "standardize", "use_clipped_linears"),
}
"""Fields of the parts for images and sounds, which the product carries through."""
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


class Audit(NamedTuple):
    """What came of the changes of one model."""

    outcomes: list[Outcome]
    unread: list[str]
    """Fields that transformers' model reads and the product does not, without `UNREAD`."""


def base_config(case: str) -> dict[str, Any]:
    """Returns the config.json that is changed, as transformers writes it."""
    from transformers import AutoConfig

    name, outer = _WRAPPED.get(case, (case, None))
    kind, changes = (MODELS | FAMILY_MODELS)[name]
    fields = _COMMON | {"tie_word_embeddings": False} | changes
    if outer in ("gemma4", "gemma4_unified"):
        fields["pad_token_id"] = (
            0  # its class writes it over tokens of images, of which there are none
        )
    config = AutoConfig.for_model(kind, **fields)
    if outer is not None:
        config = AutoConfig.for_model(
            outer,
            text_config=config.to_dict(),
            vision_config=VISION[outer],
            tie_word_embeddings=False,
        )
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    written.pop("_name_or_path", None)
    return written


def audit(case: str, only: str = "") -> Audit:
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
        first = _compare(theirs, ours, folder, config, Mutation({}, "text"), unchanged)
        outcomes = [Outcome(case, "", *first)]
        unread = theirs.fields_read(folder) - ours.reads - UNREAD.keys()
        if case in _WRAPPED:
            unread -= _OF_IMAGES
        known = theirs.reads | theirs.declared(folder) | ours.reads
        for change in mutations(config, known, case in _WITH_EVERY_ROPE):
            if only in change.title:
                kind, note = _compare(theirs, ours, folder, config, change, unchanged)
                outcomes.append(Outcome(case, change.title, kind, note))
    return Audit(outcomes, sorted(unread))


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
    """Returns the kind of outcome of a change, and a note."""
    expected = _theirs(theirs, folder, change.apply(config))
    if isinstance(expected, str):
        return "not computed", expected
    try:
        found = ours.compute(folder)
    except ValueError as failure:
        line = str(failure).replace(str(folder), "FOLDER")
        if "\n" in line:
            return "raises", line
        is_same = _difference(unchanged, expected) is None
        return "refused without need" if is_same else "refused", line
    except Exception as failure:
        return "raises", f"{type(failure).__name__}: {failure}"[:300]
    difference = _difference(found, expected)
    return ("alike", "") if difference is None else ("differs", difference)


def _difference(found: Computed, expected: Computed) -> str | None:
    """Returns what differs between two sides; None if nothing does."""
    if found.differs_in_training != expected.differs_in_training:
        sides = [side.differs_in_training for side in (found, expected)]
        return f"training differs from inference: {sides[0]}, in transformers {sides[1]}"
    pairs = list(zip(found.logits, expected.logits, strict=True))
    if any(one.shape != other.shape for one, other in pairs):
        return "sizes of logits"
    apart = max(
        ((one - other).abs().max() / other.abs().max().clamp(min=1e-6)).item()
        for one, other in pairs
    )
    return None if apart <= _TOLERANCE else f"logits by {apart:.1e}"


def page(audits: dict[str, Audit]) -> str:
    """Returns Markdown: the outcomes of each model, and each refusal with its changes."""
    names = ("torch", "megatron-core", "transformers")
    kinds = list(OUTCOMES)
    totals = Counter(outcome.kind for audit in audits.values() for outcome in audit.outcomes)
    lines = [
        "# Fields of config.json",
        "",
        f"{date.today()}, CPU, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in names),
        "",
        "```",
        "make config-fields",
        "```",
        "",
        f"{sum(totals.values())} changes of a config.json (fields switched, changed, null, "
        "missing, unknown; ropes in the spellings of transformers 4 and 5; of wrapper and text "
        "part), each computed by transformers and by the product from the same random weights in "
        f"float64. Equal: logits of two sequences within {_TOLERANCE:g} of the "
        "largest, and both or neither compute otherwise in training (dropout, losses of routers). "
        "Left out: what transformers refuses itself.",
        "",
        f"| model | {' | '.join(OUTCOMES.values())} | read by transformers alone |",
        "|---" * (len(kinds) + 2) + "|",
    ]
    missing = [case for case in CASES if case not in audits]
    if missing:
        lines[-3:-3] = ["", f"Not run: {', '.join(missing)}."]
    for case, found in audits.items():
        counts = Counter(outcome.kind for outcome in found.outcomes)
        unread = ", ".join(found.unread) or "none"
        lines.append(f"| {case} | {' | '.join(str(counts[kind]) for kind in kinds)} | {unread} |")
    lines += ["", "Fields that transformers reads of a model and the product does not:", ""]
    lines += [f"- `{name}`: {why}" for name, why in UNREAD.items()]
    for kind in ("differs", "raises", "refused without need", "refused"):
        lines += ["", f"## {OUTCOMES[kind][0].upper()}{OUTCOMES[kind][1:]}", ""]
        lines += _refusals([o for a in audits.values() for o in a.outcomes if o.kind == kind])
    return "\n".join(lines) + "\n"


def _refusals(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns a table of messages; of each an example, and the models that have it."""
    by_message: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        message = outcome.note.removeprefix("FOLDER/config.json").strip(": ")
        by_message.setdefault(re.sub(r"[0-9.]+(e-?[0-9]+)?", "#", message), []).append(outcome)
    if not by_message:
        return ["None."]
    rows = ["| change, for example | message | changes | models |", "|---|---|---|---|"]
    for same in by_message.values():
        message = same[0].note.removeprefix("FOLDER/config.json").strip(": ").replace("|", "/")
        models = ", ".join(dict.fromkeys(outcome.case for outcome in same))
        rows.append(f"| {same[0].title[:160]} | {message[:240]} | {len(same)} | {models} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=CASES, help="one model")
    parser.add_argument("--change", default="", help="changes whose title holds this")
    parser.add_argument(
        "--results", type=Path, help="folder of a file per model; what is there stays"
    )
    parser.add_argument("--recorded", action="store_true", help="a page of what --results holds")
    parser.add_argument("--write", type=Path, help="page to write")
    options = parser.parse_args()
    started, audits = time.monotonic(), {}
    for case in CASES if options.case is None else [options.case]:
        kept = options.results and options.results / f"{case.replace(' ', '-')}.json"
        if kept and kept.exists():
            outcomes, unread = json.loads(kept.read_text())
            audits[case] = Audit([Outcome(*one) for one in outcomes], unread)
        if case in audits or options.recorded:
            continue
        found = run_ranks(audit, 1, case, options.change, timeout_seconds=3600)[0]
        audits[case] = found
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(found))
        counts = dict(Counter(outcome.kind for outcome in found.outcomes))
        print(f"{case}: {counts}, {time.monotonic() - started:.0f} s", flush=True)
        for outcome in found.outcomes:
            if outcome.kind in ("differs", "raises"):
                print(f"    {outcome.title} | {outcome.note}", flush=True)
    if options.write is not None:
        options.write.write_text(page(audits))
    bad = [o for a in audits.values() for o in a.outcomes if o.kind in ("differs", "raises")]
    unread = {name for found in audits.values() for name in found.unread}
    if bad or unread:
        sys.exit(f"{len(bad)} changes are computed otherwise; unread fields: {sorted(unread)}")


if __name__ == "__main__":
    main()
