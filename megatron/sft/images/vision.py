"""pure. What the folder of a vision model says of images: their sizes, the special tokens around
them, the tower, and the rotary embedding of their positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.packing.quoting import shown
from megatron.packing.user_files import read_json
from megatron.sft.options.images import ImageConfig

_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_IMAGE_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast")
_BICUBIC = 3
_PROCESSOR_DEFAULTS = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": _BICUBIC,
    "rescale_factor": 1 / 255,
}
"""Values that are supported; also those of a file that lacks them."""


PARAMETERS = "vision.tower.visual."
"""Prefix of the tower's parameters in a GPTModel; what follows is their name in transformers."""


@dataclass(frozen=True, kw_only=True)
class VisionFamily:
    """Models of one `model_type` with a vision tower, by their differences from Qwen3-VL."""

    tower_type: str
    """`model_type` of the tower in transformers."""
    prefix: str = "model.visual."
    """Prefix of the tower's tensors in files."""
    projector: tuple[str, ...] = ("merger.", "deepstack_merger_list.")
    """Prefixes of the projector's tensors within the tower: all that is not the tower itself."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Keys of config.json with the ids of special tokens -> ids where they are missing."""
    sections: tuple[int, int, int] = (24, 20, 20)
    """Pairs of channels that turn by time, height and width, where config.json lacks them."""
    tower: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `vision_config` that may be missing -> their values in transformers."""
    is_interleaved: bool = True
    """True if time, height and width turn pairs of channels in turn, False if each turns a run."""
    is_gated: bool = False
    """True if the MLPs of the tower have three matrices."""

    def is_trained(self, name: str, images: ImageConfig) -> bool:
        """Returns whether a tensor of the tower or the projector is trained, by its name within the
        tower.
        """
        is_projector = name.startswith(self.projector)
        return images.trains_projector if is_projector else images.trains_tower


_SIZES = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
}
_QWEN3_VL = VisionFamily(
    tower_type="qwen3_vl_vision",
    tokens={
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
    },
    tower=_SIZES | {"deepstack_visual_indexes": [8, 16, 24]},
)
_QWEN3_5 = replace(
    _QWEN3_VL,
    tower_type="qwen3_5_vision",
    projector=("merger.",),
    tokens={
        "image_token_id": 248056,
        "video_token_id": 248057,
        "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
    },
    sections=(11, 11, 10),
    tower=_SIZES,
)
_QWEN2_5_VL = replace(
    _QWEN3_VL,
    tower_type="qwen2_5_vl_vision",
    prefix="visual.",
    projector=("merger.",),
    sections=(16, 24, 24),
    is_interleaved=False,
    is_gated=True,
    tower=_SIZES
    | {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
)
FAMILIES: Mapping[str, VisionFamily] = {
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": replace(_QWEN3_VL, tower_type="qwen3_vl_moe_vision"),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": replace(_QWEN3_5, tower_type="qwen3_5_moe_vision"),
    "qwen2_5_vl": _QWEN2_5_VL,
}
"""`model_type` of a multimodal model -> how it sees images."""


@dataclass(frozen=True, kw_only=True)
class Vision:
    """Images of one model."""

    family: VisionFamily
    tower: Mapping[str, Any]
    """Content of `vision_config`, without missing keys."""
    image_token: int
    """Placeholder of one row of an image."""
    reserved_tokens: tuple[int, ...]
    """Tokens that only images bring into a chat, `image_token` among them."""
    sections: tuple[int, int, int]
    """Pairs of channels that turn by time, height and width."""
    min_pixels: int
    max_pixels: int
    """An image is resized to at least and at most so many."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def patch_size(self) -> int:
        """Pixels of a patch's side."""
        return int(self.tower["patch_size"])

    @property
    def merge_size(self) -> int:
        """Patches on each side of a block that becomes one token."""
        return int(self.tower["spatial_merge_size"])

    @property
    def most_tokens(self) -> int:
        """Tokens of an image of `max_pixels`."""
        return self.max_pixels // (self.patch_size * self.merge_size) ** 2

    @property
    def windows(self) -> tuple[int, int]:
        """Layers of the tower that attend within windows, and patches of a window; (0, 1) without
        any.
        """
        if "window_size" not in self.tower:
            return 0, 1
        num_whole = len(self.tower["fullatt_block_indexes"])
        return self.tower["depth"] - num_whole, (self.tower["window_size"] // self.patch_size) ** 2

    @property
    def num_deepstack(self) -> int:
        """First layers of the language model that features are added behind."""
        return len(self.tower.get("deepstack_visual_indexes") or ())


def read_vision(folder: str | Path, image_max_pixels: int) -> Vision:
    """Reads a folder's config.json and the settings of its image processor.

    Raises ValueError, naming the file, for a model that is not supported, and for settings under
    which pixels would be others.
    """
    path = Path(folder) / "config.json"
    config = _read(path)
    kind = str(config.get("model_type"))
    if kind not in FAMILIES or not isinstance(config.get("vision_config"), dict):
        raise ValueError(
            f"--images needs a model with a vision tower that is trained here, "
            f"{', '.join(FAMILIES)}, but {path} has model_type {shown(kind)}; drop --images to "
            "train it on text"
        )
    family = FAMILIES[kind]
    tower = {**family.tower, **config["vision_config"]}
    ids = {name: config.get(name, default) for name, default in family.tokens.items()}
    where, settings = _processor_settings(Path(folder))
    least, most = _pixel_limits(settings, where)
    if image_max_pixels < least:
        raise ValueError(
            f"--image-max-pixels {image_max_pixels} must be at least {least}, to which {where} "
            "enlarges smaller images"
        )
    for name in ("patch_size", "temporal_patch_size", "merge_size"):
        of_tower = tower["spatial_merge_size" if name == "merge_size" else name]
        if settings.get(name, of_tower) != of_tower:
            raise ValueError(
                f"{where} has {name} {shown(settings[name])}, but {path} has {of_tower} in "
                "vision_config; correct one"
            )
    return Vision(
        family=family,
        tower=tower,
        image_token=ids["image_token_id"],
        reserved_tokens=tuple(ids.values()),
        sections=_sections(config.get("text_config", config), family),
        min_pixels=least,
        max_pixels=min(most, image_max_pixels),
        mean=_three(settings, "image_mean", where),
        std=_three(settings, "image_std", where),
    )


def check_stages(vision: Vision, layers_of_parts: Sequence[int]) -> None:
    """Raises ValueError if a layer that adds features of the tower is not on the first stage.

    layers_of_parts: layers of each virtual stage of each pipeline stage.
    """
    of_first, needed = layers_of_parts[0], vision.num_deepstack
    if of_first < needed:
        raise ValueError(
            f"--images needs {needed} layers on the first pipeline stage, which add features of "
            f"the tower (DeepStack), but it has {of_first}; pass "
            f"--decoder-first-pipeline-num-layers {needed}, or fewer stages"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, any_integer=True)
    except ValueError as fault:
        raise ValueError(f"{path} cannot be read: {fault}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def _processor_settings(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the settings of the image processor, and the file that they are from."""
    for name in _PROCESSORS:
        path = folder / name
        content = _read(path) if path.is_file() else {}
        settings = content.get("image_processor", content)
        if not isinstance(settings, dict) or "image_mean" not in settings:
            continue
        kind = settings.get("image_processor_type", _IMAGE_PROCESSORS[0])
        if kind not in _IMAGE_PROCESSORS and kind != f"{_IMAGE_PROCESSORS[0]}Pil":
            raise ValueError(
                f"{path} has image_processor_type {shown(kind)}, but only {_IMAGE_PROCESSORS[0]} "
                "is supported"
            )
        for key, value in _PROCESSOR_DEFAULTS.items():
            if settings.get(key, value) != value:
                raise ValueError(
                    f"{path} has {key} {shown(settings[key])}, but only {value} is supported"
                )
        return path, settings
    raise ValueError(
        f"--images needs the settings of the image processor, but {folder} has none in "
        f"{' or '.join(_PROCESSORS)}; download them, too"
    )


def _pixel_limits(settings: Mapping[str, Any], where: Path) -> tuple[int, int]:
    size = settings.get("size")
    size = size if isinstance(size, dict) else {}
    limits: list[Any] = [
        size.get(edge) if settings.get(former) is None else settings[former]
        for edge, former in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels"))
    ]
    if not all(isinstance(limit, int) and limit > 0 for limit in limits):
        raise ValueError(
            f"{where} must have min_pixels and max_pixels, or size with shortest_edge and "
            f"longest_edge, but has {shown(limits)}"
        )
    return limits[0], limits[1]


def _three(settings: Mapping[str, Any], name: str, where: Path) -> tuple[float, float, float]:
    values = settings.get(name)
    if not isinstance(values, list) or len(values) != 3:
        raise ValueError(f"{where} must have three numbers in {name}, but has {shown(values)}")
    first, second, third = map(float, values)
    return first, second, third


def _sections(text: Mapping[str, Any], family: VisionFamily) -> tuple[int, int, int]:
    for name in ("rope_parameters", "rope_scaling"):
        rope = text.get(name)
        if isinstance(rope, dict) and rope.get("mrope_section"):
            first, second, third = rope["mrope_section"]
            return first, second, third
    return family.sections
