"""pure. `megatron-sft show`: prints samples as a run would train them.

Takes the options of a run, or only those about its data. A few samples are printed, with trained
tokens in colour (between ⟦ and ⟧ if the output is not a terminal). Then a table gives lengths and
the share of trained tokens over more samples. No model is built, and neither a GPU nor torch is
needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, ClassVar

import numpy as np

from megatron.packing.flag_help import Command
from megatron.packing.flags import FlagError, parse_flags
from megatron.packing.quoting import shortened
from megatron.packing.rules import Rule, at_least, check_rules
from megatron.sft.arguments.defaults import positions_of
from megatron.sft.arguments.megatron_flags import without_megatron_flags
from megatron.sft.arguments.other_trainers import answers_to
from megatron.sft.arguments.pretrained import implied_options
from megatron.sft.data.chat_encoder import Tokenizer
from megatron.sft.data.counts import Counts
from megatron.sft.data.datasets import Datasets, build_datasets
from megatron.sft.data.stream import SampleStream, Share
from megatron.sft.environment import exit_with_message, outlive_output
from megatron.sft.images.sizes import PATCHES
from megatron.sft.options.config import GROUPS, SFTConfig
from megatron.sft.preflight.notes_on_data import notes_on_same_records

COMMON = {
    "What to show": ("config", "data_path", "samples", "count"),
    "How it becomes tokens": (
        "pretrained_checkpoint",
        "tokenizer_model",
        "tokenizer_type",
        "chat_template",
        "chat_template_kwargs",
        "data_columns",
        "train_turns",
        "sequence_packing",
        "seq_length",
        "over_length_policy",
        "loss",
    ),
    "Which part of it": ("split", "blend_mode", "seed", "skip_bad_samples"),
}
_DEFAULT_SEQ_LENGTH = 8192
_TURNS = {
    "served": "each of the assistant's turns behind the prompt that it is generated from",
    "all": "all of the assistant's turns, in one rendering",
    "last": "the assistant's last turn of each conversation",
}
"""Value of --train-turns -> its meaning, for the last line of the output."""
_LONGEST_RUN = 3
"""Equal tokens in a row that are printed one by one, in samples with images."""
_TRAINED, _PLAIN = ("\033[1;32m", "\033[0m"), ("⟦", "⟧")


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    """Samples to show."""

    samples: int = 3
    """Samples to print."""
    count: int = 1000
    """Samples to count lengths and trained tokens of."""

    rules: ClassVar[tuple[Rule, ...]] = (*at_least(0, "samples"), *at_least(1, "count"))

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)


def main(arguments: Sequence[str], program: str) -> None:
    """Prints samples and their table; a wrong option or record is one line, with status 2."""
    outlive_output()
    try:
        config, options, assumes_truncation = _parse(arguments, program)
        datasets = build_datasets(config)
        if datasets.tokenizer is None:
            raise ValueError(
                "--mock-data has synthetic tokens, so there is nothing to show; pass --data-path"
            )
        stream = SampleStream(
            datasets.train,
            Share(0, 1, 1, 1),
            max_bad_samples_in_a_row=config.data.bad_samples_in_a_row,
        )
        names = datasets.train.names
        marks = _TRAINED if sys.stdout.isatty() else _PLAIN
        report = _Report(names, datasets.tokenizer, options.samples, marks)
        for _ in range(min(options.count, len(datasets.train))):
            report.add(next(stream))
        report.summary(stream.counts)
        options_of_pairs = config.preference
        print(
            f"--loss {options_of_pairs.loss}: prompts once, answers as branches; what is marked "
            + ("is scored" if options_of_pairs.scores_answers else "counts in the loss")
            + ", of both answers"
            if options_of_pairs.is_on
            else f"--train-turns {datasets.train_turns}: {_TURNS[datasets.train_turns]}"
        )
        if (note := datasets.tokenizer_note()) is not None:
            print(shortened(note))
        for line in _notes(config, datasets, stream.counts, assumes_truncation):
            print(shortened(line))
    except (FlagError, ValueError, OSError) as failure:
        exit_with_message(program, failure)


def _notes(
    config: SFTConfig, datasets: Datasets, counts: Counts, assumes_truncation: bool
) -> Iterator[str]:
    """Yields what a run with these options does otherwise, and what was probably not meant."""
    num_truncated = sum(counts.of("cut"))
    if num_truncated and assumes_truncation:
        yield (
            f"note: train refuses samples longer than --seq-length {config.model.seq_length}, as "
            f"{num_truncated:,} are, unless --over-length-policy truncate or drop is passed"
        )
    if config.data.tokenizer_type is None and config.data.tokenizer_model is None:
        yield (
            "note: tokens are bytes (ByteLevelTokenizer), and roles have no template; pass "
            "--pretrained-checkpoint or --tokenizer-model for those of a model"
        )
    yield from notes_on_same_records(config.data, datasets)


def _parse(arguments: Sequence[str], program: str) -> tuple[SFTConfig, ShowConfig, bool]:
    """Returns the options, and whether samples are truncated only because no policy is given.

    Options that a run needs and this command does not (layers, learning rate) get a placeholder.
    """
    command = Command(
        program=program,
        about="Show samples as a run would train them, and how long they are.",
        answers=answers_to,
        usage="--data-path FILE [--pretrained-checkpoint FOLDER] | --config run.yaml",
        common=COMMON,
    )

    assumes_truncation = False

    def imply(given: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal assumes_truncation
        size = 1 if given.get("loss") != "kto" else 2
        implied = {"global_batch_size": size, "lr": 0.0, "train_iters": 1} | implied_options(given)
        if given.get("pretrained_checkpoint") is None:
            implied |= {"num_layers": 1, "hidden_size": 1, "num_attention_heads": 1}
        positions = positions_of(given.get("pretrained_checkpoint"))
        implied["seq_length"] = min(_DEFAULT_SEQ_LENGTH, positions or _DEFAULT_SEQ_LENGTH)
        # A reward model scores whole answers.
        implied["over_length_policy"] = "drop" if given.get("loss") == "reward" else "truncate"
        assumes_truncation = "over_length_policy" not in given
        if not any(one.split("=")[0] == "--config" for one in arguments):
            # A run that trains turns as they are generated needs trees, and so packing.
            implied["sequence_packing"] = True
        return implied

    notes: list[str] = []
    ours = without_megatron_flags(arguments)
    *groups, options = parse_flags((*GROUPS, ShowConfig), ours, command, imply=imply, notes=notes)
    for line in notes:
        print(line)
    return SFTConfig.of(groups), options, assumes_truncation


class _Report:
    """Prints the first few samples as they come, and at the end a table over all of them."""

    def __init__(
        self, names: Sequence[str], tokenizer: Tokenizer, num_printed: int, marks: tuple[str, str]
    ) -> None:
        self._names = names
        self._tokenizer = tokenizer
        self._left_to_print = num_printed
        self._marks = marks
        self._lengths: list[list[int]] = [[] for _ in names]
        self._num_trained = [0] * len(names)
        self._num_apart = [0] * len(names)
        """Tokens of all paths, as separate sequences."""

    def add(self, samples: Sequence[Mapping[str, Any]]) -> None:
        for sample in samples:
            source, length = sample["source"], len(sample["tokens"])
            trained = int((sample["loss_mask"] > 0).sum())
            self._lengths[source].append(length)
            apart = path_tokens(sample)
            self._num_trained[source] += trained
            self._num_apart[source] += apart
            if self._left_to_print:
                self._left_to_print -= 1
                saved = f"; {apart:,} as sequences, {apart / length:.1f} times as many"
                print(
                    f"--- {self._names[source]}: {length:,} tokens, {trained:,} trained"
                    + (saved if "parents" in sample else "")
                    + answers_of(sample)
                )
                show = self._tokenizer.show
                if "payload_key" in sample:
                    show = partial(without_runs, show)
                print(marked(sample, show, *self._marks), end="\n\n")
                for line in images_of(sample):
                    print(line)

    def summary(self, counts: Counts) -> None:
        """Prints a line per source: counts, lengths, and reasons for dropped records."""
        width = max(map(len, self._names), default=0)
        print(
            f"{'':{width}}  samples   trained  length: mean   median      90%      max  truncated  "
            "dropped"
        )
        for number, name in enumerate(self._names):
            lengths, dropped = np.array(self._lengths[number] or [0]), counts.dropped(number)
            print(
                f"{name:{width}}  {len(self._lengths[number]):7,} "
                f"{self._num_trained[number] / max(1, int(lengths.sum())):9.1%}  "
                f"{lengths.mean():12,.0f} {np.median(lengths):8,.0f} "
                f"{np.percentile(lengths, 90):8,.0f} {lengths.max():8,} "
                f"{counts.of('cut')[number]:10,} {sum(dropped.values()):8,}"
            )
            for reason, times in dropped.items():
                print(f"{name:{width}}  dropped for {reason}: {times:,}")
            num_tokens, num_apart = int(lengths.sum()), self._num_apart[number]
            if num_apart > num_tokens:
                print(
                    f"{name:{width}}  shared prefixes are computed once: {num_tokens:,} tokens; "
                    f"as sequences {num_apart:,}, {num_apart / num_tokens:.2f} times as many"
                )


def without_runs(show: Callable[[Sequence[int]], str], ids: Sequence[int]) -> str:
    """Returns the text of tokens, with placeholders of an image as one and their number.

    <img> <img> <img> <img> </s> -> <img>*4</s>
    """
    parts: list[str] = []
    plain: list[int] = []
    for token, run in groupby(ids):
        length = len(list(run))
        if length <= _LONGEST_RUN:
            plain += [token] * length
            continue
        parts += [show(plain), f"{show([token])}*{length}"]
        plain = []
    return "".join([*parts, show(plain)])


def images_of(sample: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each image of a sample: what the model sees of it."""
    patches = sample.get("costs", {}).get(PATCHES, ())
    for number, (image, count) in enumerate(zip(sample.get("payload_key", ()), patches), 1):
        height, width = image.size
        yield f"image {number}: {height} x {width} pixels, {count:,} patches, {image.source.name}"


