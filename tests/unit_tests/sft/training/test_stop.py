"""Ctrl-C, SIGTERM and SIGHUP end a run at a step boundary."""

import signal
import threading
import time

import pytest

from megatron.sft.training.stop import StopSignals


@pytest.fixture
def handlers():
    """Handlers of this test's own, so that nothing that it does reaches pytest's; returns what they
    saw.
    """
    seen: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: seen.append(n)) for number in numbers}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_only_sets_the_flag(handlers, number):
    """A step cut off in the middle leaves the other ranks hanging in a collective, and saves
    nothing.
    """
    with StopSignals() as signals:
        assert not signals.requested
        signal.raise_signal(number)
        assert signals.requested
    assert signals.requested
    assert handlers == []


@pytest.mark.filterwarnings("error")
def test_sigterm_is_told_to_a_thread_once(handlers):
    """The main thread may wait for a rank that has died, and would hear of it when the launcher
    loses its patience.
    """
    told: list[int] = []
    with StopSignals(lambda agreed: told.append(threading.get_ident())):
        signal.raise_signal(signal.SIGINT)
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        end = time.monotonic() + 5
        while not told and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)
        signal.raise_signal(signal.SIGTERM)
    assert len(told) == 1
    assert told[0] != threading.get_ident()


def test_second_interrupt_interrupts(handlers):
    """A run that hangs could not be ended from the keyboard."""
    with StopSignals():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_second_sigterm_is_as_the_first(handlers):
    """Launchers send SIGTERM more than once; the checkpoint that the first one asked for must be
    written.
    """
    with StopSignals() as signals:
        try:
            for _ in range(3):
                signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            pytest.fail("a second SIGTERM interrupts")
        assert signals.requested


def test_one_interrupt_after_sigterm_does_not_interrupt(handlers):
    """A launcher's SIGTERM followed by the user's first Ctrl-C would lose the checkpoint; the
    second may.
    """
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        try:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            pytest.fail("the first SIGINT interrupts")
        assert signals.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_handlers_are_restored(handlers, how):
    """Else Ctrl-C does nothing for the rest of the process, such as the report or a user's
    notebook.
    """
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def enter():
        with StopSignals():
            assert [
                signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
            ] != before
            if how == "raises":
                raise ZeroDivisionError

    if how == "raises":
        with pytest.raises(ZeroDivisionError):
            enter()
    else:
        enter()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    signal.raise_signal(signal.SIGINT)
    assert handlers == [signal.SIGINT]


def test_flag_is_of_one_object_only(handlers):
    """A second training in the same process would end at its first step."""
    with StopSignals():
        signal.raise_signal(signal.SIGTERM)
    with StopSignals() as signals:
        assert not signals.requested


@pytest.mark.parametrize(
    ("handled", "stops"), [(None, False), ("SIGTERM,SIGINT", False), ("SIGTERM,SIGHUP", True)]
)
def test_a_hangup_that_is_ignored(handlers, monkeypatch, handled, stops):
    """Under nohup a run outlives its terminal; but torchrun passes SIGHUP on, and kills its ranks
    after it.
    """
    monkeypatch.delenv("TORCHELASTIC_SIGNALS_TO_HANDLE", raising=False)
    if handled is not None:
        monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", handled)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGHUP)
        assert signals.requested == stops
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
