"""Options of the run that tunes released weights, which no other test starts."""

import json
from pathlib import Path

import pytest

from examples.released_finetune.compare import LAYOUTS, MAX_TOKENS, QUESTIONS, STEP, read_chats
from megatron.sft.arguments.parse import parse_config

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "examples" / "released_finetune" / "config.yaml"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """config.json of SmolLM2-135M-Instruct as released."""
    releases = ROOT / "tests" / "fixtures" / "released" / "configs" / "huggingface.json"
    release = json.loads(releases.read_text(encoding="utf-8"))[0]
    assert release["repository"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    (tmp_path / "config.json").write_text(json.dumps(release["config"]), encoding="utf-8")
    return tmp_path


def test_the_run_has_options_that_exist(model: Path) -> None:
    """`make finetune-released` takes a quarter of an hour, so no other test would see it break."""
    config = parse_config(["--config", str(CONFIG), "--pretrained-checkpoint", str(model)], 2)
    assert config.model.num_layers == 30
    assert config.training.sample_tokens == MAX_TOKENS
    assert {turn["role"] for chat in read_chats(QUESTIONS) for turn in chat} == {"user"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layouts_fit_the_model(model: Path, layout: str) -> None:
    """9 heads, 3 groups and 30 layers split into few numbers of ranks."""
    num_processes, options = LAYOUTS[layout]
    given = f"--pretrained-checkpoint {model} --mock-data --global-batch-size 4 {STEP} {options}"
    parallel = parse_config(given.split(), num_processes).parallel
    ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    assert ranks == num_processes
