"""What waits in a checkpoint is taken over by whatever run continues it."""

import pytest
import torch

from megatron.packing.step.delay_queue import DelayQueue, Waiting
from megatron.sft.options.packing import PackingConfig
from megatron.sft.waiting import build_queue, gather_waiting

OFF = PackingConfig(sequence_packing=True)
ON = PackingConfig(sequence_packing=True, outlier_delay_steps=4)


@pytest.fixture
def waiting():
    """A sequence of 3 tokens on the first rank, one of 5 on the second."""
    states = []
    for length in (3, 5):
        queue = DelayQueue(4)
        queue.finish(Waiting([torch.arange(length, dtype=torch.int32)], [(length, 0, -1)]))
        states.append(queue.state_dict())
    return states


def test_without_waiting():
    """A queue where none was asked for would add to logs and checkpoints of all runs."""
    assert build_queue(OFF, (), 0, 2) is None
    assert build_queue(PackingConfig(), (), 0, 2) is None
    assert gather_waiting(None) == []
    queue = build_queue(ON, (), 0, 2)
    assert queue is not None
    assert (queue.max_steps, len(queue)) == (4, 0)


@pytest.mark.parametrize(("packing", "max_steps"), [(OFF, 0), (ON, 4)])
def test_what_waits_is_taken_over(waiting, packing, max_steps):
    """Also by a run that lets nothing wait any more: it would leave out what an earlier one drew."""
    for rank, length in enumerate((3, 5)):
        queue = build_queue(packing, waiting, rank, 2)
        assert queue is not None
        assert queue.max_steps == max_steps
        assert queue.begin(is_repeated=False).rows == [(length, 0, -1)]


def test_padded_training_refuses_to_forget_what_waits(waiting):
    """Without packs there is no queue that would give it back."""
    with pytest.raises(ValueError, match="holds sequences that wait for a later step; pass --sequence-packing"):
        build_queue(PackingConfig(), waiting, 0, 2)
