"""mcore. megatron-core on CPU: where its functions say `cuda`, they read `cpu`.

`torch.cpu` mirrors the part of `torch.cuda` that training needs (`current_device`, `synchronize`,
streams), so one rule covers all sites: in the code objects of the modules named below, the
attribute `cuda` becomes `cpu` (`torch.cuda.current_device()`, `tensor.cuda()`), and the literals
`"cuda"` and `"torch.cuda.FloatTensor"` become their CPU counterparts. Code objects are changed in
place, so that names that other modules imported before change too; it costs nothing at run time,
works under `torch.compile`, and leaves torch itself untouched. Three things need more than the
rule: the random number tracker (its setters silently do nothing without CUDA), the context-parallel
RoPE slice (pinned memory) and the experts' side stream.

Where CUDA is available `install()` does nothing. A megatron-core that this was not checked with is
refused: an unseen site would otherwise appear in the middle of somebody's run.

The other way, a `torch.overrides.TorchFunctionMode` that maps devices in every call of the process,
was tried with both releases. It costs a third of a step of small models and lies to all code in the
process (docs/reference/megatron-core.md).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from megatron.packing.device import Device
from megatron.packing.model.mcore_versions import check_version

_MODULES = (
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.state_dict_saver",
    "distributed.param_and_grad_buffer",
    "models.common.embeddings.rotary_pos_embedding",
    "models.common.language_module.language_module",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "optimizer.grad_scaler",
    "optimizer.optimizer",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "tensor_parallel.data",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.utils",
    "timers",
    "transformer.moe.moe_utils",
    "transformer.moe.router",
    "transformer.moe.token_dispatcher",
    "transformer.multi_token_prediction",
    "transformer.utils",
    "utils",
)
_NAMES = {"cuda": "cpu"}
_LITERALS = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}
# Functions that ask whether there is a GPU, or that reach for what torch.cpu lacks: they are right
# as they are, or never run on CPU.
_LEFT_ALONE = {
    "is_available",
    "empty_cache",
    "get_device_properties",
    "nvtx",
    "memory_allocated",
    "default_stream",
}


class Change(NamedTuple):
    """One function of megatron-core that reads differently on CPU."""

    where: str
    what: str


_installed: list[Change] = []


def install() -> list[Change]:
    """Makes megatron-core run on CPU; returns all that was changed (empty where CUDA is).
    Idempotent.

    Raises RuntimeError for a megatron-core that was not checked.
    """
    if Device.here().is_gpu or _installed:
        return list(_installed)
    check_version("megatron-core on CPU", "or run where CUDA is available")
    changed: list[Change] = []
    for function, code, change in rewritten_functions():
        function.__code__ = code
        changed.append(change)
    changed.extend(_use_cpu_generator())
    changed.append(_slice_rope_without_pinned_memory())
    changed.extend(_dispatch_tokens_without_copies())
    _installed.extend(changed)
    return list(_installed)


@cache
def rewritten_functions() -> tuple[tuple[types.FunctionType, types.CodeType, Change], ...]:
    """Returns the functions of megatron-core that read differently on CPU, each with its new code.

    Nothing is changed yet: processes that are forked afterwards need not find them again.
    """
    modules = (importlib.import_module(f"megatron.core.{name}") for name in _MODULES)
    return tuple(
        found
        for module in modules
        for function in _functions_of(module)
        if (found := rewritten(function, _LITERALS, _NAMES)) is not None
    )


def report() -> str:
    """Returns a readable list of every change that `install` made."""
    return "\n".join(f"{change.where}: {change.what}" for change in _installed) or "nothing changed"


def _functions_of(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Yields each plain function defined in `module`, methods and wrapped ones included, once."""
    seen: set[int] = set()
    todo = [
        value
        for value in vars(module).values()
        if getattr(value, "__module__", None) == module.__name__
    ]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if inspect.isclass(value):
            todo.extend(vars(value).values())
        elif isinstance(value, property):
            todo.extend(part for part in (value.fget, value.fset) if part is not None)
        elif hasattr(value, "__wrapped__"):
            todo.append(value.__wrapped__)
        elif isinstance(value, (staticmethod, classmethod)):
            todo.append(value.__func__)
        elif isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
            yield value


def rewritten(
    function: types.FunctionType, literals: Mapping[str, str], names: Mapping[str, str]
) -> tuple[types.FunctionType, types.CodeType, Change] | None:
    """Returns `function` with code that reads other string literals and other names of globals and
    attributes; None where it reads none of them.
    """
    code, changed = _rewritten(function.__code__, literals, names)
    if not changed:
        return None
    where = f"{function.__module__}.{function.__qualname__}"
    return function, code, Change(where, ", ".join(sorted(set(changed))))


