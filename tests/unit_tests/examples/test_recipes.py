"""Recipes of released models: options that exist, layouts that the models take."""

import json
import re
from pathlib import Path

import pytest
import yaml

from examples.recipes.try_recipe import model_config
from megatron.sft.arguments.parse import parse_config

RECIPES = sorted((Path(__file__).parents[3] / "examples" / "recipes").glob("*.yaml"))


def num_gpus(path: Path) -> int:
    """What the head of the recipe says."""
    return int(re.findall(r"^# GPUs: (\d+)$", path.read_text(), re.MULTILINE)[0])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_fit_their_models_and_gpus(path, tmp_path, monkeypatch):
    """Whoever rents 64 GPUs for a recipe would read there that 80 layers make no 3 stages."""
    recipe = yaml.safe_load(path.read_text())
    folder = tmp_path / recipe["pretrained_checkpoint"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model_config(recipe)))
    monkeypatch.chdir(tmp_path)
    config = parse_config(["--config", str(path)], num_gpus(path))
    assert config.packing.sequence_packing
    assert config.lora.lora == ("lora" in path.stem)
    usual = 1e-5 if config.preference.is_on else 1e-4
    assert config.training.lr == usual if config.lora.lora else config.training.lr <= 2e-5
    layers = config.parallel.pipeline_model_parallel_size * (config.num_virtual_stages or 1)
    assert config.model.num_layers % layers == 0
    gpus = num_gpus(path)
    launch = f"--nnodes {gpus // 8} " if gpus > 8 else f"--nproc-per-node {gpus} " * (gpus > 1)
    assert launch in path.read_text()


def test_all_are_listed():
    """A recipe that the table lacks is found by nobody."""
    table = (RECIPES[0].parent / "README.md").read_text()
    assert len(RECIPES) >= 10
    assert {path.name for path in RECIPES} == set(re.findall(r"\((\S+\.yaml)\)", table))
