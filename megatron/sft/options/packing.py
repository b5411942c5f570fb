"""pure. Options of sequence packing."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from megatron.packing.batch.layout import OverLengthPolicy
from megatron.packing.rules import Rule, at_least, check_rules
from megatron.packing.scheduling.fitted_cost import FittedCost, read_fitted_cost
from megatron.packing.scheduling.registry import SCHEDULERS, get_scheduler


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """Sequence packing."""

    sequence_packing: bool = False
    """Pack sequences end to end, without padding (THD)."""
    sequence_packing_scheduler: str | None = field(
        default=None, metadata={"only_with": "sequence_packing", "names": SCHEDULERS}
    )
    """Scheduler that places sequences on ranks and microbatches: NAMES, or a function of yours
    as module:function (default: default, the least modelled step time).
    """
    max_seqlen_per_dp_cp_rank: int | None = field(
        default=None, metadata={"only_with": "sequence_packing"}
    )
    """Tokens of a pack per rank (default: --seq-length / --context-parallel-size)."""
    over_length_policy: OverLengthPolicy = "error"
    """Handling of a sample longer than --seq-length."""
    pack_cost: str | None = field(default=None, metadata={"only_with": "sequence_packing"})
    """File of megatron-sft calibrate: schedule by measured times, and predict the step's
    (default: by FLOPs).
    """

    rules: ClassVar[tuple[Rule, ...]] = tuple(at_least(1, "max_seqlen_per_dp_cp_rank"))

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)
        # No rules, as the one may import a module of the user's, and the other reads a file.
        if self.sequence_packing_scheduler is not None:
            get_scheduler(self.sequence_packing_scheduler)
        _ = self.fitted_cost

    @cached_property
    def fitted_cost(self) -> FittedCost | None:
        """Cost model of the file of --pack-cost, read once; None without it."""
        return None if self.pack_cost is None else read_fitted_cost(self.pack_cost)
