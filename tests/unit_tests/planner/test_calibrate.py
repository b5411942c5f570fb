"""Calibration for real, of a model so small that it takes seconds on a CPU."""

import json
import re

import pytest
import torch
import torch.distributed as dist

from megatron.packing.device import CPU
from megatron.packing.flags import FlagError
from megatron.packing.scheduling.fitted_cost import read_fitted_cost
from megatron.packing.step.settings import model_of
from megatron.planner import calibrate
from megatron.planner.calibrate import packs_to_measure, parse_arguments
from megatron.sft.arguments.parse import parse_config
from megatron.sft.commands import calibrate as command
from megatron.sft.fit.fake.described_gpu import DescribedGPU
from megatron.sft.model import kernels

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="expects what is measured on a CPU"),
]

MODEL = (
    "--num-layers 6 --hidden-size 16 --num-attention-heads 2 --seq-length 256 "
    "--position-embedding-type rope"
).split()


@pytest.mark.slow
def test_measured_cost_is_read_by_training(tmp_path, capsys):
    """All else about the file is tested with made-up times; here a model runs, and its file says
    what it was.
    """
    path = tmp_path / "cost.json"
    wide = (
        "--hidden-size 64 --seq-length 512 --swiglu --vocab-size 100 --repeats 3".split()
    )  # times that noise cannot hide
    command.main([*MODEL, *wide, "--output", str(path)], "calibrate")
    fitted = read_fitted_cost(path)
    assert fitted.cost.linear > 0
    assert (fitted.model["num_layers"], fitted.model["vocab_size"], fitted.model["dtype"]) == (
        6,
        128,
        "float32",
    )
    content = json.loads(path.read_text())
    assert len(content["points"]) >= 6
    assert all(0 < point["seconds"] < 10 for point in content["points"])
    assert {"torch", "megatron-core"} < set(content["versions"])
    assert f"written to {path}" in capsys.readouterr().out
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--swiglu --disable-bias-linear --normalization RMSNorm --group-query-attention "
        "--num-query-groups 1 --bf16",
        "--ffn-hidden-size 24 --kv-channels 4 --qk-layernorm",
        "--disable-bias-linear --num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax "
        "--moe-ffn-hidden-size 8",
        "--mtp-num-layers 1 --recompute-granularity full",
    ],
)
def test_model_is_the_one_that_training_builds(arguments):
    """A default that differs between the two would make training refuse the file of its own
    options.
    """
    from megatron.sft.model.build import build_transformer_config
    from megatron.sft.model.build import padded_vocab_size as padded_in_training

    known = [*MODEL, *arguments.split()]
    run = parse_config(
        [*known, *"--train-iters 1 --global-batch-size 1 --lr 1 --mock-data".split()], world_size=1
    )
    options = parse_arguments([*known, "--vocab-size", "200"])
    mine = model_of(
        calibrate.transformer_config(options, options.num_layers, CPU), options.padded_vocab_size
    )
    assert mine == model_of(build_transformer_config(run, CPU), padded_in_training(200, run))


@pytest.mark.parametrize(
    "flags",
    [
        "--swiglu",
        "--swiglu --num-experts 4 --disable-bias-linear",
        "--swiglu --num-experts 4",
        "--swiglu --activation-func-clamp-value 7",
        "--swiglu --glu-linear-offset 1",
        "--final-logit-softcapping 30",
    ],
)
def test_kernels_are_those_of_training(flags: str) -> None:
    """Experts one by one would be measured, where training runs them together."""
    arguments = [*NEEDED, *flags.split(), "--bf16"]
    run = parse_config(
        [*arguments, *"--mock-data --train-iters 1 --global-batch-size 8 --lr 1".split()], 1
    )
    trained = kernels.kernels_for(run, DescribedGPU())
    options = parse_arguments(arguments)
    for name in ("bias_swiglu_fusion", "moe_grouped_gemm", "cross_entropy_loss_fusion"):
        taken = calibrate._takes(name, options, DescribedGPU())
        assert taken == getattr(trained, name), name


