"""mcore. The bytes of each pipeline stage of a run, by traces in fake worlds.

weights, gradients, optimizer        run at the run's own depth
activations, workspaces of passes    run where the stage is shallow; else extrapolated from traces
                                     of one to three layers, and checked at a fourth depth
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from megatron.sft.fit.affine import NotAffineError, fitted
from megatron.sft.fit.counter import ByteCounter, Phase
from megatron.sft.fit.fake import cuda_branches
from megatron.sft.fit.fake.host_reads import HostReads, Routing
from megatron.sft.fit.fake.world import fake_world
from megatron.sft.fit.save_bytes import save_bytes
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
from megatron.sft.options.config import SFTConfig

How = Literal["run", "extrapolated", "described"]
STATES = ("weights", "gradients", "main parameters", "optimizer state")
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
    """Alive beside the states when most is, in forward and backward passes."""
    build: Part
    """All that is alive at most while the model is built and before the first step."""
    optimizer: Part
    """Alive beside the states, at most, in an optimizer step."""
    save_host_bytes: int
    """Bytes on the host of the rank that writes, at most, while a checkpoint is made."""
    remarks: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes of tensors, at most."""
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
    routing: Routing = "balanced"
    like_cuda: bool = True

    def data(self, num_microbatches: int) -> StepData:
        """Returns microbatches as large as they may be."""
        config = self.config
        rows = (config.model.seq_length,) * config.training.micro_batch_size
        if config.packing.sequence_packing:
            size, length = (
                config.capacity_per_rank * config.parallel.context_parallel_size,
                int(config.alignment.padded_length(config.model.seq_length)),  # type: ignore[arg-type]
            )
            rest = size % length // config.alignment.pack * config.alignment.pack
            rows = (length,) * (size // length) + ((rest,) if rest else ())
        return StepData(lengths=(rows,) * num_microbatches, loss_share=self.loss_share)


def trace(
    request: Request, rank: int, num_microbatches: int, *, passes: bool = True
) -> tuple[list[Phase], int]:
    """Returns the phases of a rank (build, a step, and what follows once the optimizer has its
    state), and the bytes on the host that a checkpoint takes then.
    """
    counter = ByteCounter(
        unit=cuda_branches.ALLOCATION_BYTES if request.like_cuda else 1,
        workspaces=cuda_branches.workspaces() if request.like_cuda else {},
    )
    reads = HostReads(routing=request.routing)
    config = one_step(request.config)
    world = fake_world(config, rank, request.world_size, reads, like_cuda=request.like_cuda)
    with world as mode:
        training = run_step(
            config,
            request.vocab_size,
            request.data(num_microbatches),
            counter,
            (mode, reads),
            num_steps=1 if passes else 2,
            like_cuda=request.like_cuda,
            passes=passes,
        )
        return counter.phases, save_bytes(training)


Shared = dict[tuple[Any, ...], Any]
"""Traces that requests share: those of one model and data, which differ in layout, recomputation
and capacity alone.
"""


def estimates(request: Request, shared: Shared | None = None) -> list[StageEstimate]:
    """Returns the bytes of each stage. Middle stages of equal layers share their traces."""
    return list(each_estimate(request, {} if shared is None else shared))


def each_estimate(request: Request, shared: Shared) -> Iterator[StageEstimate]:
    """Yields the same, stage by stage: the first one is often the fullest."""
    for stage in stages_of(request.config, request.world_size):
        yield _estimate(request, stage, shared)


def _estimate(request: Request, stage: Stage, shared: Shared) -> StageEstimate:
    config, parallel = request.config, request.config.parallel
    kind = stage.number == 0, stage.number == stage.num_stages - 1
    chunks = config.num_virtual_stages
    layout = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    # Context-parallel ranks share the optimizer as replicas do: what is left of the world counts.
    shards = request.world_size if config.shards_optimizer else None
    depth = stage.num_stages, chunks, kinds_of(config, stage)
    states_key = ("states", kind, layout, depth, shards, parallel.overlap_grad_reduce)
    context = parallel.context_parallel_size, config.shards_optimizer
    if states_key not in shared:
        shared[states_key] = trace(request, stage.rank, 1, passes=False)
    (build, _, optimizer), save_host_bytes = shared[states_key]
    # Only what lives on is at a phase's end.
    states = {name: optimizer.at_peak.get(name, 0) for name in STATES}
    again = config.model.recompute_granularity, config.capacity_per_rank, request.routing
    filled = None if chunks is None else (chunks, stage.num_stages)
    traced = shared.setdefault(("passes", kind, layout, context, again, filled), {})
    remarks: list[str] = []
    passes = _passes(request, stage, traced, remarks)
    return StageEstimate(
        stage=stage,
        states=tuple(Part(name, size, "run") for name, size in states.items() if size),
        passes=passes,
        build=Part("building the model", build.peak, "run"),
        optimizer=Part("optimizer step", optimizer.peak - sum(states.values()), "run"),
        save_host_bytes=save_host_bytes,
        remarks=tuple(remarks),
    )


def _passes(
    request: Request,
    stage: Stage,
    traced: dict[tuple[int, int], dict[str, int]],
    remarks: list[str],
) -> tuple[Part, ...]:
    depths, depth = depths_of(request.config, stage), len(layers_of(request.config, stage)[0])
    is_interleaved = request.config.num_virtual_stages is not None
    flight = stage.in_flight
    if is_interleaved:  # megatron-core wants a multiple of the stages; twice as many fill it
        flight = 2 * stage.num_stages
        depths = depths if sum(depths) < depth else ()  # all would take longer than the stage
    if depths:
        points = [(d, flight) for d in depths]
        if not is_interleaved:
            points = _points(depths, flight, has_experts=request.config.model.num_experts)
        for point in points:
            if point not in traced:
                traced[point] = bytes_beside_states(request, stage, *point)
        try:
            return _extrapolated({point: traced[point] for point in points}, depth, flight)
        except NotAffineError as failure:
            remarks.append(f"run at its own depth: {failure}")
    own = bytes_beside_states(request, stage, None, flight)
    return tuple(Part(name, size, "run") for name, size in sorted(own.items()) if size)


def _points(
    depths: Sequence[int], flight: int, *, has_experts: int | None
) -> list[tuple[int, int]]:
    """Returns the (layers, microbatches in flight) to trace.

    Dispatchers of experts keep a few numbers until the next microbatch replaces them: the first
    microbatch of a step finds none, so a step of one is not on the surface of the others.
    """
    low, middle, high, _ = depths
    fewest = min(flight, 2) if has_experts else 1
    points = [(depth, fewest) for depth in depths]
    if flight > fewest:
        points += [(low, fewest + 1), (middle, fewest + 1)]
    if flight > fewest + 1:
        points.append((high, fewest + 2))
    return points


def bytes_beside_states(
    request: Request, stage: Stage, depth: int | None, flight: int
) -> dict[str, int]:
    """Returns by part what is alive beside the states at the passes' peak, in a run of that depth;
    None: of its own.
    """
    if depth is not None:
        request = replace(request, config=at_depth(request.config, depth))
    phases = {phase.name: phase for phase in trace(request, stage.rank, flight)[0]}
    passes = phases["forward and backward 1"]
    alive_before = {name: passes.at_peak.get(name, 0) for name in STATES}
    others = {name: size for name, size in passes.at_peak.items() if name not in STATES}
    assert sum(others.values()) + sum(alive_before.values()) == passes.peak
    return others


def _extrapolated(
    points: Mapping[tuple[int, int], Mapping[str, int]], depth: int, flight: int
) -> tuple[Part, ...]:
    """Returns the parts at a depth that was not traced.

    Their sum must be affine, to the byte; where a part alone is not, all are one.
    """
    names: Sequence[str] = sorted({name for parts in points.values() for name in parts})
    total = fitted({point: sum(parts.values()) for point, parts in points.items()}).at(
        depth, flight
    )
    try:
        found = [
            Part(
                name,
                fitted({point: parts.get(name, 0) for point, parts in points.items()}).at(
                    depth, flight
                ),
                "extrapolated",
            )
            for name in names
        ]
    except NotAffineError:
        return (Part("activations and temporaries", total, "extrapolated"),)
    assert sum(part.num_bytes for part in found) == total
    return tuple(part for part in found if part.num_bytes)
