"""CPU time and tokens of preference tuning beside TRL's DPOTrainer, and 20 steps of both.

PYTHONPATH=.venv-trl python -m examples.benchmarks.preference_cost --write PAGE

Both train the same tiny Qwen3 in float32 on one thread, with a frozen copy of it for the reference
that computes in each step. Prompts are about twice as long as both answers together. TRL runs as it
does: padded, without gradient checkpointing, at several batch sizes. The time is that of the
process; other programs on the machine change it by their use of its caches, so that the page says
how many there were.

Each trainer runs in a process of its own, and notes its CPU time at the end of each step.
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
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.benchmarks.provenance import processor

VOCAB = 1024
GLOBAL_BATCH = 8
BATCH_SIZES = (2, 4, 8)
ROUNDS = 3
STEPS, WARM = 5, 1
BETA, LR = 0.1, 1e-5
FOLLOWED = 20
SIZES = {
    "vocab_size": VOCAB + 2,
    "hidden_size": 160,
    "intermediate_size": 448,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": VOCAB,
    "pad_token_id": VOCAB + 1,
    "bos_token_id": None,
}


class Pair(NamedTuple):
    """Tokens of a prompt and of its answers, without the end token."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def apart(self) -> int:
        """Tokens of two sequences, with their end tokens."""
        return 2 * len(self.prompt) + len(self.chosen) + len(self.rejected) + 2

    @property
    def bound(self) -> int:
        """Tokens of a tree: P + C + R + 1, end tokens counted with the answers."""
        return len(self.prompt) + len(self.chosen) + len(self.rejected) + 2 + 1

    def record(self) -> dict[str, str]:
        prompt, chosen, rejected = (" ".join(map(str, ids)) for ids in self)
        return {"prompt": f"{prompt} ", "chosen": chosen, "rejected": rejected}


class Step(NamedTuple):
    """Figures that a trainer logs for a step."""

    seconds: float
    """CPU time of the process since it began."""
    loss: float
    margin: float


