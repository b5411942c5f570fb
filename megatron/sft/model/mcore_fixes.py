"""mcore. Mends faults of megatron-core without Transformer Engine, on CUDA as much as on CPU, from
outside.

Each function mends one, and only where megatron-core has it: 0.19 defines `te_general_gemm`, and
0.16.1 has no other keys of groups. docs/reference/megatron-core.md lists them for users.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron.packing.device import Device
from megatron.packing.model.layers.routers import define_te_general_gemm
from megatron.packing.model.loss import auxiliary_losses
from megatron.sft.model import cpu_offload, host_time, weight_gradients
from megatron.sft.model.checkpoints import read, shares


def install() -> None:
    """Mends all of them; what a later megatron-core has mended is left alone. Idempotent."""
    define_te_general_gemm()
    _ask_for_no_version_of_nothing()
    _recompute_norms_without_fp8()
    _recompute_without_a_compiler()
    _load_distributed_adam()
    _count_float32_weights_first()
    _tell_parameter_groups_apart_by_what_they_are()
    _save_without_other_processes()
    _keep_norms_on_the_device()
    _clip_in_place()
    _sum_gradients_of_words()
    read.install()
    shares.install()
    cpu_offload.install()
    host_time.install()
    weight_gradients.install()
    auxiliary_losses.install()


def _ask_for_no_version_of_nothing() -> None:
    """Answers False where options of a precision-aware optimizer compare Transformer Engine's
    version with another, and there is none.
    """
    from megatron.core import utils
    from megatron.core.optimizer import optimizer_config

    if utils.get_te_version() is None:
        optimizer_config.is_te_min_version = lambda *_, **__: False  # type: ignore[assignment]


def _recompute_norms_without_fp8() -> None:
    """Recomputes norms without fp8: the default, False, is taken for a kind of fp8, whose state is
    then asked of Transformer Engine, installed or not.
    """
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    initialize = CheckpointWithoutOutput.__init__
    if getattr(initialize, "is_mended", False):
        return

    def with_fp8_if_asked(self: Any, fp8: Any = None) -> None:
        initialize(self, fp8 or None)

    with_fp8_if_asked.is_mended = True  # type: ignore[attr-defined]
    CheckpointWithoutOutput.__init__ = with_fp8_if_asked


def _recompute_without_a_compiler() -> None:
    """Gives recomputed outputs back by a copy on CPU, as 0.16.1 does everywhere.

    0.19 lets both share memory by C++ that it compiles in the first backward pass: half a minute
    per core, and an error without ninja and a compiler. On a GPU, whose images have both, that
    saves memory and stays.
    """
    from megatron.core.tensor_parallel import random

    get_compiled = getattr(random, "_get_share_storage", None)
    if get_compiled is None or hasattr(get_compiled, "copies_on_cpu") or Device.here().is_gpu:
        return

    def share(output: Tensor, recomputed: Tensor) -> None:
        storage, source = output.untyped_storage(), recomputed.untyped_storage()
        storage.resize_(source.size())
        storage.copy_(source)

    def get_share_storage() -> Callable[[Tensor, Tensor], None]:
        return share

    get_share_storage.copies_on_cpu = True  # type: ignore[attr-defined]
    random._get_share_storage = get_share_storage


def _load_distributed_adam() -> None:
    """Restores the `step` that torch's Adam keeps per parameter, in which the distributed optimizer
    has two faults.

    `fully_reshardable` checkpoints leave it out, then look for it (KeyError). And all parameters
    are given one tensor, which each of them then increments: after a resume the bias correction
    runs ahead by the number of parameters.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if hasattr(DistributedOptimizer, "restores_steps"):
        return
    load_state_dict = DistributedOptimizer.load_state_dict
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def load_with_own_steps(self: Any, state_dict: dict[str, Any]) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()

    def set_states_but_step(self: Any, model_param: object, tensors: dict[str, Any]) -> None:
        if not self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            group_index, group_order = self.model_param_group_index_map[model_param]
            main_param = self.optimizer.param_groups[group_index]["params"][group_order]
            state = self.optimizer.state[main_param]
            if "step" in state:  # restored before, from the parameter groups
                tensors = {"step": state["step"], **tensors}
        set_states(self, model_param, tensors)

    DistributedOptimizer.load_state_dict = load_with_own_steps
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_but_step
    DistributedOptimizer.restores_steps = True  # type: ignore[attr-defined]


