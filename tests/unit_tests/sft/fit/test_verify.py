"""Measurements on a GPU are of the kernels that a run has there."""

from __future__ import annotations

from typing import Any

import torch

from megatron.sft.fit.verify import AllocatorCounter


def test_functions_are_compiled_while_bytes_are_measured() -> None:
    """Else `fit --verify` would measure temporaries that no run makes, and blame the estimate."""
    graphs: list[list[str]] = []

    def backend(graph: Any, _: object) -> Any:
        graphs.append([node.name for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    compiled = torch.compile(lambda x: x.sin() * 2, backend=backend)
    with AllocatorCounter():
        compiled(torch.ones(3))
    assert graphs == [["sin", "mul"]]
