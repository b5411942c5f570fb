"""mcore. Megatron-LM's own calls, as its scripts and its packing tests of 2026-08 make them; to be
opted into.

    from megatron.packing.conventions import (
        get_batch_on_this_rank_for_sequence_packing, wrap_data_iterator)

or `plugin.install(config, arguments, megatron_lm_calls=True)`, which has them appear in
`megatron.core.datasets.data_schedule`. Beside what `data_schedule` does:

- tensor-parallel ranks other than 0 give and get None for an iterator (a list of them with virtual
  stages), and receive each microbatch from rank 0: one object and up to five tensors are broadcast
  for each, and one for each extra field;
- an iterator may be over microbatches of the script's own, as Megatron-LM builds them, without a
  `padding_mask`;
- `cu_seqlens` are on the device of the tokens, and the padded ones under all four names of
  PackedSeqParams, as there; our own attention has a copy on the host;
- `num_microbatches` may be left out where one `next` gives the whole share of a rank;
- a scheduler may be a subclass of `BasePackingScheduler`.

Sums stay exact integers over real lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron.packing import data_schedule
from megatron.packing.data_schedule import WrappedDataLoader
from megatron.packing.model.get_batch import Batch, packed_seq_params
from megatron.packing.model.get_batch import (
    get_batch_on_this_rank_for_sequence_packing as get_own_batch,
)
from megatron.packing.scheduling.problem import Schedule, Scheduler, ScheduleRequest
from megatron.packing.scheduling.registry import SCHEDULERS
from megatron.packing.step.groups import device_of

T = TypeVar("T")

_DTYPES = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
    "padding_mask": torch.bool,
}


def wrap_dataloader(
    data_iterator: Any,
    config: Any,
    num_microbatches: int | str | Enum = 1,
    scheduler_type: Any = None,
    pg_collection: ProcessGroupCollection | None = None,
    *,
    installed: Any = None,
) -> WrappedDataLoader:
    """Does what `data_schedule.wrap_dataloader` does; `data_iterator` is None where the
    tensor-parallel rank is not 0.

    Also as `wrap_dataloader(data_iterator, config, scheduler_type, pg_collection)` and
    `wrap_dataloader(data_iterator, scheduler_type)`, which call `next` once.

    Args:
        installed: the config where none is given; `plugin.install` knows it.
    """
    # Megatron-LM's arguments shift to the left where its callers leave some out:
    # (iterator, scheduler) and (iterator, config, scheduler, groups).
    if isinstance(config, (str, Enum)):
        config, num_microbatches = installed, config
    if config is None:
        raise ValueError(
            "wrap_dataloader(data_iterator, scheduler_type) needs a config: call "
            "plugin.install(config, megatron_lm_calls=True) before, or "
            "wrap_dataloader(data_iterator, config, scheduler_type)"
        )
    if isinstance(num_microbatches, (str, Enum)):
        pg_collection = pg_collection or scheduler_type
        num_microbatches, scheduler_type = 1, num_microbatches
    name = scheduler_type.value if isinstance(scheduler_type, Enum) else scheduler_type
    wrapped = data_schedule.wrap_dataloader(
        data_iterator, config, num_microbatches, name, pg_collection
    )
    if _groups(pg_collection).tp.rank() == 0:
        return wrapped
    stages = wrapped.data_iterator
    none: Any = [None] * len(stages) if isinstance(stages, list) else None
    return wrapped._replace(data_iterator=none)


def wrap_data_iterator(
    data_iterator: object,
    config: object,
    num_microbatches: int,
    pg_collection: ProcessGroupCollection | None = None,
) -> WrappedDataLoader:
    """Does what `wrap_dataloader` does, under the name that later Megatron-LM uses."""
    return wrap_dataloader(data_iterator, config, num_microbatches, pg_collection=pg_collection)


def wrap_iterator_helper(
    config: object,
    data_iterator: object,
    num_microbatches: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> WrappedDataLoader | tuple[Any, int | None, None, None]:
    """Does what `wrap_dataloader` does where packing is on; where it is off, returns the arguments
    unchanged and None for both sums.
    """
    if getattr(config, "sequence_packing_scheduler", None) is None:
        return data_iterator, num_microbatches, None, None
    return wrap_dataloader(
        data_iterator, config, num_microbatches or 1, pg_collection=pg_collection
    )


def get_batch_on_this_rank_for_sequence_packing(
    data_iterator: Iterator[dict[str, Any]] | None,
    vpp_size: int | None = None,
    mtp_on_this_rank: bool = False,
    vp_stage: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    *,
    dynamic_cp: bool = False,
    config: object = None,
) -> Batch:
    """Does what `model.get_batch`'s does, with an iterator on tensor-parallel rank 0 alone; the
    others receive its batch.

    Collective over the tensor-parallel group. An error on rank 0 is raised on all: the end of the
    iterator as StopIteration, anything else as RuntimeError on the others.
    """
    groups = _groups(pg_collection)
    batch, failure = None, None
    if groups.tp.rank() == 0:
        try:
            microbatches = None if data_iterator is None else map(_completed, data_iterator)
            batch = get_own_batch(
                microbatches,
                vpp_size,
                mtp_on_this_rank,
                vp_stage,
                groups,
                dynamic_cp=dynamic_cp,
                config=config,
            )
        except Exception as error:  # the other ranks wait for a batch
            failure = error
    if groups.tp.size() > 1:
        batch = _received(batch, failure, groups.tp)
    if failure is not None:
        raise failure
    assert batch is not None
    params = batch.packed_seq_params
    padded = params.cu_seqlens_q.to(batch.padding_mask.device, non_blocking=True)
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        setattr(params, name, padded)
    return batch


def _groups(pg_collection: ProcessGroupCollection | None) -> Any:
    return pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp"])


def _completed(microbatch: dict[str, Any]) -> dict[str, Any]:
    """Returns a microbatch of Megatron-LM's with zeros and a mask where its sequences are padded.

    lengths 2 1 in 3 2    ->    padding_mask F F T F T
    """
    if "padding_mask" in microbatch:
        return microbatch
    cu_seqlens, padded = (
        microbatch[name].reshape(-1).cpu() for name in ("cu_seqlens", "cu_seqlens_padded")
    )
    lengths = cu_seqlens.diff().long()
    in_turn = torch.stack((lengths, padded.diff() - lengths), dim=1).view(-1)
    padding_mask = torch.tensor([False, True]).repeat(lengths.numel()).repeat_interleave(in_turn)
    completed = {
        **microbatch,
        "cu_seqlens_padded": padded,
        "max_seqlen": int(microbatch["max_seqlen"]),
    }
    padding_mask = padding_mask.to(microbatch["cu_seqlens"].device)  # where all of a microbatch is
    for name in _DTYPES:
        values: Tensor | None = microbatch.get(name)
        if values is not None:
            completed[name] = values.reshape(-1).masked_fill(padding_mask, 0)
    return {**completed, "padding_mask": padding_mask}


class _Header(NamedTuple):
    """Everything of a batch but its tensors' values, which travels first."""

    fields: list[tuple[str, torch.dtype, tuple[int, ...]]]
    extra: list[tuple[str, torch.dtype, tuple[int, ...]]]
    layout: dict[str, Any]

    @classmethod
    def of(cls, batch: Batch) -> _Header:
        def described(tensors: Mapping[str, Tensor]) -> list[Any]:
            return [(name, one.dtype, tuple(one.shape)) for name, one in tensors.items()]

        params = batch.packed_seq_params
        layout = {"cu_seqlens_padded": params.cu_seqlens_q.cpu(), "max_seqlen": params.max_seqlen_q}
        return cls(described(_tensors(batch)), described(batch.extra), layout)