def test_refusals_are_one_line(monkeypatch, tmp_path, capsys):
    """Under torchrun every rank would measure alone and write the same file."""
    arguments = [*MODEL, "--vocab-size", "100", "--output", str(tmp_path / "cost.json")]

    def said(*more):
        with pytest.raises(SystemExit) as stop:
            command.main([*arguments, *more], "calibrate")
        (line,) = capsys.readouterr().err.splitlines()
        assert (stop.value.code, line.partition(": error: ")[0]) == (2, "calibrate")
        return line

    assert "measured on a GPU only" in said("--num-experts", "2", "--disable-bias-linear")
    experts = "--num-experts 2 --disable-bias-linear --moe-layer-freq".split()
    assert "one stands for all" in said(*experts, *"011111")
    assert "raise --seq-length" in said("--seq-length", "16")
    assert "--num-layers" in said("--num-layers", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "one process; start it with" in said()
    assert not dist.is_initialized()
    assert not (tmp_path / "cost.json").exists()


NEEDED = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 256 --vocab-size 130"
).split()


def test_options():
    """An option that is lost on its way leaves another model measured."""
    options = parse_arguments([*NEEDED, "--swiglu", "--normalization", "RMSNorm"])
    assert (options.num_layers, options.hidden_size, options.swiglu) == (2, 16, True)
    assert (options.normalization, options.bf16, options.num_experts) == ("RMSNorm", None, None)
    assert options.padded_vocab_size == 256


def test_yaml_of_a_training_run(tmp_path):
    """The user would copy options by hand, and one of them wrong."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "num-layers: 4\nhidden_size: 32\nnum-attention-heads: 2\nseq-length: 512\nswiglu: "
        "true\nbf16: false\n"
        "lr: 1.0e-3\ndata-path: [a.jsonl]\nkv-channels:\n"
    )
    options = parse_arguments(["--config", str(path), "--vocab-size", "256", "--num-layers", "8"])
    assert (options.num_layers, options.hidden_size, options.seq_length, options.vocab_size) == (
        8,
        32,
        512,
        256,
    )
    assert (options.swiglu, options.bf16, options.kv_channels) == (True, False, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (NEEDED[:-2], "required: --vocab-size"),
        ([*NEEDED, "--num-layers", "0"], "--num-layers must be at least 1, but is 0"),
        ([*NEEDED, "--repeats", "0"], "--repeats must be at least 1, but is 0"),
        (
            [*NEEDED, "--tensor-model-parallel-size", "2"],
            "unknown option --tensor-model-parallel-size",
        ),
        ([*NEEDED, "--config", "absent.yaml"], "--config absent.yaml: "),
        (
            [*NEEDED, "--output", "no/such/folder/x.json"],
            "--output no/such/folder/x.json must be a file that can be",
        ),
        (
            [*NEEDED, "--output", "."],
            "--output . must be a file that can be written to; give another place",
        ),
    ],
)
def test_wrong_options_are_named(arguments, words):
    """It would show as an error inside megatron-core."""
    with pytest.raises(FlagError, match=re.escape(words)):
        parse_arguments(arguments)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "must map options to values"),
        ("num-layers: x", "'num-layers' must be a whole number"),
    ],
)
def test_wrong_yaml_is_named(tmp_path, content, words):
    """The same from a file."""
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(FlagError, match=words):
        parse_arguments([*NEEDED, "--config", str(tmp_path / "run.yaml")])


def test_packs_tell_the_terms_apart():
    """Packs of one shape only would leave the split between linear and quadratic to chance."""
    assert packs_to_measure(256)[:4] == [(256,), (64,) * 4, (16,) * 16, (128,)]
    for largest in (256, 1000, 131072):
        packs = packs_to_measure(largest)
        assert len(packs) == len(set(packs)) >= 6
        assert max(map(sum, packs)) == largest
        assert {len(pack) for pack in packs} == {1, 4, 16}
        assert all(len(set(pack)) == 1 for pack in packs)
    with pytest.raises(ValueError, match="raise --seq-length"):
        packs_to_measure(32)