def pairs(count: int, seed: int = 0) -> list[Pair]:
    """Returns pairs whose prompts are about twice as long as their answers together."""
    random = np.random.default_rng(seed)

    def some(mean: int) -> list[int]:
        size = random.integers(mean // 2, mean * 3 // 2 + 1)
        return random.integers(0, VOCAB, size).tolist()

    return [Pair(some(160), some(40), some(40)) for _ in range(count)]


def write_model(folder: Path) -> None:
    """Writes a model with random weights, and a tokenizer that reads "7 8" as the ids 7 and 8."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = {str(number): number for number in range(VOCAB)} | {"<end>": VOCAB, "<pad>": VOCAB + 1}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<end>", pad_token="<pad>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(folder)


def by_trl(folder: Path, data: Path, batch_size: int, steps: int) -> list[Step]:
    """Returns what TRL's trainer notes; runs in a process of its own."""
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    torch.set_num_threads(1)
    seconds: list[float] = []

    class Note(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.process_time())

    with tempfile.TemporaryDirectory() as place:
        trainer = DPOTrainer(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            args=DPOConfig(
                output_dir=place,
                beta=BETA,
                learning_rate=LR,
                lr_scheduler_type="constant",
                weight_decay=0.0,
                max_grad_norm=1.0,
                per_device_train_batch_size=batch_size,
                gradient_accumulation_steps=GLOBAL_BATCH // batch_size,
                max_steps=steps,
                max_length=None,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                report_to=[],
                logging_steps=1,
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=load_dataset("json", data_files=str(data), split="train"),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[Note()],
        )
        trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return [
        Step(at, float(log["loss"]), float(log["rewards/margins"]))
        for at, log in zip(seconds, logs, strict=True)
    ]


def by_product(folder: Path, data: Path, steps: int, run_dir: Path) -> list[Step]:
    """Returns what the product notes; runs in a process of its own."""
    import torch

    from megatron.sft.run import main
    from megatron.sft.training.step_account import StepAccount

    torch.set_num_threads(1)
    seconds: list[float] = []
    metrics_of = StepAccount.metrics

    def noted(self: StepAccount, *arguments: Any) -> Any:
        seconds.append(time.process_time())
        return metrics_of(self, *arguments)

    StepAccount.metrics = noted  # type: ignore[method-assign, assignment]
    command = (
        f"--pretrained-checkpoint {folder} --data-path {data} --split 1,0,0 --loss dpo --beta "
        f"{BETA} --seq-length 512 --max-seqlen-per-dp-cp-rank 1024 --global-batch-size "
        f"{GLOBAL_BATCH} --train-iters {steps} --lr {LR} --lr-decay-style constant "
        "--weight-decay 0 --lr-warmup-iters 0 --adam-beta2 0.999 --clip-grad 1 --eval-iters 0 "
        f"--log-interval 1000 --run-dir {run_dir}"
    )
    main(command.split(), "train")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["kind"] == "train"]
    return [
        Step(at, line["loss"], line["figures"]["rewards/margins"])
        for at, line in zip(seconds, found, strict=True)
    ]


def tokens_computed(run_dir: Path) -> int:
    """Returns the tokens that the product computed in all steps, padding included."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return sum(one["padded_tokens"] for one in map(json.loads, lines) if one["kind"] == "train")


def in_process(what: str, *arguments: object) -> list[list[Step]]:
    """Runs a trainer in a process of its own, on one thread; returns the steps of each run."""
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--child", what]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{done.stderr[-3000:]}")
    return [[Step(*step) for step in run] for run in json.loads(done.stdout.splitlines()[-1])]


def seconds_per_pair(steps: Sequence[Step]) -> float:
    """Returns the median over steps, those that warm up left out."""
    ends = [step.seconds for step in steps][WARM - 1 :]
    return statistics.median(b - a for a, b in pairwise(ends)) / GLOBAL_BATCH


def child(what: str, folder: str, data: str, *more: str) -> None:
    """Runs one trainer, and prints its steps as JSON in the last line."""
    if what == "trl":
        sizes = map(int, more[1:])
        runs = [by_trl(Path(folder), Path(data), size, int(more[0])) for size in sizes]
    else:
        runs = [by_product(Path(folder), Path(data), int(more[0]), Path(more[1]))]
    print()
    print(json.dumps(runs))


def draw(path: Path, ours: Sequence[Step], theirs: Sequence[Step]) -> None:
    """Draws losses and margins of both trainers."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from megatron.sft.report.plot import BLUE, ORANGE, STYLE

    with rc_context(STYLE):
        figure = Figure(figsize=(9, 3.2), dpi=110, layout="constrained")
        for number, name in enumerate(("loss", "margin")):
            axes = figure.add_subplot(1, 2, number + 1)
            steps = range(1, len(ours) + 1)
            axes.plot(steps, [getattr(s, name) for s in theirs], color=ORANGE, lw=4, label="TRL")
            axes.plot(steps, [getattr(s, name) for s in ours], color=BLUE, lw=1.5, label="here")
            axes.set_title({"loss": "loss", "margin": "rewards/margins"}[name])
            axes.set_xlabel("step")
            axes.legend()
        figure.savefig(path)


def measure(place: Path) -> tuple[dict[str, list[float]], list[Pair], int]:
    """Returns CPU seconds per pair by trainer, one number per round; the pairs; and the tokens that
    the product computed for each of them once.
    """
    made = pairs(GLOBAL_BATCH * STEPS)
    data = place / "pairs.jsonl"
    data.write_text("\n".join(json.dumps(pair.record()) for pair in made) + "\n")
    found: dict[str, list[float]] = {}
    for number in range(ROUNDS):
        print(f"load {os.getloadavg()[0]:.1f}", flush=True)
        run_dir = place / f"run{number}"
        (steps,) = in_process("product", place / "model", data, STEPS, run_dir)
        found.setdefault("here", []).append(seconds_per_pair(steps))
        runs = in_process("trl", place / "model", data, STEPS, *BATCH_SIZES)
        for size, steps in zip(BATCH_SIZES, runs, strict=True):
            found.setdefault(f"TRL, {size} pairs", []).append(seconds_per_pair(steps))
        print({name: f"{values[-1]:.3f}" for name, values in found.items()}, flush=True)
    return found, made, tokens_computed(place / "run0")


def follow(place: Path) -> tuple[list[Step], list[Step]]:
    """Returns 20 steps of the product and of TRL, whose global batch is all of the data."""
    data = place / "few.jsonl"
    records = [pair.record() for pair in pairs(GLOBAL_BATCH, seed=1)]
    data.write_text("\n".join(map(json.dumps, records)) + "\n")
    (ours,) = in_process("product", place / "model", data, FOLLOWED, place / "followed")
    (theirs,) = in_process("trl", place / "model", data, FOLLOWED, GLOBAL_BATCH)
    return ours, theirs


def main() -> None:
    """Measures, prints, and writes the page with its picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(*given.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_model(place / "model")
        ours, theirs = follow(place)
        text = page(*measure(place), ours, theirs)
    print(text)
    if given.write is not None:
        given.write.write_text(text, encoding="utf-8")
        draw(given.write.with_suffix(".png"), ours, theirs)


def page(
    found: dict[str, list[float]],
    made: Sequence[Pair],
    computed: int,
    ours: Sequence[Step],
    theirs: Sequence[Step],
) -> str:
    """Returns the page in Markdown."""
    apart, bound = (sum(getattr(pair, name) for pair in made) for name in ("apart", "bound"))
    medians = {name: statistics.median(values) for name, values in found.items()}
    best = min(medians.keys() - {"here"}, key=lambda name: medians[name])
    ratios = [a / b for a, b in zip(found["here"], found[best])]
    rows = [
        f"| {name} | {' | '.join(f'{1000 * value:.1f}' for value in values)} |"
        for name, values in found.items()
    ]
    of_loss = max(abs(a.loss - b.loss) for a, b in zip(ours, theirs))
    of_margin = max(abs(a.margin - b.margin) for a, b in zip(ours, theirs))
    versions = ", ".join(f"{name} {version(name)}" for name in ("trl", "transformers", "torch"))
    return "\n".join(
        [
            "# Cost of preference tuning beside TRL",
            "",
            f"`make preference-cost` on {time.strftime('%Y-%m-%d')}: {versions}, megatron-core "
            f"{version('megatron-core')}, {processor()}, one thread, float32. A Qwen3 of "
            f"{SIZES['num_hidden_layers']} layers of {SIZES['hidden_size']} channels, a frozen "
            f"copy as the reference, {GLOBAL_BATCH} pairs per step, prompts about twice as long as "
            "both answers together.",
            "",
            "## Tokens",
            "",
            f"{len(made)} pairs have {apart:,} tokens as two sequences each, TRL's real tokens; "
            f"TRL pads them besides. Computed here, padding included: {computed:,}, "
            f"{computed / apart:.3f} of them. The bound (P + C + R + 1) / (2P + C + R) is "
            f"{bound / apart:.3f}.",
            "",
            "## CPU time",
            "",
            "Milliseconds of the process per pair, median over "
            f"{STEPS - WARM} steps, forward, backward, reference and update; a column is a round.",
            "",
            f"| trainer | {' | '.join(f'round {n + 1}' for n in range(ROUNDS))} |",
            f"|---|{'---|' * ROUNDS}",
            *rows,
            "",
            f"Beside TRL at its best batch size ({best.removeprefix('TRL, ')}): "
            f"{min(ratios):.2f} to {max(ratios):.2f} of its time. The machine has "
            f"{os.cpu_count()} cores and had a load of {os.getloadavg()[0]:.0f} at the end.",
            "",
            f"## {len(ours)} steps",
            "",
            f"One data set of {GLOBAL_BATCH} pairs, all of them in each step, learning rate "
            f"{LR:g}. The loss falls from {theirs[0].loss:.4f} to {theirs[-1].loss:.4f}; losses "
            f"differ by at most {of_loss:.1e}, margins by at most {of_margin:.1e} of "
            f"{theirs[-1].margin:.3f}.",
            "",
            "![losses and margins of both trainers](preference_cost.png)",
            "",
        ]
    )


if __name__ == "__main__":
    main()