def _tensors(batch: Batch) -> dict[str, Tensor]:
    return {name: getattr(batch, name) for name in _DTYPES if getattr(batch, name) is not None}


def _received(
    batch: Batch | None, failure: Exception | None, tp: dist.ProcessGroup
) -> Batch | None:
    """Returns `batch` of tensor-parallel rank 0 on all ranks of the group; None where it failed."""
    error: tuple[bool, str] | None = None
    if failure is not None:
        error = isinstance(failure, StopIteration), f"{type(failure).__name__}: {failure}"
    error, header = _broadcast((error, None if batch is None else _Header.of(batch)), tp)
    if error is not None:
        if failure is not None:
            return None
        raise StopIteration if error[0] else RuntimeError(f"tensor-parallel rank 0: {error[1]}")
    assert header is not None
    source, device = dist.get_global_rank(tp, 0), device_of(tp)

    def broadcast(described: list[Any], own: Mapping[str, Tensor]) -> dict[str, Any]:
        received = {}
        for name, dtype, shape in described:
            received[name] = torch.empty(shape, dtype=dtype, device=device)
            if name in own:
                received[name].copy_(own[name])
            dist.broadcast(received[name], src=source, group=tp)
        return received

    fields = broadcast(header.fields, {} if batch is None else _tensors(batch))
    extra = broadcast(header.extra, {} if batch is None else batch.extra)
    received = Batch(
        **{**dict.fromkeys(_DTYPES), **fields},  # type: ignore[arg-type]
        attention_mask=None,
        packed_seq_params=packed_seq_params(header.layout, device),
    )
    received.packed_seq_params.padding_mask = received.padding_mask
    received.extra = extra
    return received


