"""mcore. Sequence packing for a training script that exists: whatever calls megatron-core's
`get_forward_backward_func` trains packed.

    plugin.add_arguments(parser)               # --sequence-packing and its companions
    plugin.install(config, arguments)          # before the model is built
    # In the script's forward step:
    batch = get_batch_on_this_rank_for_sequence_packing(data_iterator)

The three forward-backward functions of `megatron.core.pipeline_parallel.schedules` are replaced by
ones that pack for models whose config asks for it and pass all others through. `wrap_dataloader`
and what belongs to it also appear in `megatron.core.datasets.data_schedule`, where Megatron-LM's
users look; a data iterator that a script wrapped itself is not packed again. `uninstall` takes back
both.

Unsupported settings raise ValueError (see `plugin_checks`): at once where the config shows them,
else when a forward-backward function first sees the model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from megatron.core.datasets import data_schedule as exposed_in
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model

from megatron.packing.model.layers.routers import define_te_general_gemm, mask_padding
from megatron.packing.model.loss import auxiliary_losses
from megatron.packing.model.mcore_versions import check_version, naming_version
from megatron.packing.plugin_checks import (
    check_config,
    check_groups,
    check_modules,
    check_training,
    checking_loss,
    checking_packs,
)
from megatron.packing.plugin_options import add_arguments, asks_for_packing, configure

if TYPE_CHECKING:
    from megatron.packing.model.pipeline import PackedPasses
    from megatron.packing.step.payloads import PayloadStore

# The other files of this package are imported when they are needed: older megatron-cores lack names
# that they import, and would end in an ImportError instead of `check_version`'s message.

__all__ = ["PackingSchedule", "add_arguments", "install", "uninstall"]
USER = "the packing plug-in"
SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


def install(
    config: TransformerConfig,
    arguments: argparse.Namespace | None = None,
    *,
    megatron_lm_calls: bool = False,
    payloads: PayloadStore | None = None,
) -> ExitStack:
    """Makes models of `config` train packed.

    Call it before the model is built and before `get_forward_backward_func()`; that name may have
    been imported earlier. It is idempotent; call it once per config. Without --sequence-packing
    `config` is not changed, and its models train unpacked. With --outlier-delay-steps,
    `config.sequence_packing_options` has the run's `delay_queue`, whose state belongs in the
    script's checkpoints.

    Args:
        arguments: options by `add_arguments`; None takes those of `config`.
        megatron_lm_calls: accept Megatron-LM's own calls (see `conventions`). The result of the
            forward-backward function then ends in two more entries: the sums of lengths and of
            their squares.
        payloads: how payloads of samples (images) are made, moved and bounded; None for samples of
            tokens alone.

    Returns:
        A context manager, whose end takes back a first installation.

    Raises:
        RuntimeError: for a megatron-core that is too old, or lacks what packing needs. One that is
            newer than those that were checked gets a warning.
        ValueError: for settings that are not supported.
    """
    check_version(USER, "or leave plugin.install out")
    if arguments is None or asks_for_packing(arguments):
        configure(config, arguments, megatron_lm_calls, payloads)
        with naming_version(USER):
            check_config(config)
            define_te_general_gemm()
    taken_back = ExitStack()
    if _replace_schedules():
        taken_back.callback(uninstall)
    for name, value in _exposed(config if megatron_lm_calls else None).items():
        is_ours = _is_ours(getattr(exposed_in, name, None))
        if not hasattr(exposed_in, name) or (megatron_lm_calls and is_ours):
            setattr(exposed_in, name, value)
    return taken_back


def _replace_schedules() -> bool:
    """Replaces those of megatron-core's functions that are not replaced yet; False for none."""
    found = {name: getattr(schedules, name) for name in SCHEDULES}
    plain = {name: each for name, each in found.items() if not isinstance(each, PackingSchedule)}
    for name, function in plain.items():
        setattr(schedules, name, PackingSchedule(function))
    return bool(plain)


def uninstall() -> None:
    """Restores megatron-core as it was before `install`.

    With --prefetch-global-batches call it on all ranks, before the process groups are destroyed.
    Raises RuntimeError if the forward-backward functions were replaced since.
    """
    found = {name: getattr(schedules, name) for name in SCHEDULES}
    ours = [name for name, value in vars(exposed_in).items() if _is_ours(value)]
    for name, function in found.items():
        if ours and not isinstance(function, PackingSchedule):
            raise RuntimeError(
                f"{schedules.__name__}.{name} was replaced after install; take that back first"
            )
    for name, function in found.items():
        if isinstance(function, PackingSchedule):
            function.close()
            setattr(schedules, name, function.plain)
    for name in ours:
        delattr(exposed_in, name)


