"""pure. A scheduled step as files: JSON, which the planner reads, a page, and a picture where matplotlib is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from megatron.planner.step_page import page
from megatron.planner.step_picture import picture_of
from megatron.planner.step_record import StepRecord


def dump_schedule(stem: Path, record: StepRecord) -> list[Path]:
    """Write `stem`.json, .html and, where matplotlib is, .png; returns their paths."""
    paths = [stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.html")]
    paths[0].write_text(record.to_json() + "\n", encoding="utf-8")
    picture = picture_of(record)
    lead = "as it ran; python -m megatron.packing.plan compares it with other schedules"
    paths[1].write_text(page(record.title, lead, [picture], None, []), encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is not None:
        from megatron.planner.step_plot import figure_of

        paths.append(stem.with_name(f"{stem.name}.png"))
        figure_of([picture]).savefig(paths[-1])
    return paths
