"""pure. Global batches to schedule: lengths of many shapes, on few ranks and on thousands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.cost import gpt_pack_cost

try:
    from megatron.sft.data.mock.lengths import parse_distribution
except ImportError:  # before 2026-11-25
    from megatron.sft.data.mock_lengths import parse_distribution  # type: ignore[import-not-found,no-redef]

SEED = 14_142_135
"""Not one of those that `default` was tuned with."""

# 8 billion parameters in the shape of Llama 3: a microbatch costs as much as 500 tokens besides its
# sequences.
_COST = gpt_pack_cost(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    ffn_hidden_size=14336,
    vocab_size=128256,
    swiglu=True,
)

COST = _COST.linear, _COST.quadratic, _COST.fixed


def _lognormal(shortest: int, longest: int, mean: int, sigma: float) -> dict:
    return {
        "type": "lognormal",
        "min_seq_len": shortest,
        "max_seq_len": longest,
        "mean_seq_len": mean,
        "lognormal_sigma": sigma,
    }


DISTRIBUTIONS = {
    "lognormal 1K to 8K": _lognormal(1024, 8192, 4096, 1.1),
    "long tail to 128K": _lognormal(32, 131072, 4000, 1.4),
    "chat and long documents": {
        "type": "mixture",
        "components": [
            {"weight": 0.9, **_lognormal(16, 8192, 550, 0.8)},
            {"weight": 0.1, "type": "uniform", "min_seq_len": 16384, "max_seq_len": 65536},
        ],
    },
    "uniform to 8K": {"type": "uniform", "min_seq_len": 1, "max_seq_len": 8192},
    "constant": {"type": "constant", "seq_len": 4096},
    "one giant": {"type": "uniform", "min_seq_len": 16, "max_seq_len": 128},
    "shaped like chat": {"type": "empirical", "preset": "chat"},
    "shaped like long documents": {"type": "empirical", "preset": "long_documents"},
}
GIANT = 32768
TIMED = ((1024, 64), (8192, 512), (100_000, 4096))
"""Sequences and ranks of batches whose schedules are timed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One global batch."""

    distribution: str
    size: int
    num_ranks: int
    capacity_factor: int
    multiple: int

    def lengths(self, seed: int = SEED) -> npt.NDArray[np.int64]:
        """int64 [size]."""
        numbers = [self.size, self.num_ranks, self.capacity_factor, self.multiple]
        rng = np.random.default_rng([seed, list(DISTRIBUTIONS).index(self.distribution), *numbers])
        lengths = parse_distribution(DISTRIBUTIONS[self.distribution]).quantile(
            rng.random(self.size)
        )
        if self.distribution == "one giant":
            lengths[rng.integers(self.size)] = GIANT
        return lengths


def cases_of(quick: bool) -> list[Case]:
    """All batches, or fewer and smaller ones."""
    sizes = (64, 256, 1024) if quick else (64, 256, 1024, 8192, 100_000)
    ranks = (1, 2, 8, 64) if quick else (1, 2, 8, 64, 512, 4096)
    return list(cases(sizes, ranks, all_ways=not quick))


def cases(sizes: tuple[int, ...], ranks: tuple[int, ...], all_ways: bool) -> Iterator[Case]:
    """Batches of at least a sequence per rank: with `all_ways` those of up to 1,024 sequences at
    all capacities and multiples, the others at one in turn.
    """
    ways = [(factor, multiple) for factor in (1, 2) for multiple in (1, 4, 8)]
    number = 0
    for distribution in DISTRIBUTIONS:
        for size in sizes:
            for num_ranks in ranks:
                if num_ranks > size:
                    continue
                number += 1
                for factor, multiple in (
                    ways if size <= 1024 and all_ways else [ways[number % len(ways)]]
                ):
                    yield Case(
                        distribution=distribution,
                        size=size,
                        num_ranks=num_ranks,
                        capacity_factor=factor,
                        multiple=multiple,
                    )
