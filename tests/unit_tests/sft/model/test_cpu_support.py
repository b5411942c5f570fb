"""megatron-core reads `cpu` where it says `cuda`, in a process without CUDA only, and torch itself
stays as it is.
"""

from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron.sft.model import cpu_support
from megatron.sft.model.cpu_support import _functions_of, rewrite

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

needs_no_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="install() does nothing where CUDA is"
)


@pytest.fixture(scope="module")
def changes():
    """What install() changed; it works on the whole test process, once."""
    return cpu_support.install()


@pytest.fixture
def not_installed(monkeypatch):
    """The state before the first install()."""
    monkeypatch.setattr(cpu_support, "_installed", [])


@pytest.fixture
def random_state():
    """Leave torch's generator and megatron-core's tracker as they were."""
    from megatron.core.tensor_parallel import random as tracked

    state, tracker = torch.get_rng_state(), tracked._CUDA_RNG_STATE_TRACKER
    initialized = tracked._CUDA_RNG_STATE_TRACKER_INITIALIZED
    yield
    torch.set_rng_state(state)
    tracked._CUDA_RNG_STATE_TRACKER = tracker
    tracked._CUDA_RNG_STATE_TRACKER_INITIALIZED = initialized


# Where it must do nothing.


def test_nothing_where_cuda_is(monkeypatch, not_installed):
    """A training on CUDA would silently run on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu_support, "rewritten_functions", pytest.fail)
    monkeypatch.setattr(cpu_support, "_use_cpu_generator", pytest.fail)
    assert cpu_support.install() == []
    assert cpu_support.report() == "nothing changed"


@needs_no_cuda
def test_an_older_version_is_refused_untouched(monkeypatch, not_installed):
    """A site that other code has would say `cuda` in the middle of somebody's run."""
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", "0.15.0")
    monkeypatch.setattr(cpu_support, "rewritten_functions", pytest.fail)
    with pytest.raises(RuntimeError, match=r"0\.15\.0.*, or run where CUDA is available"):
        cpu_support.install()
    assert cpu_support.report() == "nothing changed"


# What it does.


@needs_no_cuda
def test_install_is_idempotent(changes):
    """A second rewrite, or a second wrap of the tracker, would come with every set of process
    groups.
    """
    from megatron.core.tensor_parallel import layers, random

    code = layers.ColumnParallelLinear.__init__.__code__
    fork = random.CudaRNGStatesTracker.fork
    assert cpu_support.install() == changes
    assert layers.ColumnParallelLinear.__init__.__code__ is code
    assert random.CudaRNGStatesTracker.fork is fork


@needs_no_cuda
def test_report_tells_every_change(changes):
    """What is changed in somebody else's package must be there to read."""
    lines = cpu_support.report().splitlines()
    assert len(lines) == len(changes) == len(set(changes)) > 50
    for site in (
        "megatron.core.tensor_parallel.layers.ColumnParallelLinear.__init__: .cuda -> .cpu",
        'megatron.core.optimizer.clip_grads.get_grad_norm_fp32: "cuda" -> "cpu"',
        "megatron.core.tensor_parallel.random.fork: uses the CPU generator",
    ):
        assert site in lines


@needs_no_cuda
def test_every_listed_module_is_changed(changes):
    """A module that is skipped fails at its first tensor."""
    for name in cpu_support._MODULES:
        assert any(change.where.startswith(f"megatron.core.{name}.") for change in changes), name


@needs_no_cuda
def test_no_site_is_left_in_the_listed_modules(changes):
    """A method, a property, a nested or a wrapped function that is missed raises where only some
    options lead.
    """
    import importlib

    for name in cpu_support._MODULES:
        module = importlib.import_module(f"megatron.core.{name}")
        for function in _functions_of(module):
            left = rewritten(function)[1]
            assert not left, f"{name}: {left}"


@needs_no_cuda
def test_torch_is_untouched(changes):
    """Other code in the process that asks torch for CUDA must get torch's own answer."""
    assert torch.cuda.current_device.__module__ == "torch.cuda"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.current_device()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1).cuda()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


@needs_no_cuda
def test_names_imported_before_change_too(changes):
    """Replaced functions would leave the old ones where another module has imported them by
    name."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer

    assert optimizer.get_grad_norm_fp32 is clip_grads.get_grad_norm_fp32
    assert utils.GlobalMemoryBuffer().get_tensor((2, 3), torch.float32, "test").device.type == "cpu"
    norm = clip_grads.get_grad_norm_fp32(
        [torch.full((4,), 3.0)], grad_stats_parallel_group=_alone()
    )
    assert norm == pytest.approx(6.0)


def _alone():
    """A process group of this process only."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left():
    """Other tests find no process group."""
    import torch.distributed as dist

    was_there = dist.is_initialized()
    yield
    if dist.is_initialized() and not was_there:
        dist.destroy_process_group()