def from_first_rank(value: T, pg_collection: ProcessGroupCollection | None) -> T:
    """Returns tensor-parallel rank 0's `value` on all ranks; collective over them."""
    return _broadcast(value, _groups(pg_collection).tp)


def _broadcast(value: T, tp: dist.ProcessGroup) -> T:
    values = [value]
    if tp.size() > 1:
        dist.broadcast_object_list(values, src=dist.get_global_rank(tp, 0), group=tp)
    return values[0]


class BasePackingScheduler:
    """A scheduler as Megatron-LM's users write one; `register_scheduler` gives it a name.

    It is built for each global batch, on the scheduling rank. A data-parallel replica counts as one
    rank of it, whatever its context-parallel size.
    """

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None,
    ) -> None:
        """Takes the layout.

        Args:
            max_seqlen_per_dp_cp_rank: tokens that a pack may hold.
            cp_size: 1.
            dp_size: data-parallel ranks.
            microbatch_group_size_per_vp_stage: the number of microbatches must be a multiple of it;
                None for any number.
        """
        self.max_seqlen_per_dp_cp_rank = max_seqlen_per_dp_cp_rank
        self.cp_size = cp_size
        self.dp_size = dp_size
        self.microbatch_group_size_per_vp_stage = microbatch_group_size_per_vp_stage

    def get_groups_and_subsamples(
        self, sample_id_seqlens: list[tuple[int, int]]
    ) -> list[list[list[int]]]:
        """Returns [microbatch][rank] -> ids of the samples in that pack.

        Args:
            sample_id_seqlens: (id, padded length) of each sample.
        """
        raise NotImplementedError


def register_scheduler(name: str, scheduler: type[BasePackingScheduler]) -> Scheduler:
    """Registers `scheduler` under `name`, in any case, for `sequence_packing_scheduler`.

    Returns it as a function, which `--sequence-packing-scheduler module:function` takes. Raises
    ValueError for a name that is taken.
    """
    if name.lower() in SCHEDULERS:
        raise ValueError(
            f"there is a packing scheduler {name.lower()!r}; register {scheduler.__name__} as "
            "another"
        )

    def schedule(request: ScheduleRequest) -> Schedule:
        multiple = request.microbatch_multiple
        made = scheduler(request.capacity, 1, request.num_ranks, multiple if multiple > 1 else None)
        groups = made.get_groups_and_subsamples(list(enumerate(request.lengths.tolist())))
        if any(len(ranks) != request.num_ranks for ranks in groups):
            raise ValueError(
                f"each microbatch must have a list of ids for each of {request.num_ranks} ranks"
            )
        placed = [
            (i, rank, m)
            for m, ranks in enumerate(groups)
            for rank, ids in enumerate(ranks)
            for i in ids
        ]
        ids, rank, microbatch = np.array(sorted(placed), np.int64).reshape(-1, 3).T
        if not np.array_equal(ids, np.arange(request.lengths.size)):
            raise ValueError(
                f"each of {request.lengths.size} samples must be in one pack, but those in packs "
                f"are {ids}"
            )
        return Schedule(rank, microbatch, request.num_ranks, len(groups))

    SCHEDULERS[name.lower()] = schedule
    return schedule
