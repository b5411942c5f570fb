"""The step that a batch is scheduled for."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.sft.training import step_batches
from megatron.sft.training.step_batches import StepBatches


@pytest.mark.parametrize(("trains", "steps"), [(True, [7, 8, 9]), (False, [7, 7, 7])])
def test_an_evaluation_is_of_one_step(monkeypatch, trains, steps):
    """Its batches were counted from step 0: what changes from step to step, such as a scheduler's
    random choices or the tokens of a pack, would be that of the run's first steps.
    """
    scheduled: list[int] = []
    monkeypatch.setattr(
        step_batches, "schedule_global_batch", lambda *_, step, **__: scheduled.append(step)
    )
    batches: Any = StepBatches.__new__(StepBatches)
    batches._queue, batches._source, batches._config, batches._groups = None, None, None, None
    batches._stream, batches._share = SimpleNamespace(counts=0), SimpleNamespace(num_fetches=1)
    batches._step, batches._trains = 7, trains
    for _ in steps:
        batches._packed()
    assert scheduled == steps
