"""mcore. The hook on megatron-core's forward-backward functions: they run packed global batches, in
training and in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from megatron.packing.device import Device
from megatron.packing.plugin_rules import PASS_RULES
from megatron.packing.rules import check_rules
from megatron.packing.step.global_batch import GROUPS, GlobalBatch, schedule_global_batch
from megatron.packing.step.groups import data_groups, device_of
from megatron.packing.step.prefetch import Prefetcher
from megatron.packing.step.settings import PackingOptions


class PackedLosses(list):
    """Results of the forward-backward function, one entry per microbatch, and the `batch` that it
    ran.
    """

    def __init__(self, losses: list[Any], batch: GlobalBatch, waiting_payload_bytes: int) -> None:
        super().__init__(losses)
        self.batch = batch
        self.waiting_payload_bytes = waiting_payload_bytes
        """Bytes of payloads of the global batches that are prepared ahead, on the rank that holds
        most of each.
        """


class PackedPasses:
    """`forward_backward_func` (from megatron-core's `get_forward_backward_func`), fed by the
    packing scheduler.

    Takes the same arguments. `data_iterator` gives samples (see `data_schedule.wrap_dataloader`)
    and `num_microbatches` says how often each data rank calls `next`; how many microbatches then
    run is the scheduler's decision. The model's config must pass `check_config`. In training
    outliers wait for company (see `delay`) where its `PackingOptions` have a queue, and global
    batches are prepared ahead where they say so: then all training steps must give the same
    iterator, which stands that many batches ahead of the step. With `forward_only` neither happens.
    """

    def __init__(self, forward_backward_func: Callable[..., list[Any]]) -> None:
        update_wrapper(self, forward_backward_func)
        self._forward_backward = forward_backward_func
        self._training: _Training | None = None

    def __call__(
        self,
        *,
        data_iterator: object,
        model: object,
        num_microbatches: int,
        pg_collection: ProcessGroupCollection | None = None,
        forward_only: bool = False,
        **arguments: object,
    ) -> PackedLosses:
        config = get_model_config(model[0] if isinstance(model, list) else model)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(GROUPS)
        device = Device.at(device_of(groups.pp))
        check_config(config, device)
        if forward_only:
            if self._training is not None:
                self._training.batches.settle()
            done = 0 if self._training is None else self._training.num_steps_done
            step = PackingOptions.of(config).step + done
            batch = schedule_global_batch(
                data_iterator, config, num_microbatches, groups, step=step
            )
        else:
            if self._training is None:
                self._training = _Training(data_iterator, config, num_microbatches, groups)
            batch = self._training.next(data_iterator, num_microbatches)
        losses = self._forward_backward(
            data_iterator=batch.iterators(config.virtual_pipeline_model_parallel_size, device),
            model=model,
            num_microbatches=batch.stats.microbatches,
            pg_collection=pg_collection,
            forward_only=forward_only,
            **arguments,
        )
        waiting = 0 if self._training is None else self._training.batches.waiting_bytes
        return PackedLosses(losses, batch, waiting)

    def close(self) -> None:
        """Ends what prepares batches ahead; before the process groups are destroyed.

        After an error of this rank alone others may never prepare theirs, so it waits a minute and
        no longer.
        """
        if self._training is not None:
            self._training.batches.close(timeout_seconds=60.0)


class _Training:
    """The global batches of the training steps of a model, each as its step finds it."""

    def __init__(
        self,
        data_iterator: object,
        config: TransformerConfig,
        num_fetches: int,
        groups: ProcessGroupCollection,
    ) -> None:
        options = PackingOptions.of(config)
        self._ahead = options.prefetch_global_batches
        self._iterator, self._num_fetches = _only(data_iterator), num_fetches
        self._config, self._groups = config, groups
        self._step, self._queue = options.step, options.delay_queue
        self._working_queue = self._queue
        if self._ahead:
            data_groups(groups)  # made by this thread: that is collective over the world
            # Below the rerun state machine's iterator, which must not record what is read ahead.
            self._iterator = getattr(self._iterator, "iterable", self._iterator)
            self._working_queue = None if self._queue is None else self._queue.copy()
        self._given = _only(data_iterator)
        self.num_steps_done = 0
        """Training steps whose batch was handed out."""
        self._last: GlobalBatch | None = None
        store = options.payloads
        self.batches = Prefetcher(
            self._prepare,
            self._ahead,
            size_of=None if store is None else _payload_bytes,
            max_waiting=0 if store is None else store.max_waiting_bytes,
            device=Device.of(config),
        )

    def next(self, data_iterator: object, num_fetches: int) -> GlobalBatch:
        if not self._ahead:
            self._iterator, self._num_fetches = _only(data_iterator), num_fetches
            # megatron-core's rerun state machine runs a step again whose loss looked wrong, on the
            # samples that its iterator has recorded: the same step, so the same schedule.
            is_again = getattr(self._iterator, "replaying", False)
            self._step -= is_again
            self.num_steps_done += not is_again
            return next(self.batches)
        if _only(data_iterator) is not self._given or num_fetches != self._num_fetches:
            raise ValueError(
                "with --prefetch-global-batches every training step must be given the same data "
                "iterator and number of microbatches, as its batches are loaded ahead; pass "
                "--prefetch-global-batches 0"
            )
        if (
            self._last is not None
            and get_rerun_state_machine().state is RerunState.RERUNNING_IN_PLACE
        ):
            # Its iterator records nothing of data that are read ahead: the batch itself is kept.
            return self._last
        self._last = batch = next(self.batches)
        self.num_steps_done += 1
        if self._queue is not None:
            # The working queue is steps ahead; this one is what a checkpoint of this step saves.
            self._queue.finish(batch.delayed)
        return batch

    def _prepare(self) -> GlobalBatch:
        batch = schedule_global_batch(
            self._iterator,
            self._config,
            self._num_fetches,
            self._groups,
            queue=self._working_queue,
            step=self._step,
        )
        self._step += 1
        return batch


def _payload_bytes(batch: GlobalBatch) -> int:
    return batch.stats.payload_bytes


def _only(data_iterator: object) -> Any:
    """Returns the iterator that is read: with interleaving the first of a list."""
    return data_iterator[0] if isinstance(data_iterator, (list, tuple)) else data_iterator


def check_config(config: TransformerConfig, device: Device) -> None:
    """Raises ValueError for a config under which packs would be weighted wrongly, mixed up, or hang
    on `device`.
    """
    check_rules(PASS_RULES, config=config, device=device)
