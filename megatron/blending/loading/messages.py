"""pure. Messages between a rank and its workers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from megatron.blending.streams.failures import Failure

END = 2**62
"""The turn after the last one of a pass."""


class Start(NamedTuple):
    """Says where servers begin."""

    generation: int = 0
    """Number of the start: outputs of earlier ones are thrown away."""
    pass_number: int = 0
    cells: Sequence[Any] = ()
    """Start of each lane (part of the stream): its `next` is the next position."""


class Message(NamedTuple):
    """An output, with all that the state of the stream needs once it was used."""

    generation: int
    lane: int
    turn: int
    """END if the pass is over: then there is nothing else."""
    cell: int = 0
    given: int = 0
    """Outputs of the cell up to this one: `part` of the next."""
    items: Sequence[tuple[int | None, Any]] = ()
    """(part, output), or (None, Leftover)."""
    ends_turn: bool = True
    ends_cell: bool = True
    num_failed: int = 0
    num_skipped: int = 0
    error: tuple[str, bytes] | None = None
    """Failures in place of an output, and the exception, pickled; b"" if it cannot be."""


class Server(Protocol):
    """Makes a worker's outputs, in its process or in the rank's own."""

    def start(self, start: Start) -> None:
        """Begins again."""

    def next(self, lane: int = 0) -> Message:
        """Makes the next output of a lane."""

    def places(self) -> list[str]:
        """Returns where a person finds the records that the last output was made of, in order."""

    def close(self) -> None:
        """Gives up what it holds."""


MakeServer = Callable[[Callable[[Failure], None]], Server]
"""Called, where the server works, with what reports failures."""
