"""pure. Options of chats with images."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron.packing.rules import Rule, above_zero, at_least, check_rules

TRAINED = "trained_of_tower"
"""Key of a checkpoint's options with what a run trains of the vision tower."""
WITHOUT_LANGUAGE_MODEL = "no language model"
"""Among these: the language model is frozen, and is in its folder alone."""


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """Images."""

    images: bool = False
    """Train chats with images, by the vision tower of --pretrained-checkpoint."""
    image_max_pixels: int = field(default=1024 * 1024, metadata={"only_with": "images"})
    """Resize larger images to at most so many pixels."""
    image_root: str | None = field(default=None, metadata={"only_with": "images"})
    """Folder of relative image paths (default: the folder of the file that names them)."""
    image_url_cache: str | None = field(default=None, metadata={"only_with": "images"})
    """Fetch images of http and https URLs into this folder, each once (default: refuse them)."""
    image_url_hosts: tuple[str, ...] = field(default=(), metadata={"only_with": "image_url_cache"})
    """Hosts in private networks whose URLs may be fetched (default: none)."""
    tower_lr: float | None = field(default=None, metadata={"only_with": "images"})
    """Train the vision tower with this peak learning rate (default: frozen)."""
    projector_lr: float | None = field(default=None, metadata={"only_with": "images"})
    """Train the projector behind the tower with this peak learning rate (default: frozen)."""

    freeze_language_model: bool = field(default=False, metadata={"only_with": "images"})
    """Train the tower or the projector alone, and keep the language model as it is."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *at_least(1, "image_max_pixels"),
        *above_zero("tower_lr", "projector_lr"),
        Rule(
            when=lambda options: (
                options.freeze_language_model
                and options.tower_lr is None
                and options.projector_lr is None
            ),
            why="{freeze_language_model.flag} would leave nothing to train",
            way_out="pass {projector_lr.flag} or {tower_lr.flag}",
        ),
    )

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)

    def identity(self) -> dict[str, Any]:
        """Returns what must be the same in a checkpoint and in the run that loads it: the parts
        whose weights and optimizer state it holds.
        """
        parts = {"tower": self.trains_tower, "projector": self.trains_projector}
        parts[WITHOUT_LANGUAGE_MODEL] = self.freeze_language_model
        return {TRAINED: [name for name, is_true in parts.items() if is_true]}

    @property
    def freezes(self) -> bool:
        """Whether a run with images leaves some of the weights as they are."""
        trains_all = self.trains_tower and self.trains_projector and not self.freeze_language_model
        return self.images and not trains_all

    @property
    def trains_tower(self) -> bool:
        """Whether the tower is trained."""
        return self.tower_lr is not None

    @property
    def trains_projector(self) -> bool:
        """Whether the projector is trained."""
        return self.projector_lr is not None
