"""pure. Layouts of a model over GPUs, and the choice of the fastest that fit.

Memory and validity are asked for as seldom as possible: from the fastest layout on, until enough
fit. A layout that does not fit rules out those that hold more: larger packs, or less recomputation,
with all else alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import product
from typing import Any, Literal, NamedTuple

from megatron.packing.flags import flag_of
from megatron.packing.stages import StageLayers

Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
"""From most memory to least."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout, and the options that memory and time depend on besides."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    counts_embedding: bool = False
    """Whether the embedding counts as a layer of the first pipeline stage."""
    counts_loss: bool = False
    """Whether output layer and loss count as a layer of the last pipeline stage."""
    first_layers: int | None = None
    """Layers of the first pipeline stage; None for as many as the middle ones."""
    last_layers: int | None = None
    """Layers of the last pipeline stage; None for as many as the middle ones."""
    recompute: Recompute = "none"
    capacity: int = 1
    """Tokens that a rank holds of a pack."""
    shards_optimizer: bool = True

    @property
    def world_size(self) -> int:
        """GPUs."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def title(self) -> str:
        """The layout in short: `TP2 PP4 DP8, full recomputation, packs of 8,192`."""
        sizes = {"TP": self.tp, "PP": self.pp, "VPP": self.vpp, "CP": self.cp, "EP": self.ep}
        named = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
        counted = {"embedding": self.counts_embedding, "loss": self.counts_loss}
        names = " and ".join(name for name, is_counted in counted.items() if is_counted)
        alone = f", {names} counted as a layer" * bool(names)
        ends = {"first": self.first_layers, "last": self.last_layers}
        for end, layers in ends.items():
            alone += f", {layers} layers on the {end} stage" * (layers is not None)
        again = f", {self.recompute} recomputation" * (self.recompute != "none")
        sharded = ", optimizer sharded" * self.shards_optimizer
        return f"{named} DP{self.dp}{alone}{again}, packs of {self.capacity:,}{sharded}".strip()

    def holds_at_least(self, other: Candidate) -> bool:
        """Returns whether memory is not less than that of `other`: all else alike, packs as large,
        and as few layers recomputed.
        """
        alike = all(
            getattr(self, name) == getattr(other, name)
            for name in ("dp", "tp", "cp", "ep", "stage_layers", "shards_optimizer")
        )
        less = RECOMPUTES.index(self.recompute) <= RECOMPUTES.index(other.recompute)
        return alike and less and self.capacity >= other.capacity

    @property
    def stage_layers(self) -> StageLayers:
        """Layers of each pipeline stage."""
        return StageLayers(
            num_stages=self.pp,
            num_virtual_stages=self.vpp,
            first=self.first_layers,
            last=self.last_layers,
            counts_embedding=self.counts_embedding,
            counts_loss=self.counts_loss,
        )

    def layers_per_chunk(self, num_layers: int) -> int:
        """Returns the layers of a virtual stage, with what counts as one."""
        return self.stage_layers.num_counted(num_layers) // self.pp // self.vpp

    def options(self, num_layers: int) -> dict[str, Any]:
        """Returns the options of training that make it for a model of so many layers, by name."""
        return {
            "tensor_model_parallel_size": self.tp,
            "sequence_parallel": self.tp > 1,
            "pipeline_model_parallel_size": self.pp,
            "num_layers_per_virtual_pipeline_stage": self.layers_per_chunk(num_layers)
            if self.vpp > 1
            else None,
            "account_for_embedding_in_pipeline_split": self.counts_embedding,
            "account_for_loss_in_pipeline_split": self.counts_loss,
            "decoder_first_pipeline_num_layers": self.first_layers,
            "decoder_last_pipeline_num_layers": self.last_layers,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "recompute_granularity": None if self.recompute == "none" else self.recompute,
            "sequence_packing": True,
            "max_seqlen_per_dp_cp_rank": self.capacity,
            "use_distributed_optimizer": self.shards_optimizer,
        }

    def flags(self, num_layers: int) -> str:
        """Returns these options as a command line, without those that are off."""
        return " ".join(
            flag_of(name) if value is True else f"{flag_of(name)} {value}"
            for name, value in self.options(num_layers).items()
            if not (value in (None, False) or (name.endswith("_parallel_size") and value == 1))
        )


def enumerated(
    world_size: int,
    *,
    num_layers: int,
    num_experts: int | None,
    capacities: Callable[[int, int], Sequence[int]],
    gpus_per_node: int = 8,
) -> Iterator[Candidate]:
    """Yields every layout whose sizes divide the number of GPUs, tensor parallel within a machine.

    capacities: of (tensor, context parallel size), the tokens of a rank to try. What the model does
    not divide by is left to its own checks.
    """
    for tp in _divisors(min(world_size, gpus_per_node)):
        for pp, cp in product(_divisors(world_size), repeat=2):
            if world_size % (tp * pp * cp):
                continue
            dp = world_size // (tp * pp * cp)
            experts = [n for n in _divisors(num_experts or 1) if tp * cp * dp % n == 0]
            for stages, ep, recompute, capacity in product(
                _splits(num_layers, pp), experts, RECOMPUTES, capacities(tp, cp)
            ):
                for shards in (False, True) if dp * cp > 1 else (False,):
                    yield Candidate(
                        dp=dp,
                        tp=tp,
                        pp=pp,
                        vpp=stages.num_virtual_stages,
                        counts_embedding=stages.counts_embedding,
                        counts_loss=stages.counts_loss,
                        first_layers=stages.first,
                        last_layers=stages.last,
                        cp=cp,
                        ep=ep,
                        recompute=recompute,
                        capacity=capacity,
                        shards_optimizer=shards,
                    )


def _splits(num_layers: int, num_stages: int) -> list[StageLayers]:
    """Ways to share layers out, one for each result: alike, or with the loss, or both ends,
    counted as layers; where that does not divide, with fewer layers at the ends.
    """
    found: dict[tuple[int, ...], StageLayers] = {}
    counts = ((False, False), (False, True), (True, True))
    for chunks, (embedding, loss) in product((1, 2, 3, 4) if num_stages > 1 else (1,), counts):
        split = StageLayers(
            num_stages=num_stages,
            num_virtual_stages=chunks,
            counts_embedding=embedding,
            counts_loss=loss,
        )
        counted, parts = split.num_counted(num_layers), num_stages * chunks
        if counted % parts == 0 and num_layers >= parts:
            found.setdefault((chunks, *split.of_parts(num_layers)), split)
    return list(found.values()) or list(_shorter_ends(num_layers, num_stages))


def _shorter_ends(num_layers: int, num_stages: int) -> Iterator[StageLayers]:
    """32 layers on 5 stages: 7 7 7 7 4, and 6 7 7 7 5."""
    middle = -(-num_layers // num_stages)
    missing = num_stages * middle - num_layers
    for of_first in dict.fromkeys((0, missing // 2)):
        first, last = middle - of_first, middle - (missing - of_first)
        if min(first, last) > 0:
            yield StageLayers(num_stages=num_stages, first=first if of_first else None, last=last)


def _divisors(number: int) -> list[int]:
    """`12 -> [1, 2, 3, 4, 6, 12]`."""
    return [each for each in range(1, number + 1) if number % each == 0]


class Choice(NamedTuple):
    """A layout that fits, its modelled seconds, and its bytes on the fullest GPU."""

    candidate: Candidate
    seconds: float
    num_bytes: int


def undominated(choices: Sequence[Choice]) -> list[Choice]:
    """Returns those of `choices`, which go from the fastest on, that need less memory than all
    before them, by a hundredth at least.
    """
    found: list[Choice] = []
    for one in choices:
        if not found or one.num_bytes <= 0.99 * found[-1].num_bytes:
            found.append(one)
    return found


class Search(NamedTuple):
    """The fastest layouts, and how many were looked at."""

    best: list[Choice]
    num_layouts: int
    """Layouts that were listed, valid or not."""
    num_timed: int
    """Layouts whose step was scheduled."""
    num_measured: int
    """Layouts whose memory was traced."""
    num_too_large: int
    """Layouts among the faster ones that do not fit."""
    num_refused: int = 0
    """Layouts among the faster ones that are not valid."""


class Measures(NamedTuple):
    """Time and memory of a layout, each with bounds that cost little."""

    least_seconds: Callable[[Candidate], float]
    """At most `seconds`."""
    bound_seconds: Callable[[Candidate], float]
    """A closer bound, asked of few."""
    seconds: Callable[[Candidate], float]
    least_bytes: Callable[[Candidate], int]
    """At most `num_bytes`."""
    num_bytes: Callable[[Candidate], int]
    is_valid: Callable[[Candidate], bool] = lambda one: True
    """Asked before all but `least_seconds`."""


class _Known(IntEnum):
    """How closely the seconds of a layout are known."""

    LEAST = 0
    BOUND = 1
    SCHEDULED = 2


def search(
    candidates: Iterable[Candidate],
    measures: Measures,
    memory: int,
    count: int = 5,
    progress: Callable[[Search], None] = lambda so_far: None,
) -> Search:
    """Returns the `count` fastest of `candidates` that need at most `memory` bytes.

    Best first: a layout is scheduled once no other may be faster by its bound, and traced once none
    may be faster at all. Of layouts that are as fast, those with less recomputation come first,
    then smaller packs, then the order of `candidates`. Each of `candidates` is bounded before the
    next one is drawn; then `progress` is called with the search so far before each step.
    """
    listed: list[Candidate] = []
    failed: list[Candidate] = []
    waiting: list[tuple[float, _Known, int, int, int]] = []
    for number, one in enumerate(candidates):
        listed.append(one)
        least = measures.least_seconds(one)
        waiting.append((least, _Known.LEAST, RECOMPUTES.index(one.recompute), one.capacity, number))
    heapq.heapify(waiting)
    found = Search([], len(listed), 0, 0, 0)
    while waiting and len(found.best) < count:
        progress(found)
        seconds, known, recompute, capacity, number = heapq.heappop(waiting)
        one = listed[number]
        if known is _Known.LEAST and not measures.is_valid(one):
            found = found._replace(num_refused=found.num_refused + 1)
        elif known is _Known.LEAST:
            bound = max(seconds, measures.bound_seconds(one))
            heapq.heappush(waiting, (bound, _Known.BOUND, recompute, capacity, number))
        elif measures.least_bytes(one) > memory or any(
            one.holds_at_least(other) for other in failed
        ):
            found = found._replace(num_too_large=found.num_too_large + 1)
        elif known is _Known.BOUND:
            found = found._replace(num_timed=found.num_timed + 1)
            entry = measures.seconds(one), _Known.SCHEDULED, recompute, capacity, number
            heapq.heappush(waiting, entry)
        else:
            found = found._replace(num_measured=found.num_measured + 1)
            num_bytes = measures.num_bytes(one)
            if num_bytes > memory:
                failed.append(one)
                found = found._replace(num_too_large=found.num_too_large + 1)
            else:
                found.best.append(Choice(one, seconds, num_bytes))
    return found
