"""Changes of options until a run fits into a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.sft.fit import estimate
from megatron.sft.fit.estimate import Request
from megatron.sft.fit.fewer_bytes import fitting, flags_between, ladder
from megatron.sft.fit.report import LIBRARIES_BYTES, with_margin
from tests.unit_tests.sft.command_line import parse

FLAGS = "--keep-logits --bf16 --recompute-granularity selective --micro-batch-size 4"
RECOMPUTE = "--recompute-granularity full"
CHUNKS = f"{RECOMPUTE} --query-groups-per-gather 1 --mlp-chunks-for-training 16"
HOST = f"{CHUNKS} --fine-grained-activation-offloading"


def test_changes_come_cheapest_first() -> None:
    """A run would take what costs a third of its time where a smaller change was enough."""
    config = parse(FLAGS, 2)
    found = [flags_between(config, one) for one in ladder(config, 2)]
    added = [
        "without --keep-logits",
        "--micro-batch-size 2",
        "--micro-batch-size 1",
        "--use-distributed-optimizer",
        "--recompute-granularity full",
        "--mlp-chunks-for-training 16",
        "--fine-grained-activation-offloading",
        "--use-precision-aware-optimizer --optimizer-cpu-offload",
    ]
    assert len(found) == len(added) + 1
    for flag, before, after in zip(added, found, found[1:], strict=False):
        assert flag not in before
        assert flag in after


def test_what_the_trainer_refuses_is_left_out() -> None:
    """It would end with a message about options that nobody has given."""
    lora = parse("--bf16 --lora", 1)
    last = list(ladder(lora, 1))[-1]
    assert flags_between(lora, last) == HOST
    capped = parse("--attn-logit-softcapping 20", 1)
    assert all("groups" not in flags_between(capped, one) for one in ladder(capped, 1))


@pytest.mark.parametrize(
    ("memory", "host", "flags"),
    [(1000, None, ""), (99, None, RECOMPUTE), (50, None, CHUNKS), (1, None, HOST), (1, 7, CHUNKS)],
)
def test_the_first_that_fits_is_taken(
    monkeypatch: pytest.MonkeyPatch, memory: int, host: int | None, flags: str
) -> None:
    """Of options that fit the cheapest; the last of all where none does, or the host is short."""
    peaks = {"": 900, RECOMPUTE: 90, CHUNKS: 40, HOST: 30}
    config = parse("--lora --lora-rank 4", 1)

    def estimates(request: Any) -> list[Any]:
        changed = flags_between(config, request.config)
        return [SimpleNamespace(peak=peaks[changed], host_bytes=8 * (changed == HOST))]

    monkeypatch.setattr(estimate, "estimates", estimates)
    request = Request(config=config, vocab_size=96, world_size=1)
    found = fitting(request, LIBRARIES_BYTES + memory, host)
    assert (found.flags, found.needed) == (flags, with_margin(peaks[flags]))
    assert found.given == with_margin(900)
    assert flags_between(config, found.config) == flags
