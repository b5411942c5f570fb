"""The users' fields of a run: what later steps have of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.packing.batch.columns import LABELS, Column
from megatron.packing.batch.samples import SchemaOfPart
from megatron.packing.step.run_fields import RunFields, run_fields_of

GAINS = Column("gains", "float32", "token", extra=True)
IDS = Column("ids", "int64", "sequence", extra=True)


def test_a_step_without_samples_has_the_fields_of_the_run() -> None:
    """A loss of the user's would find no such field in it."""
    fields = RunFields()
    assert fields.agree([]) == ()
    assert fields.agree([SchemaOfPart((LABELS, GAINS, IDS), False)]) == (LABELS, GAINS, IDS)
    assert fields.agree([]) == (GAINS, IDS)
    assert fields.agree([SchemaOfPart((), False)]) == (), "evaluation may have none"
    assert fields.agree([]) == (GAINS, IDS)


def test_types_hold_all_numbers_so_far() -> None:
    """A step of whole rewards would give integers, which a loss divides otherwise."""
    fields = RunFields()
    whole = GAINS._replace(dtype="int64")
    assert fields.agree([SchemaOfPart((GAINS,), False), SchemaOfPart((whole,), False)]) == (
        GAINS._replace(dtype="float64"),
    )
    assert fields.agree([SchemaOfPart((whole,), False)]) == (GAINS._replace(dtype="float64"),)


def test_samples_of_one_token_decide_no_scope() -> None:
    """The first of them would make a field per token one per sequence for the whole run."""
    fields = RunFields()
    either = GAINS._replace(scope="sequence")
    assert fields.agree([SchemaOfPart((either,), True)]) == (either,)
    assert fields.agree([SchemaOfPart((either,), True), SchemaOfPart((GAINS,), False)]) == (GAINS,)
    assert fields.agree([SchemaOfPart((either,), True)]) == (GAINS,)
    with pytest.raises(ValueError, match="'gains' must have one scope and shape"):
        fields.agree([SchemaOfPart((either,), False)])


def test_a_config_is_one_run() -> None:
    """Two models of one process would have to agree, and two steps would not."""
    config = SimpleNamespace()
    assert run_fields_of(config) is run_fields_of(config)
    assert run_fields_of(SimpleNamespace()) is not run_fields_of(config)
    assert run_fields_of(object()).agree([]) == ()
