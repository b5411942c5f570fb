"""megatron-core's faults are mended once, and what is right is left alone."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NAME = "_set_main_param_and_optimizer_states"


@pytest.fixture
def optimizer(monkeypatch):
    """megatron-core's class with an unmended method that notes what it is given."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    calls = []
    monkeypatch.setattr(DistributedOptimizer, NAME, lambda self, param, tensors: calls.append(tensors))
    return SimpleNamespace(cls=DistributedOptimizer, calls=calls)


def install():
    from megatron.sft import mcore_fixes

    mcore_fixes.install()


def a_self(state, precision_aware=False):
    """What the method reads of its optimizer: parameter "p" is the second of group 0, with this state."""
    return SimpleNamespace(
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=precision_aware),
        model_param_group_index_map={"p": (0, 1)},
        optimizer=SimpleNamespace(param_groups=[{"params": ["other", "main"]}], state={"main": state, "other": {}}),
    )


def test_idempotent(optimizer):
    """Wrapped once per call, the method would grow deeper with every set of process groups."""
    install()
    first = getattr(optimizer.cls, NAME)
    install()
    assert getattr(optimizer.cls, NAME) is first


def test_adam_keeps_its_step(optimizer):
    """Loading a checkpoint of another layout ends in a KeyError, also on CUDA."""
    install()
    getattr(optimizer.cls, NAME)(a_self({"step": 7, "exp_avg": 1}), "p", {"param": 2, "exp_avg": 3})
    assert optimizer.calls == [{"step": 7, "param": 2, "exp_avg": 3}]


def test_a_step_in_the_checkpoint_wins(optimizer):
    """The optimizer's own step would undo what was loaded."""
    install()
    getattr(optimizer.cls, NAME)(a_self({"step": 7}), "p", {"step": 9})
    assert optimizer.calls == [{"step": 9}]


@pytest.mark.parametrize(("state", "precision_aware"), [({"exp_avg": 1}, False), ({"step": 7}, True)])
def test_other_optimizers_are_left_alone(optimizer, state, precision_aware):
    """Fused optimizers keep no step per parameter, and must not be given one."""
    install()
    getattr(optimizer.cls, NAME)(a_self(state, precision_aware), "p", {"param": 2})
    assert optimizer.calls == [{"param": 2}]


def test_te_general_gemm_is_defined_only_when_missing(monkeypatch):
    """Without the name the router of experts raises NameError; overwritten, it would run without its fast kernel."""
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    install()
    assert moe_utils.te_general_gemm is None
    kernel = object()
    monkeypatch.setattr(moe_utils, "te_general_gemm", kernel)
    install()
    assert moe_utils.te_general_gemm is kernel
