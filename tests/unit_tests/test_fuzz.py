"""A short part of `make fuzz`: each class of hostile input, a hundred times."""

import signal

import pytest

from tests.fuzz import __main__ as fuzz
from tests.fuzz.classes import CLASSES


@pytest.fixture
def hangs_are_errors():
    before = {
        number: signal.signal(number, fuzz.end_hang) for number in (signal.SIGPROF, signal.SIGALRM)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.parametrize("one", CLASSES, ids=lambda one: one.name)
def test_every_bad_input_ends_in_an_error_of_our_own(one, hangs_are_errors):
    """A bare exception of some library tells a user neither the file nor the line; a hang tells
    nothing at all.
    """
    found = fuzz.run_class(one, 100, seed=2)
    assert found["faults"] == {}, found["examples"]
    assert found["refused"] + found["read"] == 100
