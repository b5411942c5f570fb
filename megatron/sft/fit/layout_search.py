"""mcore. Memory and validity of layouts for `megatron.planner.layout`, by the trainer's checks and
traces.

Most layouts need no trace of their own. What a layer keeps for its backward pass is traced once for
each (TP, recomputation) and grows with the tokens; times the layers and microbatches in
flight it says what the first stage holds at least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace

from megatron.packing.flags import FlagError
from megatron.planner.layout.search import Candidate
from megatron.sft.fit.estimate import (
    Request,
    Shared,
    StageEstimate,
    bytes_beside_states,
    device_bytes,
    estimate,
)
from megatron.sft.fit.report import FRAGMENTATION_PERCENT, LIBRARIES_BYTES
from megatron.sft.fit.stages import Stage, depths_of, fullest_of, layers_of, stages_of
from megatron.sft.options.config import SFTConfig


def config_of(base: SFTConfig, candidate: Candidate) -> SFTConfig:
    """Returns the options of `base` in that layout; ValueError where they contradict it."""
    options = candidate.options(base.model.num_layers)
    options["num_virtual_stages_per_pipeline_rank"] = None
    changed = {}
    for name in ("model", "parallel", "packing"):
        group = getattr(base, name)
        known = {field.name for field in fields(group)}
        changed[name] = replace(group, **{n: v for n, v in options.items() if n in known})
    return replace(base, **changed)


def is_valid(base: SFTConfig, candidate: Candidate) -> bool:
    """Returns whether the trainer would accept the layout."""
    try:
        config_of(base, candidate).check(candidate.world_size)
    except (FlagError, ValueError):
        return False
    return True


@dataclass(kw_only=True)
class Memory:
    """Bytes of layouts of one model, whose traces are shared between them."""

    base: SFTConfig
    vocab_size: int
    limit: int
    """Bytes of a GPU: stages are traced as long as they fit."""
    loss_share: float = 1.0
    _estimates: dict[tuple[Candidate, Stage], StageEstimate] = field(default_factory=dict)
    _shared: Shared = field(default_factory=Shared)
    _kept: dict[tuple[object, ...], tuple[int, float]] = field(default_factory=dict)
    """See `_kept_by_layers`; by (TP, recomputation)."""

    def num_bytes(self, candidate: Candidate) -> int:
        """Returns those of the fullest GPU, margin included; of the first one that has more than
        `limit`.
        """
        request, peak = self._request(candidate), 0
        for stage in fullest_of(request.config, stages_of(request.config, request.world_size)):
            peak = max(peak, _with_margin(self._estimate(candidate, stage).peak))
            if peak > self.limit:
                break
        return peak

    def stages(self, candidate: Candidate) -> list[StageEstimate]:
        """Returns the bytes of every stage."""
        request = self._request(candidate)
        stages = stages_of(request.config, request.world_size)
        return [self._estimate(candidate, stage) for stage in stages]

    def _estimate(self, candidate: Candidate, stage: Stage) -> StageEstimate:
        key = candidate, stage
        if key not in self._estimates:
            request = self._request(candidate)
            self._estimates[key] = estimate(request, stage, self._shared)
        return self._estimates[key]

    def least_bytes(self, candidate: Candidate, states: int) -> int:
        """Returns bytes that a GPU of the first stage needs at least, of which `states` live from
        step to step.

        Price: two traces of shallow models for each (TP, recomputation).
        """
        request = self._request(candidate)
        first = stages_of(request.config, request.world_size)[0]
        layers = min(len(part) for part in layers_of(request.config, first))
        passes = first.in_flight
        if candidate.vpp > 1:  # of chunks: those before the first backward pass, and one more
            passes = 2 * (candidate.pp - 1) + (candidate.vpp - 1) * candidate.pp + 1
        unit, kept = self._kept_by_layers(candidate)
        runs = layers // unit * passes if layers % unit == 0 else 0
        return _with_margin(states + int(_CERTAIN * runs * kept * candidate.capacity))

    def _kept_by_layers(self, candidate: Candidate) -> tuple[int, float]:
        """A number of layers, one unless kinds of layers take turns, and bytes that they keep at
        least for each token of a rank.

        Experts' ranks hold each other's tokens: as many as their own, so that the fewest experts
        on a rank, which are traced soonest, stand for all. Context parallel keeps gathered keys
        besides.
        """
        key = candidate.tp, candidate.recompute
        if key not in self._kept:
            alone = replace(
                candidate,
                dp=candidate.world_size // candidate.tp,
                pp=1,
                vpp=1,
                cp=1,
                ep=math.gcd(self.base.model.num_experts or 1, candidate.world_size),
                counts_embedding=False,
                counts_loss=False,
                first_layers=None,
                last_layers=None,
            )
            unit, size = _kept_by_layers(self._request(alone))
            self._kept[key] = unit, size / candidate.capacity
        return self._kept[key]

    def _request(self, candidate: Candidate) -> Request:
        return Request(
            config=config_of(self.base, candidate),
            vocab_size=self.vocab_size,
            world_size=candidate.world_size,
            loss_share=self.loss_share,
        )


def _kept_by_layers(request: Request) -> tuple[int, int]:
    """Returns by how many bytes the passes' peak grows with so many layers; with 0 where layers are
    too few to tell.
    """
    (stage,) = stages_of(request.config, request.world_size)
    depths = depths_of(request.config, stage)[:2]
    if not depths:
        return 1, 0
    low, high = (device_bytes(bytes_beside_states(request, stage, depth, 1)) for depth in depths)
    return depths[1] - depths[0], high - low


_CERTAIN = 0.97
"""Share of what layers keep that they keep at any number of tokens: nearly all of it is
proportional.
"""


def _with_margin(peak: int) -> int:
    return peak + peak * FRAGMENTATION_PERCENT // 100 + LIBRARIES_BYTES
