"""`--fit-to-memory`: all ranks train with the same options, and the log says which."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.packing.flags import FlagError
from megatron.packing.memory_size import GIB
from megatron.sft.memory_estimate import Fitted
from megatron.sft.preflight import fit_to_memory as module
from megatron.sft.preflight.fit_to_memory import fit_to_memory, note
from tests.unit_tests.sft.command_line import parse

FULL = "--recompute-granularity full"
FITTED = "--fit-to-memory 24GB --distributed-timeout-minutes 2"


class Store(dict[str, Any]):
    """Stands for the store at which ranks have met."""

    def set(self, key: str, value: bytes) -> None:
        self[key] = value


def test_ranks_take_over_what_rank_0_has_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank with other options would wait in another collective for ever."""
    config, changed = parse(FITTED), parse(f"{FITTED} {FULL}")
    asked = list[Any]()

    def fitted(*arguments: Any, seconds: float) -> Fitted:
        asked.append((arguments[3], seconds))
        return Fitted(changed, FULL, 23 * GIB, 78 * GIB)

    monkeypatch.setattr(module, "fitted_options", fitted)
    store = Store()
    assert fit_to_memory(config, 96, 0, 2, store) == changed
    assert fit_to_memory(config, 96, 1, 2, store) == changed
    assert asked == [(24 * 10**9, 60.0)]  # the other rank waits for at most 120
    assert FULL in capsys.readouterr().out


def test_without_the_option_or_a_gpu_nothing_changes() -> None:
    """Each start would wait for an estimate, on CPUs too."""
    for flags in ("", "--fit-to-memory off", "--fit-to-memory found"):
        config = parse(flags)
        assert fit_to_memory(config, 96, 0, 1) is config


def test_lines_of_the_log() -> None:
    """Who finds a run slower than another reads here why."""
    memory = 24 * GIB
    config = parse("")
    assert note(Fitted(config, FULL, 23 * GIB, 78 * GIB), memory) == (
        f"chosen for GPUs of 24.00 GiB: {FULL} (23.00 GiB instead of 78.00, estimated); "
        "--fit-to-memory off keeps options as given"
    )
    assert note(Fitted(config, FULL, 25 * GIB, 78 * GIB), memory).endswith(
        "; it may not fit: take more GPUs, or lower --seq-length"
    )
    assert note(Fitted(config, "", 9 * GIB, 9 * GIB), memory) == (
        "memory: 9.00 GiB (estimated) of GPUs of 24.00 GiB: fits"
    )
    assert "no estimate (late); options stay as given" in note(Fitted(failure="late"), memory)


def test_a_size_that_is_none_is_refused() -> None:
    """It would be found out after the data were read."""
    with pytest.raises(FlagError, match=r"--fit-to-memory much: must be a size above 0"):
        parse("--fit-to-memory much")
