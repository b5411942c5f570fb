"""The road that runs take on a GPU, on a stand-in for one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.sft.__main__ import main
from megatron.sft.model import cpu_support
from megatron.sft.training.train import Trainer
from tests.functional_tests import cuda_stand_in
from tests.functional_tests.forked_runs import LIMIT_SECONDS, train_forked
from tests.functional_tests.hf_models import write_model
from tests.functional_tests.ranks import run_ranks
from tests.functional_tests.test_run import steps_of

NUM_STEPS = 3
ARGUMENTS = (
    "--seq-length 96 --global-batch-size 8 --mock-data --sequence-packing --over-length-policy "
    "truncate --max-seqlen-per-dp-cp-rank 256 --eval-iters 0 --bf16 "
    f"--train-iters {NUM_STEPS}"
)
FOUND = "found on the stand-in: "
ROOT = Path(__file__).resolve().parents[2]


def main_on_stand_in() -> None:
    """A run, and what was read from the device in each of its steps."""
    cuda_stand_in.install()
    take_step: Any = Trainer._step
    reads: list[list[str]] = []

    def step(trainer: Trainer, *arguments: Any) -> bool:
        cuda_stand_in.reads.clear()
        stops = take_step(trainer, *arguments)
        reads.append(cuda_stand_in.reads.copy())
        return bool(stops)

    Trainer._step = step  # type: ignore[method-assign, assignment]
    main()
    print(
        FOUND
        + json.dumps(
            {"reads": reads, "mixed": cuda_stand_in.mixed, "streams": cuda_stand_in.streams}
        )
    )


def train_on_stand_in(arguments: Sequence[str]) -> tuple[int, str]:
    """Return (exit status, output). A fork, unless a test of this process, as those of `fit`, has
    changed megatron-core for CPUs: its forks could train on nothing else.
    """
    if cpu_support.report() == "nothing changed":
        return train_forked(1, arguments, main_on_stand_in)
    code = f"from {main_on_stand_in.__module__} import main_on_stand_in as run; run()"
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    return ended.returncode, ended.stdout


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        # At 1e-3 its steps multiply what bfloat16 rounds, which is another on each processor.
        ("gemma", "--lora --lr 1e-4"),
        ("qwen3", "--async-save --gradient-accumulation-fusion --lr 1e-3"),
        ("gpt-oss", "--moe-grouped-gemm --moe-permute-fusion --lr 1e-3"),
    ],
)
def test_a_step_trains_as_on_cpu_and_waits_once(model: str, flags: str, tmp_path: Path) -> None:
    """A tensor left on the host ends a run on a GPU; each further read empties the device's queue,
    and no figure says why. A stream of each step's own is soon one of NCCL's.
    """
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: make gpu-test")
    run_ranks(write_model, 1, model, tmp_path / "model")
    outputs = {}
    for name in ("cpu", "here"):
        text = (
            f"{ARGUMENTS} {flags} --pretrained-checkpoint {tmp_path}/model --run-dir "
            f"{tmp_path}/{name}"
        )
        text += f" --save {tmp_path}/{name}/checkpoints --save-hf {tmp_path}/{name}/model"
        if name == "cpu":
            status, outputs[name] = train_forked(1, text.split())
        else:
            status, outputs[name] = train_on_stand_in(text.split())
        assert status == 0, outputs[name]
    cpu, here = steps_of(tmp_path / "cpu"), steps_of(tmp_path / "here")
    for iteration in range(1, NUM_STEPS + 1):
        assert here[iteration]["loss"] == pytest.approx(cpu[iteration]["loss"], rel=5e-3)
        assert here[iteration]["grad_norm"] == pytest.approx(cpu[iteration]["grad_norm"], rel=0.1)
    found = json.loads(outputs["here"].partition(FOUND)[2])
    assert found["mixed"] == []
    assert sum("microbatches.py" in place for place in found["streams"]) == 1
    for of_step in found["reads"][1:]:  # the first asks which groups have weights
        assert len(of_step) == 1, of_step
        assert "clip_grads.py" in of_step[0]


def main_on_one_gpu() -> None:
    """A rank that takes the GPU that every other takes."""
    cuda_stand_in.install()
    torch.cuda.get_device_properties(0).uuid = "GPU-1"  # type: ignore[misc]
    main()


def test_ranks_that_share_a_gpu_are_refused(tmp_path: Path) -> None:
    """NCCL says "Duplicate GPU detected", in a traceback of each rank."""
    model = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 64"
    arguments = f"{ARGUMENTS} --lr 1e-3 {model} --run-dir {tmp_path}/run".split()
    status, output = train_forked(2, arguments, main_on_one_gpu)
    assert status == 2, output
    (line,) = re.findall(r"error: (.*)", output)
    assert line.startswith("ranks 0 and 1 have the same GPU (GPU-1); start one process per GPU")
    assert "Traceback" not in output


def test_an_optimizer_on_the_host_trains_and_continues_as_one_on_the_device(tmp_path: Path) -> None:
    """Its checkpoints could not be read again, and its state came back on the other device; all
    that without an error before the second run. Half of the weights' states stay on the device.
    """
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: make gpu-test")
    run_ranks(write_model, 1, "llama3", tmp_path / "model")
    offload = (
        "--use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.5"
    )
    runs = {
        "plain": "--save-interval 2",
        "offloaded": f"--load {tmp_path}/plain/saved --ckpt-step 2 --save-interval 3 {offload}",
        "continued": f"--load {tmp_path}/offloaded/saved --ckpt-step 3",
    }
    for name, flags in runs.items():
        text = (
            f"{ARGUMENTS} --lr 1e-3 {flags} --use-distributed-optimizer --pretrained-checkpoint "
            f"{tmp_path}/model --run-dir {tmp_path}/{name} --save {tmp_path}/{name}/saved"
        )
        status, output = train_on_stand_in(text.split())
        assert status == 0, output
        assert json.loads(output.partition(FOUND)[2])["mixed"] == []
    plain = steps_of(tmp_path / "plain")
    for name, first in (("offloaded", 3), ("continued", 4)):
        found = steps_of(tmp_path / name)
        assert list(found) == list(range(first, NUM_STEPS + 1))
        for iteration, step in found.items():
            for figure in ("loss", "grad_norm"):
                assert step[figure] == plain[iteration][figure], (name, iteration)
