"""Counts what a reader of the code must hold: files that one training step runs through, files that
ask what the device is, functions that raise the error of a wrong option.

    python -m examples.benchmarks.structure                        # this checkout
    python -m examples.benchmarks.structure --repository FOLDER    # another one, of any commit
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("blending", "packing", "planner", "sft")
_STEP = """
import json, sys
from pathlib import Path
root = str(Path.cwd() / "megatron") + "/"
files, moves, steps, recording, before = set(), set(), 0, False, None

def watch(frame, event, _):
    global moves, steps, recording, before
    if event != "call":
        return
    code = frame.f_code
    if not code.co_filename.startswith(root):
        return
    name = code.co_filename.removeprefix(root)
    if (name, code.co_name) == ("sft/training/train.py", "_step"):
        steps += 1
        recording = steps == 3  # what is made once is made by then
    if recording:
        files.add(name)
        if before not in (None, name):
            moves.add((before, name))
        before = name

from megatron.sft.__main__ import main
sys.setprofile(watch)
try:
    sys.argv = ["megatron-sft", *json.loads(sys.argv[1])]
    main()
finally:
    sys.setprofile(None)
    print("COUNTED", json.dumps([sorted(files), len(moves), steps]))
"""
"""Runs the command of the checkout it stands in, and follows its third step."""
RUN = (
    "--mock-data --sequence-packing --num-layers 4 --hidden-size 32 --num-attention-heads 4 "
    "--seq-length 128 --vocab-size 64 --global-batch-size 4 --train-iters 4 --lr 1e-3 "
    "--eval-iters 0 --num-experts 4 --moe-router-topk 2 --window-size 16 0 --mtp-num-layers 1 "
    "--use-distributed-optimizer --bf16 --swiglu --normalization RMSNorm --qk-layernorm "
    "--position-embedding-type rope"
).split()


def trace_step(repository: Path) -> tuple[list[str], int]:
    """Returns the files of ours that a training step runs through on one process, and between how
    many ordered pairs of them calls go. Raises RuntimeError where the run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [sys.executable, "-c", _STEP, json.dumps([*RUN, "--run-dir", folder])],
            cwd=repository,
            env={**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    counted = [line for line in run.stdout.splitlines() if line.startswith("COUNTED ")]
    if run.returncode or not counted:
        raise RuntimeError(run.stdout[-2000:] + run.stderr[-2000:])
    files, moves, steps = json.loads(counted[0].removeprefix("COUNTED "))
    if steps != 4:
        raise RuntimeError(f"{repository}: followed {steps} steps instead of 4")
    return files, moves


def modules(repository: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Yields each module of the packages."""
    for package in PACKAGES:
        for path in sorted((repository / "megatron" / package).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def asks_device(tree: ast.AST) -> bool:
    """Returns whether code asks torch, or a tensor, what the device is."""
    return any(
        isinstance(node, ast.Attribute)
        and (
            node.attr == "is_cuda"
            or (node.attr == "is_available" and ast.unparse(node.value) == "torch.cuda")
            or (node.attr == "type" and ast.unparse(node.value).endswith("device"))
        )
        for node in ast.walk(tree)
    )


def num_refusals(tree: ast.AST) -> int:
    """Returns how many functions raise the error of a wrong option."""
    return sum(
        any(
            isinstance(inner, ast.Raise)
            and inner.exc is not None
            and ast.unparse(inner.exc).split("(")[0] in ("ValueError", "FlagError")
            for inner in ast.walk(node)
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    )


def type_hints(tree: ast.AST) -> Iterator[ast.expr]:
    """Yields the type hint of each argument, result and variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            yield node.returns


def count(repository: Path) -> dict[str, str]:
    """Returns what is counted, in words, by name."""
    trees = dict(modules(repository))
    files, moves = trace_step(repository)
    hints = [hint for tree in trees.values() for hint in type_hints(tree)]
    num_any = sum(isinstance(hint, ast.Name) and hint.id == "Any" for hint in hints)
    refusing = [number for tree in trees.values() if (number := num_refusals(tree))]
    statements = sum(isinstance(n, ast.stmt) for tree in trees.values() for n in ast.walk(tree))
    return {
        "modules": f"{len(trees):,}",
        "statements": f"{statements:,}",
        "files of ours that a step runs through": f"{len(files)}",
        "ordered pairs of them with a move": f"{moves}",
        "files that ask what the device is": f"{sum(map(asks_device, trees.values()))}",
        "functions that raise ValueError or FlagError": f"{sum(refusing)}",
        "files that have such a function": f"{len(refusing)}",
        "annotations that are bare Any": f"{num_any / len(hints):.1%}",
    }


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repository", type=Path, default=Path.cwd())
    for name, value in count(parser.parse_args().repository.resolve()).items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