def _count_float32_weights_first() -> None:
    """Counts the weights of a group in float32 first, as the distributed optimizer holds them.

    It counts them in the order of their buffers: of a group with float32 and half precision, the
    states of one weight are saved and loaded as those of another.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    count = DistributedOptimizer._build_optimizer_group_ranges
    if hasattr(count, "has_order"):
        return

    def count_in_order(
        cls: object, groups: object, buffers: list[dict[tuple[torch.dtype, ...], Any]]
    ) -> Any:
        return count(
            groups, sorted(buffers, key=lambda buffer: next(iter(buffer))[0] != torch.float32)
        )

    count_in_order.has_order = True  # type: ignore[attr-defined]
    DistributedOptimizer._build_optimizer_group_ranges = classmethod(count_in_order)  # type: ignore[method-assign, assignment]


def _tell_parameter_groups_apart_by_what_they_are() -> None:
    """Finds a checkpoint's parameter groups by what their parameters are, not by the learning rate
    they had.

    0.19 compares limits of the learning rate and of weight decay, too, and refuses a run that
    continues with its own.
    """
    from megatron.core.optimizer import distrib_optimizer, optimizer

    kinds = {"wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"}
    for module in (optimizer, distrib_optimizer):
        keys = module.param_group_identifier_keys
        module.param_group_identifier_keys = tuple(key for key in keys if key in kinds)  # type: ignore[attr-defined]


def _save_without_other_processes() -> None:
    """Keeps results of a save in a queue of this process, which writes itself, too
    (checkpoints/write.py); so does megatron-core from 0.17 on.

    megatron-core 0.16 starts a process for that queue in the first save. A launcher's SIGTERM to
    all of a job's processes ends it, and every later save with it. After a SIGKILL of the rank it
    lives on, and holds its connections open, so that others wait for it.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()  # type: ignore[assignment]


def _keep_norms_on_the_device() -> None:
    """Computes the norm of all gradients on the device, to the same bits.

    megatron-core's way reads the norm of each parameter, one after the other: hundreds of waits in
    every step.
    """
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    def norm(
        chunk_size: int, noop_flag: Tensor, tensors: Sequence[list[Tensor]], *_: object
    ) -> tuple[Tensor, None]:
        (gradients,) = tensors
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)  # of --main-grads-dtype bf16
        norms = torch._foreach_norm(gradients, dtype=dtype)
        return torch.stack(norms).norm().float().reshape(1), None

    # The norms of Transformer Engine and Apex do not wait for the device in the first place.
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm


def _clip_in_place() -> None:
    """Scales all gradients in place and in one call: megatron-core's way copies each one twice."""
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_scale

    def scale(
        chunk_size: int, noop_flag: Tensor, tensors: Sequence[list[Tensor]], factor: float
    ) -> None:
        gradients, same_gradients = tensors
        assert all(one is other for one, other in zip(gradients, same_gradients))
        torch._foreach_mul_(gradients, factor)

    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale


def _sum_gradients_of_words() -> None:
    """Sums a word's gradient in float32 on CPU, in whatever type the embedding is.

    torch's `embedding` adds the rows of its tokens in bfloat16 there, one by one: the gradient of a
    word that comes 10,000 times stops growing at 256 of its rows, as 256 + 1 is 256.
    """
    from megatron.core.tensor_parallel import layers

    if layers.F is not functional:
        return

    def embedding(ids: Tensor, weight: Tensor) -> Tensor:
        if weight.is_cuda or weight.dtype not in (torch.bfloat16, torch.float16):
            return functional.embedding(ids, weight)
        return weight.index_select(0, ids.flatten()).view(*ids.shape, -1)

    names = {**vars(functional), "embedding": embedding}
    layers.F = SimpleNamespace(**names)  # type: ignore[assignment]
