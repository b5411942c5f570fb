"""Folders as other libraries and model makers write them, trained on, saved, exported, and loaded
by them again.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.sft.commands import export
from tests.functional_tests.forked_runs import ROOT, train_forked
from tests.functional_tests.hf_models import read_folder
from tests.functional_tests.ranks import run_ranks
from tests.functional_tests.test_hf_run import talk

RELEASED = ROOT / "tests/fixtures/released"
CHATS = RELEASED / "datasets/chats.jsonl"
STEPS = (
    "--seq-length 128 --global-batch-size 4 --train-iters 2 --lr 1e-3 --sequence-packing "
    "--eval-iters 0 --num-workers 0"
)
HUGE = "1000000000000000019884624838656"
ONE_LINE = r"pretrain_sft.py: error: (.*)\n"


def train(
    model: str, *arguments: object, data: Path = CHATS, num_processes: int = 1
) -> tuple[int, str]:
    """Exit status and output of two steps from a released folder."""
    given = [
        "--pretrained-checkpoint",
        RELEASED / model,
        "--data-path",
        data,
        *STEPS.split(),
        *arguments,
    ]
    return train_forked(num_processes, list(map(str, given)))


def settings_of(folder: Path) -> dict[str, str]:
    """What the files beside the weights hold; chat_template.jinja and JSON as text."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix in (".json", ".jinja") and ".index." not in path.name
    }


@pytest.mark.parametrize("model", ["llama2", "mistral", "gemma", "llama3", "qwen", "trl"])
def test_a_released_model_comes_back(tmp_path: Path, model: str) -> None:
    """Its files are read at the start and written at the end: what the end cannot write is a
    training lost.
    """
    checkpoints, first, second = (tmp_path / name for name in ("checkpoints", "first", "second"))
    status, output = train(
        model, "--save", checkpoints, "--save-hf", first, "--run-dir", tmp_path / "run"
    )
    assert status == 0, output

    def run_export() -> None:
        export.main([str(checkpoints), str(second)], "export")

    status, output = train_forked(1, [], run_export)
    assert status == 0, output
    before, written = settings_of(RELEASED / model), settings_of(first)
    assert written == settings_of(second)
    assert written.keys() == before.keys()
    assert HUGE in written["tokenizer_config.json"]
    for name in before.keys() - {"config.json", "generation_config.json"}:
        expected = before[name]
        if (model, name) == ("llama2", "tokenizer_config.json"):
            # transformers 5 does not put a space before the text behind a special token, as the
            # tokenizer.json does.
            expected = expected.replace("LlamaTokenizer", "PreTrainedTokenizerFast")
        assert written[name] == expected, name
    for name in ("config.json", "generation_config.json"):
        kept = json.loads(before[name])
        found = json.loads(written[name])
        assert {
            key: found[key] for key in kept if key not in ("_name_or_path", "eos_token_id")
        } == {
            key: value
            for key, value in kept.items()
            if key not in ("_name_or_path", "eos_token_id")
        }
    if model in ("llama2", "trl"):
        arguments = ["--save", checkpoints, "--load", checkpoints, "--train-iters", 3]
        status, output = train(model, *arguments, "--save-hf", tmp_path / "third")
        assert status == 0, output
        assert re.findall(r"step (\d+)/", output) == ["3"]
        assert settings_of(tmp_path / "third") == written
    ((complaints, _, _),) = run_ranks(talk, 1, second, ["how"])
    assert complaints == []
    assert read_folder(first).keys() == read_folder(RELEASED / model).keys()


def test_an_adapter_of_trl_is_trained_on(tmp_path: Path) -> None:
    """Beside the model that it was trained for, and peft loads what comes out."""
    target = tmp_path / "adapter"
    arguments = [
        "--lora",
        "--lora-adapter",
        RELEASED / "trl-adapter",
        "--save",
        tmp_path / "save",
        "--save-hf",
        target,
    ]
    status, output = train("qwen", *arguments)
    assert status == 0, output
    assert run_ranks(adapted_modules, 1, target) == [14]


def adapted_modules(folder: Path) -> int:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(RELEASED / "qwen")
    names = [
        name
        for name, _ in PeftModel.from_pretrained(model, folder).named_modules()
        if name.endswith("lora_A")
    ]
    return len(names)


@pytest.mark.parametrize("data", ["datasets/chats.parquet", "energon"])
def test_released_data_are_trained_on(tmp_path: Path, data: str) -> None:
    """As datasets and energon write them; the same chats give the same losses."""
    losses = []
    for name, source in (("lines", CHATS), ("other", RELEASED / data)):
        status, output = train("qwen", "--run-dir", tmp_path / name, data=source)
        assert status == 0, output
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append(
            [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"]
        )
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (
            "--save-hf {file}/model",
            "must be a folder that can be written to, but: File exists; pass another --save-hf",
        ),
        (
            "--run-dir {file}",
            "must be a folder that can be written to, but: File exists; pass another --run-dir",
        ),
        (
            "--tensorboard-dir {file}",
            "must be a folder that can be written to, but: File exists; pass another --tens",
        ),
        ("--save-hf {folder}/" + "n" * 250, "--save-hf .* cannot be written: File name too long"),
        (
            "--save-hf {folder}/model --tokenizer-model {odd}",
            "tokenizer_config.json cannot be read",
        ),
        (
            "--save {folder}/save --pretrained-checkpoint {odd} --tokenizer-model {good}",
            "config.json has dtype 'int8', but must have float64 or",
        ),
    ],
)
def test_what_the_end_cannot_write_is_refused_at_the_start(
    tmp_path: Path, arguments: str, fault: str
) -> None:
    """... in one line, before a step is taken."""
    odd, file = tmp_path / "odd", tmp_path / "file"
    shutil.copytree(RELEASED / "qwen", odd)
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"dtype": "int8"}))
    settings = (odd / "tokenizer_config.json").read_text()
    (odd / "tokenizer_config.json").write_text(settings.replace(HUGE, "1" * 4200))
    file.write_text("")
    given = arguments.format(file=file, folder=tmp_path, odd=odd, good=RELEASED / "qwen").split()
    status, output = train(
        "qwen", *(["--run-dir", tmp_path / "run"] if "--run-dir" not in given else []), *given
    )
    assert status != 0
    assert "Traceback" not in output
    assert "step 1" not in output
    (line,) = re.findall(ONE_LINE, output)
    assert re.search(fault, line), line
