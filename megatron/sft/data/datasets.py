"""pure. Opens what a run reads by its options: sources, blended or one after the other, split three
ways.

A metadataset (YAML) as --data-path is blended, and so are paths with weights; others are read one
after the other, each epoch in an order of its own over all of them. Held-out data are, in this
order: --valid-data-path; the splits val and test that the data say they have (metadatasets and
prepared folders); a part of the data by --split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from megatron.blending.formats.source_part import SourcePart
from megatron.blending.formats.sources import Record
from megatron.blending.loading.sources import (
    DatasetBlendMode,
    LoadedDatasetList,
    loaded_for_training,
    source_of,
    split_names,
)
from megatron.blending.loading.token_weights import by_tokens, mean_tokens
from megatron.blending.metadatasets.metadataset import (
    Blend,
    Join,
    SourceEntry,
    flattened,
    load_metadataset,
    source_entries,
)
from megatron.blending.order.weights import WeightSchedule
from megatron.blending.streams.source import SourceDataset
from megatron.sft.data.chat_encoder import ChatEncoder, EncodedSample, Tokenizer
from megatron.sft.data.chats import ChatLoad, num_tokens, open_chats
from megatron.sft.data.mock.dataset import MockSFTDataset
from megatron.sft.data.prompts import Prompt, read_prompts
from megatron.sft.data.sample_set import SampleSet, blended, concatenated
from megatron.sft.data.source_names import short_names
from megatron.sft.data.tokenizer import build_tokenizer
from megatron.sft.options.chat_template import to_json
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.data import DataConfig, TrainTurns

MOCK_VOCAB_SIZE = 1024
_MOCK_SAMPLES = 2**40
_HELD_OUT = ("val", "test")


class Datasets(NamedTuple):
    """Data of a run. An empty validation or test set is not evaluated."""

    train: SampleSet
    valid: SampleSet
    test: SampleSet
    vocab_size: int
    """Vocabulary size of the model: that of --pretrained-checkpoint, which may have rows that no
    token uses, else the tokenizer's.
    """
    tokenizer: Tokenizer | None = None
    """None for mock data."""
    train_turns: TrainTurns = "all"
    """Turns of conversations that are trained, by --train-turns or its default."""
    prompts: Sequence[Prompt] = ()
    """Prompts of --sample-prompts."""

    def vocabulary(self) -> dict[str, Any]:
        """Returns what a checkpoint must share with the run that loads it: with other tokens, its
        weights mean nothing.
        """
        facts: dict[str, Any] = {"vocab_size": self.vocab_size}
        return (
            facts if self.tokenizer is None else {**facts, "tokenizer": self.tokenizer.fingerprint}
        )


def build_datasets(config: SFTConfig) -> Datasets:
    """Opens the files that the options name, or makes mock data.

    Only indices are read; records only for weights by tokens. Raises ValueError, one line that
    names the file, for anything that cannot be read.
    """
    if config.data.mock_data:
        return build_mock(config)
    data = config.data
    tokenizer = build_tokenizer(
        data.resolved_tokenizer_type,
        data.tokenizer_model,
        data.vocab_size,
        data.template_choice,
    )
    encoder = ChatEncoder(
        tokenizer,
        config.model.seq_length,
        config.packing.over_length_policy,
        data.columns,
        _train_turns(config, tokenizer),
        _takes_trees(config),
    )
    schedule = data.weight_schedule(config.training.global_batch_size)
    builder = _Builder(data, encoder, config.training.seed, schedule)
    train, valid, test = builder.build_blend() if data.is_blend else builder.build_files()
    if not len(valid) and (config.output.keep_best or config.training.early_stopping is not None):
        raise ValueError(
            "--keep-best and --early-stopping need records to validate with, but there are none; "
            "raise the second share of --split, or pass --valid-data-path"
        )
    turns = encoder.train_turns
    made_by = _made_by(data, turns)
    train, valid, test = (
        replace(samples, identity=samples.identity | made_by) for samples in (train, valid, test)
    )
    path = config.training.sample_prompts
    prompts = [] if path is None else read_prompts(path, encoder)
    return Datasets(train, valid, test, _vocab_size(config, tokenizer), tokenizer, turns, prompts)


def _made_by(data: DataConfig, turns: TrainTurns) -> dict[str, str]:
    """Returns the options by which samples are made of records, for the identity of a split: a
    checkpoint continues with the same ones only.

    Defaults are left out: checkpoints that are older than an option do not have its key.
    """
    options = {} if turns == "all" else {"train_turns": str(turns)}
    if data.template_date is not None:
        options["template_date"] = str(data.today)
    if data.template_choice.variables:
        options["chat_template_kwargs"] = to_json(data.template_choice.variables)
    return options


def _train_turns(config: SFTConfig, tokenizer: Tokenizer) -> TrainTurns:
    """Returns --train-turns, or its default; ValueError where it cannot be done."""
    turns, has_trees = config.data.train_turns, _takes_trees(config)
    further = config.model.mtp_num_layers is not None
    if turns is None:
        return "served" if has_trees and tokenizer.contexts == "differ" else "all"
    if turns == "served" and tokenizer.contexts == "differ" and not has_trees:
        raise ValueError(
            "--train-turns served makes trees of sequences under this chat template, which "
            + ("--mtp-num-layers does not take; drop it" if further else "need --sequence-packing")
            + ", or pass --train-turns all or last"
        )
    return turns


def _takes_trees(config: SFTConfig) -> bool:
    """Returns whether samples may be trees of sequences."""
    return config.packing.sequence_packing and config.model.mtp_num_layers is None


def _vocab_size(config: SFTConfig, tokenizer: Tokenizer) -> int:
    folder, of_model = config.output.pretrained_checkpoint, config.data.vocab_size
    if folder is None or of_model is None:
        return tokenizer.vocab_size
    if tokenizer.vocab_size > of_model:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model of "
            f"--pretrained-checkpoint {folder} only {of_model}; give the tokenizer that belongs to "
            "it, or enlarge its embeddings first"
        )
    return of_model


def _entries(paths: Sequence[str], split: str) -> list[SourceEntry | Join]:
    """Returns the sources of all paths, those of metadatasets among them."""
    nodes = [load_metadataset(path, split) for path in paths]
    return [entry for node in nodes for entry in source_entries(node)]


class _Opened(NamedTuple):
    """A source, and which of its records are meant."""

    entry: SourceEntry | Join
    dataset: SourceDataset
    records: range

    def part(self, records: range) -> _Opened:
        """Returns the same with others of its records."""
        return self._replace(records=records)

    def within(self, cut: range, start: int) -> _Opened:
        """Returns the part of this source that lies in `cut`, a range of all sources' records one
        after the other, of which this source's begin at `start`.
        """
        first, last = max(cut.start - start, 0), min(cut.stop - start, len(self.records))
        return self.part(range(first, last))

    def described(self) -> str:
        """Returns its place in a metadataset, or else its path."""
        return self.entry.where or _path_of(self.entry)

    def node(self, is_shuffled: bool = True) -> SourceDataset:
        """Returns them as a data set."""
        whole, load = self.dataset.source, self.dataset.load
        source = whole if len(self.records) == len(whole) else SourcePart(whole, self.records)
        multiplier = self.entry.shuffle_over_epochs_multiplier if is_shuffled else None
        return SourceDataset(source, load=load, multiplier=multiplier, name=self.dataset.name)


class _Builder:
    """Makes the three splits of the data that the options name."""

    def __init__(
        self, data: DataConfig, encoder: ChatEncoder, seed: int, schedule: WeightSchedule | None
    ) -> None:
        self._data = data
        self._schedule = schedule
        self._encoder = encoder
        self._seed = seed
        self._held_out = self._splits_of_data()

    def build_files(self) -> tuple[SampleSet, SampleSet, SampleSet]:
        """Returns the sources one after the other."""
        data = self._data
        opened = self._opened(_entries(data.paths, "train"))
        if data.valid_data_path or self._held_out:
            return (
                self._concatenated(opened, seed=self._seed),
                self._all_of("val"),
                self._all_of("test"),
            )
        # Sources of 3 and 5 records cut at 6: the first gives range(0, 3), the second range(0, 3)
        # to training and range(3, 5) to the rest.
        starts = [0, *accumulate(len(source.records) for source in opened)]
        cuts = self._cut(starts[-1], "")
        train, valid, test = (
            [source.within(cut, start) for source, start in zip(opened, starts)] for cut in cuts
        )
        return (
            self._concatenated(train, seed=self._seed),
            self._concatenated(valid),
            self._concatenated(test),
        )

    def build_blend(self) -> tuple[SampleSet, SampleSet, SampleSet]:
        """Returns the sources in the proportions of a metadataset, or of the weights in
        --data-path.
        """
        found = [
            (load_metadataset(path, "train"), weight) for weight, path in self._data.weighted_paths
        ]
        weighted = tuple((node, weight) for node, weight in found if weight is not None)
        kind, shares = flattened(Blend(children=weighted) if weighted else found[0][0])
        opened = self._opened([entry for entry, _ in shares])
        if self._data.valid_data_path or self._held_out:
            valid, test = self._all_of("val"), self._all_of("test")
        else:
            # Each source is cut by itself, so that all three splits have its share of the blend.
            cuts = [
                self._cut(len(source.records), f" of {source.described()}") for source in opened
            ]
            train, held_out, tested = (
                [source.part(cut) for source, cut in zip(opened, of_split)]
                for of_split in zip(*cuts)
            )
            valid, test = self._concatenated(held_out), self._concatenated(tested)
            opened = train
        made = [(source.node(), share, source.entry) for source, (_, share) in zip(opened, shares)]
        return self._blended(loaded_for_training(kind, made)), valid, test

    def _splits_of_data(self) -> set[str]:
        """Returns the splits to hold out that the data bring along, as a metadataset may."""
        if self._data.valid_data_path:
            return set()
        found = {path: split_names(path).intersection(_HELD_OUT) for path in self._data.paths}
        with_splits = [path for path, names in found.items() if names]
        without = [path for path, names in found.items() if not names]
        if with_splits and without:
            raise ValueError(
                f"{with_splits[0]} has data to hold out, but {without[0]} has none; pass "
                "--valid-data-path, or name both in a metadataset with splits train and val"
            )
        return set().union(*found.values())

    def _all_of(self, split: str) -> SampleSet:
        """Returns what is held out, unshuffled."""
        paths: Sequence[str] = self._data.valid_paths if split == "val" else ()
        if not self._data.valid_data_path:
            paths = [path for path in self._data.paths if split in split_names(path)]
        return self._concatenated(self._opened(_entries(paths, split)))

    def _opened(self, entries: Sequence[SourceEntry | Join]) -> list[_Opened]:
        found = [open_chats(entry, self._encoder) for entry in entries]
        return [_Opened(entry, one, range(len(one.source))) for entry, one in zip(entries, found)]

    def _concatenated(self, opened: Sequence[_Opened], seed: int | None = None) -> SampleSet:
        filled = [source for source in opened if source.records]
        nodes = [source.node(is_shuffled=False) for source in filled]
        return concatenated(self._named(filled, nodes), nodes, seed)

    def _named(self, sources: Sequence[_Opened], nodes: Sequence[SourceDataset]) -> list[str]:
        """Returns the names of sources. Numbers their nodes, so that each sample says by number
        which of the names it is of.
        """
        for number, node in enumerate(nodes):
            assert isinstance(node.load, ChatLoad)
            node.load = node.load.numbered(number)
        return short_names([_path_of(source.entry) for source in sources])

    def _blended(self, loaded: LoadedDatasetList) -> SampleSet:
        shares = [
            one.weight if one.repetitions is None else one.repetitions for one in loaded.datasets
        ]
        weighted, schedule = loaded.datasets, self._schedule
        needs_weights = schedule is not None or self._data.blend_weights_by == "tokens"
        if needs_weights and loaded.blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS:
            raise ValueError(
                "--blend-weights-by tokens and --blend-weight-schedule are for 'blend', but the "
                "metadataset has 'blend_epochized', which says how often each source is read"
            )
        if self._data.blend_weights_by == "tokens":
            weighted, schedule = by_tokens(
                loaded.datasets, schedule, partial(mean_tokens, count=num_tokens)
            )
        sources = [_Opened(one.entry, source_of(one.dataset), range(0)) for one in weighted]
        names = self._named(sources, [source.dataset for source in sources])
        return blended(names, weighted, shares, self._seed, self._data.blend_mode, schedule)

    def _cut(self, num_records: int, of_what: str) -> tuple[range, range, range]:
        """Returns the records for training, validation and test."""
        shares = self._data.split_shares
        train_end = round(shares[0] * num_records)
        valid_end = round((shares[0] + shares[1]) * num_records)
        if train_end == 0:
            raise ValueError(
                f"--split {self._data.split} leaves no record of {num_records}{of_what} for "
                "training; raise its first share"
            )
        return range(train_end), range(train_end, valid_end), range(valid_end, num_records)


def _path_of(entry: SourceEntry | Join) -> str:
    return entry.path if isinstance(entry, SourceEntry) else entry.legs[0].entry.path


def build_mock(config: SFTConfig) -> Datasets:
    """Returns synthetic data, without a tokenizer and without a test set."""
    vocab_size = config.data.vocab_size or MOCK_VOCAB_SIZE
    training = config.training

    def mock(seed: int, num_samples: int, order: int | None = None) -> SampleSet:
        if not num_samples:
            return concatenated([], [])
        lengths = config.data.sft_mock_dataset_config_json
        samples = MockSFTDataset(
            lengths, config.model.seq_length, vocab_size, seed, num_samples=num_samples
        )
        source = SourceDataset(samples, load=mock_sample, shuffle=False, name="mock")
        return concatenated(["mock"], [source], order)

    return Datasets(
        mock(training.seed, _MOCK_SAMPLES, training.seed),
        mock(training.seed + 1, training.eval_iters * training.global_batch_size),
        concatenated([], []),
        vocab_size,
    )


def mock_sample(record: Record, key: object) -> tuple[int, EncodedSample]:
    """Returns a mock sample as `ChatLoad` returns others; all its tokens count in the loss."""
    return 0, EncodedSample(
        record["tokens"].astype(np.int32),
        record["labels"].astype(np.int32),
        record["loss_mask"],
        is_cut=False,
    )
