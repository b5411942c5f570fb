"""pure. Messages between a rank and its workers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from megatron.blending.streams.failures import Failure

END = 2**62
"""The turn after the last one of a pass."""


class Start(NamedTuple):
    """Says where servers begin."""

    generation: int = 0
    """Number of the start. Outputs of earlier starts are thrown away."""
    pass_number: int = 0
    cells: Sequence[Any] = ()
    """Start of each lane (part of the stream): its `next` is the next position."""


class Message(NamedTuple):
    """An output, with what the state of the stream needs after the output was used."""

    generation: int
    lane: int
    turn: int
    """END if the pass is over: then there is nothing else."""
    cell: int = 0
    given: int = 0
    """Outputs of the cell that were given, with this one. The next one has this number as
    `part`."""
    items: Sequence[tuple[int | None, Any]] = ()
    """(part, output), or (None, Leftover)."""
    ends_turn: bool = True
    ends_cell: bool = True
    num_failed: int = 0
    num_skipped: int = 0
    error: tuple[str, bytes] | None = None
    """Text and pickled exception of a worker that failed, in place of an output. The bytes are
    empty if the exception cannot be pickled.
    """


class Server(Protocol):
    """Makes a worker's outputs, in its process or in the rank's own."""

    def start(self, start: Start) -> None:
        """Begins again."""

    def next(self, lane: int = 0) -> Message:
        """Makes the next output of a lane."""

    def places(self) -> list[str]:
        """Returns the file and line (or the like) of each record of the last output, in order."""

    def close(self) -> None:
        """Gives up what it holds."""


MakeServer = Callable[[Callable[[Failure], None]], Server]
"""Makes a server in the process where it works. The argument is called with each failure."""
