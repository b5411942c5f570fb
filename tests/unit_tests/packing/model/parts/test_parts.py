"""Who knows a part: its own files, a family that has it, and the list of parts."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from megatron.packing.layers import Part
from megatron.packing.model.parts import known_parts
from megatron.packing.model.shape import TransformerShape

MEGATRON = Path(__file__).resolve().parents[5] / "megatron"
# The doctor makes small models of transformers, and of runs, by the names of their configs.
FAMILIES = {
    "delta_net": {"qwen3_next.py", "small_models.py", "shrink.py"},
    "global_attn": {"gemma4.py", "shrink.py"},
    "latent_attn": {"latent.py", "glm.py", "mistral.py", "small_models.py"},
}
"""Part -> the families that have it, and who knows its names."""


@pytest.mark.parametrize("part", known_parts())
def test_nobody_asks_for_a_part_by_name(part: type[Part]) -> None:
    """The next part would be missing wherever somebody asks for this one."""
    own = {one.name for one in fields(part)} - {one.name for one in fields(TransformerShape)}  # type: ignore[arg-type]
    words = {part.__name__, part.name, part.layers_option, *own}
    users = {
        path.name
        for path in MEGATRON.rglob("*.py")
        if path.parent.name != "parts"
        and re.search(rf"\b(?:{'|'.join(words)})\b", path.read_text())
    }
    # `shape` has its options among its bases.
    assert users - {"shape.py"} == FAMILIES[part.name]