@needs_no_cuda
def test_token_dispatcher_moves_nothing(changes):
    """The experts' all-to-all takes its sizes as numpy arrays; a None event ends the forward
    pass."""
    from megatron.core.transformer.moe import token_dispatcher

    sizes = torch.tensor([3, 4])
    assert token_dispatcher.maybe_move_tensor_to_cpu(sizes) is sizes
    assert token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True) is None
    assert token_dispatcher.maybe_move_tensor_to_cpu(sizes, as_numpy=True).tolist() == [3, 4]
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream.record_event().synchronize()


# The rule.


def rewritten(function, literals=cpu_support._LITERALS, names=cpu_support._NAMES):
    """A copy of `function` after the rule, and what the rule changed in it."""
    copy = type(function)(function.__code__, function.__globals__, closure=function.__closure__)
    copy.__module__, copy.__qualname__ = "here", function.__name__
    return copy, [f"{change.where}: {change.what}" for change in rewrite(copy, literals, names)]


def test_rewrite_literals_and_attributes():
    """The two ways in which megatron-core says where a tensor lives."""

    def place(tensor):
        return tensor.cuda(), torch.zeros(1, device="cuda"), "torch.cuda.FloatTensor", "cuda:0"

    function, changed = rewritten(place)

    class Tensor:
        def cpu(self):
            return "moved"

    moved, zeros, name, other = function(Tensor())
    assert (moved, zeros.device.type, name, other) == (
        "moved",
        "cpu",
        "torch.FloatTensor",
        "cuda:0",
    )
    assert changed == [
        'here.place: "cuda" -> "cpu", "torch.cuda.FloatTensor" -> "torch.FloatTensor", .cuda -> '
        ".cpu"
    ]


def test_rewrite_reaches_nested_code():
    """Backward functions and hooks are made inside of others."""

    def outer():
        def inner():
            return [(lambda: "cuda")() for _ in range(2)]

        return inner()

    function, changed = rewritten(outer)
    assert function() == ["cpu", "cpu"]
    assert changed == ['here.outer: "cuda" -> "cpu"']
    assert outer() == ["cuda", "cuda"]


def test_rewrite_reaches_tuples_of_constants():
    """`x in ("torch.cuda.HalfTensor", ...)` is one constant; missed, no parameter counts as half
    precision.
    """

    def kinds():
        return ("torch.cuda.HalfTensor", ("cuda", 1, None), "torch.cuda.BFloat16Tensor")

    function, changed = rewritten(kinds)
    assert function() == ("torch.HalfTensor", ("cpu", 1, None), "torch.BFloat16Tensor")
    assert changed[0].count("->") == 3


@pytest.mark.parametrize("name", sorted(cpu_support._LEFT_ALONE))
def test_rewrite_leaves_alone_what_is_right(name):
    """`torch.cpu.is_available()` is true: branches for GPUs would be taken."""
    namespace: dict = {}
    exec(f"def ask(torch):\n    return torch.cuda.{name}()", namespace)
    function, changed = rewritten(namespace["ask"], literals={})
    assert changed == []
    assert function.__code__ is namespace["ask"].__code__


def test_rewrite_by_other_names():
    """torch.cpu has no `manual_seed`: there the name is another."""

    def seed(module):
        return module.cuda.manual_seed(3), "cuda"

    function, changed = rewritten(seed, literals={}, names={"cuda": "random"})
    assert function(SimpleNamespace(random=SimpleNamespace(manual_seed=lambda n: n + 1))) == (
        4,
        "cuda",
    )
    assert changed == ["here.seed: .cuda -> .random"]


def test_rewrite_of_a_function_without_cuda_changes_nothing():
    """A code object replaced without need is a change that the report does not tell."""

    def add(a, b=2):
        """cuda is only mentioned."""
        return a + b, "cudart"

    function, changed = rewritten(add)
    assert changed == []
    assert function.__code__ is add.__code__


def test_functions_of_a_module_are_found_wherever_they_hide():
    """A decorated method or a property that is missed keeps its `cuda`."""
    module = ModuleType("hidden")
    source = """
import functools
from os.path import join

def plain(): ...

def wrapper(function):
    @functools.wraps(function)
    def wrapped(*a): ...
    return wrapped

@wrapper
def decorated(): ...

class Outer:
    def method(self): ...
    @staticmethod
    def static(): ...
    @classmethod
    def of_class(cls): ...
    @property
    def value(self): ...
    @value.setter
    def value(self, new): ...
    class Inner:
        @wrapper
        def deep(self): ...
"""
    exec(source, vars(module))
    functions = list(_functions_of(module))
    assert module.decorated.__wrapped__ in functions
    assert module.Outer.Inner.deep.__wrapped__ in functions
    found = [function.__name__ for function in functions]
    assert found.count("value") == 2
    expected = {"plain", "wrapper", "decorated", "method", "static", "of_class", "value", "deep"}
    assert expected <= set(found)
    assert "join" not in found


