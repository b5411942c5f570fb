"""pure. The data of a run of preference tuning: what `sft.data` asks for where --loss says so."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron.sft.data.preference.encode import PairEncoder
from megatron.sft.data.preference.partners import PartnersDataset
from megatron.sft.data.preference.score_file import ScoreFile
from megatron.sft.data.sample_set import SampleSet
from megatron.sft.options.preference import PreferenceConfig

if TYPE_CHECKING:
    from megatron.sft.options.config import SFTConfig


def preferences_of(config: SFTConfig) -> PairEncoder | None:
    """Returns the encoder of pairs or marked answers; None for supervised fine-tuning."""
    options = config.preference
    if not options.is_on:
        return None
    return PairEncoder(
        is_marked=options.loss == "kto",
        answer_tokens=options.answer_tokens,
        trains_prompt=options.nll_of_prompt,
        has_head=options.ld_alpha is not None,
        capacity=config.capacity_per_rank * config.parallel.context_parallel_size,
        unit=config.alignment.sequence,
        scores=None if options.reference_file is None else ScoreFile.read(options.reference_file),
        has_keys=options.write_reference_file is not None,
        scores_last=options.scores_answers,
        takes_plain=options.sft_weight is not None,
    )


def identity_of(options: PreferenceConfig) -> dict[str, str]:
    """Returns the options that decide how a record becomes a sample, for checkpoints; {} for
    supervised fine-tuning, whose checkpoints have none of them.
    """
    if not options.is_on:
        return {}
    plain = {} if options.sft_weight is None else {"plain_chats": "imitated"}
    return {
        **plain,
        "preference": {"kto": "marked", "reward": "scored"}.get(options.loss, "pairs"),
        "answer_tokens": options.answer_tokens,
    }


def with_partners(samples: SampleSet, config: SFTConfig) -> SampleSet:
    """Returns marked answers with that of another record, where KTO's divergence asks for it."""
    options = config.preference
    if options.loss != "kto" or "kto" not in options.types or samples.dataset is None:
        return samples
    batch, limit = config.training.global_batch_size, config.model.seq_length
    return replace(samples, dataset=PartnersDataset(samples.dataset, batch, limit))
