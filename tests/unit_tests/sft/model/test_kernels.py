"""Which fused kernels a run takes by itself."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from megatron.packing.model.attention import kernels as attention_kernels
from megatron.sft.model import kernels
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
    arguments: str, device: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cap that a kernel leaves out would train, to another loss."""
    monkeypatch.setattr(kernels, "compiles", lambda: True)
    found = asdict(kernels.kernels_for(parse(arguments), torch.device(device)))
    assert {name for name, is_on in found.items() if is_on} == expected


def test_none_that_cannot_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images for running alone have no C compiler, which Triton calls, or no headers of Python."""
    compilers: set[str] = set()
    monkeypatch.setattr(attention_kernels, "find_spec", lambda name: name)
    monkeypatch.setattr(attention_kernels.shutil, "which", lambda name: name in compilers)
    monkeypatch.setattr(attention_kernels.sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.setattr(kernels, "compiles", attention_kernels.compiles_triton.__wrapped__)
    monkeypatch.delenv("CC", raising=False)

    def taken() -> set[str]:
        found = asdict(kernels.kernels_for(parse(PLAIN), torch.device("cuda")))
        return {name for name in (SWIGLU, LOSS) if found[name]}

    (tmp_path / "Python.h").touch()
    with pytest.warns(UserWarning, match="not fused.*C compiler"):
        assert taken() == set()
    compilers.add("gcc")
    assert taken() == {SWIGLU, LOSS}
    (tmp_path / "Python.h").unlink()
    with pytest.warns(UserWarning, match=r"Python\.h"):
        assert taken() == set()
