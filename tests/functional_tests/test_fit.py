"""Memory estimates: extrapolated bytes are those of a run at its own depth, and the command says
what fits.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.mlp import MLP
from megatron.core.utils import unwrap_model

from megatron.packing.device import CPU
from megatron.sft.__main__ import main as train
from megatron.sft.arguments.parse import parse_config
from megatron.sft.commands import fit
from megatron.sft.distributed import make_groups
from megatron.sft.fit import estimate, verify, ways_out
from megatron.sft.fit.counter import SettledCounter
from megatron.sft.fit.estimate import (
    Request,
    Shared,
    StageEstimate,
    bytes_beside_states,
    estimates,
)
from megatron.sft.fit.fake.described_gpu import DescribedGPU
from megatron.sft.fit.report import GIB
from megatron.sft.fit.save_bytes import SaveBytes, save_bytes
from megatron.sft.fit.stages import stages_of
from megatron.sft.fit.step import run_step
from megatron.sft.memory_estimate import WayOut
from megatron.sft.model import cpu_support, mcore_fixes
from megatron.sft.model.checkpoints.content import Progress
from megatron.sft.model.checkpoints.save import CheckpointSave
from megatron.sft.model.huggingface.companions import Companions
from megatron.sft.model.huggingface.write import write_folder
from tests.functional_tests.fit_check import (
    COMMON,
    EXPERTS,
    GROUPED,
    LORA,
    PACKED,
    PP2,
    SP2,
    VOCAB_SIZE,
    Case,
)
from tests.functional_tests.forked_runs import command_forked, train_forked
from tests.functional_tests.ranks import run_ranks


def request_of(flags: str, world_size: int, num_layers: int, *, is_gpu: bool = True) -> Request:
    """Returns the request of a tiny model."""
    config = parse_config(
        f"--num-layers {num_layers} {COMMON} {PACKED} {flags}".split(), world_size
    )
    return Request(
        config=config,
        vocab_size=VOCAB_SIZE,
        world_size=world_size,
        device=DescribedGPU() if is_gpu else CPU,
    )


def bytes_of(found: list[StageEstimate]) -> list[tuple[int, int]]:
    """Returns of each stage the peak, and what is alive beside its states."""
    return [(one.peak, sum(part.num_bytes for part in one.passes)) for one in found]


DEEP = [
    (
        f"{GROUPED} --pipeline-model-parallel-size 3 --decoder-last-pipeline-num-layers 5 --bf16",
        3,
        15,
    ),
    (f"{GROUPED} {SP2} --bf16 --use-distributed-optimizer", 2, 6),
    (f"{EXPERTS} {PP2} --expert-model-parallel-size 2 --bf16", 4, 12),
    (f"{EXPERTS} --pipeline-model-parallel-size 4 --bf16", 4, 24),
    (f"{EXPERTS} --moe-layer-freq 0 0 0{' 1' * 9} --bf16", 1, 12),
    (f"{EXPERTS} {LORA} --max-seqlen-per-dp-cp-rank 512 --recompute-granularity full", 1, 12),
    (f"{GROUPED} --recompute-granularity full --recompute-num-layers 2 --bf16", 1, 10),
    (f"{GROUPED} {LORA} --context-parallel-size 2 --bf16", 2, 6),
]
IS_WHOLE = os.environ.get("FIT_CHECK") == "all"


@pytest.mark.parametrize(("flags", "world_size", "num_layers"), DEEP if IS_WHOLE else DEEP[:1])
def test_extrapolated_bytes_are_those_of_the_whole_depth(
    flags: str, world_size: int, num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peak that moves with depth would be wrong by GiB for a model of 80 layers."""
    request = request_of(flags, world_size, num_layers)
    extrapolated = estimates(request)
    assert {part.how for one in extrapolated for part in one.passes} == {"extrapolated"}
    monkeypatch.setattr(estimate, "depths_of", lambda *_: ())
    whole = estimates(request)
    assert {part.how for one in whole for part in one.passes} == {"run"}
    assert bytes_of(extrapolated) == bytes_of(whole)