def rewrite(
    function: types.FunctionType, literals: Mapping[str, str], names: Mapping[str, str]
) -> list[Change]:
    """Changes `function` itself."""
    found = rewritten(function, literals, names)
    if found is None:
        return []
    _, function.__code__, change = found
    return [change]


def _rewritten(
    code: types.CodeType, literals: Mapping[str, str], names: Mapping[str, str]
) -> tuple[types.CodeType, list[str]]:
    """Returns `code` with literals and names replaced, nested functions included; and what was
    replaced.
    """
    changed: list[str] = []

    def constant(value: object) -> object:
        if isinstance(value, types.CodeType):
            inner, inner_changed = _rewritten(value, literals, names)
            changed.extend(inner_changed)
            return inner
        if isinstance(value, tuple):
            return tuple(constant(item) for item in value)
        if isinstance(value, str) and value in literals:
            changed.append(f'"{value}" -> "{literals[value]}"')
            return literals[value]
        return value

    constants = tuple(constant(value) for value in code.co_consts)
    new_names = code.co_names
    if not _LEFT_ALONE & set(new_names):
        new_names = tuple(names.get(name, name) for name in new_names)
        changed += [f".{old} -> .{new}" for old, new in zip(code.co_names, new_names) if old != new]
    return code.replace(co_consts=constants, co_names=new_names), changed


def _use_cpu_generator() -> list[Change]:
    """Makes the tensor-parallel random states those of the CPU generator."""
    from megatron.core.tensor_parallel import random as tracked

    def get_state(
        device: object = None, clone: bool = False, graph_safe: bool = False
    ) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    def add(self: Any, name: str, seed: int) -> None:
        if seed in self.seeds_ or name in self.states_:
            raise ValueError(f"random state {name!r} or seed {seed} was added before")
        self._is_initialized = True
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self: Any, name: str = tracked._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        outer_name, outer = self._current_state_name, torch.get_rng_state()
        if outer_name in self.states_:
            self.states_[outer_name] = outer
        torch.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            self._current_state_name = outer_name
            torch.set_rng_state(self.states_.get(outer_name, outer))

    replaced: list[tuple[Any, str, Callable]] = [
        (tracked, "_get_cuda_rng_state", get_state),
        (tracked, "_set_cuda_rng_state", set_state),
        (tracked.CudaRNGStatesTracker, "add", add),
        (tracked.CudaRNGStatesTracker, "fork", fork),
    ]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    # torch.cuda.manual_seed(s) -> torch.random.manual_seed(s): torch.cpu has no generator of its
    # own.
    seeding = rewrite(tracked.model_parallel_cuda_manual_seed, {}, {"cuda": "random"})
    where = "megatron.core.tensor_parallel.random"
    return [
        Change(f"{where}.{name}", "uses the CPU generator") for _, name, _ in replaced
    ] + seeding


def _slice_rope_without_pinned_memory() -> Change:
    from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding

    def get_pos_emb_on_this_cp_rank(
        pos_emb: torch.Tensor, seq_dim: int, cp_group: Any
    ) -> torch.Tensor:
        pieces = pos_emb.chunk(2 * cp_group.size(), dim=seq_dim)
        return torch.cat((pieces[cp_group.rank()], pieces[-1 - cp_group.rank()]), dim=seq_dim)

    for module in (rope_utils, rotary_pos_embedding):
        module.get_pos_emb_on_this_cp_rank = get_pos_emb_on_this_cp_rank  # type: ignore[attr-defined]
    return Change(f"{rope_utils.__name__}.get_pos_emb_on_this_cp_rank", "no pinned memory")


class _CpuStream(torch.cpu.Stream):
    """A stream whose events are over when they are recorded; torch's own returns None for one."""

    def record_event(self, event: object = None) -> Any:
        return torch.cpu.Event()


def _dispatch_tokens_without_copies() -> list[Change]:
    """The experts' all-to-all takes sizes as numpy arrays, made where tensors leave the GPU; on CPU
    they never do.
    """
    from megatron.core.transformer.moe import token_dispatcher

    def maybe_move_tensor_to_cpu(
        tensor: object, as_numpy: bool = False, record_stream: bool = False
    ) -> object:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _CpuStream()
    where = token_dispatcher.__name__
    return [
        Change(f"{where}.maybe_move_tensor_to_cpu", "only makes numpy arrays"),
        Change(f"{where}.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream", "a stream on the CPU"),
    ]
