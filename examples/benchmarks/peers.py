"""pure. Tokens per second of CPU time beside other trainers: the same model, data, optimizer and
number of processes.

    python -m venv peers && peers/bin/pip install torch==2.13.0 transformers==5.23.0 trl==1.16.0
        accelerate datasets
    OMP_NUM_THREADS=1 python -m examples.benchmarks.peers --peer-python peers/bin/python

A Llama with a vocabulary of 8,192 and 4 layers of width 256 in float32, with 16 chats of 8 to 1,024
tokens a step, or others (--data; peers_kinds.KINDS). All contenders are there at once (peers_run.py
is one of them) and do steps by turns, each with the same sequences: whatever else the machine does
meanwhile slows them alike. A round is --steps of each; a figure is the median of the rounds.
Seconds are the processor's, of all processes. Tokens are those that are predicted, masked or not;
padding is none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from examples.benchmarks.peers_kinds import KINDS
from examples.benchmarks.peers_turns import TIMEOUT_SECONDS, Turns

ROOT = Path(__file__).parents[2]
OURS = ("ours, packed", "ours, packs of 1,024", "ours, padded")
PEERS = (
    "transformers, flattened",
    "transformers, flattened in pairs",
    "transformers, flattened in fours",
    "TRL, packed",
    "TRL, padded",
)


WARM_UPS = 2
"""Steps of each contender that do not count."""


class Setting(NamedTuple):
    """What all contenders have in common."""

    num_processes: int
    masked: float
    """Share of each sequence's tokens, its first ones, that are not in the loss."""
    num_steps: int
    data: str
    """Kind of sequences, one of those of `peers_kinds.KINDS`."""


class Contender:
    """One that trains in processes of its own, a step at a time."""

    def __init__(self, name: str, setting: Setting, folder: Path, python: str) -> None:
        self.name = name
        self._folder, self._setting = folder, setting
        self._pipes = [f"{name}-{rank}" for rank in range(setting.num_processes)]
        self._turns = [Turns(folder / pipe) for pipe in self._pipes]
        asked = {"name": name, "folder": str(folder), "pipes": self._pipes, **setting._asdict()}
        launcher = f"-m torch.distributed.run --standalone --nproc-per-node {setting.num_processes}"
        # Alone without a launcher: peers would wrap the model for several processes.
        launched = launcher.split() if setting.num_processes > 1 else []
        self._output = (folder / f"{name}.log").open("w+")
        self._process = subprocess.Popen(
            [python, *launched, "-m", "examples.benchmarks.peers_run", json.dumps(asked)],
            cwd=ROOT,
            env={
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
            },
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def call(self) -> None:
        """Lets it do its next step."""
        for turns in self._turns:
            turns.call()

    def wait(self) -> None:
        """Returns once the step is done on all of its processes."""
        until = time.monotonic() + TIMEOUT_SECONDS
        for turns in self._turns:
            while not turns.is_done(timeout_seconds=1):
                if self._process.poll() is not None or time.monotonic() > until:
                    self._fail()

    def result(self) -> tuple[list[int], list[float], float | None]:
        """Returns tokens and CPU seconds of each step after the first, of all processes, and the
        first step's loss; None where that step is of other sequences.
        """
        if self._process.wait(TIMEOUT_SECONDS):
            self._fail()
        files = [self._folder / f"{pipe}.json" for pipe in self._pipes]
        ranks: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files]
        tokens, seconds = (
            [sum(step) for step in zip(*(rank[key] for rank in ranks), strict=True)]
            for key in ("tokens", "seconds")
        )
        return tokens[1:], seconds, ranks[0]["loss"]

    def close(self) -> None:
        """Ends it, also in the middle of a step."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        self._output.close()
        for turns in self._turns:
            turns.close()

    def _fail(self) -> NoReturn:
        self._output.seek(0)
        raise SystemExit(f"{self.name}, {self._setting}:\n{self._output.read()[-4000:]}")


def by_turns(
    names: Sequence[str], setting: Setting, folder: Path, peer_python: str | None
) -> list[tuple[list[int], list[float], float | None]]:
    """Returns the results of all contenders, of which one at a time computes."""
    contenders: list[Contender] = []
    try:
        for name in names:
            python = sys.executable if name in OURS else str(peer_python)
            contenders.append(Contender(name, setting, folder, python))
            contenders[-1].wait()  # before the next one imports
        for step in range(1, setting.num_steps):
            for contender in contenders:
                contender.call()
                if step < setting.num_steps - 1:
                    contender.wait()
                else:  # it ends, and tells what it measured
                    contender.result()
        return [contender.result() for contender in contenders]
    finally:
        for contender in contenders:
            contender.close()


def compare(
    setting: Setting, num_rounds: int, peer_python: str | None, names: Sequence[str]
) -> None:
    """Prints a row per contender of `names`; the first is compared with the others."""
    with tempfile.TemporaryDirectory() as folder:
        results = by_turns(names, setting, Path(folder), peer_python)
    speeds = {name: _of_rounds(*result[:2], num_rounds) for name, result in zip(names, results)}
    losses = {name: result[2] for name, result in zip(names, results)}
    first, expected = speeds[names[0]], losses[names[0]]
    assert expected is not None
    for name in names:
        loss = losses[name]
        assert loss is None or abs(loss / expected - 1) < 1e-4, (
            f"{name}: the first loss is {loss}, not {expected}"
        )
        median = statistics.median(speeds[name])
        factors = [ours / theirs for ours, theirs in zip(first, speeds[name])]
        columns = [
            setting.data,
            f"{setting.num_processes}",
            f"{setting.masked:.0%}",
            name,
            f"{median:,.0f}",
            f"{min(speeds[name]):,.0f} to {max(speeds[name]):,.0f}",
            f"{statistics.median(factors):.2f}",
            f"{min(factors):.2f} to {max(factors):.2f}",
            "" if loss is None else f"{loss:.5f}",
        ]
        print(f"| {' | '.join(columns)} |", flush=True)


def _of_rounds(tokens: list[int], seconds: list[float], num_rounds: int) -> list[float]:
    """Returns tokens per second of each round: of the last steps, in their order."""
    each = (len(seconds) - WARM_UPS + 1) // num_rounds
    starts = range(len(seconds) - num_rounds * each, len(seconds), each)
    return [sum(tokens[at : at + each]) / sum(seconds[at : at + each]) for at in starts]


COLUMNS = (
    "data",
    "processes",
    "masked",
    "trainer",
    "tokens/CPU second",
    "of the rounds",
    "ours / this",
    "of the rounds",
    "first loss",
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer-python", help="of an environment with the peers; without it, packed against padded"
    )
    parser.add_argument("--names", nargs="+", help="contenders, the first beside the others")
    parser.add_argument("--data", nargs="+", default=["chats"], choices=tuple(KINDS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="steps of a round")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--masked", type=float, nargs="+", default=[0.0, 0.5])
    arguments = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    num_steps = WARM_UPS + arguments.rounds * arguments.steps
    default = OURS if arguments.peer_python is None else (*OURS, *PEERS)
    for data in arguments.data:
        for num_processes in arguments.processes:
            for masked in arguments.masked:
                compare(
                    Setting(num_processes, masked, num_steps, data),
                    arguments.rounds,
                    arguments.peer_python,
                    arguments.names or default,
                )


if __name__ == "__main__":
    main()
