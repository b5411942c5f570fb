"""Whole runs on this device, as a user starts them, beside the same on CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.packing.model.get_batch import transformer_engine_installed
from tests.functional_tests.forked_runs import ROOT
from tests.functional_tests.hf_models import read_folder, write_model
from tests.functional_tests.layouts import MODELS
from tests.functional_tests.test_plugin import PACKING, steps_in
from tests.functional_tests.test_run import EXACT, Run, steps_of

TIMEOUT_SECONDS = 300.0
COMMON = (
    "--seq-length 128 --global-batch-size 8 --lr 1e-3 --adam-eps 1e-3 --eval-iters 0 "
    "--over-length-policy truncate --num-workers 2"
)
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96"
PACKED = "--sequence-packing"
LORA = "--lora --lora-rank 4"
CASES = {
    **{model: (flags, PACKED) for model, flags in MODELS.items()},
    "padded": (MODELS["grouped"], "--micro-batch-size 4"),
    "recomputed": (MODELS["grouped"], f"{PACKED} --recompute-granularity full"),
    "sharded": (
        MODELS["grouped"],
        f"{PACKED} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "saved in the background": (MODELS["grouped"], f"{PACKED} --async-save"),
    "head of 256": (MODELS["grouped"] + " --kv-channels 256", PACKED),
    "head of 20": (MODELS["grouped"] + " --kv-channels 20", PACKED),
    "state on the host": (MODELS["grouped"], f"{PACKED} --use-distributed-optimizer"),
    "unfused": (MODELS["grouped"], PACKED),
    "unfused experts": (MODELS["experts"], PACKED),
    "gathered experts": (MODELS["experts"], f"{PACKED} --moe-permute-fusion"),
    "biases": ("--position-embedding-type rope --swiglu", PACKED),
    "shared experts": (
        f"{MODELS['experts']} --moe-shared-expert-intermediate-size 32",
        PACKED,
    ),
    "recomputed activation": (
        f"{MODELS['grouped']} --recompute-granularity selective --recompute-modules mlp",
        PACKED,
    ),
    "sharded experts": (
        MODELS["experts"],
        f"{PACKED} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "kept logits": (MODELS["tied"], f"{PACKED} --keep-logits"),
}
UNFUSED = (
    "--no-cross-entropy-loss-fusion --no-bias-swiglu-fusion --no-gradient-accumulation-fusion "
    "--no-moe-grouped-gemm"
)
ON_GPU = {
    "state on the host": "--use-precision-aware-optimizer --optimizer-cpu-offload",
    "unfused": UNFUSED,
    "unfused experts": UNFUSED,
}
"""Options of a case that need a GPU, or turn off what one takes by itself."""


def train(arguments: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a run on `device` prints."""
    with monkeypatch.context() as patch:
        if device.type == "cpu":
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        status, output = Run(1, [*COMMON.split(), *arguments.split()]).finish(TIMEOUT_SECONDS)
    assert status == 0, output
    return output


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The option that reads two files of chats, one twice as often as the other."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("first", "second"):
        chats = [
            {"instruction": f"{name} {i}?", "output": "yes " * (1 + i * 7 % 29)} for i in range(40)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return f"--data-path 2 {folder}/first.jsonl 1 {folder}/second.jsonl --skip-bad-samples"


@pytest.mark.parametrize(
    ("precision", "apart"), [("", 1e-5), ("--bf16", 5e-3)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("case", CASES)
def test_goes_on_as_on_cpu(
    case: str,
    precision: str,
    apart: float,
    blend: str,
    tmp_path: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three steps from a checkpoint that was made on CPU. Blends with worker processes, a mask on
    the wrong device, a kernel with another scale: each would train, to another loss.
    """
    model, how = CASES[case]
    text = f"{SHAPE} {model} {how} {precision} {blend} --train-iters 4"
    cpu, here = tmp_path / "cpu", tmp_path / "here"
    train(
        f"{text} --run-dir {cpu} --save {cpu}/checkpoints --save-interval 1",
        torch.device("cpu"),
        monkeypatch,
    )
    shutil.copytree(cpu / "checkpoints", here / "checkpoints")
    (here / "checkpoints/latest_checkpointed_iteration.txt").write_text("1")
    saved = f"--load {here}/checkpoints --save {here}/checkpoints"
    if device.type == "cuda":
        saved += f" {ON_GPU.get(case, '')}"
    train(f"{text} --run-dir {here} {saved}", device, monkeypatch)
    expected, found = steps_of(cpu), steps_of(here)
    assert list(found) == [2, 3, 4]
    for iteration, step in found.items():
        assert step["loss"] == pytest.approx(expected[iteration]["loss"], rel=apart)
        assert step["grad_norm"] == pytest.approx(expected[iteration]["grad_norm"], rel=20 * apart)
        for name in ("tokens", "square_sum", "num_loss_tokens"):
            assert step[name] == expected[iteration][name]


@pytest.mark.parametrize(
    ("model", "lora"),
    [*((model, "") for model in ("llama3", "qwen2", "gemma", "qwen3-moe")), ("llama3", LORA)],
)
def test_weights_in_and_out(
    model: str, lora: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that is cut, joined or cast otherwise on the device is written to the folder that
    others load.
    """
    write_model(model, tmp_path / "model")
    text = f"--pretrained-checkpoint {tmp_path}/model --mock-data {PACKED} --train-iters 3 {lora}"
    for name, where in (("cpu", torch.device("cpu")), ("here", device)):
        train(
            f"{text} --run-dir {tmp_path}/{name} --save-hf {tmp_path}/{name}/model",
            where,
            monkeypatch,
        )
    expected, found = steps_of(tmp_path / "cpu"), steps_of(tmp_path / "here")
    assert [found[i]["loss"] for i in (1, 2, 3)] == pytest.approx(
        [expected[i]["loss"] for i in (1, 2, 3)], rel=1e-4
    )
    before, after = read_folder(tmp_path / "model"), read_folder(tmp_path / "here/model")
    expected_after = read_folder(tmp_path / "cpu/model")
    assert after.keys() == expected_after.keys()
    assert lora or after.keys() == before.keys()
    for name, tensor in after.items():
        assert lora or not torch.equal(tensor, before[name]), f"{name} was not trained"
        torch.testing.assert_close(tensor, expected_after[name], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("precision", ["", "--bf16"], ids=["float32", "bfloat16"])
def test_two_runs_and_a_continued_one_are_equal(
    precision: str,
    blend: str,
    tmp_path: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With --deterministic-mode to the bit: atomic additions would come in another order each
    time."""
    text = (
        f"{SHAPE} {MODELS['grouped']} {PACKED} {precision} {blend} --train-iters 6 "
        "--deterministic-mode"
    )
    for name in ("first", "second"):
        folder = tmp_path / name
        saved = f"--load {folder}/checkpoints --save {folder}/checkpoints --save-interval 2"
        train(f"{text} --run-dir {folder} {saved}", device, monkeypatch)
        if name == "first":
            (folder / "checkpoints/latest_checkpointed_iteration.txt").write_text("4")
            whole = steps_of(folder)
            train(f"{text} --run-dir {folder} {saved}", device, monkeypatch)
    for other in (steps_of(tmp_path / "first"), steps_of(tmp_path / "second")):
        assert list(other) == list(whole) == [1, 2, 3, 4, 5, 6]
        for iteration, step in other.items():
            assert {name: step[name] for name in EXACT} == {
                name: whole[iteration][name] for name in EXACT
            }


def run_example(*arguments: str) -> list[tuple[float, int]]:
    """Loss and number of microbatches of each step that torchrun's examples/plugin/train.py
    prints.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    done = subprocess.run(
        [*launcher, "examples/plugin/train.py", "--train-iters", "3", *arguments],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout
    return steps_in(done.stdout)


def test_the_plug_in_trains_packed_as_padded(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users copy the example."""
    ahead = (*PACKING.split(), "--prefetch-global-batches", "2")
    padded, packed = run_example(), run_example(*ahead)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    on_cpu = run_example(*ahead)
    assert [loss for loss, _ in packed] == pytest.approx([loss for loss, _ in padded], abs=1e-4)
    assert [loss for loss, _ in packed] == pytest.approx([loss for loss, _ in on_cpu], abs=1e-4)
    assert [count for _, count in packed] == [count for _, count in on_cpu]


def test_transformer_engine_trains_as_torch_on_cpu(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers, its attention and its names of parameters; from a folder, to a folder."""
    if device.type == "cuda" and not transformer_engine_installed():
        pytest.skip("Transformer Engine is not installed")
    write_model("llama3", tmp_path / "model")
    text = f"--pretrained-checkpoint {tmp_path}/model --mock-data {PACKED} --train-iters 3 --bf16"
    for name, where in (("cpu", torch.device("cpu")), ("here", device)):
        train(
            f"{text} --run-dir {tmp_path}/{name} --save-hf {tmp_path}/{name}/model",
            where,
            monkeypatch,
        )
    expected, found = steps_of(tmp_path / "cpu"), steps_of(tmp_path / "here")
    assert [found[i]["loss"] for i in (1, 2, 3)] == pytest.approx(
        [expected[i]["loss"] for i in (1, 2, 3)], rel=2e-2
    )
    assert read_folder(tmp_path / "here/model").keys() == read_folder(tmp_path / "model").keys()
