"""megatron-core's faults are mended once, and what is right is left alone."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

METHODS = (
    *("_set_main_param_and_optimizer_states", "load_state_dict", "_build_optimizer_group_ranges"),
)


@pytest.fixture
def optimizer(monkeypatch):
    """An unmended class in the place of megatron-core's, that notes what it is given; and
    megatron-core's has both.
    """
    from megatron.core.optimizer import distrib_optimizer

    from megatron.sft.model import cpu_offload

    cpu_offload.install()  # of megatron-core's class, whichever test comes first

    class DistributedOptimizer:
        calls: list = []  # noqa: RUF012 - of this test's own class
        buffers: list = []  # noqa: RUF012

        def _set_main_param_and_optimizer_states(self, model_param, tensors):
            DistributedOptimizer.calls.append(tensors)

        def load_state_dict(self, state_dict):
            DistributedOptimizer.calls.append(state_dict)

        @classmethod
        def _build_optimizer_group_ranges(cls, groups, buffers):
            return buffers

    for name in METHODS:
        assert callable(getattr(distrib_optimizer.DistributedOptimizer, name))
    monkeypatch.setattr(distrib_optimizer, "DistributedOptimizer", DistributedOptimizer)
    return DistributedOptimizer


def install():
    from megatron.sft.model import mcore_fixes

    mcore_fixes.install()


def a_self(state, precision_aware=False):
    """What the method reads of its optimizer: parameter "p" is the second of group 0, with this
    state.
    """
    return SimpleNamespace(
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=precision_aware),
        model_param_group_index_map={"p": (0, 1)},
        optimizer=SimpleNamespace(
            param_groups=[{"params": ["other", "main"]}], state={"main": state, "other": {}}
        ),
    )


def test_idempotent(optimizer):
    """Wrapped once per call, the method would grow deeper with every set of process groups."""
    install()
    first = [getattr(optimizer, name) for name in METHODS]
    install()
    assert [getattr(optimizer, name) for name in METHODS] == first


def test_adam_keeps_its_step(optimizer):
    """Loading a checkpoint of another layout ends in a KeyError, also on CUDA."""
    install()
    optimizer._set_main_param_and_optimizer_states(
        a_self({"step": 7, "exp_avg": 1}), "p", {"param": 2, "exp_avg": 3}
    )
    assert optimizer.calls == [{"step": 7, "param": 2, "exp_avg": 3}]


def test_a_step_in_the_checkpoint_wins(optimizer):
    """The optimizer's own step would undo what was loaded."""
    install()
    optimizer._set_main_param_and_optimizer_states(a_self({"step": 7}), "p", {"step": 9})
    assert optimizer.calls == [{"step": 9}]


def test_each_parameter_gets_a_step_of_its_own(optimizer):
    """One tensor for all is incremented by each: Adam's bias correction runs ahead after every
    resume.
    """
    install()
    shared = torch.tensor(3.0)
    states: dict[str, dict] = {
        "p": {"step": shared, "exp_avg": 1},
        "q": {"step": shared},
        "fused": {"exp_avg": 1},
        "int": {"step": 3},
    }
    optimizer.load_state_dict(
        SimpleNamespace(optimizer=SimpleNamespace(state=states)), {"loaded": 1}
    )
    assert optimizer.calls == [{"loaded": 1}]
    states["p"]["step"] += 1
    assert (states["p"]["step"], states["q"]["step"], shared) == (4, 3, 3)
    assert states["fused"] == {"exp_avg": 1}
    assert states["int"] == {"step": 3}


@pytest.mark.parametrize(
    ("state", "precision_aware"), [({"exp_avg": 1}, False), ({"step": 7}, True)]
)
def test_other_optimizers_are_left_alone(optimizer, state, precision_aware):
    """Fused optimizers keep no step per parameter, and must not be given one."""
    install()
    optimizer._set_main_param_and_optimizer_states(
        a_self(state, precision_aware), "p", {"param": 2}
    )
    assert optimizer.calls == [{"param": 2}]