def test_layers_of_experts_that_are_recomputed_keep_their_inputs_alone() -> None:
    """megatron-core's dispatcher kept the graph behind its shares until the next microbatch: each
    layer's input, and its gradient as large, to the end of the backward pass.
    """
    flags = "--max-seqlen-per-dp-cp-rank 512 --recompute-granularity full --bf16"
    request = request_of(f"{EXPERTS} {flags}", 1, 4)
    (stage,) = stages_of(request.config, 1)
    low, high = (sum(bytes_beside_states(request, stage, n, 1).values()) for n in (2, 4))
    of_input = 512 * 32 * 2
    assert of_input <= (high - low) / 2 < 1.6 * of_input  # beside numbers that experts keep


def test_earlier_stages_hold_more_microbatches() -> None:
    """1F1B: the first of four stages has four microbatches in flight, the last one."""
    found = estimates(request_of(f"{GROUPED} --pipeline-model-parallel-size 4 --bf16", 4, 4))
    middle = [sum(part.num_bytes for part in one.passes) for one in found[1:3]]
    assert [one.stage.in_flight for one in found] == [4, 3, 2, 1]
    assert middle[0] > middle[1]
    assert found[1].states == found[2].states


def test_replicas_and_context_ranks_share_states() -> None:
    """A search over layouts traces them once: a model of 80 layers takes seconds each time."""
    requests = [
        request_of(
            f"{GROUPED} --use-distributed-optimizer --bf16 --context-parallel-size {n}", 4, 2
        )
        for n in (1, 4)
    ]
    shared = Shared()
    found = [estimates(request, shared) for request in requests]
    assert len(shared.states) == 1
    assert found[1] == estimates(requests[1])


def test_worst_routing_takes_more_than_balanced() -> None:
    """Else one hot expert would end a run that was said to fit. Depths are traced in turn, each
    with a balancing loss per layer."""
    flags = f"{EXPERTS} --expert-model-parallel-size 2 --moe-aux-loss-coeff 0.01 --bf16"
    request = request_of(flags, 2, 5)
    worst = estimates(Request(**{**vars(request), "routing": "worst"}))
    balanced = estimates(request)
    assert worst[0].peak > balanced[0].peak
    # All layers have experts, which were counted as MLP.
    assert {"experts", "MLP"} & {part.name for part in balanced[0].passes} == {"experts"}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_grouped_experts_in_float32_are_estimated(num_ranks: int) -> None:
    """CUDA multiplies with one expert after another there; as on CPU, it was an error of torch's.
    Outputs and gradients of weights are then joined. That attention is slow, the run will say.
    """
    flags = f"{EXPERTS} --expert-model-parallel-size {num_ranks}"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="attention is computed")
        plain, grouped = (
            estimates(request_of(f"{flags} {flag}", num_ranks, 2))[0].peak
            for flag in ("", "--moe-grouped-gemm")
        )
    assert plain < grouped < 1.05 * plain


TOKENS, WIDTH, NUM_WORDS = 1024, 48, 4096


@pytest.mark.parametrize(
    ("kernel", "model", "saved"),
    [
        # Two layers keep SiLU of one half, and the other half plus an offset of zero.
        ("bias-swiglu", GROUPED, 2 * 2 * 2 * TOKENS * WIDTH),
        # Each token of two experts keeps its weighted product before it is rounded, too.
        ("bias-swiglu", EXPERTS, 2 * 2 * 2 * 3 * TOKENS * WIDTH),
        # A copy of the logits in float32.
        ("cross-entropy-loss", GROUPED, 4 * TOKENS * NUM_WORDS),
        # What megatron-core returns in the gradient's place is as large.
        ("gradient-accumulation", GROUPED, 0),
    ],
)
def test_fused_kernels_save_what_they_do_not_keep(kernel: str, model: str, saved: int) -> None:
    """A model that fits only by them would be refused, or one said to fit that runs without."""
    flags = f"{model} --bf16 --vocab-size {NUM_WORDS} --max-seqlen-per-dp-cp-rank {TOKENS}"
    fused, explicit, plain = (
        estimates(replace(request_of(f"{flags} {flag}", 1, 2), vocab_size=NUM_WORDS))
        for flag in ("", f"--{kernel}-fusion", f"--no-{kernel}-fusion")
    )
    assert fused == explicit
    # The peak beside smaller logits is in the backward pass, beside their weight's gradient.
    of_weight = 2 * NUM_WORDS * 32 if kernel == "cross-entropy-loss" else 0
    assert saved - of_weight <= plain[0].peak - fused[0].peak <= saved


