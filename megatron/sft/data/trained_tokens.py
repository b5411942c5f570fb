"""pure. Refuses data without a single token to train on, before the first step, with the reason.

Such a run would end with loss 0.0 and an untrained model. The check encodes records until one has a
token to train on: usually one record per source, at most 1,000.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.blending.streams.failures import SkipSample
from megatron.blending.streams.source import SourceDataset
from megatron.sft.data.chats import ChatLoad
from megatron.sft.data.datasets import Datasets
from megatron.sft.data.records.content import messages_of
from megatron.sft.data.sample_set import SampleSet
from megatron.sft.data.templates.chat_template import SlowTemplateError

MAX_PROBED = 1_000
"""Most records of a source that are encoded in search of a token to train on. They are spread
evenly over the source.
"""


def check_trained(datasets: Datasets, is_evaluated: bool) -> None:
    """Raises ValueError if a source of the training data has no token to train on, or if a held-out
    split has none in all its sources.

    is_evaluated: True if the run uses the held-out splits.
    """
    if datasets.tokenizer is None:  # mock data, where every token is trained
        return
    for name, source in _sources(datasets.train):
        untrained = _probe([source])
        if untrained is not None:
            raise ValueError(f"{name}: {untrained.reason()}; correct it, or leave it out")
    held_out = {"validate": datasets.valid, "test": datasets.test}
    for purpose, samples in held_out.items() if is_evaluated else ():
        untrained = _probe([source for _, source in _sources(samples)])
        if untrained is not None:
            raise ValueError(
                f"the data to {purpose} with: {untrained.reason()}; give other records by --split "
                "or --valid-data-path"
            )


def _sources(samples: SampleSet) -> list[tuple[str, SourceDataset]]:
    return list(zip(samples.names, samples.sources, strict=True))


@dataclass
class _Untrained:
    """Findings about records of which none makes a sample."""

    example: str
    """Place of the first record."""
    num_records: int
    """Number of records of the sources, probed or not."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of probed records by reason."""
    fault: str = ""
    """Error of the first broken record."""
    roles: Counter[str] = field(default_factory=Counter)
    """Number of turns by role, in records without a token to train on."""
    num_weighted: int = 0
    """Number of assistant turns among them with a weight above 0, that of the record included."""

    def reason(self) -> str:
        """Returns the error message about the data."""
        num_probed = sum(self.reasons.values())
        counted = f"none of {num_probed:,} records" + f", spread over {self.num_records:,}," * (
            num_probed < self.num_records
        )
        if self.reasons.keys() == {"bad sample"}:
            return f"{self.fault}; {counted} makes a sample"
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.reasons.items())
        said = f"{counted} has a token to train on ({reasons}; the first is {self.example})"
        return "; ".join(filter(None, (said, self.fault, self._reason_of_roles())))

    def _reason_of_roles(self) -> str:
        if not self.roles:
            return ""
        seen = ", ".join(f"{role} ({count:,})" for role, count in sorted(self.roles.items()))
        if "assistant" not in self.roles:
            return f"no turn has the role assistant; roles seen: {seen}"
        if not self.num_weighted:
            return f"each turn of the assistant, or its record, has weight 0; roles seen: {seen}"
        return f"the chat template marks nothing of what the assistant says; roles seen: {seen}"


def _probe(sources: Sequence[SourceDataset]) -> _Untrained | None:
    """Returns why no record of these sources makes a sample; None if one does, or if there are no
    sources. Raises ValueError if the chat template takes too long.
    """
    found: _Untrained | None = None
    for source in sources:
        for index in _probed(len(source)):
            place = source.source.describe(index)
            if found is None:
                found = _Untrained(place, sum(map(len, sources)))
            try:
                _encode(source, index, found)
            except SkipSample as skipped:
                found.reasons[str(skipped)] += 1
            except SlowTemplateError as error:  # a thousand of them would take hours
                raise ValueError(f"{place}: {error}") from None
            except Exception as error:
                # A broken record. Training reports it, with file and line, when it comes to it.
                found.reasons["bad sample"] += 1
                fault = str(error)
                found.fault = found.fault or (
                    fault if fault.startswith(place) else f"{place}: {fault}"
                )
            else:
                return None
    return found


def _probed(num_records: int) -> Iterator[int]:
    """Returns up to `MAX_PROBED` indices, in order: 2,500 records -> 0, 2, 5, 7, ..."""
    num_probed = min(num_records, MAX_PROBED)
    return (at * num_records // num_probed for at in range(num_probed))


def _encode(source: SourceDataset, index: int, found: _Untrained) -> Any:
    """Makes a sample of a record. If the record has no token to train on, counts the roles of its
    turns in `found` and raises SkipSample.
    """
    load = source.load
    assert isinstance(load, ChatLoad)
    key = (source.name, 0, index)
    try:
        return load(source.source[index], key)
    except SkipSample:
        reading = load.read(source.source[index])
        for message in messages_of(reading.content):
            found.roles[message.role] += 1
            found.num_weighted += (
                message.role == "assistant" and message.weight * reading.weight > 0
            )
        raise
