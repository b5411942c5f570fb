"""mcore. One rank of a world of any size, alone in this process, on tensors without memory.

`fake_world` makes megatron-core's process groups over torch's fake backend, whose collectives do
nothing, and enters FakeTensorMode, in which tensors have shapes and no memory. The trainer's own
code then builds a model, runs it forward and backward and takes an optimizer step. What it reads
from tensors on the way is answered from `HostReads`.

Everything that is replaced meanwhile is listed in `_replaced`; it is put back at the end.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer import moe
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
)
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.packing.device import CPU, Device
from megatron.packing.model import get_batch
from megatron.packing.model.embeddings import BatchPayloads
from megatron.sft import distributed
from megatron.sft.fit.counter import DEVICE
from megatron.sft.fit.fake import described_gpu, experts, optimizers
from megatron.sft.fit.fake.host_reads import HostReads
from megatron.sft.fit.fake.results import Results
from megatron.sft.images import tower
from megatron.sft.model import cpu_support, mcore_fixes
from megatron.sft.options.config import SFTConfig

aten = torch.ops.aten


@contextmanager
def fake_world(
    config: SFTConfig, rank: int, world_size: int, reads: HostReads, device: Device = CPU
) -> Iterator[FakeTensorMode]:
    """Enters the world as `rank` of it. No other process group may exist in this process.

    device: the one that the trainer will be given, a `DescribedGPU` or the CPU.

    Raises RuntimeError where CUDA is available: hide the devices before torch is imported.
    """
    if Device.here().is_gpu:
        raise RuntimeError("a fake world is a CPU's; set CUDA_VISIBLE_DEVICES= for this process")
    mcore_fixes.install()
    cpu_support.install()
    with ExitStack() as stack:
        _forget_tensors()
        stack.callback(_forget_tensors)
        stack.enter_context(warnings.catch_warnings())
        # Of slow kernels: the run will say so, and the estimate does not wait for them.
        warnings.filterwarnings("ignore", module=r"megatron\.packing\.model\.")
        others = described_gpu.replaced() if device.is_gpu else ()
        of_optimizer = optimizers.replaced(config.optimizer)
        for owner, name, replacement in (*_replaced(reads), *others, *of_optimizer):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        distributed.make_groups(config)
        stack.callback(parallel_state.destroy_model_parallel)
        tensor_parallel.model_parallel_cuda_manual_seed(config.training.seed)
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Kernels(reads, Results(mode)))
        yield mode


def _forget_tensors() -> None:
    """Empties caches of indices that layers share: tensors of one world are none of another's."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.packing.model."):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def _replaced(reads: HostReads) -> Iterator[tuple[Any, str, Any]]:
    """Functions that read values of tensors, that need another process, or that refuse fake
    tensors.
    """
    yield dist, "new_group", _of_fake_backend(dist.new_group)
    yield dist, "all_gather_object", _gather_own
    yield distributed, "_set_pg_timeout", _ignore
    yield torch.nn.Module, "_apply", _apply
    yield torch.UntypedStorage, "copy_", _nothing_to_copy
    # cu_seqlens are the host's, and their values are needed.
    yield get_batch, "packed_seq_params", _with_values(get_batch.packed_seq_params)
    # So are placeholders, and the sizes of images.
    yield BatchPayloads, "placeholders", _with_values(BatchPayloads.placeholders)
    yield tower, "grid_inputs", _with_values(tower.grid_inputs)
    yield P2PCommunicator, "_communicate_shapes", _same_shapes(P2PCommunicator._communicate_shapes)
    # Numbers that they keep from step to step belong to one world; those of losses have its depth.
    for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler):
        yield scaler, "main_loss_backward_scale", None
    yield MTPLossLoggingHelper, "tracker", {}
    if hasattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER"):
        yield moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER", {}
    else:  # megatron-core 0.19
        yield import_module(f"{moe.__name__}.moe_logging"), "_MOE_METRICS_TRACKER", None
    yield from experts.replaced(reads)


def _of_fake_backend(new_group: Callable[..., Any]) -> Callable[..., Any]:
    def make(*arguments: Any, **options: Any) -> Any:
        return new_group(*arguments, **{**options, "backend": "fake"})

    return make


def _gather_own(found: list[Any], own: Any, group: object = None) -> None:
    found[:] = [own] * len(found)


def _ignore(*arguments: object) -> None:
    pass


def _nothing_to_copy(self: torch.UntypedStorage, *arguments: object) -> torch.UntypedStorage:
    """torch's makes fake tensors of both storages, which it keeps for ever."""
    return self


def _apply(
    self: torch.nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> torch.nn.Module:
    """torch's, which swaps fake parameters and loses their attributes; real ones it sets so."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    with torch.no_grad():
        for parameter in self._parameters.values():
            if parameter is not None:
                parameter.data = fn(parameter)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
    return self


def _with_values(plain: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return plain(*arguments, **options)

    return run


def _same_shapes(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A stage sends and receives tensors of one shape: all packs here have equally many tokens."""

    def communicate(self: Any, *arguments: Any, **options: Any) -> tuple[list[int], list[int]]:
        plain(self, *arguments, **options)
        return self.config.fit_shape, self.config.fit_shape

    return communicate


class _Kernels(TorchDispatchMode):
    """Results of operations whose shapes or values depend on what tensors hold."""

    def __init__(self, reads: HostReads, results: Results) -> None:
        super().__init__()
        self._reads, self._results = reads, results

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see `ByteCounter`

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is DEVICE:
            return args[0].fake_device
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            # A norm of one, a step that counts from one, no overflow.
            dtype = args[0].dtype
            return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is aten.nonzero.default:
            assert args[0].dim() == 1
            return args[0].new_empty((self._reads.num_loss_tokens, 1), dtype=torch.int64)
        if func is aten.masked_select.default:
            return args[0].new_empty(self._reads.num_selected)
        if func.namespace == "c10d":
            # torch's fake kernels return as much, at ten times the price; it has none of coalesced
            # collectives.
            work = FakeWork().boxed()
            return (args[0], work) if len(func._schema.returns) == 2 else work
        return self._results.of(func, args, kwargs or {})