def test_parameter_groups_are_matched_whatever_their_learning_rate():
    """A continued run with a learning rate of its own would be refused."""
    from megatron.core.optimizer import distrib_optimizer, optimizer

    install()
    for module in (optimizer, distrib_optimizer):
        assert module.param_group_identifier_keys == (
            "wd_mult",
            "lr_mult",
            "is_expert_parallel",
            "is_decoupled_lr",
        )


def test_te_general_gemm_is_defined_only_when_missing(monkeypatch):
    """Without the name the router of experts raises NameError; overwritten, it would run without
    its fast kernel.
    """
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    install()
    assert moe_utils.te_general_gemm is None
    kernel = object()
    monkeypatch.setattr(moe_utils, "te_general_gemm", kernel)
    install()
    assert moe_utils.te_general_gemm is kernel


def test_the_norm_of_gradients_is_that_of_megatron_core():
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    from megatron.sft.model import cpu_support

    install()
    cpu_support.install()
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(n, 1 + n % 7, generator=generator) for n in (1, 5, 64, 1000)]
    (expected, _), (found, _) = (
        norm(2048, torch.zeros(1), [gradients], False)
        for norm in (local_multi_tensor_l2_norm, clip_grads.l2_norm_impl)
    )
    assert clip_grads.l2_norm_impl is not local_multi_tensor_l2_norm
    assert torch.equal(found, expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def test_gradients_are_clipped_to_the_same_bits():
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_scale

    install()
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(n, 1 + n % 7, generator=generator) for n in (1, 5, 64, 1000)]
    expected, found = ([each.clone() for each in gradients] for _ in range(2))
    for scale, them in (
        (local_multi_tensor_scale, expected),
        (clip_grads.multi_tensor_scale_impl, found),
    ):
        scale(2048, torch.zeros(1), [them, them], 0.3)
    assert clip_grads.multi_tensor_scale_impl is not local_multi_tensor_scale
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(found[0], gradients[0])


def test_float32_weights_are_counted_first(optimizer):
    """As the optimizer holds them; of the others the order stays."""
    half, other, whole = (
        (dtype, torch.float32) for dtype in (torch.bfloat16, torch.float16, torch.float32)
    )
    install()
    install()
    found = optimizer._build_optimizer_group_ranges([], [{half: []}, {other: []}, {whole: []}])
    assert found == [{whole: []}, {half: []}, {other: []}]


def test_recomputes_without_a_compiler(monkeypatch):
    """0.19 compiles C++ in the first backward pass of a run that recomputes parts of layers: half a
    minute of each core, and an error where no compiler is.
    """
    from megatron.core.tensor_parallel import random

    def compile_it():
        raise OSError("no ninja")

    monkeypatch.setattr(random, "_get_share_storage", compile_it, raising=False)
    install()
    output, recomputed = torch.zeros(6), torch.arange(6.0)
    part = output.view(2, 3)[1]
    output.untyped_storage().resize_(0)
    random._get_share_storage()(output, recomputed)
    assert part.tolist() == [3, 4, 5]  # a view, too, has its values again
    mended = random._get_share_storage
    install()
    assert random._get_share_storage is mended


@pytest.mark.parametrize(("dtype", "value"), [(torch.bfloat16, 9984), (torch.float32, 10_000)])
def test_gradient_of_a_frequent_word_is_its_sum(dtype, value):
    """torch's embedding stops at 256 on a CPU: a start token of 10,000 sequences hardly learns."""
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    from megatron.sft.model import mcore_fixes

    mcore_fixes.install()
    weight = torch.randn(10, 4).to(dtype).requires_grad_()
    rank_alone = SimpleNamespace(size=lambda: 1)
    layer = SimpleNamespace(
        weight=weight, tp_group=rank_alone, deterministic_mode=False, config=SimpleNamespace(),
        reduce_scatter_embeddings=False,
    )  # fmt: skip
    ids = torch.full((2, 5000), 3)
    ids[0, 0] = 7
    words = VocabParallelEmbedding.forward(layer, ids)
    assert torch.equal(words[0, 0], weight[7])
    assert torch.equal(words[1, 2], weight[3])
    words.sum().backward()
    assert weight.grad is not None
    assert weight.grad[3].tolist() == pytest.approx([value] * 4, abs=value * 1e-3)
    assert weight.grad[7].tolist() == [1] * 4
    assert not weight.grad[0].any()
