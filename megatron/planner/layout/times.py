"""pure. Modelled seconds of a step in a layout, by part: arithmetic, memory traffic, and what is
exposed of the communication of tensor, context, expert, pipeline and data parallel.

All of it is modelled from `devices`; no part was measured. The schedule is the product's own: packs
of real lengths, 1F1B simulated (`scheduling.step_time`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.layout import Alignment
from megatron.packing.model.shape import ModelShape
from megatron.packing.scheduling.cost import (
    NUM_PASSES,
    PackCost,
    launch_seconds,
    layers_pack_cost,
    part_shares,
)
from megatron.packing.scheduling.options import SchedulerOptions
from megatron.packing.scheduling.problem import Scheduler
from megatron.packing.scheduling.step_time import StepModel
from megatron.planner.compare import modelled_cost
from megatron.planner.layout.devices import ATTENTION_SHARE, GPUSpec
from megatron.planner.layout.search import Candidate
from megatron.planner.sequences import Sequences
from megatron.planner.step_record import StepLayout

IntArray = npt.NDArray[np.int64]
FLOPS_PER_WEIGHT = 12 * 256
"""Constants of `PackCost.fixed`: bytes that a microbatch moves for each weight, and operations per
byte.
"""
_OF_UNEVEN_PACKS = 0.85
"""Share of a pipeline's bound for even packs that uneven ones take at least: 0.86 was the least in
2,640 pipelines of four models and random lengths.
"""


_SLOWER = {"attention": 3.4}
_OTHERS_SLOWER = 1.5
"""Factors by which a part may take longer than modelled where nothing was measured. Attention took
3.4 times as long on an H200, in chats of some 700 tokens; the other is a judgement: products, links
and memory reach a share of their peak that depends on drivers, clocks and what runs beside them.
"""


class _Work(NamedTuple):
    """Work of a step in a layout, before any rank waits for another."""

    cost: PackCost
    """Seconds of a pack, over all stages one after the other."""
    parts: Mapping[str, float]
    """Mean seconds of a stage for a step's sequences, by part."""
    costliest: float
    """Seconds of the costliest sample, through all stages; its mean share of a step."""


