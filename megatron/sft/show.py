"""pure. What a run would train: python -m megatron.sft.show --config run.yaml, with the same options as training.

Prints a few samples with their trained tokens in colour (between ⟦ and ⟧ where there is no terminal), and of more
samples how long they are and which share of their tokens is trained. Builds no model and needs no GPU, no torch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from megatron.packing.flags import FlagError, check_range, parse_flags
from megatron.sft.data.chat_encoder import Dropped, EncodedSample, Tokenizer
from megatron.sft.data.datasets import build_datasets
from megatron.sft.data.mixture import Mixture
from megatron.sft.options.config import GROUPS, SFTConfig
from megatron.sft.options.pretrained import implied_options

_PROGRAM = "python -m megatron.sft.show"
_TRAINED, _PLAIN = ("\033[1;32m", "\033[0m"), ("⟦", "⟧")


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    """What to show."""

    samples: int = 3
    """Samples to print."""
    count: int = 1000
    """Samples to count lengths and trained tokens of."""

    def __post_init__(self) -> None:
        check_range(self, 0, None, "samples")
        check_range(self, 1, None, "count")


class Shown(NamedTuple):
    """A record at a position of the stream, as training gets it."""

    source: int
    record: int
    made: EncodedSample | Dropped


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, open and print; a wrong option or record is one line, with status 2."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        *groups, show = parse_flags(
            (*GROUPS, ShowConfig),
            given,
            "Show what would be trained.",
            _PROGRAM,
            imply=implied_options,
        )
        config = SFTConfig.of(groups)
        datasets = build_datasets(config)
        if datasets.tokenizer is None:
            raise ValueError("--mock-data has made-up tokens, so there is nothing to show; pass --data-path")
        for line in lines_of(datasets.train, datasets.tokenizer, show, sys.stdout.isatty()):
            print(line)
    except (FlagError, ValueError) as failure:
        print(f"{_PROGRAM}: error: {' '.join(str(failure).split())}", file=sys.stderr)
        raise SystemExit(2) from None


def lines_of(train: Mixture, tokenizer: Tokenizer, show: ShowConfig, in_colour: bool) -> Iterator[str]:
    """The report; records are read while it is made, in the order of training."""
    begin, end = _TRAINED if in_colour else _PLAIN
    shown: list[Shown] = []
    number_printed = 0
    for place in train.places(range(min(show.count, len(train)))):
        made = train.sources[place.source][place.record]
        shown.append(Shown(place.source, place.record, made))
        if isinstance(made, EncodedSample) and number_printed < show.samples:
            number_printed += 1
            yield _heading(train.sources[place.source].name, place.record, made)
            yield marked(made, tokenizer.show, begin, end)
            yield ""
    yield from _summary(shown, [source.name for source in train.sources])


def marked(sample: EncodedSample, show: Callable[[Sequence[int]], str], begin: str, end: str) -> str:
    """The text of a sample, its trained parts between `begin` and `end`."""
    ids = [int(sample.tokens[0]), *sample.labels.tolist()]
    weights = [0.0, *sample.loss_mask.tolist()]
    parts = []
    for weight, run in groupby(zip(ids, weights), key=lambda pair: pair[1]):
        text = show([token for token, _ in run])
        factor = "" if weight in (0, 1) else f"{weight:g} x "
        parts.append(f"{begin}{factor}{text}{end}" if weight else text)
    return "".join(parts)


def _heading(source: str, record: int, sample: EncodedSample) -> str:
    trained = int((sample.loss_mask > 0).sum())
    cut = ", cut to --seq-length" if sample.is_cut else ""
    return f"--- {source}, record {record + 1}: {len(sample.tokens):,} tokens{cut}, {trained:,} trained"


def _summary(shown: Sequence[Shown], names: Sequence[str]) -> Iterator[str]:
    """A line per source, and the reasons why records make no sample."""
    width = max(map(len, names), default=0)
    yield f"{'':{width}}  samples   trained  length: mean   median      90%      max      cut  dropped"
    for number, name in enumerate(names):
        made = [one.made for one in shown if one.source == number]
        samples = [sample for sample in made if isinstance(sample, EncodedSample)]
        lengths = np.array([len(sample.tokens) for sample in samples] or [0])
        trained = sum(int((sample.loss_mask > 0).sum()) for sample in samples)
        yield (
            f"{name:{width}}  {len(samples):7,}   {trained / max(1, int(lengths.sum())):7.1%}  {lengths.mean():12,.0f} "
            f"{np.median(lengths):8,.0f} {np.percentile(lengths, 90):8,.0f} {lengths.max():8,} "
            f"{sum(sample.is_cut for sample in samples):8,} {len(made) - len(samples):8,}"
        )
    reasons = Counter(one.made.reason for one in shown if isinstance(one.made, Dropped))
    for reason, number in reasons.most_common():
        yield f"dropped for {reason}: {number:,}"


if __name__ == "__main__":
    main()
