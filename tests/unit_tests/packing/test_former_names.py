"""Names that users type, import or have in files and that were renamed: each works for one more
release."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from megatron.packing.former_names import with_former_names
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.problem import ScheduleRequest
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.step import groups
from megatron.packing.step.stats import PackingStats


@with_former_names(size="num_tokens")
@dataclass(frozen=True, kw_only=True)
class Renamed:
    """A class with a field that was named `size`."""

    num_tokens: int = 1
    other: int = 0


def test_a_former_name_is_passed_and_read():
    """A user's script that builds or reads the class would end in a TypeError or AttributeError."""
    kind: Any = Renamed
    for made in (kind(size=3), kind(num_tokens=3), replace(kind(other=2), size=3)):
        assert made.num_tokens == made.size == 3
    assert Renamed(other=4) == Renamed(num_tokens=1, other=4)
    with pytest.raises(TypeError, match="sizes"):
        kind(sizes=3)


def test_public_former_names():
    """Users' schedulers, their tests, and scripts that ask which ranks load data."""
    zeros = np.zeros(2, np.int64)
    kind: Any = ScheduleRequest
    model: Any = StepModel
    request = kind(
        lengths=zeros + 3,
        source_rank=zeros,
        source_draw=np.arange(2),
        num_ranks=1,
        num_draws=2,
        capacity=8,
        cost=PackCost(1.0, 0.0),
        model=model(ranks_meet=True),
    )
    assert request.source_draw is request.source_fetch
    assert request.source_fetch.tolist() == [0, 1]
    assert request.num_draws == request.num_fetches == 2
    assert request.model.ranks_meet is request.model.sync_every_microbatch is True
    assert isinstance(vars(PackingStats)["cut_samples"], property)
    assert groups.is_drawing_rank is groups.is_data_rank
