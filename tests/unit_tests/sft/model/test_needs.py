"""Options that need a GPU or a package: refused without it, passed on with a stand-in for it."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.packing.device import CPU, Device
from megatron.sft.fit.fake.described_gpu import DescribedGPU
from tests.unit_tests.sft.command_line import parse

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CUDA = DescribedGPU()
PRECISION = "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer"
EXPERTS = "--disable-bias-linear --num-experts 4"


class FusedAdam:
    """The arguments of Transformer Engine's that megatron-core passes on."""

    def __init__(
        self,
        params: Any,
        master_weight_dtype: torch.dtype,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
        use_decoupled_grad: bool,
    ) -> None: ...


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module in the place of Transformer Engine's optimizers."""
    name = "transformer_engine.pytorch.optimizers"
    module = ModuleType(name)
    module.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    for parent in ("transformer_engine", "transformer_engine.pytorch"):
        package = ModuleType(parent)
        package.__spec__ = ModuleSpec(parent, None)  # which find_spec asks for
        monkeypatch.setitem(sys.modules, parent, package)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize(
    ("arguments", "device", "message"),
    [
        (PRECISION, CPU, "--use-precision-aware-optimizer needs a GPU; drop it"),
        (PRECISION, Device("cuda"), "needs Transformer Engine's FusedAdam; pip install"),
        (f"{PRECISION} --optimizer-cpu-offload", CPU, "needs a GPU; drop it"),
        (
            "--cross-entropy-loss-fusion",
            CPU,
            "--cross-entropy-loss-fusion needs a GPU; drop it",
        ),
        (
            "--attention-dropout 0.1",
            CPU,
            "^--attention-dropout 0.1 needs a GPU with Transformer Engine; pass 0, and for dropout",
        ),
    ],
)
def test_what_is_not_here_is_refused_before_anything_is_built(
    arguments: str, device: Device, message: str
) -> None:
    """megatron-core says so with a trace, some of it after weights are read."""
    from megatron.sft.model.needs import check_needs

    with pytest.raises(ValueError, match=message):
        check_needs(parse(arguments), device)


def test_what_is_here_is_taken(engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that is never passed would hide an option from everybody."""
    from megatron.sft.model import needs

    monkeypatch.setattr(needs, "transformer_engine_installed", lambda: True)
    needs.check_needs(parse("--attention-dropout 0.1"), CUDA)
    needs.check_needs(parse(PRECISION), Device("cuda"))
    engine.FusedAdam = type("FusedAdam", (), {"__init__": lambda self, params: None})  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="FusedAdam"):  # of an old release
        needs.check_needs(parse(PRECISION), Device("cuda"))
    needs.check_needs(parse(f"{PRECISION} --optimizer-cpu-offload"), CUDA)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "--main-params-dtype fp16 --exp-avg-dtype fp8 --exp-avg-sq-dtype bf16 "
            "--main-grads-dtype bf16",
            {
                "main_params_dtype": torch.float16,
                "store_param_remainders": False,
                "exp_avg_dtype": torch.uint8,
                "exp_avg_sq_dtype": torch.bfloat16,
                "main_grads_dtype": torch.bfloat16,
                "optimizer_cpu_offload": False,
            },
        ),
        (
            "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d",
            {
                "main_params_dtype": torch.float32,
                "store_param_remainders": True,
                "optimizer_cpu_offload": True,
                "optimizer_offload_fraction": 1.0,
                "overlap_cpu_optimizer_d2h_h2d": True,
            },
        ),
    ],
)
def test_precisions_reach_the_optimizer(
    arguments: str, expected: dict[str, Any], engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option that is parsed and not passed on is silently ignored."""
    from megatron.sft.model import optimizer

    made: list[Any] = []
    monkeypatch.setattr(optimizer, "OptimizerConfig", lambda **named: made.append(named))
    monkeypatch.setattr(optimizer, "get_megatron_optimizer", lambda *_, **__: None)
    monkeypatch.setattr(optimizer, "get_standard_config_overrides", lambda _: {})
    model: Any = [SimpleNamespace(parameters=lambda: iter([torch.zeros(1)]))]
    optimizer.build_optimizer(parse(f"{PRECISION} {arguments}"), model)
    expected["use_precision_aware_optimizer"] = True
    assert {name: made[0][name] for name in expected} == expected


def test_gradients_are_summed_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """--main-grads-dtype is of the buffers, which megatron-core's optimizer does not make."""
    from megatron.sft.model import build

    made: list[bool] = []

    def config_of(grad_reduce_in_fp32: bool, **_: Any) -> None:
        made.append(grad_reduce_in_fp32)
        raise StopIteration

    monkeypatch.setattr(build, "DistributedDataParallelConfig", config_of)
    for arguments in ("--bf16", f"{PRECISION} --main-grads-dtype bf16"):
        with pytest.raises(StopIteration):
            build.build_model(parse(arguments), None, 8, CPU)  # type: ignore[arg-type]
    assert made == [True, False]


def test_fused_kernels_reach_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that is parsed and not passed on is silently ignored."""
    from megatron.core.transformer.moe import moe_utils

    from megatron.sft.model import kernels
    from megatron.sft.model.build import build_transformer_config

    flags = "--bias-swiglu-fusion --moe-permute-fusion --gradient-accumulation-fusion"
    without_engine = build_transformer_config(parse(f"{EXPERTS} --swiglu {flags}"), CPU)
    assert not without_engine.moe_permute_fusion  # megatron-core would refuse it
    for name in kernels._OF_PERMUTATION:
        monkeypatch.setattr(moe_utils, name, object(), raising=False)
    monkeypatch.setattr(Device, "has_package", lambda self, name: name == "transformer_engine")
    built = build_transformer_config(parse(f"{EXPERTS} --swiglu {flags}"), CPU)
    plain = build_transformer_config(parse(f"{EXPERTS} --swiglu"), CPU)
    for name in ("bias_activation_fusion", "moe_permute_fusion", "gradient_accumulation_fusion"):
        assert (getattr(built, name), getattr(plain, name)) == (True, False)


@pytest.mark.parametrize(("bias", "weighted"), [(True, False), (False, False), (False, True)])
def test_fused_swiglu_is_the_plain_one(bias: bool, weighted: bool) -> None:
    """Uncompiled: what megatron-core's kernel is made from has a backward pass of its own."""
    from megatron.core.fusions import fused_bias_swiglu as fused

    generator = torch.Generator().manual_seed(1)
    x, offset, scale = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((3, 8), (8,), (3, 1))
    )
    bias_of = offset if bias else None
    torch.compiler.set_stance("force_eager")
    try:
        if weighted:
            found = fused.weighted_bias_swiglu_impl(x, None, scale, False)
        else:
            found = fused.bias_swiglu_impl(x, bias_of, False, False)
        inputs = [each for each in (x, bias_of, scale if weighted else None) if each is not None]
        gradients = torch.autograd.grad(found.square().sum(), inputs)
    finally:
        torch.compiler.set_stance("default")
    gate, linear = (x if bias_of is None else x + bias_of).chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) * linear * (scale if weighted else 1)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted.square().sum(), inputs))
