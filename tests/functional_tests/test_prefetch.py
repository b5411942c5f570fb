"""Global batches prepared ahead over real processes: the same batches, the same errors, and nobody
hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core import rerun_state_machine as rerun
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.packing.model.pipeline import PackedPasses
from megatron.packing.step.delay import DelayQueue
from megatron.packing.step.global_batch import GROUPS
from megatron.packing.step.groups import is_data_rank
from megatron.packing.step.settings import PackingOptions
from tests.functional_tests.ranks import run_ranks
from tests.functional_tests.test_delay import DRAWS, MAX_STEPS, NUM_STEPS, data, numbers_in
from tests.functional_tests.test_global_batch import Layout, sample, start

LAYOUTS = [Layout(2), Layout(4, pipeline=2, virtual=2), Layout(4, context=2)]


def forward_backward(*, data_iterator: Any, num_microbatches: int, **_: Any) -> list[Any]:
    """Stands for megatron-core's: takes all microbatches, and gives whose sequences they were."""
    first = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    microbatches = list(first)
    assert len(microbatches) == num_microbatches
    return numbers_in(microbatch for microbatch in microbatches if "tokens" in microbatch)


def unsteady(items: Iterator[Any], rank: int) -> Iterator[Any]:
    """The same items; ranks are ahead of one another in turns."""
    for number, item in enumerate(items):
        time.sleep(0.003 * ((number // DRAWS + rank) % 2))
        yield item


def trained(layout: Layout, ahead: int, case: str) -> Any:
    """What each training step and the evaluations between them had, and the end of it; threads that
    are left.
    """
    config = start(
        layout, calculate_per_token_loss=True, overlap_p2p_comm=True, batch_p2p_comm=False
    )
    config.deallocate_pipeline_outputs = False
    queue = DelayQueue(MAX_STEPS)
    config.sequence_packing_options = PackingOptions(
        delay_queue=queue, prefetch_global_batches=ahead
    )  # type: ignore[attr-defined]
    rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.VALIDATE_RESULTS)
    machine = rerun.get_rerun_state_machine()
    groups = ProcessGroupCollection.use_mpu_process_groups(GROUPS)
    rank = groups.dp.rank()

    def draws() -> Iterator[Any]:
        for number, item in enumerate(unsteady(data(rank), rank)):
            if case == "error" and number == 2 * DRAWS + 1 and rank == groups.dp.size() - 1:
                raise OSError("disk gone")
            yield item

    source = rerun.RerunDataIterator(draws()) if is_data_rank(groups) else None
    given = [source] * layout.virtual if layout.virtual else source
    held_out = (
        iter([sample(900 + i, 5) for i in range(NUM_STEPS + 1)]) if source is not None else None
    )
    passes = PackedPasses(forward_backward)
    model = SimpleNamespace(config=config)
    steps: list[Any] = []
    end = ""
    arguments: dict[str, Any] = {"model": model, "pg_collection": groups}
    try:
        for _ in range(
            NUM_STEPS + 2 * (case != "rerun")
        ):  # megatron-core cannot repeat a step beyond the end
            again = [list(passes(data_iterator=given, num_microbatches=DRAWS, **arguments))]
            if case == "rerun":  # as megatron-core's state machine has it, which needs a GPU
                machine.state = rerun.RerunState.RERUNNING_IN_PLACE
                if source is not None:
                    source.rewind()
                again.append(list(passes(data_iterator=given, num_microbatches=DRAWS, **arguments)))
                machine.state = rerun.RerunState.INITIAL_RUN
            if source is not None:
                source.advance()
            assert all(packs == again[0] for packs in again)
            steps.append((again[0], len(queue)))
            evaluated = passes(
                data_iterator=[held_out] * (layout.virtual or 1),
                num_microbatches=1,
                forward_only=True,
                **arguments,
            )
            steps.append(list(evaluated))
    except (StopIteration, RuntimeError) as failure:
        end = repr(failure)
    passes.close()
    return (
        steps,
        end,
        [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")],
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", ["end of data", "error", "rerun"])
def test_batches_prepared_ahead_are_those_drawn_in_the_step(layout: Layout, case: str) -> None:
    """A batch that skips, repeats or mixes with evaluation's still trains; and what one rank alone
    hears of hangs.
    """
    inline = run_ranks(trained, layout.world, layout, 0, case)
    ahead = run_ranks(trained, layout.world, layout, 2, case)
    assert ahead == inline
    assert len({end for _, end, _ in ahead}) == 1
    steps, end, threads = ahead[0]
    assert len(steps) >= (2 * NUM_STEPS if case != "error" else 4)
    assert ("disk gone" in end) == (case == "error")
    assert any(num_waiting for step in steps if isinstance(step, tuple) for num_waiting in step[1:])
    assert threads == []
