"""Whole runs of pretrain_sft.py, as a user starts them: they end as they should, and continue as if
never stopped.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron.sft.model.checkpoints.checksums import (
    file_names,
    read_checksums,
    sum_of,
    write_checksums,
)
from tests.functional_tests.forked_runs import ROOT, ForkedRun, command_forked, train_forked

TIMEOUT_SECONDS = 120.0
MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 96 "
    "--position-embedding-type rope --global-batch-size 4 --lr 1e-2 --sequence-packing "
    "--over-length-policy truncate --eval-iters 0"
).split()
EXACT = (
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "square_sum",
    "num_loss_tokens",
    "sequences",
    "consumed_samples",
)


class Run:
    """A started command; `finish` waits for its end, with the stacks of all its processes if there
    is none.
    """

    def __init__(self, num_processes: int, arguments: Sequence[str], **environment: str) -> None:
        launcher = (
            ["-m", "torch.distributed.run", "--nproc-per-node", str(num_processes)]
            if num_processes > 1
            else []
        )
        self.process = subprocess.Popen(
            [sys.executable, *launcher, "pretrain_sft.py", *arguments],
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1", **os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def is_running(self) -> bool:
        """Return whether the command has not ended."""
        return self.process.poll() is None

    def finish(self, timeout_seconds: float = TIMEOUT_SECONDS) -> tuple[int, str]:
        """(exit status, all output)."""
        try:
            output, _ = self.process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            self.signal_all(signal.SIGUSR1)
            time.sleep(1)
            self.signal_all(signal.SIGKILL)
            raise AssertionError("hang:\n" + self.process.communicate()[0]) from None
        return self.process.returncode, output

    def signal_all(self, number: int) -> None:
        """Signal every rank and the launcher; torchrun gives each rank a session of its own."""
        launcher = psutil.Process(self.process.pid)
        for process in [*launcher.children(recursive=True), launcher]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def train(num_processes: int, *arguments: str) -> str:
    status, output = train_forked(num_processes, [*MODEL, *arguments])
    assert status == 0, output
    return output


def steps_of(folder: Path) -> dict[int, dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {record["iteration"]: record for record in records if record["kind"] == "train"}


def wait_for_step(run: Run | ForkedRun, folder: Path, iteration: int) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while iteration not in steps_of(folder):
        assert run.is_running(), run.finish()
        assert time.monotonic() < deadline, "no steps"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    with path.open("w") as file:
        for i in range(40):
            messages = [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": "yes " * (1 + i * 7 % 29)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture(scope="module")
def whole(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps on two ranks, never stopped, with a checkpoint at every second."""
    folder = tmp_path_factory.mktemp("whole")
    dump = ("--dump-schedule", "3", "--dump-schedule", "6")
    output = train(2, *options(chats, folder), *dump)
    assert " of the bound | moved " in output
    assert "predicted" not in output  # there is no fitted cost
    return folder


