"""Values prepared ahead are those of calls in order; what goes wrong is heard where it belongs, and
threads end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from megatron.packing.step.prefetch import Prefetcher


def counting(
    failure: BaseException | None = None, at: int = 0
) -> tuple[Callable[[], int], list[int]]:
    """A `prepare` that counts its calls, and raises at one; and the calls so far."""
    calls: list[int] = []

    def prepare() -> int:
        calls.append(len(calls))
        if failure is not None and calls[-1] == at:
            raise failure
        return calls[-1]

    return prepare, calls


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_values_come_in_order_and_as_many_are_prepared_as_was_said(ahead: int) -> None:
    """A rank that prepares one more or less than the others waits for them for ever, or they for
    it.
    """
    before = threading.active_count()
    prepare, calls = counting()
    prefetcher = Prefetcher(prepare, ahead)
    assert calls == []
    for number in range(4):
        assert next(prefetcher) == number
        prefetcher.settle()
        assert len(calls) == number + 1 + ahead
    prefetcher.close()
    assert len(calls) == 4 + ahead
    assert threading.active_count() == before


@pytest.mark.parametrize("pause", [0.0, 0.02])
def test_what_waits_is_bounded_alike_on_all_ranks(pause: float) -> None:
    """By the bytes of values that all ranks know, so that fast and slow ranks prepare as many: one
    more would wait for the others for ever.
    """
    sizes = [5, 1, 1, 9, 1, 1, 1, 20, 1, 1, 1, 1]
    #  waiting after each call, at most 5 bytes and the one that goes beyond, of at most 3 values:
    #  1 1 9 | 1 9 | 9 | 1 1 1 | 1 1 20 | 1 20 | 20 | 1 1 1 | 1 1 1
    expected = [4, 4, 4, 7, 8, 8, 8, 11, 12]
    numbers = iter(range(len(sizes)))

    def prepare() -> int:
        time.sleep(pause)
        return next(numbers)

    prefetcher = Prefetcher(prepare, 3, size_of=sizes.__getitem__, max_waiting=5)
    for asked, prepared in enumerate(expected, start=1):
        assert next(prefetcher) == asked - 1
        if pause == 0 or asked % 3 == 0:
            prefetcher.settle()
            assert prefetcher.waiting_bytes == sum(sizes[asked:prepared])
    prefetcher.close()
    assert next(numbers, None) is None


def test_no_more_is_prepared_than_will_be_asked_for() -> None:
    """The last step takes all delayed sequences: a batch drawn after it would be missing in what
    was consumed.
    """
    prepare, calls = counting()
    prefetcher = Prefetcher(prepare, 3, limit=4)
    assert [next(prefetcher) for _ in range(4)] == calls == [0, 1, 2, 3]
    prefetcher.close()
    assert len(calls) == 4


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(
    "failure", [StopIteration(), ValueError("broken"), SystemExit(3)], ids=repr
)
def test_a_failure_belongs_to_its_step(ahead: int, failure: BaseException) -> None:
    """Raised earlier, two good steps would be lost; swallowed by the thread, the step would wait
    for ever.
    """
    before = threading.active_count()
    prepare, calls = counting(failure, at=2)
    prefetcher = Prefetcher(prepare, ahead)
    assert [next(prefetcher), next(prefetcher)] == [0, 1]
    with pytest.raises(type(failure)):
        next(prefetcher)
    if ahead:
        with pytest.raises(type(failure)):
            next(prefetcher)
        assert len(calls) == 3
    prefetcher.settle()
    prefetcher.close()
    assert threading.active_count() == before


def test_closing_finishes_what_other_ranks_prepare_too() -> None:
    """A collective left in the middle would leave their threads in it."""
    is_slow = threading.Event()

    def prepare() -> int:
        is_slow.wait(0.05)
        return 0

    prefetcher = Prefetcher(prepare, 2)
    next(prefetcher)
    prefetcher.close()
    assert prefetcher._num_prepared == 3
    with pytest.raises(RuntimeError, match="was closed"):
        next(prefetcher)


def test_closing_after_an_error_waits_only_so_long() -> None:
    """The error of one rank would never be seen, while its thread waits for ranks that wait for
    it."""
    continues_across_epochs = threading.Event()
    prepare, _ = counting()

    def stuck() -> int:
        number = prepare()
        if number:
            continues_across_epochs.wait()
        return number

    prefetcher = Prefetcher(stuck, 1)
    next(prefetcher)
    start = time.monotonic()
    prefetcher.close(timeout_seconds=0.05)
    assert time.monotonic() - start < 5
    continues_across_epochs.set()
    prefetcher.close()


def test_waiting_is_what_the_step_waited() -> None:
    """The log would blame the data for time in which the step before was computed."""
    prefetcher = Prefetcher(lambda: time.sleep(0.02), 1)
    next(prefetcher)
    assert prefetcher.seconds_waited >= 0.02
    prefetcher.settle()
    next(prefetcher)
    assert prefetcher.seconds_waited < 0.02
    prefetcher.close()
