"""Runs the commands of the how-to pages in order, each page in a folder that has what its reader
has.

python -m tests.functional_tests.pages --write examples/benchmarks/results/howto.md
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = {
    page.name: page.read_text(encoding="utf-8")
    for page in sorted((ROOT / "docs" / "howto").glob("*.md"))
    if page.name != "clusters.md"  # of several machines
}
_SHRINK = (
    "--train-iters 2 --global-batch-size 4 --seq-length 64 --over-length-policy truncate "
    "--eval-iters 1 --num-workers 0"
).split()
"""Appended to each training command: the last value of an option counts."""
_PARALLEL = ("--nproc-per-node", "--tensor-model-parallel-size")
_MAX_PARALLEL = "2"
_BEFORE = {"follow.md": "continue.md"}
"""Page -> the page whose first run it looks at."""
_BLOCK = re.compile(r"^```(?:bash)?\n(.*?)^```", re.MULTILINE | re.DOTALL)

Execute = Callable[[list[str], Path], tuple[int, str]]
"""Runs words in a folder; returns status and output."""


class Outcome(NamedTuple):
    """A command of a page that was run."""

    page: str
    words: list[str]
    status: int
    output: str
    seconds: float


def commands_of(text: str, programs: tuple[str, ...] = ("megatron-sft",)) -> list[list[str]]:
    """Returns the words of each command of these programs in the blocks of a page, in order."""
    lines = [
        line
        for block in _BLOCK.findall(text)
        for line in block.replace("\\\n", " ").splitlines()
        if line.partition(" ")[0] in programs
    ]
    return [shlex.split(line, comments=True) for line in lines]


def shrunken(words: list[str]) -> list[str]:
    """Returns the words of a command with sizes for two cores: at most two processes, two steps."""
    found = list(words)
    for flag in _PARALLEL:
        if "train" in words and flag in words:
            found[words.index(flag) + 1] = _MAX_PARALLEL
    if words[:2] == ["megatron-sft", "train"]:
        found += _SHRINK
    if words[:2] == ["megatron-sft", "chat"]:
        found += ["--max-new-tokens", "4"]
    return found


def furnish(place: Path) -> None:
    """Writes what the pages take for granted: a model, chats, options of a run, lengths."""
    shutil.copytree(ROOT / "tests" / "fixtures" / "released" / "qwen", place / "Qwen3-8B")
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    (place / "data").mkdir()
    sizes = {"chats": 64, "code": 64, "prompts": 2, "held_out": 64, "data/a": 32, "data/b": 32}
    for name, size in sizes.items():
        lines = (json.dumps({"messages": turns}) + "\n") * size
        (place / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    pair = json.dumps({"prompt": turns[:1], "chosen": "Hello.", "rejected": "Go away."}) + "\n"
    (place / "pairs.jsonl").write_text(pair * 64, encoding="utf-8")
    (blend,) = re.findall(r"```yaml\n(.*?)```", PAGES["blend.md"], re.DOTALL)
    (place / "blend.yaml").write_text(blend, encoding="utf-8")
    (place / "run.yaml").write_text(
        "pretrained_checkpoint: Qwen3-8B\ndata_path: chats.jsonl\nsequence_packing: true\n"
    )
    (place / "lengths.csv").write_text("\n".join(str(30 + 97 * n % 4000) for n in range(2048)))
    (place / "examples").symlink_to(ROOT / "examples")


def run_pages(
    execute: Execute, programs: tuple[str, ...] = ("megatron-sft",), *names: str
) -> Iterator[Outcome]:
    """Yields the outcome of each command of the pages (default: of all)."""
    for page in names or PAGES:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            furnish(place)
            if page in _BEFORE:
                execute(shrunken(commands_of(PAGES[_BEFORE[page]])[0]), place)
            for words in commands_of(PAGES[page], programs):
                start = time.monotonic()
                status, output = execute(shrunken(words), place)
                yield Outcome(page, words, status, output, time.monotonic() - start)


def execute_as_shell(words: list[str], place: Path) -> tuple[int, str]:
    """Runs a command in processes of its own, as a reader does; `chat` is told "Hi"."""
    name, *arguments = words
    program = {
        "megatron-sft": ["-m", "megatron.sft"],
        "torchrun": ["-m", "torch.distributed.run"],
        "python": [],
    }
    done = subprocess.run(
        [sys.executable, *program[name], *arguments],
        cwd=place,
        input="Hi\n",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    return done.returncode, done.stdout


def main() -> None:
    """Runs all pages, and writes a table of what came of them; status 1 where a command failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    rows, num_failed = [], 0
    for done in run_pages(execute_as_shell, ("megatron-sft", "python", "torchrun")):
        command = " ".join(done.words)
        print(f"{done.page}: {command}\n{done.output if done.status else ''}", flush=True)
        rows.append(f"| {done.page} | `{command}` | {done.status} | {done.seconds:.0f} |")
        num_failed += done.status != 0
    if options.write is not None:
        options.write.write_text(
            "# The commands of the how-to pages\n\n"
            "`make howto`: each page's commands, in order, in a folder with a tiny model and small "
            f"data. Training gets `{' '.join(_SHRINK)}` more, and two processes at most.\n\n"
            "| page | command | status | seconds |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
        )
    sys.exit(f"{num_failed} failed" if num_failed else 0)


if __name__ == "__main__":
    main()
