"""A plugin of pytest: each test that ends is a line of JSON in the file that RESULTS names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds the line; skipped tests and those that fail to begin, too."""
    path = os.environ.get("RESULTS")
    is_worker = "PYTEST_XDIST_WORKER" in os.environ  # its reports come to the one that started it
    if path is None or is_worker or (report.when != "call" and report.passed):
        return
    line = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "seconds": round(report.duration, 1),
        "figures": dict(report.user_properties),
    }
    with Path(path).open("a") as file:
        file.write(json.dumps(line) + "\n")
