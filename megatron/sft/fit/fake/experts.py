"""mcore. Experts of a fake world: the numbers of tokens that their dispatcher reads on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor

from megatron.sft.fit.fake.host_reads import Dispatch, Experts, HostReads

_Dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher


def replaced(reads: HostReads) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Returns what `world` replaces for them: (owner, name, replacement)."""
    initialize, preprocess = _Dispatcher.__init__, _Dispatcher.preprocess
    permute = token_dispatcher.permute

    def with_order(self: Any, *arguments: Any, **options: Any) -> None:
        initialize(self, *arguments, **options)
        chunks = np.arange(self.num_experts * self.tp_size)
        by_expert = chunks.reshape(-1, self.num_local_experts).T.ravel()
        by_rank = chunks.reshape(self.num_local_experts, -1).T.ravel()
        self.sort_input_by_local_experts = Read(by_expert, self.sort_input_by_local_experts)
        self.restore_output_by_local_experts = Read(by_rank, self.restore_output_by_local_experts)

    def with_numbers(self: Any, routing_map: Tensor) -> Any:
        tokens_per_expert = preprocess(self, routing_map)
        experts = Experts(
            self.num_experts,
            self.num_local_experts,
            self.config.moe_router_topk,
            self.ep_size,
            self.ep_group.rank(),
        )
        numbers = reads.dispatch(routing_map.shape[0], experts)
        for name in ("input_splits", "output_splits"):
            if getattr(self, name) is not None:
                setattr(self, name, Held.of(getattr(numbers, name), getattr(self, name)))
        if self.output_splits_tp is not None:
            total = numbers.output_splits.sum(keepdims=True)
            self.output_splits_tp = Held.of(total, self.output_splits_tp)
        if self.num_local_experts > 1:
            fake = self.num_global_tokens_per_local_expert
            self.num_global_tokens_per_local_expert = Read(numbers.from_ranks, fake)
        # Still a tensor: grouped experts compute with it, and read it where they run in turn.
        tokens_per_expert.tolist = numbers.tokens_per_expert.tolist
        return tokens_per_expert

    def counted_permute(*arguments: Any, num_out_tokens: int, **options: Any) -> Any:
        reads.num_selected = num_out_tokens
        return permute(*arguments, num_out_tokens=num_out_tokens, **options)

    yield _Dispatcher, "__init__", with_order
    yield _Dispatcher, "preprocess", with_numbers
    yield token_dispatcher, "permute", counted_permute
    yield token_dispatcher, "sort_chunks_by_idxs", _sorted_chunks


def _sorted_chunks(
    input: Tensor, split_sizes: object, sorted_idxs: object, probs: Any = None, fused: bool = False
) -> tuple[Tensor, Tensor | None]:
    """megatron-core's, which takes tensors into a chunk for each expert and rank, 256 of them for
    128 experts on 8 ranks, forward and backward: a sixth of the time of such a model's trace.
    """
    return _Reordered.apply(input), None if probs is None else _Reordered.apply(probs)


class _Reordered(torch.autograd.Function):
    """Rows in another order: one tensor forward, one backward, and none is kept."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.new_empty(rows.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.new_empty(gradient.shape)


class Held(np.ndarray):
    """An array that keeps the tensor alive that it stands for, as an array of its memory would."""

    tensor: Tensor

    @classmethod
    def of(cls, values: Any, tensor: Tensor) -> Held:
        held = np.asarray(values).view(cls)
        held.tensor = tensor
        return held


class Read:
    """A tensor on the host whose values are known: the part of its interface that is used."""

    def __init__(self, values: Any, tensor: Tensor) -> None:
        self.values, self.tensor = values, tensor

    def tolist(self) -> list[Any]:
        return self.values.tolist()

    def ravel(self) -> Read:
        return Read(self.values.ravel(), self.tensor.ravel())

    @property
    def T(self) -> Read:
        return Read(self.values.T, self.tensor.T)


@contextmanager
def recorded() -> Iterator[list[Dispatch]]:
    """Yields a list to which each layer and microbatch of a run on real tensors adds its
    numbers."""
    found: list[Dispatch] = []
    preprocess = _Dispatcher.preprocess

    def record(self: Any, routing_map: Tensor) -> Any:
        tokens_per_expert = preprocess(self, routing_map)
        parts = (
            tokens_per_expert,
            self.input_splits,
            self.output_splits,
            getattr(self, "num_global_tokens_per_local_expert", None),
        )
        values: list[Any] = [None if part is None else np.array(part) for part in parts]
        found.append(Dispatch(*values))
        return tokens_per_expert

    with mock.patch.object(_Dispatcher, "preprocess", record):
        yield found