# Random numbers.


@pytest.fixture
def tracker(changes, random_state):
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 2)
    return tracker


def draw(tracker, name):
    with tracker.fork(name):
        return torch.rand(4).tolist()


@needs_no_cuda
def test_fork_gives_the_numbers_of_its_name(tracker):
    """megatron-core's own tracker silently does nothing here: weights of tensor-parallel ranks
    would be equal.
    """
    expected = {
        name: torch.rand(8, generator=torch.Generator().manual_seed(seed))
        for name, seed in (("a", 1), ("b", 2))
    }
    drawn: dict[str, list[float]] = {name: [] for name in expected}
    for name in ("a", "b", "b", "a"):  # interleaved, each name goes on where it was
        drawn[name] += draw(tracker, name)
    assert {name: torch.tensor(values).equal(expected[name]) for name, values in drawn.items()} == {
        "a": True,
        "b": True,
    }
    assert drawn["a"] != drawn["b"]


@needs_no_cuda
@pytest.mark.parametrize("path", ["aa", "ab", "aba", "abba"])
def test_nested_forks_go_on_with_the_numbers_of_their_name(tracker, path):
    """A layer in the fork of another would draw numbers that were drawn before: dropout masks that
    are equal.
    """
    seeds = {"a": 1, "b": 2}
    expected = {
        name: torch.rand(16, generator=torch.Generator().manual_seed(seed))
        for name, seed in seeds.items()
    }
    drawn: dict[str, list[float]] = {name: [] for name in seeds}
    outside = torch.get_rng_state()

    def enter(names):
        if names:
            with tracker.fork(names[0]):
                drawn[names[0]] += torch.rand(2).tolist()
                enter(names[1:])
                drawn[names[0]] += torch.rand(2).tolist()

    enter(path)
    assert sum(map(len, drawn.values())) == 4 * len(path)
    for name, values in drawn.items():
        assert torch.tensor(values).equal(expected[name][: len(values)]), name
    assert torch.get_rng_state().equal(outside)


@needs_no_cuda
def test_fork_leaves_the_outer_generator(tracker):
    """Numbers outside (order of data, dropout of replicated layers) would depend on what was drawn
    inside.
    """
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    draw(tracker, "a")
    assert torch.rand(2).equal(expected)


@needs_no_cuda
def test_fork_restores_after_an_error(tracker):
    """A forward pass that fails would leave the generator of one name for all."""
    before = torch.get_rng_state()

    def fail():
        with tracker.fork("a"):
            torch.rand(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.get_rng_state().equal(before)


@needs_no_cuda
def test_states_can_be_saved_and_restored(tracker):
    """Recomputed activations would see other dropout than the forward pass, and gradients be
    wrong."""
    states = tracker.get_states()
    first = draw(tracker, "a")
    assert draw(tracker, "a") != first
    tracker.set_states(states)
    assert draw(tracker, "a") == first


@needs_no_cuda
@pytest.mark.parametrize(("name", "seed"), [("a", 3), ("c", 1)])
def test_a_name_or_seed_twice_is_refused(tracker, name, seed):
    """Two names with one seed draw the same numbers."""
    with pytest.raises(ValueError, match="added before"):
        tracker.add(name, seed)


@needs_no_cuda
def test_seeds_of_ranks_and_names_differ(changes, random_state):
    """Equal seeds on tensor-parallel ranks make the shards of a weight copies of one another."""
    from megatron.core.tensor_parallel import random as tracked

    drawn = {}
    for rank in range(2):
        tracked.model_parallel_cuda_manual_seed(
            7, tp_rank=rank, ep_rank=rank, etp_rank=0, force_reset_rng=True
        )
        outside = torch.rand(4).tolist()
        tracker = tracked.get_cuda_rng_tracker()
        drawn[rank] = {name: draw(tracker, name) for name in sorted(tracker.get_states())} | {
            "outside": outside
        }
    shared, own = "data-parallel-rng", ("model-parallel-rng", "expert-parallel-rng")
    assert drawn[0][shared] == drawn[1][shared]
    assert drawn[0]["outside"] == drawn[1]["outside"]
    distinct = [drawn[rank][name] for rank in range(2) for name in own] + [drawn[0][shared]]
    assert len({tuple(values) for values in distinct}) == 5