@pytest.fixture(scope="module")
def pack_cost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cost of MODEL's packs, measured here; again where other tests kept the machine so busy
    that none fits.
    """
    path = tmp_path_factory.mktemp("cost") / "cost.json"
    shape = [
        *MODEL[: MODEL.index("--global-batch-size")],
        "--vocab-size",
        "264",
        "--max-seqlen-per-dp-cp-rank",
        "512",
    ]
    command = ["calibrate", *shape, "--repeats", "3", "--output", str(path)]
    for _ in range(3):
        status, _, errors = command_forked(command)
        if status == 0:
            return path
    raise AssertionError(errors)


def options(chats: Path, folder: Path, train_iters: int = 6) -> list[str]:
    return [
        *("--data-path", str(chats), "--train-iters", str(train_iters), "--run-dir", str(folder)),
        *(
            "--save",
            str(folder / "checkpoints"),
            "--save-interval",
            "2",
            "--load",
            str(folder / "checkpoints"),
        ),
    ]


def test_killed_run_continues_as_if_never_stopped(chats: Path, whole: Path, tmp_path: Path) -> None:
    """A position, optimizer or random state that is off by one would change the model and nobody
    would see it.
    """
    run = ForkedRun(2, [*MODEL, *options(chats, tmp_path)])
    wait_for_step(run, tmp_path, 3)
    run.signal_all(signal.SIGKILL)
    run.finish()
    train(2, *options(chats, tmp_path))
    expected, found = steps_of(whole), steps_of(tmp_path)
    assert list(found) == list(expected) == [1, 2, 3, 4, 5, 6]
    for iteration, step in found.items():
        assert {name: step[name] for name in EXACT} == {
            name: expected[iteration][name] for name in EXACT
        }


@pytest.mark.parametrize(
    ("lr", "said"),
    [
        ("1e15", r"the loss is (nan|inf) on rank 0, 1, source"),
        ("1e4", r"the gradient norm is (nan|inf)"),
    ],
)
def test_what_is_not_finite_ends_the_run_unsaved(
    chats: Path, tmp_path: Path, lr: str, said: str
) -> None:
    """Weights of NaN would be saved over the last good ones, by a run that goes on for days."""
    arguments = [
        "--data-path",
        str(chats),
        str(chats),
        "--split",
        "1",
        "--train-iters",
        "4",
        "--run-dir",
        str(tmp_path),
    ]
    save = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "1"]
    status, output = train_forked(2, [*MODEL, *arguments, *save, "--lr", lr])
    assert status != 0
    told = re.findall(
        rf"^pretrain_sft.py: error: step (\d+): {said}.*; nothing was saved of it",
        output,
        re.MULTILINE,
    )
    assert [step for step, *_ in told] == ["2"], output
    assert list(steps_of(tmp_path)) == [1]
    assert [path.name for path in (tmp_path / "checkpoints").glob("iter_*")] == ["iter_0000001"]


def test_objects_of_a_checkpoint_run_nothing(chats: Path, whole: Path, tmp_path: Path) -> None:
    """torch trusts whatever stands beside the tensors of a checkpoint: a file that is sent round
    would run code.
    """
    shutil.copytree(whole, tmp_path / "run")
    folder, ran = tmp_path / "run" / "checkpoints" / "iter_0000006", tmp_path / "ran"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn.startswith("random_states"))
    place = metadata.storage_data[index]
    with (folder / place.relative_path).open("ab") as file:
        start = file.tell()
        torch.save([Code(ran)], file)
        metadata.storage_data[index] = replace(place, offset=start, length=file.tell() - start)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    write_checksums(
        folder, {name: sum_of(folder / name) for name in file_names(folder)}
    )  # as whoever crafts it would
    status, output = train_forked(2, [*MODEL, *options(chats, tmp_path / "run", train_iters=8)])
    assert status != 0
    assert re.search(
        rf"^pretrain_sft.py: error: (rank [01]: )?{folder}/\*.distcp holds a posix.mkdir, which",
        output,
        re.M,
    )
    assert not ran.exists()


class Code:
    """Whoever unpickles it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_dumped_schedule_is_what_ran(whole: Path) -> None:
    """A picture of other packs than those that were trained would be believed."""
    for step in (3, 6):
        record = json.loads((whole / f"schedule_{step}.json").read_text())
        packs = [json.loads(line) for line in (whole / "packs.jsonl").read_text().splitlines()]
        assert record["packs"] == next(line["packs"] for line in packs if line["iteration"] == step)
        assert (
            sum(sum(pack) for rank in record["packs"] for pack in rank)
            == steps_of(whole)[step]["tokens"]
        )
        assert (whole / f"schedule_{step}.html").read_text().count("<svg") == 1
    assert not (whole / "schedule_4.json").exists()
    command = [sys.executable, "-m", "megatron.sft", "plan", str(whole / "schedule_6.json")]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "as it ran (default)" in printed


