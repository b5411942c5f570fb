"""Options that work alone work together: random combinations train, save, and continue to the bit,
or are refused in a line before the first step.

    OPTION_COMBINATIONS=500 pytest tests/functional_tests/test_option_combinations.py
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.functional_tests.forked_runs import train_forked
from tests.functional_tests.hf_models import write_model
from tests.functional_tests.layouts import MODELS, OPTIMIZERS
from tests.functional_tests.ranks import run_ranks
from tests.functional_tests.test_blend import write_documents, write_lines
from tests.functional_tests.test_run import EXACT, steps_of

COMMON = (
    "--seq-length 96 --global-batch-size 8 --over-length-policy truncate --lr 1e-2 --adam-eps 1e-3 "
    "--train-iters 4 --save-interval 2"
)
SHAPE = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48"
PRETRAINED = ("llama3", "gemma", "qwen2-moe")
LAYOUTS = {
    "": 1,
    " ": 2,
    "--tensor-model-parallel-size 2 --sequence-parallel": 2,
    "--pipeline-model-parallel-size 2": 2,
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1": 2,
    "--context-parallel-size 2": 2,
    "--tensor-model-parallel-size 2 --sequence-parallel  ": 4,
    "--pipeline-model-parallel-size 2  ": 4,
}
"""Flags -> processes."""
LORA = (
    "--lora",
    "--lora --lora-modules-to-save lm_head",
    "--lora --lora-dropout 0.1 --lora-target-modules q_proj",
)
DATA = (
    *["--mock-data"] * 4,
    *(
        "--data-path {}/chats.jsonl",
        "--data-path {}/chats.jsonl --split 6,2,2",
        "--data-path {}/docs",
    ),
    "--data-path 0.7 {}/chats.jsonl 0.3 {}/docs --blend-mode random",
    "--data-path 0.7 {}/chats.jsonl 0.3 {}/texts.jsonl --valid-data-path {}/texts.jsonl "
    "--skip-bad-samples",
    "--data-path 3 {}/chats.jsonl 1 {}/texts.jsonl --blend-weights-by tokens --skip-bad-samples",
    "--data-path {}/blend.yaml",
)
"""{}: the folder."""
OFTEN = (
    *("--sequence-packing", "--sequence-packing", "--bf16", "--bf16"),
    *(
        "--eval-iters 1 --eval-interval 2 --keep-best",
        "--recompute-granularity full",
        "--async-save",
    ),
)
SELDOM = (
    *(
        "--deterministic-mode",
        "--logits-of-masked-tokens",
        "--clip-grad 0",
        "--micro-batch-size 2",
        "--num-workers 1",
    ),
    *(
        "--num-workers 2",
        "--seed 7",
        "--overlap-grad-reduce",
        "--eval-iters 2 --eval-interval 1 --early-stopping 1",
    ),
    *(
        "--keep-checkpoints 2",
        "--prefetch-global-batches 0",
        "--skip-nan-steps 1",
        "--lr-decay-style linear",
    ),
    *(
        "--sequence-packing --outlier-delay-steps 2",
        "--sequence-packing --sequence-packing-scheduler dp_balanced",
    ),
)


def combination(number: int, models: Path, data: Path) -> tuple[int, list[str]]:
    """Processes and flags."""
    draw = random.Random(number)
    layout = draw.choice(list(LAYOUTS))
    flags = [
        "--eval-iters 0",
        draw.choice(DATA).replace("{}", str(data)),
        layout,
        OPTIMIZERS[draw.choice(list(OPTIMIZERS))],
    ]
    if draw.random() < 0.5:
        flags += [SHAPE, MODELS[draw.choice(list(MODELS))]]
    else:
        flags += [f"--pretrained-checkpoint {models / draw.choice(PRETRAINED)}"]
        flags += [draw.choice(LORA)] * (draw.random() < 0.6)
    flags += [option for option in OFTEN if draw.random() < 0.5]
    flags += [option for option in SELDOM if draw.random() < 0.15]
    flags += ["--max-seqlen-per-dp-cp-rank 144"] * any("--sequence-packing" in one for one in flags)
    if ("--num-experts" in " ".join(flags) or "qwen2-moe" in " ".join(flags)) and LAYOUTS[
        layout
    ] > 1:
        flags += ["--expert-model-parallel-size 2"] * (
            "sequence-parallel" in layout or draw.random() < 0.3
        )
    return LAYOUTS[layout], [part for flag in flags for part in flag.split()]


TIED_PREDICTION = (
    f"{SHAPE} {MODELS['further-tied']} --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer --overlap-grad-reduce "
    "--sequence-packing --max-seqlen-per-dp-cp-rank 144 --mock-data --eval-iters 0"
)
"""megatron-core makes a weight there that nothing trains."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in PRETRAINED:
        run_ranks(write_model, 1, name, folder / name)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    chats = [{"instruction": f"{i}?", "output": "yes " * (1 + i * 7 % 29)} for i in range(23)]
    write_lines(folder / "chats.jsonl", chats)
    write_lines(
        folder / "texts.jsonl",
        [{"text": "no " * (1 + i)} if i % 5 else {"text": None} for i in range(12)],
    )
    write_documents(folder / "docs", [[i % 120 for i in range(5 + 3 * n)] for n in range(12)])
    blend = [{"weight": weight, "path": path} for weight, path in ((2, "chats.jsonl"), (1, "docs"))]
    splits = {"train": {"blend": blend}, "val": {"path": "chats.jsonl"}}
    text = json.dumps(
        {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}
    )
    (folder / "blend.yaml").write_text(text)
    return folder


@pytest.mark.parametrize("number", range(-1, int(os.environ.get("OPTION_COMBINATIONS", "4"))))
def test_they_train_save_and_continue(
    number: int, models: Path, data: Path, tmp_path: Path
) -> None:
    """What no other test has together fails at a user's: at the first save, say, of a run of
    hours."""
    num_processes, flags = (
        (2, TIED_PREDICTION.split()) if number < 0 else combination(number, models, data)
    )
    text = " ".join(
        [COMMON, *flags, f"--run-dir {tmp_path} --save {tmp_path}/saved --load {tmp_path}/saved"]
    )
    status, output = train_forked(num_processes, text.split())
    if status:
        # Where another rank was the first to end, torchrun's summary would say why.
        assert not output or "pretrain_sft.py: error: " in output, f"{text}\n{output}"
        assert "Traceback" not in output, f"{text}\n{output}"
        assert not steps_of(tmp_path), f"{text}\n{output}"
        return
    whole = steps_of(tmp_path)
    if 2 not in whole:  # --early-stopping
        return
    if not (tmp_path / "saved/iter_0000002").exists():  # --keep-best, or --keep-checkpoints
        shutil.rmtree(tmp_path / "saved")
        status, output = train_forked(num_processes, [*text.split(), "--exit-interval", "2"])
        assert status == 0, f"{text}\n{output}"
    (tmp_path / "saved/latest_checkpointed_iteration.txt").write_text("2")
    status, output = train_forked(num_processes, text.split())
    assert status == 0, f"{text}\n{output}"
    for iteration, step in steps_of(tmp_path).items():
        assert {name: step[name] for name in EXACT} == {
            name: whole[iteration][name] for name in EXACT
        }, text
