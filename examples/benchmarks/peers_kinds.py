"""pure. Kinds of sequences that contenders of peers.py train on."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """Lengths of sequences, and how many make a step."""

    mean_log: float
    """Mean logarithm of a sequence's length: lognormal, from 8 to 1,024 tokens."""
    deviation: float
    global_batch_size: int
    """Sequences of a step."""
    sequences_per_pack: int
    """About as many as a pack of 1,024 tokens holds: so a step of TRL's packing is as large as the
    others'.
    """


KINDS = {
    "chats": Kind(5.0, 1.0, 16, 4),
    "short": Kind(3.8, 0.7, 32, 16),
    "joined": Kind(9.0, 0.0, 4, 1),
}
"""Name -> kind: chats of 190 tokens on average; short ones, of 57; and rows of 1,024, as data that
were joined to full rows have them, which leave nothing to pack.
"""
