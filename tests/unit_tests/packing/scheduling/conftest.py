"""Fixtures of the tests of scheduling."""

from collections.abc import Iterator

import pytest

from tests.unit_tests.packing.stubs import in_python, needs_compiled


@pytest.fixture(params=["python", pytest.param("compiled", marks=needs_compiled)])
def form(request) -> Iterator[str]:
    """Placements by the compiled loops, and by the plain ways without them."""
    if request.param == "compiled":
        yield request.param
    else:
        with in_python():
            yield request.param