LAYOUTS = {
    "tensor": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pipeline": (2, "--pipeline-model-parallel-size 2"),
    "single": (1, ""),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_continues_in_another_layout(
    chats: Path, whole: Path, pack_cost: Path, tmp_path: Path, layout: str
) -> None:
    """A checkpoint that only its own layout can read ties a run to its machine. The measured cost
    decides schedules
    here: it must be read, predict each step's time, and change no loss.
    """
    num_processes, flags = LAYOUTS[layout]
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").write_text("4")
    output = train(
        num_processes,
        *options(chats, tmp_path / "run"),
        *flags.split(),
        "--pack-cost",
        str(pack_cost),
    )
    assert " ms, predicted " in output
    assert "mean absolute error of the passes" in output
    assert ("bubble" in output) == (layout == "pipeline")
    expected, found = steps_of(whole), steps_of(tmp_path / "run")
    assert list(found) == list(expected)
    for iteration in (5, 6):
        assert found[iteration]["loss"] == pytest.approx(expected[iteration]["loss"], rel=1e-5)
        assert found[iteration]["tokens"] == expected[iteration]["tokens"]
        assert found[iteration]["predicted_seconds"] == found[iteration]["step_cost"] > 0


INTERLEAVED = (
    "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
)
UNEVEN = "--num-layers 4 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3"


@pytest.mark.parametrize("further", ["--async-save --bf16", INTERLEAVED])
def test_distributed_optimizer_continues(chats: Path, tmp_path: Path, further: str) -> None:
    """megatron-core's own restore gives Adam one step counter for all parameters; with the gather
    of parameters overlapped, what is saved without it are other ranks' weights of the step before;
    what is saved in the background is the next step's, unless it is copied; and tied embeddings are
    in buckets behind padding, which shifts them. Other numbers of layers on the stages move layers
    between ranks.
    """
    overlapped = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather".split()
    sharded = [*overlapped, *further.split()]
    train(2, *options(chats, tmp_path), *sharded)
    expected = steps_of(tmp_path)
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("2")
    train(2, *options(chats, tmp_path), *sharded)
    found = steps_of(tmp_path)
    assert [found[i]["loss"] for i in range(1, 7)] == [expected[i]["loss"] for i in range(1, 7)]
    if further == INTERLEAVED:
        (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("2")
        train(2, *options(chats, tmp_path), *overlapped, *UNEVEN.split())
        found = steps_of(tmp_path)
        for i in range(3, 7):
            assert found[i]["loss"] == pytest.approx(expected[i]["loss"], rel=1e-5)


def test_continued_run_follows_its_own_learning_rate(
    chats: Path, whole: Path, tmp_path: Path
) -> None:
    """megatron-core restores the schedule of the checkpoint: a new --lr or --train-iters would be
    ignored without a word.
    """
    arguments = [
        "--data-path",
        str(chats),
        "--train-iters",
        "8",
        "--load",
        str(whole / "checkpoints"),
    ]
    new = ["--run-dir", str(tmp_path), "--lr", "5e-4", "--min-lr", "4e-4", "--seed", "5"]
    output = train(1, *arguments, *new)
    assert list(steps_of(tmp_path)) == [7, 8]
    assert all(4e-4 <= step["lr"] <= 5e-4 for step in steps_of(tmp_path).values())
    assert "after step 6" in output
    assert "was trained on other data, or in another order" in output
    # Schedules count sequences: with fewer in a step that of eight steps is over already.
    few = ["--global-batch-size", "2", "--run-dir", str(tmp_path / "few")]
    status, output = train_forked(1, [*MODEL, *arguments, *few])
    assert status == 2, output
    assert "2 steps would train nothing; pass --lr-decay-samples" in output


def test_parts_of_a_checkpoint(chats: Path, whole: Path, tmp_path: Path) -> None:
    """Weights of another step, or an optimizer that is there after all, train another model without
    a word.
    """
    load = ["--data-path", str(chats), "--load", str(whole / "checkpoints"), "--ckpt-step", "2"]
    losses = {iteration: step["loss"] for iteration, step in steps_of(whole).items()}
    # Without a learning rate, and with an optimizer that has copies of the weights, which must
    # follow those loaded.
    still = ["--train-iters", "3", "--lr", "0", "--bf16", "--use-distributed-optimizer"]
    output = train(2, *load, *still, "--finetune", "--run-dir", str(tmp_path / "again"))
    assert "taking the weights of" in output
    again = steps_of(tmp_path / "again")
    assert list(again) == [1, 2, 3]
    assert again[3]["loss"] == pytest.approx(
        losses[3], abs=0.02
    )  # the same samples, the weights after step 2
    assert abs(again[1]["loss"] - losses[1]) > 0.1
    parts = ["--no-load-optim", "--no-load-rng", "--exit-interval", "4"]
    output = train(2, *load, "--train-iters", "6", *parts, "--run-dir", str(tmp_path / "further"))
    assert "stopped by --exit-interval after step 4" in output
    further = steps_of(tmp_path / "further")
    assert list(further) == [3, 4]
    assert further[3]["loss"] == losses[3]
    assert further[3]["lr"] == steps_of(whole)[3]["lr"]
    assert further[4]["loss"] != losses[4]  # Adam's first step is another one than its third


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_ends_with_success(chats: Path, tmp_path: Path, number: int) -> None:
    """A cluster that preempts a job, or a user's Ctrl-C, would cost all steps since the last
    checkpoint; it may end the processes that read, too.
    """
    arguments = [*MODEL, *options(chats, tmp_path, train_iters=100_000), "--num-workers", "1"]
    run = ForkedRun(1, arguments)
    wait_for_step(run, tmp_path, 3)  # one save is done, and nothing of it is needed again
    run.signal_all(number)
    status, output = run.finish()
    assert status == 0, output
    assert_stopped(tmp_path, output)


def assert_stopped(folder: Path, output: str) -> None:
    last = max(steps_of(folder))
    assert f"stopped by a signal after step {last}" in output
    assert (folder / "checkpoints/latest_checkpointed_iteration.txt").read_text() == str(last)


def test_signal_to_one_rank_stops_all(chats: Path, tmp_path: Path) -> None:
    """If only one rank hears of it, the others wait for it in a collective."""
    run = ForkedRun(2, [*MODEL, *options(chats, tmp_path, train_iters=100_000)])
    wait_for_step(run, tmp_path, 2)
    run.signal_rank(1, signal.SIGTERM)
    status, output = run.finish()
    assert status == 0, output
    assert "stopped by a signal" in output


def test_broken_line_is_named_once_and_the_run_saved(chats: Path, tmp_path: Path) -> None:
    """A bad record on one rank must end all ranks in seconds, name its place, and lose no step."""
    broken = tmp_path / "broken.jsonl"
    lines = chats.read_text().splitlines()
    lines[17] = '{"messages": [{"role": "user"}]}'
    broken.write_text("\n".join(lines) + "\n")
    run = ForkedRun(2, [*MODEL, *options(broken, tmp_path, train_iters=30)])
    status, output = run.finish()
    assert status != 0
    assert output.count(f"{broken}:18: ") == 1
    assert run.summary.count(f"{broken}:18: ") == 1
    done = max(steps_of(tmp_path), default=0)
    assert not done or (
        tmp_path / "checkpoints/latest_checkpointed_iteration.txt"
    ).read_text() == str(done)
    output = train(2, *options(broken, tmp_path / "skipping", train_iters=12), "--skip-bad-samples")
    assert sum(step["dropped_samples"] for step in steps_of(tmp_path / "skipping").values()) >= 1


def test_a_broken_line_saves_a_single_unpacked_run(chats: Path, tmp_path: Path) -> None:
    """All steps since the last checkpoint were lost, though no other rank could be waited for."""
    broken = tmp_path / "broken.jsonl"
    lines = chats.read_text().splitlines()
    lines[17] = '{"messages": [{"role": "user"}]}'
    broken.write_text("\n".join(lines) + "\n")
    flags = [flag for flag in MODEL if flag != "--sequence-packing"]
    arguments = [*options(broken, tmp_path, 30), "--save-interval", "20", "--seed", "3"]
    status, output = train_forked(1, [*flags, *arguments, "--num-workers", "0"])
    assert status == 2, output
    (line,) = [line for line in output.splitlines() if "error: " in line]
    assert f"{broken}:18: " in line
    done = max(steps_of(tmp_path))
    tracker = tmp_path / "checkpoints/latest_checkpointed_iteration.txt"
    assert 0 < done < 20
    assert tracker.read_text() == str(done)


def test_a_suspended_run_ends_in_a_line_or_goes_on(chats: Path, tmp_path: Path) -> None:
    """A scheduler suspends a job for longer than its collectives wait."""
    arguments = [*MODEL, *options(chats, tmp_path, train_iters=60), "--save-interval", "2"]
    run = ForkedRun(2, [*arguments, "--distributed-timeout-minutes", "0.05"])
    wait_for_step(run, tmp_path, 3)
    run.signal_all(signal.SIGSTOP)
    time.sleep(4)
    run.signal_all(signal.SIGCONT)
    status, output = run.finish()
    steps = steps_of(tmp_path)
    if status:
        assert "error: " in output
        assert "Traceback" not in output.split("error: ")[0], output
    else:
        assert max(steps) == 60
    saved = int((tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert 2 <= saved <= max(steps)
    checkpoint = tmp_path / f"checkpoints/iter_{saved:07}"
    sums = read_checksums(checkpoint)
    assert sums == {name: sum_of(checkpoint / name) for name in file_names(checkpoint)}


def test_an_error_before_the_first_step_is_told(tmp_path: Path) -> None:
    """A save of an optimizer that has taken no step fails, and would be all that is told."""
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"messages": [{"role": "user"}]}\n' * 39 + '{"text": "one that is sound"}\n')
    arguments = [*MODEL, *options(broken, tmp_path), "--split", "1", "--use-distributed-optimizer"]
    for num_processes in (1, 2):
        status, output = train_forked(num_processes, arguments)
        assert status == 2
        (line,) = [line for line in output.splitlines() if "Error" in line]
        assert re.match(rf"pretrain_sft.py: error: .*{broken}:\d+: ", line)
        assert not list((tmp_path / "checkpoints").glob("iter_*"))


def test_data_without_a_trained_token_end_a_run_before_it_begins(tmp_path: Path) -> None:
    """It would end with status 0 and loss 0.0."""
    path = tmp_path / "questions.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "?"}]}\n' * 8)
    status, output = train_forked(2, [*MODEL, *options(path, tmp_path), "--split", "1"])
    assert status == 2
    assert "questions: none of 8 records has a token to train on" in output
    assert "step 1/" not in output


def test_without_torchrun(chats: Path, tmp_path: Path) -> None:
    """As Slurm starts a task per device: rank 0 keeps the store, and aborted at its end while it
    listened there. A signal reaches all tasks, and the processes that read.
    """
    arguments = [*MODEL, *options(chats, tmp_path, train_iters=100_000), "--num-workers", "1"]
    with (
        socket.socket() as held
    ):  # bound, so that no connection of other tests takes the port before rank 0 listens
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        met = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
        met |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        runs = [Run(1, arguments, RANK=rank, LOCAL_RANK=rank, **met) for rank in "01"]
        wait_for_step(runs[0], tmp_path, 3)
        for run in runs:
            run.signal_all(signal.SIGINT)
        ended = [run.finish() for run in runs]
    for status, output in ended:
        assert status == 0, output
        assert "TCPStore" not in output
    assert_stopped(tmp_path, ended[0][1])


def test_padded_run_has_the_same_losses(chats: Path, whole: Path, tmp_path: Path) -> None:
    """The baseline to compare with must train the same model on the same samples."""
    flags = [flag for flag in MODEL if flag != "--sequence-packing"]
    status, output = train_forked(2, [*flags, *options(chats, tmp_path), "--micro-batch-size", "2"])
    assert status == 0, output
    for iteration, step in steps_of(tmp_path).items():
        packed = steps_of(whole)[iteration]
        assert step["loss"] == pytest.approx(packed["loss"], rel=1e-5)
        assert step["tokens"] == packed["tokens"]
        assert step["padded_tokens"] > packed["padded_tokens"]
        assert 0 < step["data_seconds"] < step["step_seconds"]
        longest = step["figures"]["longest_sequence"]
        assert 0 < longest == packed["figures"]["longest_sequence"]


def test_adams_constants_are_those_of_the_run_that_continues(tmp_path: Path) -> None:
    """As the learning rate is; those of the checkpoint were taken, while the run's options said
    otherwise.
    """
    first = ["--mock-data", "--save-interval", "2", "--save", str(tmp_path / "saved")]
    train(1, *first, "--run-dir", str(tmp_path / "first"), "--train-iters", "2")
    losses = []
    for name, constants in (
        ("same", []),
        ("other", ["--adam-beta1", "0", "--adam-beta2", "0.5", "--adam-eps", "1"]),
    ):
        run = [
            "--load",
            str(tmp_path / "saved"),
            "--run-dir",
            str(tmp_path / name),
            "--train-iters",
            "5",
        ]
        train(1, "--mock-data", *run, *constants)
        losses.append([step["loss"] for step in steps_of(tmp_path / name).values()])
    assert losses[0][0] == losses[1][0]  # of the weights that were loaded
    assert losses[0][1] != losses[1][1]


def test_the_best_of_steps_that_were_gone_back_on(chats: Path, tmp_path: Path) -> None:
    """With --ckpt-step a later best is none of this run's: it was kept, and the true one
    removed."""
    saved = tmp_path / "saved"
    run = [
        "--data-path",
        str(chats),
        "--valid-data-path",
        str(chats),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    run += ["--save", str(saved), "--load", str(saved)]
    run += "--eval-iters 1 --eval-interval 2 --save-interval 2 --keep-best --train-iters 6".split()
    run += ["--lr-decay-style", "constant"]
    alone = tmp_path / "alone"
    train(1, *run, "--save", str(alone), "--load", str(alone), "--keep-checkpoints", "1")
    assert [path.name for path in alone.glob("iter_*")] == [
        "iter_0000006"
    ]  # the best until then is gone
    train(1, *run)
    best = saved / "best_checkpointed_iteration.txt"
    assert best.read_text() == "6"
    train(1, *run, "--ckpt-step", "2", "--lr", "9", "--keep-checkpoints", "1")
    assert best.read_text() == "2"
    assert sorted(path.name for path in saved.glob("iter_*")) == ["iter_0000002", "iter_0000006"]


def test_samples_are_counted_in_batches_of_one_size(tmp_path: Path) -> None:
    """Steps of 4 samples were taken for steps of 8: half of what was asked for was never
    trained."""
    run = ["--mock-data", "--save", str(tmp_path), "--load", str(tmp_path), "--train-samples", "16"]
    train(1, *run, "--exit-interval", "2")
    status, output = train_forked(1, [*MODEL, *run, "--global-batch-size", "8"])
    assert status
    assert "need one --global-batch-size in all of a run" in output, output


def test_the_lowest_loss_of_other_validation_data(chats: Path, tmp_path: Path) -> None:
    """It was compared with: of harder data no checkpoint was ever the best again, and
    --early-stopping ended it.
    """
    saved, other = tmp_path / "saved", tmp_path / "other.jsonl"
    other.write_text("".join(reversed(chats.read_text().splitlines(keepends=True))))
    run = [
        "--data-path",
        str(chats),
        "--save",
        str(saved),
        "--load",
        str(saved),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    run += (
        "--eval-iters 1 --eval-interval 1 --keep-best --early-stopping 1 --lr-decay-style "
        "constant --lr 0"
    ).split()
    output = train(1, *run, "--valid-data-path", str(chats), "--train-iters", "1")
    assert "note: other validation data" not in output
    output = train(1, *run, "--valid-data-path", str(other), "--train-iters", "2")
    assert "note: other validation data than before" in output
    assert "stopped early" not in output
    assert (saved / "best_checkpointed_iteration.txt").read_text() == "2"
    output = train(1, *run, "--valid-data-path", str(other), "--train-iters", "4")
    assert "stopped early" in output
    assert "note: other validation data" not in output


def test_mock_data_experts_and_evaluation(tmp_path: Path) -> None:
    """Options that no other run here uses together: mock lengths, experts, bf16, YAML, TensorBoard,
    evaluation; and torch's deterministic mode, which ends a run at an operation that has no such
    way.
    """
    config = tmp_path / "run.yaml"
    config.write_text(
        "mock-data: true\nnum-experts: 4\ndisable-bias-linear: true\nbf16: true\n"
        "eval-iters: 2\ntrain-iters: 3\neval-interval: 2\ndeterministic-mode: true\n"
    )
    lengths = (
        '{"mode": "distribution", "type": "lognormal", "min_seq_len": 8, "max_seq_len": 96, '
        '"mean_seq_len": 40, '
    )
    output = train(
        2,
        *(
            "--config",
            str(config),
            "--run-dir",
            str(tmp_path / "run"),
            "--tensorboard-dir",
            str(tmp_path / "board"),
        ),
        *(
            "--sft-mock-dataset-config-json",
            lengths + '"lognormal_sigma": 1.1}',
            "--expert-model-parallel-size",
            "2",
        ),
        *("--use-distributed-optimizer", "--eval-iters", "1"),
    )
    assert output.count("valid loss") >= 3
    assert list((tmp_path / "board").iterdir())
    assert set(steps_of(tmp_path / "run")) == {1, 2, 3}
