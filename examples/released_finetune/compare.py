"""tensor. Compares the released model before and after config.yaml with transformers: losses in
several layouts, and answers; writes a result page.

    python -m examples.released_finetune.compare --write PAGE
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from examples.tiny_finetune.ask import answers

BEFORE = Path("data/smollm2")
RUN = Path("runs/released_finetune")
AFTER = RUN / "huggingface"
QUESTIONS = Path(__file__).parent / "questions.jsonl"
MAX_TOKENS = 48
"""Length of each answer in tokens, the `sample-tokens` of config.yaml."""
NUM_CHATS = 8
END = "<|im_end|>"
TOLERANCE = 1e-5
REFERENCE = "transformers"
LAYOUTS = {
    "one process": (1, ""),
    "tensor parallel 3": (3, "--tensor-model-parallel-size 3"),
    "pipeline parallel 2": (2, "--pipeline-model-parallel-size 2"),
    "one process, `--bf16`": (1, "--bf16"),
}
"""Name -> number of processes, options. The model has 9 heads in 3 groups, and 30 layers."""
STEP = (
    "--sequence-packing --seq-length 2048 --train-iters 1 --lr 1e-12 --weight-decay 0 "
    "--eval-iters 0 --num-workers 0 --split 100,0,0"
)


PAGE = """# A released model, tuned on two CPU cores

{date}, {versions}, Python {python}. `make finetune-released`.

SmolLM2-135M-Instruct (134,515,008 weights, in float32 as read from the 4-bit numbers of a GGUF)
learns from the questions and answers of `make run` about Python's standard library:
`examples/released_finetune/config.yaml`, two processes, float32. {run}.

{evaluations}

Loss of the answers to {num_chats} held-out questions. transformers runs each chat alone, the
trainer packs them:

{losses}

Answers, the likeliest {max_tokens} tokens of each: the same from `megatron-sft chat` and from
transformers' `generate`.

{answers}
"""


def read_chats(path: Path) -> list[list[dict[str, str]]]:
    """Returns the messages of each record."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def loss_of_transformers(folder: Path, chats: list[list[dict[str, str]]]) -> float:
    """Returns the mean loss of the answers' tokens, each chat alone.

    What is trained is found in the text: all behind the prompt, up to the end of the turn.
    """
    import torch
    import transformers

    library: Any = transformers
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, num_tokens = 0.0, 0
    for chat in chats:
        prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=False)
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        text = text[: text.rindex(END) + len(END)]
        start = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
        with torch.no_grad():
            # torch's own loss in float32 is 3e-6 too low here: on a CPU it drops unlikely tokens
            # that it adds to a likely one.
            logits = model(ids[None]).logits[0, start - 1 : -1].double()
        total += torch.nn.functional.cross_entropy(logits, ids[start:], reduction="sum").item()
        num_tokens += len(ids) - start
    return total / num_tokens


