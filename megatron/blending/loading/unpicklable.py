"""pure. Builds the error for an output that a worker cannot pickle: it names the part, and the
sample.
"""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from megatron.blending.arguments import shown
from megatron.blending.loading.messages import Message
from megatron.blending.streams.failures import FatalSampleError

_MAX_PARTS = 10_000
_MAX_PLACES = 3


def unpicklable(message: Message, error: Exception, places: Sequence[str]) -> FatalSampleError:
    """Returns the error for a message that `pickle` refused with `error`:

    output['x'][3] of sample 'a/17' (a.jsonl:18) is a function, which cannot be sent ...

    places: places of the records that the output was made from.
    """
    outputs = [value for _, value in message.items]
    bad = next((value for value in outputs if not _is_picklable(value)), None)
    place, part = _smallest("output", bad)
    key = _key_of(bad)
    sample = "" if key is None else f" of sample {shown(key)}"
    if places:
        sample += f" ({_place_of(bad, places)})"
    return FatalSampleError(
        f"{place}{sample} is a {type(part).__qualname__}, which cannot be sent to the rank "
        f"({type(error).__name__}: {error!s:.200}); let the encoder return plain values, arrays or "
        "tensors, or pass num_workers=0"
    )


def _place_of(value: Any, places: Sequence[str]) -> str:
    """Returns the places of the samples that cannot be pickled, or the first of the batch."""
    if isinstance(value, (list, tuple)) and len(value) == len(places) > 1:
        places = [
            place for part, place in zip(value, places, strict=True) if not _is_picklable(part)
        ]
    more = f" and {len(places) - _MAX_PLACES:,} more" if len(places) > _MAX_PLACES else ""
    return ", ".join(places[:_MAX_PLACES]) + more


def _smallest(place: str, value: Any) -> tuple[str, Any]:
    """Returns the innermost part that cannot be pickled, and its place."""
    for _ in range(_MAX_PARTS):
        found = next(((at, part) for at, part in _parts(value) if not _is_picklable(part)), None)
        if found is None:
            break
        place, value = place + found[0], found[1]
    return place, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{shown(key)}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))
    elif is_dataclass(value):
        yield from ((f".{one.name}", getattr(value, one.name, None)) for one in fields(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        yield from ((f".{name}", part) for name, part in vars(value).items())


def _is_picklable(value: Any) -> bool:
    try:
        pickle.dumps(value, protocol=5)
    except Exception:  # a class of the user may raise anything
        return False
    return True


def _key_of(value: Any) -> Any:
    """Returns the key of a sample, or of the failing sample of a batch; None without a key."""
    if isinstance(value, Mapping):
        return value.get("__key__")
    if isinstance(value, (list, tuple)):
        bad = next((part for part in value if not _is_picklable(part)), None)
        return None if bad is None else _key_of(bad)
    return getattr(value, "__key__", None)
