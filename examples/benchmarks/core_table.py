"""pure. Writes what releases of megatron-core do, as `core_probes` saw it, beside the test that
would fail if it changed.

    python -m examples.benchmarks.core_table FOUND.json ... --write FILE.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from examples.benchmarks.provenance import commit

TESTS: Mapping[str, tuple[str, str]] = {
    "fields_of_packs": ("further fields of PackedSeqParams", "packing/test_plugin.py"),
    "rope_of_packs": ("positions of a pack's sequences", "packing/model/attention/test_rotary.py"),
    "local_attention": (
        "attention without Transformer Engine",
        "packing/model/attention/test_core_attention.py",
    ),
    "uninitialized_weights": (
        "shards with perform_initialization=False, on CPU",
        "functional: test_hf_training.py",
    ),
    "loss_and_logits": ("float32 logits after the loss", "packing/model/loss"),
    "labels_outside": ("a label of -100", "sft/data/records"),
    "optimizer_groups": ("what a checkpoint finds groups by", "sft/model/test_mcore_fixes.py"),
    "prediction_loss": (
        "loss of multi-token prediction",
        "packing/model/loss/test_auxiliary_losses.py",
    ),
    "routers_know_padding": (
        "mask of padding in routers",
        "packing/model/layers/test_routers.py",
    ),
    "expert_gemm": ("te_general_gemm without it", "sft/model/test_mcore_fixes.py"),
    "model_fields": ("fields that families need", "sft/model/test_build.py"),
    "context_by_pack": ("context parallel by pack", "packing/test_plugin_checks.py"),
    "packing_schedulers": ("classes of data_schedule", "packing/test_plugin.py"),
    "deprecated_model": ("GPTModel is deprecated", "functional: test_layouts.py"),
}
"""Probe -> what it is about, and the test, in tests/unit_tests or tests/functional_tests."""


def page(found: Sequence[Mapping[str, str]]) -> str:
    """Returns Markdown: a row per behaviour, a column per release."""
    names = [one["version"].partition("+")[0] for one in found]
    torches = ", ".join(
        f"{n} with torch {one['torch']}" for n, one in zip(names, found, strict=True)
    )
    lines = [
        "# megatron-core by version",
        "",
        f"{date.today()}, commit {commit()}, CPU; {torches}",
        "",
        "```",
        "make core-table",
        "```",
        "",
        "What this project relies on, as each release does it, and the test that would fail. "
        "docs/reference/megatron-core.md says what follows.",
        "",
        f"| | {' | '.join(names)} | test |",
        "|---" * (len(found) + 2) + "|",
    ]
    for probe, (about, test) in TESTS.items():
        cells = [one[probe].replace("|", "/") for one in found]
        lines.append(f"| {about} | {' | '.join(cells)} | {test} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("found", nargs="+", type=Path, help="output of core_probes")
    parser.add_argument("--write", required=True, type=Path)
    arguments = parser.parse_args()
    found = [json.loads(path.read_text().splitlines()[-1]) for path in arguments.found]
    arguments.write.write_text(page(found))


if __name__ == "__main__":
    main()
