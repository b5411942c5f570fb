"""The compiled core: found, refused, or done without."""

import importlib.machinery

import pytest

from megatron.packing.scheduling import compiled
from tests.unit_tests.packing.stubs import needs_compiled


@needs_compiled
def test_a_library_of_another_version_is_told_and_left(monkeypatch):
    """After an update of an editable install it would get arguments that it doesn't take."""
    monkeypatch.setattr(compiled, "_INTERFACE_VERSION", 0)
    with pytest.warns(UserWarning, match=r"built of another version.*install the project again"):
        assert compiled._load() is None


def test_no_library_is_no_error(monkeypatch):
    """Machines without a compiler schedule too."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert compiled._load() is None
