"""What has to be seen on a GPU: `make gpu-test`. With `--device cpu` the same tests run at tiny
size without one, so that none of their code is new on the day when there is a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run at tiny size"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def memory_for_others() -> Iterator[None]:
    """Gives memory of the device back after each test, as several processes share it. cuBLAS keeps
    workspaces of 32 MiB, which a test that counts bytes would take for its own.
    """
    yield
    gc.collect()
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
        torch.cuda.empty_cache()


@pytest.fixture(scope="session", autouse=True)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the tests run."""
    chosen = torch.device(request.config.getoption("--device", "cuda"))
    if chosen.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device; pytest tests/gpu_tests --device cpu is a dry run")
    if chosen.type == "cpu" and torch.cuda.is_available():
        pytest.skip(
            "a dry run needs CUDA_VISIBLE_DEVICES= (empty): megatron-core takes a GPU wherever it "
            "sees one"
        )
    return torch.device("cuda", 0) if chosen.type == "cuda" else chosen