def test_a_folder_with_a_config_alone_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of 140 GB are not downloaded for an estimate."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = [
        *f"--pretrained-checkpoint {tmp_path} --world-size 2 --bf16 --sequence-packing".split(),
        *f"{SP2} --fit-json {tmp_path}/out.json --memory".split(),
    ]
    fit.main([*arguments, "8GiB"], "fit")
    printed = capsys.readouterr().out
    assert "fits: 6.00 GiB left on every rank" in printed
    assert "vocabulary 512, bfloat16" in printed
    assert "building the model instead of all; the optimizer step instead of the passes" in printed
    (stage,) = json.loads((tmp_path / "out.json").read_text())["stages"]
    sizes = {part["name"]: part["bytes"] for part in stage["parts"]}
    # Half of each matrix, and whole norms: embedding, head, six layers.
    of_layer = 64 * (64 + 64) + 64 * 64 + 3 * 64 * 128
    weights = 2 * ((2 * 512 * 64 + 6 * of_layer) // 2 + 13 * 64)
    assert sizes["weights"] == pytest.approx(weights, rel=0.02)  # rounded up to 512 bytes each
    passes = sum(size for name, size in sizes.items() if not name.startswith("instead"))
    assert stage["peak_bytes"] >= passes


def _save(case: Case, folder: Path) -> tuple[list[int], SaveBytes]:
    """Bytes alive at most while a checkpoint of real tensors is written in the background, and
    while a model is written; and what is described.
    """
    config = case.config()
    mcore_fixes.install()
    cpu_support.install()
    make_groups(config)
    tensor_parallel.model_parallel_cuda_manual_seed(config.training.seed)
    counter = SettledCounter()
    training = run_step(config, VOCAB_SIZE, case.data, counter, num_steps=1)
    taken = []

    def note(work: Callable[[], Any]) -> Any:
        with counter, counter.phase("save"):
            done = work()
        taken.append(counter.phases[-1].peak - counter.phases[-1].start)
        return done

    arguments: Any = (folder, training, Progress(1, 24, False), {}, {})
    CheckpointSave(*arguments).finish()
    note(partial(CheckpointSave, *arguments, in_background=True)).finish()
    companions = Companions(config, None, VOCAB_SIZE, "bfloat16")
    chunks = [unwrap_model(chunk) for chunk in training.model]
    note(lambda: write_folder(folder / "hf", chunks, companions.weights(), companions.write))
    return taken, save_bytes(training)


@pytest.mark.parametrize("layout", ["", "--overlap-grad-reduce", "--tensor-model-parallel-size 2"])
def test_what_is_written_takes_what_is_described(tmp_path: Path, layout: str) -> None:
    """A run that fits for a thousand steps would end at its first checkpoint. Each rank has a share
    of its own.
    """
    case = Case(2, f"{PACKED} {GROUPED} --bf16 --use-distributed-optimizer {layout}")
    for (in_background, huggingface), described in run_ranks(_save, 2, case, tmp_path):
        # Twice: the counter takes the storages over the run's own memory for memory, too.
        assert in_background / 2 == pytest.approx(described.in_background, rel=0.03)
        assert described.checkpoint < in_background / 20
        assert huggingface <= described.huggingface


def test_a_measurement_needs_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said before minutes of traces, in a line. The process that would see it is a fork."""

    def forked(command: list[str], **_: object) -> mock.Mock:
        assert command[1:] == ["-m", "megatron.sft.fit.verify"]
        return mock.Mock(returncode=command_forked([], script=verify.main)[0])

    monkeypatch.setattr(subprocess, "run", forked)
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as ended:
        fit.main(f"--num-layers 2 {COMMON} {PACKED} --verify".split(), "fit")
    assert ended.value.code == 2
    assert "--verify needs a GPU that torch can use" in capsys.readouterr().err


def test_what_does_not_fit_has_ways_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads that 20 GiB are too much asks next what to change."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    flags = (
        "--max-seqlen-per-dp-cp-rank 512 --use-distributed-optimizer --world-size 2 --memory 1GiB"
    )
    with pytest.raises(SystemExit) as ended:
        fit.main(f"--num-layers 1 {COMMON} {PACKED} {GROUPED} {flags}".split(), "fit")
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("does not fit" in line for line in lines)
    first = lines.index("ways out, cheapest first:") + 1
    assert re.search("enough alone, and together they leave 2.00 GiB; .*--auto-", lines.pop())
    assert [line.split("  ")[1] for line in lines[first:]] == [
        "--max-seqlen-per-dp-cp-rank 256",
        "--recompute-granularity full",
        "--recompute-granularity full --query-groups-per-gather 1 --mlp-chunks-for-training 16 "
        "--fine-grained-activation-offloading",
    ]
    # The margin alone is 2 GiB: that a way is none must be said, too.
    assert all(re.search(r"GiB less, still [0-9.]+ too much$", line) for line in lines[first:])


def test_more_replicas_are_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where most is the optimizer's state, smaller packs help nothing."""
    config = request_of(f"{GROUPED} --use-distributed-optimizer --bf16", 2, 1).config
    found = list(ways_out.changes(config, 2))
    assert found[-1] == (config, 4)
    stage = mock.Mock(peak=5)
    monkeypatch.setattr(ways_out, "changes", lambda *_: [(config, 4)])
    monkeypatch.setattr(estimate, "estimates", lambda _: [stage])
    request = Request(config=config, vocab_size=VOCAB_SIZE, world_size=2)
    way = WayOut("the same options on 4 GPUs", 4)
    assert list(ways_out.ways_out(request, 9)) == [way]
    # The fifth is the first that is enough, beside three that save something.
    peaks = iter(peak * GIB for peak in (8, 7, 6, 5, 2, 1))
    monkeypatch.setattr(ways_out, "changes", lambda *_: [(config, 4)] * 6)
    monkeypatch.setattr(estimate, "estimates", lambda _: [mock.Mock(peak=next(peaks))])
    enough = list(ways_out.ways_out(request, 9 * GIB, 5 * GIB))
    assert [one.saved_bytes // GIB for one in enough] == [1, 2, 3, 7]


def _run_out_of_memory() -> None:
    """The main function of a training whose second step needs more than there is."""
    plain = MLP.forward
    calls = count(1)

    def forward(self: MLP, *arguments: object, **options: object) -> object:
        if next(calls) > 8:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"
            )
        return plain(self, *arguments, **options)

    with mock.patch.object(MLP, "forward", forward):
        train()


def test_a_gpu_out_of_memory_ends_in_one_line(tmp_path: Path) -> None:
    """torch's message says how much was asked for, not what to change; its traceback hides even
    that.
    """
    flags = f"--num-layers 1 {COMMON} {PACKED} {GROUPED} --max-seqlen-per-dp-cp-rank 128"
    flags = f"{flags} --use-distributed-optimizer --train-iters 3 --run-dir {tmp_path}"
    status, output = train_forked(2, flags.split(), _run_out_of_memory)
    assert status == 2  # as in one process: a message for the user, with the ways out
    assert "Traceback" not in output
    (line,) = (line for line in output.splitlines() if "out of memory" in line)
    assert "out of memory in the passes of step 2, in MLP: 2.00 GiB asked for; what grew" in line
    ways = line.split("cheapest ways out: ")[1]
    assert re.findall(r"--\S+ \w+", ways) == [
        "--max-seqlen-per-dp-cp-rank 64",
        "--recompute-granularity full",
        "--recompute-granularity full",
        "--query-groups-per-gather 1",
        "--mlp-chunks-for-training 16",
    ]
    assert ways.count(" less)") == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--memory 80G --world-size 1", "--memory 80G: must be a size above 0, such as 80GiB"),
        ("--memory 80 --world-size 1", "--memory 80 is 80 bytes; give the unit: 80GiB"),
        ("--world-size 0", "--world-size"),
        ("--world-size 2 --verify", "--verify runs the steps on one GPU; pass --world-size 1"),
        ("--world-size 3 --tensor-model-parallel-size 2", "must be a multiple of tensor"),
    ],
)
def test_bad_options_are_one_line(
    flags: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is built."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit) as ended:
        fit.main([*f"--num-layers 2 {COMMON} {flags}".split()], "fit")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
