"""pure. Tokens per second of CPU time beside other trainers: the same model, data, optimizer and
number of processes.

    python -m venv peers && peers/bin/pip install torch==2.13.0 transformers==5.23.0 trl==1.16.0
        accelerate datasets
    OMP_NUM_THREADS=1 python -m examples.benchmarks.peers --peer-python peers/bin/python

A Llama with a vocabulary of 8,192 and 4 layers of width 256 in float32, with 16 chats of 8 to 1,024
tokens a step, or others (--data; peers_kinds.KINDS). Contenders run one after the other, `--rounds`
times (peers_run.py is one of them); a figure is the median of the rounds. Seconds are the
processor's, of all processes, so that what else the machine does counts little. Tokens are those
that are predicted, masked or not; padding is none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from examples.benchmarks.peers_kinds import KINDS

ROOT = Path(__file__).parents[2]
OURS = ("ours, packed", "ours, padded")
PEERS = (
    "transformers, flattened",
    "transformers, flattened in pairs",
    "transformers, flattened in fours",
    "TRL, packed",
    "TRL, padded",
)


class Setting(NamedTuple):
    """What all contenders have in common."""

    num_processes: int
    masked: float
    """Share of each sequence's tokens, its first ones, that are not in the loss."""
    num_steps: int
    data: str
    """Kind of sequences, one of those of `peers_kinds.KINDS`."""


def run(name: str, setting: Setting, folder: Path, python: str) -> tuple[float, float | None]:
    """Tokens per second of CPU time after the warm-up, and the loss of the first step, of one
    contender; None where its first step is of other sequences.
    """
    for old in folder.glob("rank*.json"):
        old.unlink()
    asked = json.dumps({"name": name, "folder": str(folder), **setting._asdict()})
    command = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(setting.num_processes),
    ]
    done = subprocess.run(
        [*command, "-m", "examples.benchmarks.peers_run", asked],
        cwd=ROOT,
        env={
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name}, {setting}:\n{done.stdout[-4000:]}")
    ranks: list[dict[str, Any]] = [
        json.loads(path.read_text()) for path in folder.glob("rank*.json")
    ]
    assert len(ranks) == setting.num_processes
    tokens, seconds = (sum(rank[key] for rank in ranks) for key in ("tokens", "seconds"))
    return tokens / seconds, ranks[0]["loss"]


def compare(setting: Setting, rounds: int, peer_python: str | None, names: Sequence[str]) -> None:
    """Prints a row per contender of `names`; the first is compared with the others."""
    speeds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name in names:
                python = sys.executable if name in OURS else str(peer_python)
                speed, losses[name] = run(name, setting, Path(folder), python)
                speeds[name].append(speed)
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--masked", type=float, nargs="+", default=[0.0, 0.5])
    arguments = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    default = OURS if arguments.peer_python is None else (*OURS, *PEERS)
    for data in arguments.data:
        for num_processes in arguments.processes:
            for masked in arguments.masked:
                compare(
                    Setting(num_processes, masked, arguments.steps, data),
                    arguments.rounds,
                    arguments.peer_python,
                    arguments.names or default,
                )


if __name__ == "__main__":
    main()