@dataclass(frozen=True, kw_only=True)
class TimeModel:
    """Times of a model's layouts on a device, for given global batches."""

    shape: ModelShape
    vocab_size: int
    device: GPUSpec
    batches: Sequence[Sequences]
    scheduler: Scheduler
    has_adapters: bool = False
    """LoRA: weights have neither gradients nor an optimizer's state."""
    measured: PackCost | None = None
    """Seconds of a pack on one device, in place of the arithmetic and its memory traffic."""
    num_forward_passes: int = 0
    """Forward passes of a step beside those of training, in the same packs: of a reference."""
    scheduling: SchedulerOptions = field(default_factory=SchedulerOptions)
    _scheduled: dict[Candidate, float] = field(default_factory=dict, init=False, repr=False)
    """Seconds of scheduled steps. The optimizer's sharding does not change a schedule."""
    _works: dict[tuple[object, ...], _Work] = field(default_factory=dict, init=False, repr=False)
    """Work of the layouts seen, which neither the optimizer's sharding nor stages with fewer layers
    change.
    """

    def seconds(self, candidate: Candidate) -> float:
        """Returns the modelled seconds of a step."""
        return sum(self.parts(candidate).values())

    def most_seconds(self, candidate: Candidate) -> float:
        """Returns the seconds of a step on a device that is slower than the model has it; those of
        `seconds` where a pack's cost was measured.
        """
        parts = self.parts(candidate)
        if self.measured is not None:
            return sum(parts.values())
        return sum(seconds * _SLOWER.get(name, _OTHERS_SLOWER) for name, seconds in parts.items())

    def least_seconds(self, candidate: Candidate) -> float:
        """Returns those of a step in which no rank or stage waits for another, or of the costliest
        sample, whose pack goes through all stages, one after the other.
        """
        work = self._work(candidate)
        once = sum(self._per_step(candidate).values())
        return max(sum(work.parts.values()), work.costliest) + once

    def bound_seconds(self, candidate: Candidate) -> float:
        """Returns those below which no schedule was found: bubbles, and each microbatch's movement
        of the weights, are in them.
        """
        layout = self._step_layout(candidate, self._work(candidate).cost)
        bound = sum(layout.request(batch).bound for batch in self.batches) / len(self.batches)
        bound *= _OF_UNEVEN_PACKS if candidate.pp > 1 else 1.0
        return bound + sum(self._per_step(candidate).values())

    def parts(self, candidate: Candidate) -> dict[str, float]:
        """Returns the seconds of a step by part; `schedule` is waiting for other ranks and stages,
        and each microbatch's movement of the weights.
        """
        work = self._work(candidate)
        found = dict(work.parts)
        key = replace(candidate, shards_optimizer=False)
        if key not in self._scheduled:
            layout = self._step_layout(candidate, work.cost)
            step = modelled_cost(self.batches, layout, self.scheduler)
            self._scheduled[key] = step / len(self.batches)
        found["schedule"] = self._scheduled[key] - sum(found.values())
        return found | self._per_step(candidate)

    def _work(self, candidate: Candidate) -> _Work:
        """Returns the layout's work, computed once for all that share it."""
        one = candidate
        key = one.dp, one.tp, one.pp, one.vpp, one.cp, one.ep, one.recompute, one.capacity
        if key not in self._works:
            self._works[key] = self._new_work(candidate)
        return self._works[key]

    def _new_work(self, candidate: Candidate) -> _Work:
        per_token = self._per_token(candidate)
        cost = self._pack_cost(candidate, sum(per_token.values()))
        stages = len(self.batches) * candidate.dp * candidate.pp
        tokens = sum(batch.num_tokens for batch in self.batches) / stages
        found = {name: seconds * tokens for name, seconds in per_token.items()}
        costs = [_costs(cost, batch) for batch in self.batches]
        whole = float(sum(each.sum() for each in costs))
        found["attention"] = whole / stages - cost.linear * tokens
        costliest = float(max(each.max() for each in costs)) / len(costs)
        return _Work(cost, found, costliest)

    def _pack_cost(self, candidate: Candidate, linear: float) -> PackCost:
        """Seconds of a pack, over all stages one after the other."""
        ranks = candidate.tp * candidate.cp
        if self.measured is not None:
            repeated = self._repeated(candidate)
            return PackCost(
                linear=linear,
                quadratic=self.measured.quadratic * repeated / ranks,
                fixed=self.measured.fixed * self._passes / NUM_PASSES / candidate.tp,
                windows=_scaled(self.measured.windows, repeated / ranks),
            )
        flops = self._flops
        attention = ATTENTION_SHARE * self.device.flops
        repeated = (self._passes + (candidate.recompute != "none")) / NUM_PASSES
        # Each microbatch moves the weights twice, and adds to their gradients; a forward pass moves
        # them once.
        weights = self._num_weights(candidate) * (2 + 2 + 4 + 4 + 2 * self.num_forward_passes)
        return PackCost(
            linear=linear,
            quadratic=flops.quadratic * repeated / ranks / attention,
            fixed=weights / self.device.memory_bandwidth,
            windows=_scaled(flops.windows, repeated / ranks / attention),
            least=launch_seconds(self._num_layers, candidate.pp * candidate.vpp)
            * self._passes
            / NUM_PASSES,
        )

    @property
    def _passes(self) -> int:
        """Forward passes that a step's passes cost; recomputation is not counted."""
        return NUM_PASSES + self.num_forward_passes

    def _repeated(self, candidate: Candidate) -> float:
        """Returns the factor by which arithmetic of layers grows: each forward pass more is one of
        three.
        """
        return (self._passes + (candidate.recompute == "full")) / NUM_PASSES

    @property
    def _num_layers(self) -> int:
        """Layers, those that predict further tokens among them."""
        assert self.shape.num_layers is not None
        return self.shape.num_layers + (self.shape.mtp_num_layers or 0)

    @cached_property
    def _flops(self) -> PackCost:
        assert self.shape.hidden_size is not None
        return layers_pack_cost(
            self.shape.layer_kinds(),
            hidden_size=self.shape.hidden_size,
            vocab_size=self.vocab_size,
            is_gated=self.shape.is_gated,
            mtp_num_layers=self.shape.mtp_num_layers or 0,
        )

    def _num_weights(self, candidate: Candidate) -> float:
        """Weights of all stages that a rank of each holds; experts are not cut by tensor
        parallel.
        """
        shape = self.shape
        assert shape.hidden_size is not None
        whole = self._flops.fixed / FLOPS_PER_WEIGHT
        experts = 0.0
        if shape.num_experts is not None:
            assert shape.num_layers is not None
            ffn = shape.moe_ffn_hidden_size or shape.resolved_ffn_hidden_size
            layers = shape.num_layers - shape.moe_layer_freq.count(0)
            experts = layers * shape.num_experts * (2 + shape.is_gated) * shape.hidden_size * ffn
        return (whole - experts) / candidate.tp + experts / candidate.ep

    def _per_token(self, candidate: Candidate) -> dict[str, float]:
        """Seconds per token of a pack, summed over stages."""
        shape, device = self.shape, self.device
        assert shape.num_layers is not None
        assert shape.hidden_size is not None
        layers, hidden = shape.num_layers, shape.hidden_size
        tp, cp, ep = candidate.tp, candidate.cp, candidate.ep
        ranks, repeated = tp * cp, self._repeated(candidate)
        found: dict[str, float] = {}
        if self.measured is not None:
            found["arithmetic"] = self.measured.linear * repeated / ranks
        else:
            ffn = shape.moe_ffn_hidden_size or shape.resolved_ffn_hidden_size
            tokens_of_expert = candidate.capacity
            if shape.num_experts is not None:
                tokens_of_expert = candidate.capacity * shape.moe_router_topk // shape.num_experts
            width = max(min(hidden, ffn // (1 if shape.num_experts else tp), tokens_of_expert), 16)
            flops = self._flops
            head = flops.head * self._passes / NUM_PASSES
            products = (flops.linear - flops.head) * repeated + head
            found["arithmetic"] = products / ranks / device.matmul_flops(width)
            # Norms, residuals, activations, rotary embeddings: tensors read or written, 2 bytes.
            tensors = layers * (20 * hidden + 8 * ffn * (shape.moe_router_topk if ep > 1 else 1))
            traffic = 2 * tensors * NUM_PASSES * repeated
            found["memory traffic"] = traffic / ranks / device.memory_bandwidth
        row = 2 * hidden  # bytes of a token between layers
        more = self.num_forward_passes
        if tp > 1:  # all-gathers and reduce-scatters: 4 forward, 6 backward
            times = 10 + 4 * (more + (candidate.recompute == "full"))
            size = layers * times * row * (tp - 1) / tp / cp
            found["tensor parallel"] = size / device.bandwidth(tp, candidate.world_size)
        if cp > 1:  # keys and values forward, their gradients backward
            times = 2 + more + (candidate.recompute != "none")
            channels = sum(kind.exchanged_channels(tp, cp) for kind in shape.layer_kinds())
            size = times * 2 * channels * (cp - 1) / cp
            found["context parallel"] = size / device.bandwidth(tp * cp, candidate.world_size)
        if ep > 1:  # tokens to experts and back, forward and backward
            times = 4 + 2 * (more + (candidate.recompute == "full"))
            size = layers * times * row * shape.moe_router_topk * (ep - 1) / ep / ranks
            found["expert parallel"] = size / device.bandwidth(
                max(ep, tp * cp), candidate.world_size
            )
        if candidate.pp > 1:  # forward and backward between each two chunks
            size = (2 + more) * (candidate.pp * candidate.vpp - 1) * row / ranks
            span = candidate.tp * candidate.cp * candidate.dp * 2
            found["pipeline parallel"] = size / device.bandwidth(span, candidate.world_size)
        return found

    def _per_step(self, candidate: Candidate) -> dict[str, float]:
        """Seconds of the gradients' reduction and of the optimizer. Neither is overlapped."""
        weights = self._num_weights(candidate) / candidate.pp
        sharers = candidate.dp * candidate.cp
        found = {}
        if sharers > 1:
            # float32 gradients to their owners, bfloat16 weights back; or gradients to all.
            size = (4 + 2 if candidate.shards_optimizer else 8) * weights
            span = candidate.tp * sharers
            moved = size * (sharers - 1) / sharers
            found["gradient reduction"] = moved / self.device.bandwidth(span, candidate.world_size)
        own = weights / (sharers if candidate.shards_optimizer else 1)
        traffic = 4 * 8 * own + 4 * 2 * weights  # Adam's tensors read and written; gradients' norm
        found["optimizer"] = traffic / self.device.memory_bandwidth
        return found

    def _step_layout(self, candidate: Candidate, cost: PackCost) -> StepLayout:
        alignment = Alignment.for_layout(
            context_parallel_size=candidate.cp,
            tensor_parallel_size=candidate.tp,
            sequence_parallel=candidate.tp > 1,
        )
        multiple = candidate.pp if candidate.vpp > 1 else 1
        waits = candidate.dp > 1 and candidate.ep > candidate.tp * candidate.cp
        return StepLayout(
            num_ranks=candidate.dp,
            capacity=candidate.capacity * candidate.cp // alignment.pack * alignment.pack,
            alignment=alignment,
            cost=cost,
            microbatch_multiple=multiple,
            model=StepModel(
                num_stages=candidate.pp,
                num_virtual_stages=candidate.vpp,
                stage_group=multiple,
                sync_every_microbatch=waits,
                shares=self._shares(candidate),
            ),
            options=self.scheduling,
        )

    def _shares(self, candidate: Candidate) -> tuple[float, ...]:
        shape = self.shape
        assert shape.num_layers is not None
        assert shape.hidden_size is not None
        return part_shares(
            shape.layer_kinds(),
            candidate.stage_layers.of_parts(shape.num_layers),
            hidden_size=shape.hidden_size,
            vocab_size=self.vocab_size,
            is_gated=shape.is_gated,
            mtp_num_layers=shape.mtp_num_layers or 0,
        )

    def least_bytes(self, candidate: Candidate) -> int:
        """Returns bytes that a GPU holds at least: states of the weights, and what each layer keeps
        of its input and of its MLP.
        """
        shape = self.shape
        assert shape.hidden_size is not None
        kept = 2 * shape.hidden_size
        if candidate.recompute != "full" and shape.num_experts is None:
            kept += 2 * (1 + 2 * shape.is_gated) * shape.resolved_ffn_hidden_size
        layers = self._first_layers(candidate) * self._in_flight(candidate)
        activations = kept * layers * candidate.capacity / candidate.tp
        return self.least_states(candidate) + int(0.98 * activations)

    def least_states(self, candidate: Candidate) -> int:
        """Returns bytes of weights, gradients and optimizer that a GPU holds at least: one of the
        first stage, or of the fullest where layers are of several kinds.
        """
        shape = self.shape
        assert shape.hidden_size is not None
        own = self._num_weights(candidate)
        if self._is_uniform:
            head = shape.hidden_size * self.vocab_size / candidate.tp  # or embedding: as large
            own = head + (own - head) / self._num_layers * self._first_layers(candidate)
        else:
            own /= candidate.pp
        states = 2 * own
        if not self.has_adapters:
            sharers = candidate.dp * candidate.cp if candidate.shards_optimizer else 1
            states += (4 + 12 / sharers) * own
            states += 2 * own * (self.num_forward_passes > 0)  # the reference, a copy
        return int(0.98 * states)

    @cached_property
    def _is_uniform(self) -> bool:
        """Whether all layers are of one kind."""
        return len(set(self.shape.layer_kinds())) == 1

    def _first_layers(self, candidate: Candidate) -> float:
        """Layers of the first stage; of the mean one where layers are of several kinds."""
        assert self.shape.num_layers is not None
        if not self._is_uniform:
            return self.shape.num_layers / candidate.pp
        return sum(candidate.stage_layers.of_parts(self.shape.num_layers)[:: candidate.pp])

    def _in_flight(self, candidate: Candidate) -> int:
        """Microbatches that the first stage holds; the last one, for a mean, holds one."""
        if not self._is_uniform:
            return 1
        fewest = min(batch.size for batch in self.batches) // candidate.dp
        return min(candidate.pp, max(fewest, 1))


def _costs(cost: PackCost, batch: Sequences) -> npt.NDArray[np.float64]:
    """Seconds of each sample, trees by their own pairs of tokens."""
    return cost.of_sequences(batch.lengths, squares=batch.squares)


def _scaled(windows: Sequence[tuple[int, float]], factor: float) -> tuple[tuple[int, float], ...]:
    return tuple((window, each * factor) for window, each in windows)


def reason(parts: Mapping[str, float]) -> str:
    """Returns where the time goes: `arithmetic 71 %, tensor parallel 12 %, schedule 6 %`."""
    total = sum(parts.values())
    largest = sorted(parts.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in largest)
