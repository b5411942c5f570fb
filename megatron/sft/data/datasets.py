"""pure. Opens the data of a run, as the options name it: sources, their order, three splits.

A metadataset (YAML) as --data-path is a blend, and so are paths with weights: sources are mixed in
proportion. Any other paths are read one after the other, and each epoch shuffles all their records
together. The validation and the test set are the first of these that exists: --valid-data-path;
the splits `val` and `test` of the data themselves (metadatasets and prepared folders may have
them); the shares of --split.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from megatron.blending.formats.sources import Record
from megatron.blending.streams.source import SourceDataset
from megatron.sft.data.chat_encoder import ChatEncoder, EncodedSample, Tokenizer
from megatron.sft.data.hf_tokenizer import note_on_rows
from megatron.sft.data.image_chats import ImageChats
from megatron.sft.data.mock.dataset import MockSFTDataset
from megatron.sft.data.preference.of_run import identity_of, preferences_of, with_partners
from megatron.sft.data.prompts import Prompt, read_prompts
from megatron.sft.data.record_notes import notes_on_records
from megatron.sft.data.sample_set import SampleSet, concatenated
from megatron.sft.data.splits import SplitBuilder
from megatron.sft.data.tokenizer import build_tokenizer
from megatron.sft.images.urls import url_cache
from megatron.sft.images.vision import read_vision
from megatron.sft.options.chat_template import to_json
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.data import DataConfig, TrainTurns
from megatron.sft.options.data_paths import notes_on_held_out

MOCK_VOCAB_SIZE = 1024
_log = logging.getLogger("megatron.sft.data")
_MOCK_SAMPLES = 2**40  # more than any run reads: training never comes to a second epoch


class Datasets(NamedTuple):
    """The three splits of a run, with its tokenizer. An empty split is not evaluated."""

    train: SampleSet
    valid: SampleSet
    test: SampleSet
    vocab_size: int
    """Vocabulary size of the model: that of --pretrained-checkpoint, or else the tokenizer's. The
    model may have more rows than the tokenizer has tokens, or fewer.
    """
    tokenizer: Tokenizer | None = None
    """None for mock data."""
    train_turns: TrainTurns = "all"
    """Turns of conversations that are trained, by --train-turns or its default."""
    prompts: Sequence[Prompt] = ()
    """Prompts of --sample-prompts."""

    def tokenizer_note(self) -> str | None:
        """Returns one line on the files of the tokenizer, for the log; None if it has none."""
        if self.tokenizer is None or self.tokenizer.note is None:
            return None
        return self.tokenizer.note + note_on_rows(self.tokenizer, self.vocab_size)

    def vocabulary(self) -> dict[str, Any]:
        """Returns the facts about the vocabulary that a checkpoint records. A run that loads the
        checkpoint must have the same: its weights belong to these token ids.
        """
        facts: dict[str, Any] = {"vocab_size": self.vocab_size}
        return (
            facts if self.tokenizer is None else {**facts, "tokenizer": self.tokenizer.fingerprint}
        )


def build_datasets(config: SFTConfig) -> Datasets:
    """Opens the files that the options name, or makes mock data.

    Opening parses no records: it reads an index, or looks for the ends of lines in a JSON Lines
    file that has none. Two options are exceptions: --blend-weights-by tokens measures the mean
    length of each source, and --sample-prompts is read whole.

    Raises ValueError, one line with the file's name, if anything cannot be read.
    """
    if config.data.mock_data:
        if config.images.images:
            _log.warning("--mock-data has no images: --images does nothing, and no tower is run")
        return build_mock(config)
    data = config.data
    tokenizer = build_tokenizer(
        data.resolved_tokenizer_type,
        data.tokenizer_model,
        data.vocab_size,
        data.template_choice,
    )
    num_rows = _num_rows(config, tokenizer)
    encoder = ChatEncoder(
        tokenizer,
        config.model.seq_length,
        config.packing.over_length_policy,
        data.columns,
        _train_turns(config, tokenizer),
        _allows_trees(config) and not config.images.images,
        num_rows,
        preferences_of(config),
        _image_chats(config, tokenizer),
    )
    schedule = data.weight_schedule(config.training.global_batch_size)
    builder = SplitBuilder(data, encoder, config.training.seed, schedule)
    train, valid, test = builder.build_blend() if data.is_blend else builder.build_files()
    if not len(valid) and (config.output.keep_best or config.training.early_stopping is not None):
        raise ValueError(
            "--keep-best and --early-stopping need records to validate with, but there are none; "
            "raise the second share of --split, or pass --valid-data-path"
        )
    encoder.note(*notes_on_held_out(data.data_path, "--data-path"))
    encoder.note(*notes_on_records(train.sources))
    turns = encoder.train_turns
    if encoder.images is not None and turns == "served" and tokenizer.contexts == "differ":
        encoder.note(
            "with --images each turn and its context are a sequence of their own, and images are "
            "encoded once for each"
        )
    encoding_options = _encoding_options(data, turns) | identity_of(config.preference)
    if encoder.images is not None:
        vision = encoder.images.vision
        encoder.note(
            f"images have at most {vision.max_pixels:,} pixels, {vision.most_tokens:,} tokens "
            "(--image-max-pixels); larger ones are resized, by Pillow"
        )
        encoding_options["image_max_pixels"] = str(vision.max_pixels)
        encoding_options["image_backend"] = "pillow"
    train, valid, test = (
        replace(samples, identity=samples.identity | encoding_options)
        for samples in (train, valid, test)
    )
    train, valid, test = (with_partners(samples, config) for samples in (train, valid, test))
    if tokenizer.chat_template is not None:
        # Of the training data alone: a note compares it with the checkpoint's.
        digest = hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()[:16]
        train = replace(train, identity=train.identity | {"chat_template": digest})
    path = config.training.sample_prompts
    prompts = [] if path is None else read_prompts(path, encoder)
    return Datasets(train, valid, test, num_rows, tokenizer, turns, prompts)


def _image_chats(config: SFTConfig, tokenizer: Tokenizer) -> ImageChats | None:
    """Returns what puts images into chats; None without --images."""
    images, folder = config.images, config.output.pretrained_checkpoint
    if not images.images:
        return None
    assert folder is not None  # by a rule
    if importlib.util.find_spec("PIL") is None:
        raise ValueError("--images needs Pillow; pip install megatron-sft[images]")
    vision = read_vision(folder, images.image_max_pixels)
    if max(vision.reserved_tokens) >= tokenizer.vocab_size:
        raise ValueError(
            f"--images needs the tokenizer of the model, but {config.data.tokenizer_model} has no "
            f"token {max(vision.reserved_tokens)}, which {folder} has for images"
        )
    return ImageChats(
        vision,
        tuple(tokenizer.show([token]) for token in vision.reserved_tokens),
        images.image_root or "",
        url_cache(images.image_url_cache, images.image_url_hosts),
        # A damaged file that is found only where it is trained ends the run.
        decodes=config.data.bad_samples_in_a_row is not None,
    )


def _encoding_options(data: DataConfig, turns: TrainTurns) -> dict[str, str]:
    """Returns the options that decide how a record becomes a sample. They are part of a split's
    identity: a checkpoint can be continued with the same options only.

    Options at their default are left out, so that checkpoints from before an option existed still
    compare equal.
    """
    options = {} if turns == "all" else {"train_turns": str(turns)}
    if data.template_date is not None:
        options["template_date"] = str(data.today)
    if data.template_choice.variables:
        options["chat_template_kwargs"] = to_json(data.template_choice.variables)
    return options


def _train_turns(config: SFTConfig, tokenizer: Tokenizer) -> TrainTurns:
    """Returns --train-turns, or its default. Raises ValueError if it needs trees of sequences and
    the run cannot train them.
    """
    if config.preference.is_on:
        return "last"
    turns, allows_trees = config.data.train_turns, _allows_trees(config)
    # A template whose contexts differ gives each turn a prompt of its own, so that one
    # conversation becomes several sequences with a shared prefix: a tree.
    needs_trees = tokenizer.contexts == "differ"
    if turns is None:
        return "served" if allows_trees and needs_trees else "all"
    if turns == "served" and needs_trees and not allows_trees:
        has_mtp = config.model.mtp_num_layers is not None
        raise ValueError(
            "--train-turns served makes trees of sequences under this chat template, which "
            + ("--mtp-num-layers does not take; drop it" if has_mtp else "need --sequence-packing")
            + ", or pass --train-turns all or last"
        )
    return turns


def _allows_trees(config: SFTConfig) -> bool:
    """Returns whether samples may be trees of sequences."""
    return config.packing.sequence_packing and config.model.mtp_num_layers is None


def _num_rows(config: SFTConfig, tokenizer: Tokenizer) -> int:
    """Returns the number of rows of the model's embedding, before padding. Raises ValueError if no
    document can end, as the model has no row for its last token.
    """
    folder, num_rows = config.output.pretrained_checkpoint, config.data.vocab_size
    if folder is None or num_rows is None:
        return tokenizer.vocab_size
    if tokenizer.eod >= num_rows:
        raise ValueError(
            f"the tokenizer's end token {tokenizer.show([tokenizer.eod])} has id {tokenizer.eod}, "
            f"but the model of --pretrained-checkpoint {folder} only {num_rows} rows; give the "
            "tokenizer that belongs to it, or enlarge its embeddings first"
        )
    return num_rows


def build_mock(config: SFTConfig) -> Datasets:
    """Returns mock data: synthetic samples, without a tokenizer and without a test set."""
    vocab_size = config.data.vocab_size or MOCK_VOCAB_SIZE
    training = config.training

    def mock(seed: int, num_samples: int, order: int | None = None) -> SampleSet:
        """Returns `num_samples` samples drawn by `seed`, shuffled by the seed `order` if given."""
        if not num_samples:
            return concatenated([], [])
        lengths = config.data.sft_mock_dataset_config_json
        samples = MockSFTDataset(
            lengths, config.model.seq_length, vocab_size, seed, num_samples=num_samples
        )
        source = SourceDataset(samples, load=mock_sample, shuffle=False, name="mock")
        return concatenated(["mock"], [source], order)

    return Datasets(
        train=mock(training.seed, _MOCK_SAMPLES, training.seed),
        # Another seed, so that no training sample is validated on.
        valid=mock(training.seed + 1, training.eval_iters * training.global_batch_size),
        test=concatenated([], []),
        vocab_size=vocab_size,
    )


def mock_sample(record: Record, key: object) -> tuple[int, EncodedSample]:
    """Returns a mock sample with source number 0, in the form of `ChatLoad`. All its tokens count
    in the loss.
    """
    return 0, EncodedSample(
        record["tokens"].astype(np.int32),
        record["labels"].astype(np.int32),
        record["loss_mask"],
        is_cut=False,
    )