def answers_of(sample: Mapping[str, Any]) -> str:
    """Returns what a sample's answers are, in the order of its branches; "" for one to imitate."""
    if "path_rank" not in sample:
        return ""
    if sample["path_rank"][0] < 0:
        return "; a chat to imitate"
    if "path_good" in sample:
        return f"; marked {'good' if sample['path_good'][0] else 'bad'}" + (
            ", beside the answer of another record" * (len(sample["path_rank"]) > 1)
        )
    names = ["rejected" if rank else "chosen" for rank in sample["path_rank"].tolist()]
    return f"; answers: {', '.join(names)}"


def path_tokens(sample: Mapping[str, Any]) -> int:
    """Returns the number of tokens of a sample's paths, if each were a sequence of its own.

    A tree of nodes with 5, 2 and 3 tokens and parents -1, 0, 0 has paths of 7 and 8 tokens: 15.
    """
    if "parents" not in sample:
        return len(sample["tokens"])
    parents, ends = sample["parents"].tolist(), np.diff(sample["cu_seqlens"]).tolist()
    for node, parent in enumerate(parents):
        ends[node] += ends[parent] if parent >= 0 else 0
    return sum(end for node, end in enumerate(ends) if node not in set(parents))


def marked(
    sample: Mapping[str, Any], show: Callable[[Sequence[int]], str], begin: str, end: str
) -> str:
    """Returns the text of a sample with its trained parts between `begin` and `end`. A weight other
    than 1 is written before the part: `⟦0.5 x yes⟧`.

    The nodes of a tree are printed one below the other, each indented by a bar per ancestor.
    """
    is_scored = "path_margin" in sample  # labels are the tokens themselves
    if "parents" not in sample:
        ids = [int(sample["tokens"][0]), *sample["labels"].tolist()]
        return _marked(ids, [0.0, *sample["loss_mask"].tolist()], show, begin, end)
    levels: list[int] = []
    lines = []
    bounds = sample["cu_seqlens"].tolist()
    for start, stop, parent in zip(bounds, bounds[1:], sample["parents"].tolist()):
        levels.append(levels[parent] + 1 if parent >= 0 else 0)
        # Labels, not tokens: the label of a node's last token is the first token of its branch, so
        # that a node's text begins after that token, which its parent has printed.
        ids, weights = (sample[name][start:stop].tolist() for name in ("labels", "loss_mask"))
        if parent < 0 and not is_scored:
            ids, weights = [int(sample["tokens"][start]), *ids], [0.0, *weights]
        text = _marked(ids, weights, show, begin, end)
        bar = "| " * levels[-1]
        lines += [f"{bar}{line}" for line in text.removesuffix("\n").split("\n")]
    return "\n".join(lines)


def _marked(
    ids: Sequence[int],
    weights: Sequence[float],
    show: Callable[[Sequence[int]], str],
    begin: str,
    end: str,
) -> str:
    parts = []
    for weight, run in groupby(zip(ids, weights), key=lambda pair: pair[1]):
        text = show([token for token, _ in run])
        factor = "" if weight in (0, 1) else f"{weight:g} x "
        parts.append(f"{begin}{factor}{text}{end}" if weight else text)
    return "".join(parts)
