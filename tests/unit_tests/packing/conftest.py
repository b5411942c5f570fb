"""What tests of the plug-in share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def taken_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test leaves megatron-core changed to the others. Taken back before `monkeypatch` is, which
    came first.
    """
    from megatron.packing import plugin

    yield
    plugin.uninstall()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """megatron-core's function without a pipeline, which only notes what it is called with and
    steps once.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    noted: list[dict[str, Any]] = []

    def plain(**arguments: Any) -> list[Any]:
        noted.append(arguments)
        output, loss_func = arguments["forward_step_func"](
            arguments["data_iterator"], arguments["model"]
        )
        return [loss_func(output)]

    monkeypatch.setattr(schedules, "forward_backward_no_pipelining", plain)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(
        parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: None
    )
    return noted