def loss_of_trainer(folder: Path, data: Path, num_processes: int, options: str) -> float:
    """Returns the loss that a step over all records of `data` begins with."""
    with TemporaryDirectory() as place:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_processes)]
        given = ["--pretrained-checkpoint", folder, "--data-path", data, "--run-dir", place]
        given += ["--global-batch-size", NUM_CHATS, *STEP.split(), *options.split()]
        subprocess.run(
            [sys.executable, *launch, "-m", "megatron.sft", *map(str, given)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        records = map(json.loads, Path(place, "metrics.jsonl").read_text().splitlines())
        return next(record["loss"] for record in records if record["kind"] == "train")


def losses(folder: Path, data: Path, layouts: Sequence[str]) -> dict[str, float]:
    """Returns the loss on `data` by transformers and by the trainer in some layouts. Raises
    ValueError where one in float32 is more than `TOLERANCE` from transformers'.
    """
    by_name = {REFERENCE: loss_of_transformers(folder, read_chats(data))}
    for name in layouts:
        num_processes, options = LAYOUTS[name]
        by_name[name] = loss_of_trainer(folder, data, num_processes, options)
        print(f"{folder}, {name}: loss {by_name[name]:.7f}", flush=True)
        is_exact = "--bf16" not in options
        if is_exact and abs(by_name[name] / by_name[REFERENCE] - 1) > TOLERANCE:
            raise ValueError(
                f"{folder} has the loss {by_name[name]} by the trainer ({name}), but "
                f"{by_name[REFERENCE]} by transformers"
            )
    return by_name


def ask(folder: Path) -> list[tuple[str, str]]:
    """Returns (question, answer) of transformers. Raises ValueError where `megatron-sft chat`
    answers otherwise.
    """
    questions = [chat[0] for chat in read_chats(QUESTIONS)]
    texts = [question["content"] for question in questions]
    spoken = answers(folder, questions, MAX_TOKENS)
    command = [sys.executable, "-m", "megatron.sft", "chat", str(folder)]
    done = subprocess.run(
        [*command, "--max-new-tokens", str(MAX_TOKENS)],
        input="\n/clear\n".join(texts) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    if done.stdout.rstrip() != "\n".join(spoken).rstrip():
        raise ValueError(f"chat answers {done.stdout!r}, but transformers {spoken!r}")
    return list(zip(texts, (answer.strip() for answer in spoken), strict=True))


def page(
    before: dict[str, float], after: dict[str, float], dialogue: list[tuple[str, str, str]]
) -> str:
    """Returns the result page.

    dialogue: (question, answer before, answer after).
    """
    records = list(map(json.loads, (RUN / "metrics.jsonl").read_text().splitlines()))
    losses_by_step = [
        (each["iteration"], f"{each['loss']:.4f}", f"{each['token_accuracy']:.1%}")
        for each in records
        if each["kind"] == "evaluation"
    ]
    losses_by_name = [
        (name, *difference(before, name), *difference(after, name)) for name in before
    ]
    answers = [
        f"**{question}**\n\nbefore:\n\n{quoted(old)}\n\nafter:\n\n{quoted(new)}\n"
        for question, old, new in dialogue
    ]
    text = PAGE.format(
        date=datetime.date.today(),
        versions=", ".join(
            f"{name} {version(name)}" for name in ("torch", "megatron-core", "transformers")
        ),
        python=platform.python_version(),
        run=summary([each for each in records if each["kind"] == "train"]),
        evaluations=table(("steps", "validation loss", "token accuracy"), losses_by_step),
        num_chats=NUM_CHATS,
        losses=table(
            ("float32 unless said", "before", "difference", "after", "difference"), losses_by_name
        ),
        max_tokens=MAX_TOKENS,
        answers="\n".join(answers),
    )
    return text.rstrip() + "\n"


def summary(steps: list[dict[str, Any]]) -> str:
    """Returns the size of the run in words."""
    minutes = sum(step["step_seconds"] for step in steps) / 60
    tokens = sum(step["tokens"] for step in steps)
    return f"{len(steps)} steps, {tokens:,} tokens, {minutes:.1f} minutes of steps"


def difference(losses: dict[str, float], name: str) -> tuple[str, str]:
    """Returns a loss, and its difference from that of transformers; blanks where none was
    computed.
    """
    if name not in losses:
        return "", ""
    share = losses[name] / losses[REFERENCE] - 1
    return f"{losses[name]:.7f}", "" if name == REFERENCE else f"{share:+.1e}"


def table(head: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> str:
    """Returns a table of Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def quoted(text: str) -> str:
    """Returns text as a block of Markdown that shows every character."""
    return f"````\n{text}\n````"


def main() -> None:
    """Reads the command line, compares, writes the page."""
    parser = argparse.ArgumentParser(description="Compares the tuned model with transformers.")
    parser.add_argument("--write", type=Path, required=True, help="page to write")
    target = parser.parse_args().write
    lines = Path("data/tiny_chat/valid.jsonl").read_text(encoding="utf-8").splitlines()
    with TemporaryDirectory() as place:
        data = Path(place, "held_out.jsonl")
        data.write_text("\n".join(lines[:NUM_CHATS]) + "\n", encoding="utf-8")
        before, after = losses(BEFORE, data, [*LAYOUTS]), losses(AFTER, data, ["one process"])
    dialogue = [
        (question, old, new)
        for (question, old), (_, new) in zip(ask(BEFORE), ask(AFTER), strict=True)
    ]
    target.write_text(page(before, after, dialogue), encoding="utf-8")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