class PackingSchedule:
    """One of megatron-core's forward-backward functions, which packs for models whose config asks
    for it and then returns a `pipeline.PackedLosses`.
    """

    def __init__(self, plain: Callable[..., list[Any]]) -> None:
        update_wrapper(self, plain)
        self.plain = plain
        self._packed: WeakKeyDictionary[torch.nn.Module, PackedPasses] = WeakKeyDictionary()
        self._checked: WeakSet[torch.nn.Module] = WeakSet()

    def __call__(
        self,
        *,
        data_iterator: object,
        model: Any,
        forward_step_func: Callable[..., Any],
        **arguments: object,
    ) -> list[Any]:
        """See megatron-core's `get_forward_backward_func`."""
        chunks = model if isinstance(model, list) else [model]
        config = get_model_config(chunks[0])
        if getattr(config, "sequence_packing_scheduler", None) is None:
            return self.plain(
                data_iterator=data_iterator,
                model=model,
                forward_step_func=forward_step_func,
                **arguments,
            )
        for chunk in chunks:
            self._check_once(chunk)
        groups = arguments.get("pg_collection")
        check_groups(groups)
        if not arguments.get("forward_only"):
            check_training(config)
        run: Callable[..., list[Any]] = self.plain
        if not _is_packed(data_iterator, config, groups):
            run = self._packed_for(chunks[0])
        with auxiliary_losses.installed(), checking_packs(chunks):
            losses = run(
                data_iterator=data_iterator,
                model=model,
                forward_step_func=checking_loss(forward_step_func),
                **arguments,
            )
        return _with_sums(losses, config)

    def close(self) -> None:
        """Ends the threads that prepare batches ahead."""
        for passes in self._packed.values():
            passes.close()

    def _packed_for(self, chunk: torch.nn.Module) -> PackedPasses:
        from megatron.packing.model.pipeline import PackedPasses

        if chunk not in self._packed:
            self._packed[chunk] = PackedPasses(self.plain)
        return self._packed[chunk]

    def _check_once(self, chunk: torch.nn.Module) -> None:
        if chunk not in self._checked:
            with naming_version(USER):
                check_config(get_model_config(chunk))
                check_modules(chunk)
                _leave_out_masked_tokens(chunk)
                _give_whole_packs(chunk)
                mask_padding(chunk)
            self._checked.add(chunk)


def _give_whole_packs(chunk: torch.nn.Module) -> None:
    from megatron.packing.model.attention.frequencies import keep_frequencies
    from megatron.packing.model.attention.rotary import give_whole_packs

    give_whole_packs(chunk)
    keep_frequencies(chunk)


def _leave_out_masked_tokens(chunk: torch.nn.Module) -> None:
    from megatron.packing.model.loss.head import skip_masked_tokens
    from megatron.packing.step.settings import PackingOptions

    gpt = unwrap_model(chunk)
    if not isinstance(gpt, GPTModel) or PackingOptions.of(gpt.config).logits_of_masked_tokens:
        return
    # A script's own hook on the output layer needs logits, all of them.
    if not (gpt.post_process and gpt.output_layer._forward_hooks):
        skip_masked_tokens(gpt)


def _is_packed(data_iterator: object, config: object, groups: object) -> bool:
    """Returns whether the script called `wrap_dataloader` itself; the same on all ranks.

    Every rank then has its iterator. With Megatron-LM's calls tensor-parallel rank 0 alone has one,
    and the others receive the answer from it.
    """
    from megatron.packing.conventions import from_first_rank
    from megatron.packing.data_schedule import PackedIterator
    from megatron.packing.step.settings import PackingOptions

    first = (
        data_iterator[0]
        if isinstance(data_iterator, (list, tuple)) and data_iterator
        else data_iterator
    )
    is_packed = isinstance(first, PackedIterator)
    return (
        from_first_rank(is_packed, groups)
        if PackingOptions.of(config).megatron_lm_calls
        else is_packed
    )


def _with_sums(losses: list[Any], config: object) -> list[Any]:
    from megatron.packing.model.pipeline import PackedLosses
    from megatron.packing.step.settings import PackingOptions

    if isinstance(losses, PackedLosses) and PackingOptions.of(config).megatron_lm_calls:
        losses += [losses.batch.stats.tokens, losses.batch.stats.square_sum]
    return losses


def _exposed(config_of_calls: TransformerConfig | None) -> dict[str, Any]:
    """Returns the functions that appear in `exposed_in`, by name: Megatron-LM's own calls where a
    config is given for them.
    """
    from megatron.packing import conventions, data_schedule

    names = [
        "wrap_data_iterator",
        "wrap_iterator_helper",
        "get_batch_on_this_rank_for_sequence_packing",
    ]
    if config_of_calls is None:
        return {name: getattr(data_schedule, name) for name in ["wrap_dataloader", *names]}
    names += ["BasePackingScheduler", "register_scheduler"]
    calls = {name: getattr(conventions, name) for name in names}
    return {
        **calls,
        "wrap_dataloader": partial(conventions.wrap_dataloader, installed=config_of_calls),
    }


def _is_ours(value: object) -> bool:
    return str(getattr(getattr(value, "func", value), "__module__", None)).startswith(
        "megatron.packing."
    )
