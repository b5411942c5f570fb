"""mcore. The bytes of each pipeline stage of a run, by traces in fake worlds.

weights, gradients, optimizer        run at the run's own depth
activations, workspaces of passes    run where the stage is shallow; else extrapolated from traces
                                     of one to three layers, and checked at a fourth depth
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from megatron.packing.device import Device
from megatron.sft.fit.affine import NotAffineError, fitted
from megatron.sft.fit.counter import HOST, ByteCounter, Phase
from megatron.sft.fit.fake import described_gpu
from megatron.sft.fit.fake.host_reads import HostReads, Routing
from megatron.sft.fit.fake.world import fake_world
from megatron.sft.fit.save_bytes import SaveBytes, save_bytes
from megatron.sft.fit.stages import (
    Stage,
    at_depth,
    depths_of,
    kinds_of,
    layers_of,
    one_step,
    stages_of,
)
from megatron.sft.fit.step import StepData, run_step
from megatron.sft.images.source import ImageSize
from megatron.sft.images.vision import Vision
from megatron.sft.model.build import vision_of
from megatron.sft.options.config import SFTConfig

How = Literal["run", "extrapolated", "described"]
STATES = ("weights", "gradients", "main parameters", "optimizer state", "reference weights")
"""Parts that live from step to step."""


class Part(NamedTuple):
    """Some bytes of a stage, and how they are known."""

    name: str
    num_bytes: int
    how: How


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """A stage's bytes: those that stay, and those of each phase at its peak."""

    stage: Stage
    states: tuple[Part, ...]
    passes: tuple[Part, ...]
    """Bytes besides the states at the peak of forward and backward."""
    build: Part
    """Peak bytes while the model is built."""
    optimizer: Part
    """Peak bytes besides the states in an optimizer step."""
    save_host_bytes: SaveBytes
    """Bytes on the host of a rank while it writes."""
    host_bytes: int = 0
    """Peak bytes on the host of what options keep there: the optimizer's state, activations."""
    remarks: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """Peak bytes of tensors."""
        states = sum(part.num_bytes for part in self.states)
        passes = sum(part.num_bytes for part in self.passes)
        return max(self.build.num_bytes, states + max(passes, self.optimizer.num_bytes))


