"""mcore. The vision tower in a GPTModel: on the first stage a module `vision`, and on all stages
the rotary embedding of positions with axes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron.packing.model.embeddings import merged_embeddings, rows_at_placeholders
from megatron.packing.model.shared_tower import SharedTower
from megatron.packing.scheduling.payload_cost import PayloadCost
from megatron.packing.step.payload_store import PayloadStore
from megatron.sft.images.deepstack import add_deepstack, with_features
from megatron.sft.images.rotary import AxisRotary
from megatron.sft.images.sizes import PATCHES, num_ranks_of_image, tower_cost
from megatron.sft.images.source import ImageError, pixels_of
from megatron.sft.images.tower import VisionTower, tower_config
from megatron.sft.images.urls import ImageCache
from megatron.sft.images.vision import PARAMETERS, Vision
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.images import ImageConfig

IS_TOWER, IS_PROJECTOR = "is_vision_tower", "is_vision_projector"
"""Attributes of trained parameters, by which the optimizer finds their learning rates."""
IS_FROZEN_LANGUAGE_MODEL = "is_frozen_language_model"
"""Attribute of parameters that a checkpoint leaves out."""
PIXELS = "pixels"
"""Name of the images of a sample's payload."""


def add_vision(gpt: GPTModel, vision: Vision) -> None:
    """Lets a GPTModel read images; before DistributedDataParallel and the optimizer are made."""
    tower_config(vision)  # on all stages, of which the first alone builds it
    gpt.vision_settings = vision
    # megatron-core hands positions to such an embedding, in place of the longest length.
    gpt.position_embedding_type = "mrope"
    gpt.mrope_section = list(vision.sections)
    gpt.rotary_pos_emb = AxisRotary(
        gpt.rotary_pos_emb.inv_freq,
        vision.sections,
        is_interleaved=vision.family.is_interleaved,
    )
    if not gpt.pre_process:
        return
    tower = VisionTower(vision).to(gpt.config.params_dtype)
    gpt.vision = SharedTower(tower, gpt.config, gpt.pg_collection)
    add_deepstack(gpt, vision.num_deepstack)


def set_trained(gpt: GPTModel, vision: Vision, images: ImageConfig) -> None:
    """Freezes the tower, the projector and the language model, or makes the first two trainable;
    behind the adapters of LoRA, which freeze all there is.
    """
    for name, parameter in gpt.named_parameters():
        if not name.startswith(PARAMETERS):
            if images.freeze_language_model:
                parameter.requires_grad_(False)
                setattr(parameter, IS_FROZEN_LANGUAGE_MODEL, True)
        else:
            of_tower = name.removeprefix(PARAMETERS)
            parameter.requires_grad_(vision.family.is_trained(of_tower, images))
            is_projector = of_tower.startswith(vision.family.projector)
            setattr(parameter, IS_PROJECTOR if is_projector else IS_TOWER, True)


def decoder_input(gpt: Any, batch: Any, vision: Vision) -> Tensor:
    """Returns what the first layer of a first stage reads, [t, 1, h], with sequence parallel this
    rank's part of it: words, and the images of the pack.

    A pack without images runs the tower only if it is trained, on an image that counts as zero:
    each parameter must have a gradient on each rank.
    """
    pixels = [] if batch.payloads is None else list(batch.payloads.tensors.get(PIXELS, ()))
    is_trained = any(parameter.requires_grad for parameter in gpt.vision.parameters())
    if not pixels and not is_trained:
        return merged_embeddings(gpt, batch, None, vision.image_token)
    unit = vision.patch_size * vision.merge_size
    images = pixels or [torch.zeros(unit, unit, 3, dtype=torch.uint8, device=batch.tokens.device)]
    num_rows = [image.shape[0] * image.shape[1] // unit**2 for image in images]
    cost = tower_cost(vision, trains_tower=False, trains_projector=False)
    num_patches = np.array(num_rows) * vision.merge_size**2
    rows = gpt.vision(images, num_rows, cost(num_patches).tolist())
    width = gpt.config.hidden_size
    if not pixels:  # features too must have a gradient
        rows = rows.sum(-1, keepdim=True).expand(-1, width)
    hidden = merged_embeddings(gpt, batch, rows[:, :width], vision.image_token)
    if not pixels or not vision.num_deepstack:
        return hidden
    features = [
        rows_at_placeholders(gpt, batch, one.to(hidden.dtype), vision.image_token)
        for one in rows[:, width:].split(width, -1)
    ]
    return with_features(hidden, features, batch.packed_seq_params)


def image_cost(config: SFTConfig, vision: Vision) -> PayloadCost:
    """Returns the FLOPs of an image by its patches, on all ranks of a replica that encode it or
    wait meanwhile.
    """
    return tower_cost(
        vision,
        trains_tower=config.images.trains_tower,
        trains_projector=config.images.trains_projector,
        num_ranks=num_ranks_of_image(config.parallel),
    )


def payload_store(cost: PayloadCost, cache: ImageCache | None = None) -> PayloadStore:
    """Returns how images travel: as files' names or encoded bytes, decoded where they are trained.

    Args:
        cost: of an image by its patches, in the unit of the packs' cost.
        cache: folder of images of URLs, which another machine may lack.
    """
    return PayloadStore(costs={PATCHES: cost}, restore=partial(_restored, cache=cache))


def _restored(images: Any, cache: ImageCache | None) -> dict[str, Any]:
    """Returns the payloads of a key, which is a sequence of `SizedImage`."""
    try:
        pixels = [
            pixels_of(one.source if cache is None else cache.located(one.source), one.size)
            for one in images
        ]
        return {"payloads": {PIXELS: pixels}}
    except ImageError as fault:
        raise ImageError(f"{fault}; correct it, or pass --skip-bad-samples") from None
