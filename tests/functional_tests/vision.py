"""Tiny vision models of transformers' own classes, and chats with images for them, trained by both
(see `hf_models`).
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.packing.model.embeddings import merged_embeddings
from megatron.sft.data.image_chats import SizedImage
from megatron.sft.images import model, rotary
from megatron.sft.images.positions import axis_positions
from megatron.sft.images.rotary import AxisRotary
from megatron.sft.images.sizes import Grid
from megatron.sft.images.source import ImageSize, ImageSource
from tests.functional_tests.hf_models import _keep_double, train_by_product, write_model

PATCH, MERGE = 4, 2
UNIT = PATCH * MERGE
IMAGE_TOKEN, VIDEO_TOKEN, START_TOKEN, END_TOKEN = 240, 241, 242, 243
_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": PATCH,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_TEXT = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen3-vl": _TOWER | {"deepstack_visual_indexes": [0, 1]},
    "qwen3-vl-moe": _TOWER | {"deepstack_visual_indexes": [0, 1]},
    "qwen3.5": _TOWER,
    "qwen3.5-moe": _TOWER,
    "qwen2.5-vl": {
        name: value for name, value in _TOWER.items() if name != "num_position_embeddings"
    }
    | {"window_size": 2 * UNIT, "fullatt_block_indexes": [1]},
}
"""Model of `hf_models` -> sizes of its tower."""
_WIDER = {"head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
"""Of Qwen3.5, which turns a quarter of its channels: enough for all three axes, and for ranks."""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": UNIT**2, "longest_edge": 64 * UNIT**2},
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.45, 0.4],
    "image_std": [0.5, 0.25, 0.2],
}
MODULES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
GRIDS = ((Grid(2, 3), Grid(1, 1)), (), (Grid(3, 2),), (Grid(1, 4),) * 5, ())
"""Images of each sequence of a batch: of odd sizes, in packs with and without any."""


@dataclass(frozen=True)
class Chat:
    """A sequence with images, in the form of `oracle.Sample`."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.float32]
    grids: tuple[Grid, ...]
    starts: tuple[int, ...]
    pixels: tuple[npt.NDArray[np.uint8], ...]

    @property
    def position_ids(self) -> npt.NDArray[np.int32]:
        return axis_positions(len(self.tokens), self.starts, self.grids)

    def fields(self) -> dict[str, Any]:
        """As the trainer's stream has it: images by their encoded bytes."""
        fields: dict[str, Any] = {
            name: getattr(self, name) for name in ("tokens", "labels", "loss_mask")
        }
        if not self.grids:
            return fields
        return fields | {
            "position_ids": self.position_ids,
            "payload_key": tuple(map(_as_file, self.pixels)),
            "costs": {"patches": np.array([g.num_tokens * MERGE**2 for g in self.grids])},
        }

    def inputs(self) -> dict[str, Any]:
        """Further arguments of transformers' model, made by its own image processor."""
        types = torch.from_numpy((self.tokens == IMAGE_TOKEN).astype(np.int64))[None]
        if not self.grids:
            return {"mm_token_type_ids": types}
        from PIL import Image

        module = import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
        processor = module.Qwen2VLImageProcessorPil(**PROCESSOR)
        made = processor(images=[Image.fromarray(one) for one in self.pixels], return_tensors="pt")
        return {**made, "mm_token_type_ids": types}


def _as_file(pixels: npt.NDArray[np.uint8]) -> SizedImage:
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "png")
    source = ImageSource("a picture", content=content.getvalue())
    return SizedImage(source, ImageSize(*pixels.shape[:2]))


def chats(step: int, grids: Sequence[Sequence[Grid]] = GRIDS) -> list[Chat]:
    """Sequences of random words around images."""
    random = np.random.default_rng(step)
    made = []
    for of_chat in grids:
        tokens: list[int] = []
        starts = []
        for grid in of_chat:
            tokens += [*random.integers(0, 200, random.integers(1, 5)), START_TOKEN]
            starts.append(len(tokens))
            tokens += [IMAGE_TOKEN] * grid.num_tokens + [END_TOKEN]
        tokens += list(random.integers(0, 200, random.integers(4, 12)))
        mask = random.random(len(tokens)) < 0.7
        labels = np.array([*tokens[1:], int(random.integers(0, 200))], np.int64)
        mask &= (labels < IMAGE_TOKEN) | (labels > END_TOKEN)
        made.append(
            Chat(
                np.array(tokens, np.int64),
                labels,
                mask.astype(np.float32),
                tuple(of_chat),
                tuple(starts),
                tuple(
                    random.integers(0, 256, (g.rows * UNIT, g.columns * UNIT, 3), dtype=np.uint8)
                    for g in of_chat
                ),
            )
        )
    return made


def write_vision_model(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Makes a model of `TOWERS` with random weights, and the settings of its image processor."""
    ids = {
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": VIDEO_TOKEN,
        "vision_start_token_id": START_TOKEN,
        "vision_end_token_id": END_TOKEN,
    }
    rope = _TEXT | ({"mrope_section": [2, 1, 1]} if name == "qwen2.5-vl" else {})
    vision = {"tower": TOWERS[name], "ids": ids, "rope": rope}
    sizes = _WIDER if "3.5" in name else None
    write_model(name, folder, dtype, sizes=sizes, vision=vision)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


def _without_features(hidden: Tensor, *_: object) -> Tensor:
    return hidden


def _along_time(self: AxisRotary, position_ids: Tensor, *_: object, **__: object) -> Tensor:
    angles = torch.outer(position_ids[0, 0].float(), self.inv_freq)
    return torch.cat((angles, angles), -1)[:, None, None]


MISTAKES: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "no DeepStack": lambda: setattr(model, "with_features", _without_features),
    "time alone": lambda: setattr(AxisRotary, "forward", _along_time),
    "chunks of channels": lambda: setattr(
        rotary, "axes_of_pairs", lambda sections, n: torch.arange(n) * 3 // n
    ),
    "rows in another order": lambda: setattr(
        model,
        "merged_embeddings",
        lambda gpt, batch, rows, token: merged_embeddings(
            gpt, batch, None if rows is None else rows.flip(0), token
        ),
    ),
}


def train_images(*arguments: Any, mistake: str = "", **options: Any) -> Any:
    """`train_by_product`, with towers that compute in the type of their weights; with a mistake of
    `MISTAKES`, for scale.
    """
    MISTAKES[mistake]()
    for name in MODULES:
        module = f"transformers.models.{name}.modeling_{name}"
        import_module(module)
        _keep_double(sys.modules[module])
    return train_by_product(*arguments, **options)


def of_tower(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of the tower and its projector."""
    return {name: tensor for name, tensor in tensors.items() if ".visual." in name}