@dataclass(frozen=True, kw_only=True)
class Request:
    """A run, and what is assumed of it."""

    config: SFTConfig
    vocab_size: int
    world_size: int
    loss_share: float = 1.0
    image_share: float = 1.0
    """Part of each sequence's tokens that images have, in a run with images."""
    routing: Routing = "balanced"
    device: Device = field(default_factory=described_gpu.DescribedGPU)
    """A GPU, or the CPU."""

    def data(self, num_microbatches: int) -> StepData:
        """Returns the largest microbatches that the options allow."""
        config, seq_length = self.config, self.config.model.seq_length
        rows = (seq_length,) * config.training.micro_batch_size
        if config.packing.sequence_packing:
            # Capacity 10, sequence 4, alignment 2 -> rows 4 4 2.
            alignment = config.alignment
            pack_tokens = config.capacity_per_rank * config.parallel.context_parallel_size
            sequence_tokens = int(alignment.padded_length(seq_length))  # type: ignore[arg-type]
            rest = pack_tokens % sequence_tokens // alignment.pack * alignment.pack
            rows = (sequence_tokens,) * (pack_tokens // sequence_tokens)
            rows += (rest,) if rest else ()
        vision = vision_of(config)
        images = () if vision is None else largest_images(rows, vision, self.image_share)
        return StepData(
            lengths=(rows,) * num_microbatches,
            loss_share=self.loss_share,
            images=(images,) * num_microbatches if images else (),
        )


def largest_images(rows: Sequence[int], vision: Vision, share: float) -> tuple[ImageSize, ...]:
    """Returns the images of a microbatch: of each sequence as many squares of the largest size as
    its share of tokens has place for.

    rows: tokens of each sequence.
    """
    unit = vision.patch_size * vision.merge_size
    found: list[ImageSize] = []
    for tokens in (int(row * share) for row in rows):
        side = math.isqrt(min(tokens, vision.most_tokens))
        if side:
            found += [ImageSize(side * unit, side * unit)] * (tokens // side**2)
    return tuple(found)


class Trace(NamedTuple):
    """Bytes alive in a run of one rank."""

    phases: list[Phase]
    """Building the model, a step, and what follows once the optimizer has its state."""
    save_host_bytes: SaveBytes
    """Bytes on the host while a checkpoint or a model is written then."""


def trace(request: Request, rank: int, num_microbatches: int, *, passes: bool = True) -> Trace:
    """Returns the trace of a rank that trains one step. Without `passes` the optimizer alone makes
    two, of which the second has its state.
    """
    counter = ByteCounter(
        unit=described_gpu.ALLOCATION_BYTES if request.device.is_gpu else 1,
        workspaces=described_gpu.workspaces() if request.device.is_gpu else {},
    )
    reads = HostReads(routing=request.routing)
    config = one_step(request.config)
    world = fake_world(config, rank, request.world_size, reads, request.device)
    with world as mode:
        training = run_step(
            config,
            request.vocab_size,
            request.data(num_microbatches),
            counter,
            (mode, reads),
            num_steps=1 if passes else 2,
            device=request.device,
            passes=passes,
        )
        return Trace(counter.phases, save_bytes(training))


class StatesKey(NamedTuple):
    """All that the bytes of a stage's states depend on."""

    is_first: bool
    is_last: bool
    tensor_parallel_size: int
    expert_parallel_size: int
    num_stages: int
    num_virtual_stages: int | None
    kinds_of_layers: tuple[tuple[Any, ...], ...]
    """Options of each layer, by virtual stage."""
    num_optimizer_ranks: int | None
    """Size of the world if the optimizer is sharded. Context-parallel ranks share it as replicas
    do, so it does not depend on how many of each there are.
    """
    overlap_grad_reduce: bool


class PassesKey(NamedTuple):
    """All that the bytes of a stage's passes depend on, besides depth and microbatches in
    flight.
    """

    is_first: bool
    is_last: bool
    tensor_parallel_size: int
    expert_parallel_size: int
    context_parallel_size: int
    shards_optimizer: bool
    recompute_granularity: str | None
    capacity_per_rank: int
    routing: Routing
    interleaving: tuple[int, int] | None
    """Virtual stages and stages; None if stages are not interleaved."""


PassesTraces = dict[tuple[int, int], dict[str, int]]
"""Bytes of each part besides the states, by (layers, microbatches in flight)."""


@dataclass
class Shared:
    """Traces that requests share. The requests are of one model and data, and differ only in
    layout, recomputation and capacity.
    """

    states: dict[StatesKey, Trace] = field(default_factory=dict)
    passes: dict[PassesKey, PassesTraces] = field(default_factory=dict)


def estimates(request: Request, shared: Shared | None = None) -> list[StageEstimate]:
    """Returns the bytes of each stage. Middle stages of equal layers share their traces."""
    shared = Shared() if shared is None else shared
    stages = stages_of(request.config, request.world_size)
    return [estimate(request, stage, shared) for stage in stages]


def estimate(request: Request, stage: Stage, shared: Shared) -> StageEstimate:
    """Returns the bytes of one stage."""
    states_key = _states_key(request, stage)
    if states_key not in shared.states:
        shared.states[states_key] = trace(request, stage.rank, 1, passes=False)
    (build, _, optimizer), save_host_bytes = shared.states[states_key]
    host_bytes = optimizer.host_peak
    # Only what lives on is at a phase's end.
    states = {name: optimizer.at_peak.get(name, 0) for name in STATES}
    traced = shared.passes.setdefault(_passes_key(request, stage), {})
    remarks: list[str] = []
    passes = []
    for part in _passes(request, stage, traced, remarks):
        if part.name == HOST:
            host_bytes += part.num_bytes
        else:
            passes.append(part)
    return StageEstimate(
        stage=stage,
        states=tuple(Part(name, size, "run") for name, size in states.items() if size),
        passes=tuple(passes),
        build=Part("building the model", build.peak, "run"),
        optimizer=Part("optimizer step", optimizer.peak - sum(states.values()), "run"),
        save_host_bytes=save_host_bytes,
        host_bytes=host_bytes,
        remarks=tuple(remarks),
    )


def _states_key(request: Request, stage: Stage) -> StatesKey:
    config, parallel = request.config, request.config.parallel
    return StatesKey(
        is_first=stage.number == 0,
        is_last=stage.number == stage.num_stages - 1,
        tensor_parallel_size=parallel.tensor_model_parallel_size,
        expert_parallel_size=parallel.expert_model_parallel_size,
        num_stages=stage.num_stages,
        num_virtual_stages=config.num_virtual_stages,
        kinds_of_layers=kinds_of(config, stage),
        num_optimizer_ranks=request.world_size if config.shards_optimizer else None,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
    )


def _passes_key(request: Request, stage: Stage) -> PassesKey:
    config, parallel = request.config, request.config.parallel
    chunks = config.num_virtual_stages
    return PassesKey(
        is_first=stage.number == 0,
        is_last=stage.number == stage.num_stages - 1,
        tensor_parallel_size=parallel.tensor_model_parallel_size,
        expert_parallel_size=parallel.expert_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        shards_optimizer=config.shards_optimizer,
        recompute_granularity=config.model.recompute_granularity,
        capacity_per_rank=config.capacity_per_rank,
        routing=request.routing,
        interleaving=None if chunks is None else (chunks, stage.num_stages),
    )


def _passes(
    request: Request, stage: Stage, traced: PassesTraces, remarks: list[str]
) -> tuple[Part, ...]:
    config, num_in_flight = request.config, stage.in_flight
    depths, depth = depths_of(config, stage), len(layers_of(config, stage)[0])
    is_interleaved = config.num_virtual_stages is not None
    if is_interleaved:  # megatron-core wants a multiple of the stages; twice as many fill it
        num_in_flight = 2 * stage.num_stages
        depths = depths if sum(depths) < depth else ()  # all would take longer than the stage
    if depths:
        points = [(layers, num_in_flight) for layers in depths]
        if not is_interleaved:
            has_experts = bool(config.model.num_experts)
            points = _points(depths, num_in_flight, has_experts=has_experts)
        for point in points:
            if point not in traced:
                traced[point] = bytes_beside_states(request, stage, *point)
        try:
            return _extrapolated({point: traced[point] for point in points}, depth, num_in_flight)
        except NotAffineError as failure:
            remarks.append(f"run at its own depth: {failure}")
    own = bytes_beside_states(request, stage, None, num_in_flight)
    return tuple(Part(name, size, "run") for name, size in sorted(own.items()) if size)


def _points(
    depths: Sequence[int], num_in_flight: int, *, has_experts: bool
) -> list[tuple[int, int]]:
    """Returns the (layers, microbatches in flight) to trace: those that `fitted` needs, and others
    that check it.

    Dispatchers of experts keep a few numbers until the next microbatch replaces them: the first
    microbatch of a step finds none, so a step of one is not on the surface of the others.

        depths 1 2 3 4, 3 in flight -> (1, 1) (2, 1) (1, 2) (2, 2), checks (3, 1) (4, 1) (3, 3)
    """
    low, middle, high, _ = depths
    fewest = min(num_in_flight, 2) if has_experts else 1
    points = [(depth, fewest) for depth in depths]
    if num_in_flight > fewest:
        points += [(low, fewest + 1), (middle, fewest + 1)]
    if num_in_flight > fewest + 1:
        points.append((high, fewest + 2))
    return points


def bytes_beside_states(
    request: Request, stage: Stage, depth: int | None, num_in_flight: int
) -> dict[str, int]:
    """Returns the bytes of each part besides the states, at the peak of the passes of a run of that
    depth; None takes the stage's own depth. `HOST` is what they keep on the host at most.
    """
    if depth is not None:
        request = replace(request, config=at_depth(request.config, depth))
    phases = {phase.name: phase for phase in trace(request, stage.rank, num_in_flight).phases}
    passes = phases["forward and backward 1"]
    alive_before = {name: passes.at_peak.get(name, 0) for name in STATES}
    others = {name: size for name, size in passes.at_peak.items() if name not in STATES}
    assert sum(others.values()) + sum(alive_before.values()) == passes.peak
    on_host = passes.host_peak - passes.host_start
    return others | ({HOST: on_host} if on_host else {})


def device_bytes(parts: Mapping[str, int]) -> int:
    """Returns the sum of parts that are on the device."""
    return sum(size for name, size in parts.items() if name != HOST)


def _extrapolated(
    points: Mapping[tuple[int, int], Mapping[str, int]], depth: int, num_in_flight: int
) -> tuple[Part, ...]:
    """Returns the parts at a depth that was not traced.

    Raises NotAffineError unless their sum is affine, to the byte. If a part alone is not, all parts
    are returned as one.
    """
    names: Sequence[str] = sorted({name for parts in points.values() for name in parts})
    total = fitted({point: device_bytes(parts) for point, parts in points.items()}).at(
        depth, num_in_flight
    )
    on_host = fitted({point: parts.get(HOST, 0) for point, parts in points.items()}).at(
        depth, num_in_flight
    )
    names = [name for name in names if name != HOST]
    host = (Part(HOST, on_host, "extrapolated"),) if on_host else ()
    try:
        found = [
            Part(
                name,
                fitted({point: parts.get(name, 0) for point, parts in points.items()}).at(
                    depth, num_in_flight
                ),
                "extrapolated",
            )
            for name in names
        ]
    except NotAffineError:
        return (Part("activations and temporaries", total, "extrapolated"), *host)
    assert sum(part.num_bytes for part in found) == total
    return (*(part for part in found if part.num_bytes), *host)
