"""pure. The vocabulary that a run will have, from its options, without its data."""

from __future__ import annotations

from dataclasses import replace

from megatron.packing.flags import FlagError
from megatron.sft.data.datasets import MOCK_VOCAB_SIZE
from megatron.sft.data.tokenizer import build_tokenizer
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.data import DataConfig


def vocab_size_of(config: SFTConfig) -> int:
    """Returns the words of the model: what config.json says, else those of the tokenizer.

    ValueError where the tokenizer's files cannot be read.
    """
    data = config.data
    if config.output.pretrained_checkpoint is not None and data.vocab_size is not None:
        return data.vocab_size
    if data.mock_data:
        return data.vocab_size or MOCK_VOCAB_SIZE
    return _words_of_tokenizer(data)


def with_vocabulary(config: SFTConfig) -> SFTConfig:
    """Returns the options of a run whose data are not named, with the size of its vocabulary."""
    data = config.data
    if data.vocab_size is not None:
        return config
    if data.tokenizer_type is None and data.tokenizer_model is None:
        raise FlagError(
            "the size of the vocabulary is missing: pass --vocab-size, --tokenizer-model FOLDER or "
            "the data; or --mock-data, whose words are few"
        )
    return replace(config, data=replace(data, vocab_size=_words_of_tokenizer(data)))


def _words_of_tokenizer(data: DataConfig) -> int:
    """Returns the words of the run's tokenizer; ValueError where its files cannot be read."""
    tokenizer = build_tokenizer(
        data.resolved_tokenizer_type,
        data.tokenizer_model,
        data.vocab_size,
        data.template_choice,
    )
    return tokenizer.vocab_size
