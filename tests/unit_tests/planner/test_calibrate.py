"""Calibration for real, of a model so small that it takes seconds on a CPU."""

import json

import pytest
import torch
import torch.distributed as dist

from megatron.packing.scheduling.fitted_cost import read_fitted_cost
from megatron.packing.step.settings import model_of
from megatron.planner import calibrate
from megatron.planner.calibrate_options import padded_vocab_size, parse_arguments

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="expects what is measured on a CPU"),
]

MODEL = (
    "--num-layers 6 --hidden-size 16 --num-attention-heads 2 --seq-length 256 --position-embedding-type rope".split()
)
CPU = torch.device("cpu")


def test_measured_cost_is_read_by_training(tmp_path, capsys):
    """All else about the file is tested with made-up times; here a model runs, and its file says what it was."""
    path = tmp_path / "cost.json"
    wide = (
        "--hidden-size 64 --seq-length 512 --swiglu --vocab-size 100 --repeats 3".split()
    )  # times that noise cannot hide
    calibrate.main([*MODEL, *wide, "--output", str(path)])
    fitted = read_fitted_cost(path)
    assert fitted.cost.linear > 0
    assert (fitted.model["num_layers"], fitted.model["vocab_size"], fitted.model["dtype"]) == (6, 128, "float32")
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
        "--swiglu --disable-bias-linear --normalization RMSNorm --group-query-attention --num-query-groups 1 --bf16",
        "--ffn-hidden-size 24 --kv-channels 4 --qk-layernorm",
        "--disable-bias-linear --num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax --moe-ffn-hidden-size 8",
        "--mtp-num-layers 1 --recompute-granularity full",
    ],
)
def test_model_is_the_one_that_training_builds(arguments):
    """A default that differs between the two would make training refuse the file of its own options."""
    from megatron.sft.model.build import build_transformer_config
    from megatron.sft.model.build import padded_vocab_size as padded_in_training
    from megatron.sft.options.config import parse_config

    known = [*MODEL, *arguments.split()]
    run = parse_config([*known, *"--train-iters 1 --global-batch-size 1 --lr 1 --mock-data".split()], world_size=1)
    options = parse_arguments([*known, "--vocab-size", "200"])
    mine = model_of(calibrate.transformer_config(options, options.num_layers, CPU), padded_vocab_size(options))
    assert mine == model_of(build_transformer_config(run, CPU), padded_in_training(200, run))


def test_refusals_are_one_line(monkeypatch, tmp_path):
    """Under torchrun every rank would measure alone and write the same file."""
    arguments = [*MODEL, "--vocab-size", "100", "--output", str(tmp_path / "cost.json")]
    with pytest.raises(SystemExit, match="error: experts and recomputation are measured on a GPU only"):
        calibrate.main([*arguments, "--num-experts", "2", "--disable-bias-linear"])
    with pytest.raises(SystemExit, match="raise --seq-length"):
        calibrate.main([*arguments, "--seq-length", "16"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="error: calibrate measures the whole model in one process; start it with"):
        calibrate.main(arguments)
    assert not dist.is_initialized()
    assert not (tmp_path / "cost.json").exists()
