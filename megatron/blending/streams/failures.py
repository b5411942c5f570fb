"""pure. A sample that makes a function fail is left out, logged once and counted, up to a limit.

Samples are counted where they are made, in a worker, and logged by the rank's loader, to which
workers report each `Failure`: several may meet the same sample, and a worker that starts again
remembers none.
"""

import logging
from collections.abc import Callable, Set
from typing import Any, NamedTuple

from megatron.blending.streams.seeding import mark_of

logger = logging.getLogger("megatron.blending")

DEFAULT_TOLERANCE = 100

# Mistakes in the program, not in a sample: the next sample would fail too.
_FATAL = (
    SystemError,
    SyntaxError,
    ImportError,
    MemoryError,
    RecursionError,
    ReferenceError,
    NameError,
)
_LOGGED_ONE_BY_ONE = 20
_REMEMBERED = 10_000
_MAX_IN_SILENCE = 1_000_000


class SkipSample(Exception):
    """Raised by a function that leaves a sample out, silently; the loader counts it."""


class NotChosen(SkipSample):
    """No pack takes the sample, which is left out, logged and counted."""


class FatalSampleError(RuntimeError):
    """Raised when too many samples in a row failed, or one did in a way that others will too."""


class Failure(NamedTuple):
    """A function failed with a sample: the same one has the same node and place, whoever met it."""

    node: int
    place: str
    """Place of its (first) record."""
    text: str
    """Message, in one line."""


class FailureLog:
    """Logs each failing sample once, whichever workers report it and however often.

    Each of the first 20, then ever fewer: a broken source must not fill the disk. The number in a
    line is how many different ones were reported. It remembers 10,000 of them, some 2 MB; those
    beyond count again each time.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[int, str]] = set()
        self._num_seen = 0

    def add(self, failure: Failure) -> None:
        if (failure.node, failure.place) in self._seen:
            return
        if len(self._seen) < _REMEMBERED:
            self._seen.add((failure.node, failure.place))
        self._num_seen += 1
        if self._num_seen <= _LOGGED_ONE_BY_ONE or _is_power_of_two(self._num_seen):
            logger.warning("%s; left out, %d so far", failure.text, self._num_seen)


class Failures:
    """Counts what one worker left out. `tolerance` failures of one function in a row are fatal; 0:
    never.

    A row is of one source: what comes of the others does not end it.
    """

    def __init__(
        self,
        tolerance: int = DEFAULT_TOLERANCE,
        handler: Callable[[Exception, Any, Any], None] | None = None,
        report: Callable[[Failure], None] | None = None,
    ):
        """`handler(error, sample, sources)` is called in place of the logging; what it raises ends
        the run.

        `report` gets each failing sample at once, as often as it fails; None: they are logged.
        """
        self._tolerance = tolerance
        self._handler = handler
        self._report = FailureLog().add if report is None else report
        self._in_a_row: dict[tuple[int, int | None], int] = {}
        """Failures since the last success, by node, and by source where the sample has only one."""
        self.num_failed = 0
        self.num_skipped = 0
        self._silent_in_a_row = 0

    def succeeded(self, sources: Callable[[], Set[int]] | None = None) -> None:
        """Notes that something came out: failures of its sources (None: of any) are a new row from
        here on.
        """
        self._silent_in_a_row = 0
        if self._in_a_row:
            ended = None if sources is None else {None, *sources()}
            for row in [row for row in self._in_a_row if ended is None or row[1] in ended]:
                del self._in_a_row[row]

    def leave_out(
        self,
        error: Exception | None,
        node: int,
        function: object,
        where: Callable[[], str],
        sample: object,
        sources: Callable[[], Set[int]] = frozenset,
    ) -> None:
        """Counts what `function` of a node did not take; raises FatalSampleError if that is too
        much.

        `error`: None or SkipSample where it said so, which is silent. `where()`: for a person to
        find the sample; `sources()`: numbers of those that it is made of.
        """
        if error is None or isinstance(error, SkipSample):
            self._skip(function, where)
            if isinstance(error, NotChosen):
                place = where()
                self._report(Failure(node, place, f"{place}: {error}"))
            return
        if isinstance(error, FatalSampleError):
            raise error
        self._fail(error, node, function, where, sample, sources())

    def _fail(
        self,
        error: Exception,
        node: int,
        function: object,
        where: Callable[[], str],
        sample: object,
        found: Set[int],
    ) -> None:
        self.num_failed += 1
        row = (node, next(iter(found)) if len(found) == 1 else None)
        in_a_row = self._in_a_row[row] = self._in_a_row.get(row, 0) + 1
        own = failure_tolerance_of(function)
        tolerance = self._tolerance if own is None else own
        is_fatal = isinstance(error, _FATAL) or bool(tolerance and in_a_row >= tolerance)
        if self._handler is not None and not is_fatal:
            self._handler(error, sample, _sources_of(sample))
            return
        place = where()
        if is_fatal:
            reason = (
                ""
                if isinstance(error, _FATAL)
                else f"; {in_a_row} samples in a row failed, the limit"
            )
            raise FatalSampleError(
                f"{_described(error, function, place, sample)}{reason}"
            ) from error
        self._report(Failure(node, place, _described(error, function, place, sample)))

    def announce(
        self, error: Exception | None, node: int, function: object, where: Any, sample: Any
    ) -> None:
        """Logs a sample that failed, ahead of `leave_out`, which counts it: for the case that the
        rest of its block ends the process.
        """
        is_skip = error is None or isinstance(error, (SkipSample, FatalSampleError))
        if is_skip or self._handler is not None or isinstance(error, _FATAL):
            return
        place = where()
        self._report(Failure(node, place, _described(error, function, place, sample)))

    def _skip(self, function: object, where: Callable[[], str]) -> None:
        self.num_skipped += 1
        self._silent_in_a_row += 1
        if self._silent_in_a_row >= _MAX_IN_SILENCE:
            raise FatalSampleError(
                f"{_name(function)} left out {_MAX_IN_SILENCE:,} samples in a row, the last at "
                f"{where()}; nothing may be left of the data"
            )


def failure_tolerance_of(function: object) -> int | None:
    """Returns what `@stateless(failure_tolerance=...)` asked for; None if nothing did."""
    tolerance: int | None = mark_of(function, "__failure_tolerance__")
    return tolerance


def reraise_exception(error: Exception, sample: object, sources: object = None) -> None:
    """A `global_error_handler` that ends the run with the first sample that fails."""
    raise error


def log_exception(error: Exception, sample: object, sources: object = None) -> None:
    """A `global_error_handler` that logs each failure with its traceback, where the log without any
    has a line.
    """
    logger.error("a sample of %s failed", sources, exc_info=error)


def _sources_of(sample: object) -> list[Any] | None:
    """Returns the SourceInfos of a sample, or of several; None where it does not say."""
    several = sample if isinstance(sample, list) else [sample]
    has = [
        one.get("__sources__") if isinstance(one, dict) else getattr(one, "__sources__", None)
        for one in several
    ]
    return [source for sources in filter(None, has) for source in sources] or None


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _described(error: Any, function: object, place: str, sample: object) -> str:
    key = sample.get("__key__") if isinstance(sample, dict) else getattr(sample, "__key__", None)
    of_key = "" if key is None else f" (key {key})"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    at = "" if trace is None else f" [{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}]"
    text = " ".join(str(error).split()) or "no message"
    return f"{place}{of_key}: {_name(function)}: {type(error).__name__}: {text}{at}"


def _name(function: object) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
