"""tensor. A transformers model and a collator as a subject."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.packing.doctor.locate import layer_names, layer_reach
from megatron.packing.doctor.probe import Probe
from megatron.packing.doctor.subject import LENGTHS, Sample, Subject, draw_pack
from megatron.packing.doctor.subjects.collators import COLLATORS, IGNORED, Batch
from megatron.packing.doctor.subjects.small_models import WINDOW, small_config, small_model
from megatron.packing.doctor.unusable import Unusable


def subject_from_transformers(
    model: nn.Module, collator: str, name: str = "", windows: bool = True
) -> Subject:
    """Returns a model of transformers that trains on what a collator makes, as a subject.

    Args:
        model: a causal language model, in the mode of training.
        collator: a key of COLLATORS.
        name: of the subject, for the report.
        windows: whether layers with a window of small_models.WINDOW tokens are to keep it.

    Raises:
        Unusable: if there is no such collator.
    """
    if collator not in COLLATORS:
        raise Unusable(f"--collator {collator}: choose one of {', '.join(COLLATORS)}")
    packing = COLLATORS[collator]
    config: Any = model.config
    config.use_cache = packing.use_cache

    def collate(sequences: Sequence[Tensor], labels: Sequence[Tensor], fill: int) -> Batch:
        return packing.collate(sequences, labels, fill)

    def forward(batch: Batch, **more: Any) -> Any:
        arguments = {**batch.arguments, **more}
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor) and mask.is_floating_point():
            arguments["attention_mask"] = mask.to(next(model.parameters()).dtype)
        return model(**arguments, use_cache=packing.use_cache)

    def logits(sequences: Sequence[Tensor], fill: int) -> list[Tensor]:
        batch = collate(sequences, sequences, fill)
        batch.arguments.pop("labels", None)
        rows = forward(batch).logits.flatten(0, 1)
        return [rows[places] for places in batch.rows]

    def loss(packs: Sequence[Sequence[Sample]]) -> Tensor:
        count = sum(int(sample.trained.sum()) for pack in packs for sample in pack)
        total = torch.zeros(())
        for pack in packs:
            tokens = [sample.tokens for sample in pack]
            labels = [torch.where(sample.mask(), sample.tokens, IGNORED) for sample in pack]
            batch = collate(tokens, labels, 0)
            total = total + forward(batch, num_items_in_batch=torch.tensor(count)).loss
        return total

    def places(sequences: Sequence[Tensor]) -> list[Tensor]:
        return collate(sequences, sequences, 0).rows

    def num_slots(sequences: Sequence[Tensor]) -> int:
        return collate(sequences, sequences, 0).arguments["input_ids"].numel()

    return Subject(
        name=name or f"{config.model_type}, {collator}",
        model=model,
        vocab_size=config.vocab_size,
        logits=logits,
        places=places,
        num_slots=num_slots,
        loss=loss,
        embedding=model.get_input_embeddings(),  # type: ignore[operator]
        head=model.get_output_embeddings(),  # type: ignore[operator]
        windows=_windows(model, config.vocab_size) if windows else {},
    )


def _windows(model: nn.Module, vocab_size: int) -> dict[str, int]:
    """Returns the layers that see WINDOW tokens of a sequence that is run alone, without a mask.

    Configurations say it in many ways, some of which models ignore: the model itself knows.
    """
    plain = Subject(
        name="plain",
        model=model,
        vocab_size=vocab_size,
        logits=lambda sequences, fill: [
            model(input_ids=sequences[0][None], use_cache=False).logits[0]
        ],
    )
    pack = draw_pack(vocab_size, [max(LENGTHS)])
    probe = Probe(plain)
    return {
        name: WINDOW
        for name in layer_names(model)
        if layer_reach(probe, pack, 0, name, 0.0) == WINDOW
    }


def small_subject(
    source: str,
    collator: str,
    attention: str = "",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Subject:
    """Returns a small model of a type or folder as a subject; see `small_models.small_config`."""
    model = small_model(small_config(source, **changes), attention, dtype)
    config: Any = model.config
    used = attention or getattr(config, "_attn_implementation", None) or "no attention"
    name = f"{config.model_type}, {collator}, {used}"
    return subject_from_transformers(model, collator, name)
