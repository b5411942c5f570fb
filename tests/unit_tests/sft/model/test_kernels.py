"""Which fused kernels a run takes by itself."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from megatron.packing.device import CPU, Device
from megatron.sft.fit.fake.described_gpu import DescribedGPU
from megatron.sft.model import kernels
from megatron.sft.model.needs import check_needs
from tests.unit_tests.sft.command_line import parse

SWIGLU, LOSS, EXPERTS = "bias_swiglu_fusion", "cross_entropy_loss_fusion", "moe_grouped_gemm"
SUMS = "gradient_accumulation_fusion"
PLAIN = "--swiglu --disable-bias-linear --bf16"


@pytest.mark.parametrize(
    ("arguments", "device", "expected"),
    [
        (PLAIN, "cuda", {SWIGLU, LOSS, SUMS}),
        (f"{PLAIN} --lora --lora-rank 4", "cuda", {SWIGLU, LOSS}),
        (f"{PLAIN} --num-experts 4", "cuda", {SWIGLU, LOSS, EXPERTS, SUMS}),
        (f"{PLAIN} --num-experts 4", "cpu", set()),
        ("--swiglu --num-experts 4", "cuda", {LOSS}),  # float32, and experts with biases
        (f"{PLAIN} --final-logit-softcapping 30", "cuda", {SWIGLU, SUMS}),
        (f"{PLAIN} --logits-of-masked-tokens --glu-linear-offset 1", "cuda", {SUMS}),
        (f"{PLAIN} --no-{SWIGLU} --no-{LOSS}".replace("_", "-"), "cuda", {SUMS}),
        (f"{PLAIN} --num-experts 4 --{EXPERTS}".replace("_", "-"), "cpu", {EXPERTS}),
    ],
)
def test_on_a_gpu_those_that_compute_the_model(
    arguments: str, device: str, expected: set[str]
) -> None:
    """A cap that a kernel leaves out would train, to another loss."""
    found = asdict(
        kernels.kernels_for(parse(arguments), DescribedGPU() if device == "cuda" else CPU)
    )
    assert {name for name, is_on in found.items() if is_on} == expected


def test_none_that_do_not_run() -> None:
    """Images for running alone have no C compiler, which Triton calls, or no headers of Python."""
    with pytest.warns(UserWarning, match=r"not fused.*C compiler.*\(\w+Error: .*\)"):
        found = asdict(kernels.kernels_for(parse(PLAIN), Device("cuda")))
    assert {name for name, is_on in found.items() if is_on} == {SUMS}
    for flag in (SWIGLU, LOSS):
        asked = parse(f"{PLAIN} --{flag}".replace("_", "-"))
        with pytest.raises(ValueError, match=f"--{flag}: .*C compiler".replace("_", "-")):
            check_needs(asked, Device("cuda"))


def test_biases_that_transformer_engine_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of gpt-oss could not be read into Transformer Engine's grouped experts."""
    monkeypatch.setattr(kernels, "transformer_engine_installed", lambda: True)
    for flag, is_grouped in (("", False), ("--disable-bias-linear", True)):
        arguments = f"--swiglu --bf16 --num-experts 4 {flag}"
        found = kernels.kernels_for(parse(arguments), DescribedGPU())
        assert found.moe_grouped_gemm is is_grouped
