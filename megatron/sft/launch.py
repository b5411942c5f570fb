"""pure. `megatron-sft train --nproc-per-node 8 ...`: torchrun in the same command.

Options are checked before any process is started. What ends a run is its last line: torchrun's own
tracebacks and summaries of processes are left out.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import site
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from megatron.packing.flag_faults import nearest
from megatron.packing.flags import FlagError
from megatron.sft.environment import LAUNCHED

FLAGS = (
    "--nproc-per-node",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--max-restarts",
)
"""torchrun's own that are passed on; each has a value."""
_LAUNCHERS = ("--nproc", "--nnode", "--rdzv")
"""Beginnings of torchrun's options, and of no other."""
_SIGNAL_STATUS = 128


class Launch(NamedTuple):
    """A command line, taken apart."""

    torchrun: list[str]
    """torchrun's part; empty: nothing is to be launched."""
    training: list[str]

    @property
    def world_size(self) -> int | None:
        """Number of processes; None where only torchrun finds out."""
        sizes = {"--nproc-per-node": "", "--nnodes": "1"}
        sizes |= dict(zip(self.torchrun[::2], self.torchrun[1::2]))
        numbers = [sizes[name] for name in ("--nproc-per-node", "--nnodes")]
        return int(numbers[0]) * int(numbers[1]) if all(map(str.isdecimal, numbers)) else None


def taken_apart(arguments: Sequence[str]) -> Launch:
    """Returns torchrun's options and the others; FlagError for one without a value, or without
    --nproc-per-node.

    `["--nproc-per-node=2", "--lr", "1"] -> (["--nproc-per-node", "2"], ["--lr", "1"])`
    """
    torchrun, training = [], []
    left = list(arguments)
    while left:
        name, has_value, value = left.pop(0).partition("=")
        flag = name.replace("_", "-")
        if flag not in FLAGS:
            if flag.startswith(_LAUNCHERS):
                raise FlagError(f"unknown option {name}{nearest(flag, FLAGS)}")
            training.append(name + has_value + value)
            continue
        if not has_value and (not left or left[0].startswith("--")):
            raise FlagError(f"{flag} needs a value, as torchrun has it")
        torchrun += [flag, value if has_value else left.pop(0)]
    given = dict(zip(torchrun[::2], torchrun[1::2]))
    if given and "--nproc-per-node" not in given:
        raise FlagError(f"{torchrun[0]} needs --nproc-per-node, processes of this machine")
    if given and not re.fullmatch("[1-9][0-9]*|auto|cpu|gpu|xpu", given["--nproc-per-node"]):
        raise FlagError(
            f"--nproc-per-node {given['--nproc-per-node']} must be a number of processes from 1, "
            "or gpu: as many as there are GPUs"
        )
    return Launch(torchrun, training)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for a process of ours: `environment`, with the folder of this package
    added to PYTHONPATH.
    """
    project = str(Path(__file__).resolve().parents[2])
    if project in (*site.getsitepackages(), site.getusersitepackages()):
        # Installed: found anyway, and a typing.py there must not stand before the library's own.
        return dict(environment)
    # A checkout that is not installed may be on this process's path by its script's folder alone.
    paths = filter(None, [project, environment.get("PYTHONPATH", "")])
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def is_launched() -> bool:
    """Returns whether a launcher started this process."""
    return "WORLD_SIZE" in os.environ


def torchrun_arguments(found: Launch) -> list[str]:
    """Returns what torchrun is given. Signals that are ignored, as HUP is under `nohup`, stay so:
    torchrun would handle them all the same, and end the run.
    """
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    handled = [name for name in names if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]
    training = ["-m", "megatron.sft", "train", *found.training]
    return ["--signals-to-handle", ",".join(handled), *found.torchrun, *training]


def launch(found: Launch, program: str) -> NoReturn:
    """Runs the processes, and ends with their status; the last line says why, if they failed."""
    # Imported here, since it takes seconds: torch.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.update(child_environment(os.environ), **{LAUNCHED: "1"})
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it, and says so in four lines
    try:
        run(parse_args(torchrun_arguments(found)))
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        said = first.error_file_data.get("message")
        if said and said != "<NONE>":  # torch's word where a rank was killed
            print(said["message"] if isinstance(said, dict) else said, file=sys.stderr)
        else:
            how = f"signal {-first.exitcode}" if first.exitcode < 0 else f"status {first.exitcode}"
            print(f"{program}: error: rank {rank} ended by {how}; see above", file=sys.stderr)
        # torchrun ends the others by SIGTERM, at times the first one on its way out.
        statuses = [one.exitcode for one in (first, *failure.failures.values())]
        ended = (-signal.SIGTERM, _SIGNAL_STATUS + signal.SIGTERM)
        status = next((one for one in statuses if one not in ended), first.exitcode)
        raise SystemExit(status if status >= 0 else _SIGNAL_STATUS - status) from None
    except (ValueError, AssertionError) as refused:  # by torchrun, of values of its options
        print(f"{program}: error: torchrun: {refused}", file=sys.stderr)
        raise SystemExit(2) from None
    except SignalException as stopped:  # the processes have said where they stopped
        raise SystemExit(_SIGNAL_STATUS + stopped.sigval) from None
    raise SystemExit(0)
