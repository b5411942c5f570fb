"""pure. A stream is made of samples, by kind, and batches of them. Fields are those that energon's
users know.

`__key__` names a sample within its source, `__restore_key__` is (place of the source in the blend,
position in its stream, record), `__subflavors__` are what the metadataset says of the source,
`__sources__` where the bytes lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.blending.energon._encoding.collate import map_tensors
from megatron.blending.energon._encoding.fields import batch_samples, field_names
from megatron.blending.energon._encoding.source_info import SourceInfo

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self, dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda function: function


T = TypeVar("T", bound=type)

BASIC_KEYS = ("__key__", "__restore_key__", "__subflavors__", "__sources__")
_all_basic = itemgetter(*BASIC_KEYS)


@dataclass_transform(kw_only_default=True)
def edataclass(cls: T) -> T:
    """Makes a class of samples or batches: a dataclass by keyword only, compared by identity.

    The class keeps no defaults as attributes, so that a plain `@dataclass` derived from it may
    declare its fields again, without defaults, before its own.
    """
    made: Any = dataclass(cls, kw_only=True, eq=False)
    for one in fields(made):
        if one.name in vars(made):
            delattr(made, one.name)
    return made


class _Fields:
    """Samples and batches have this in common."""

    def pin_memory(self) -> Self:
        """Returns a copy whose tensors lie in page-locked memory."""
        return map_tensors(self, lambda tensor: tensor.pin_memory())

    def to_device(self, device: torch.device | str | int) -> Self:
        """Returns a copy whose tensors are on `device`, sent without a wait for the copy."""
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))

    @classmethod
    def extend(cls, src: object, **changes: object) -> Self:
        """Returns an object of this class with the fields of `src`, which may be of a parent class,
        and `changes`.
        """
        has = {name: getattr(src, name) for name in field_names(cls) if hasattr(src, name)}
        return cls(**{**has, **changes})


@edataclass
class Sample(_Fields):
    """Base of samples: where a sample came from, without content."""

    __key__: str
    __restore_key__: tuple[Any, ...] = ()
    __subflavors__: dict[str, Any] | None = None
    __sources__: tuple[SourceInfo, ...] | None = None

    @classmethod
    def derive_from(cls, base_sample: object, **own: object) -> Self:
        """Returns a sample with fields of its `own` that came from where `base_sample` did."""
        return cls(**{**basic_sample_keys(base_sample), **own})

    @classmethod
    def from_joined(cls, *samples: object, **named_samples: object) -> Self:
        """Returns one sample of those that a join found, in the order or by the names that it has
        them.

        By default it has the fields of all, of which the last one's count; where they come from is
        the first one's.
        """
        if named_samples:
            raise NotImplementedError(
                f"{cls.__name__} must define from_joined for samples that a join has by name"
            )
        has: dict[str, Any] = {}
        for sample in filter(None, samples):
            has.update(
                (name, getattr(sample, name))
                for name in field_names(sample)
                if name not in BASIC_KEYS
            )
        sources = [
            one
            for sample in filter(None, samples)
            for one in getattr(sample, "__sources__", None) or ()
        ]
        return cls(**{**basic_sample_keys(samples[0]), **has, "__sources__": tuple(sources)})


class CrudeSample(dict[str, Any]):
    """Parts of a record by name, as read: for a cooker, or for
    `encode_sample`.
    """


@edataclass
class TextSample(Sample):
    text: str


@edataclass
class ImageSample(Sample):
    image: torch.Tensor


@edataclass
class CaptioningSample(Sample):
    image: torch.Tensor
    caption: str


@edataclass
class VQASample(Sample):
    image: torch.Tensor
    context: str
    answers: list[str] | None = None
    answer_weights: torch.Tensor | None = None


@edataclass
class ImageClassificationSample(Sample):
    image: torch.Tensor
    label: int | None = None
    label_name: str | None = None


@edataclass
class MultiChoiceVQASample(Sample):
    image: torch.Tensor
    context: str
    choices: list[str] | None = None
    correct_choice_idx: int = 0


@edataclass
class InterleavedSample(Sample):
    sequence: list[Any]


@edataclass
class SimilarityInterleavedSample(Sample):
    images: list[torch.Tensor]
    texts: list[str]
    audio: list[torch.Tensor] | None = None
    video: list[torch.Tensor] | None = None
    similarity_matrix: torch.Tensor | None = None
    matched_text_indices: list[int] | None = None


@edataclass
class OCRSample(Sample):
    image: torch.Tensor
    text: str
    block_boxes: torch.Tensor | None = None
    block_classes: torch.Tensor | list[str] | None = None
    block_text: list[str] | None = None
    lines_boxes: torch.Tensor | None = None
    lines_text: list[str] | None = None
    words_boxes: torch.Tensor | None = None
    words_text: list[str] | None = None
    chars_boxes: torch.Tensor | None = None
    chars_text: list[str] | None = None


@edataclass
class VidQASample(Sample):
    video: Any
    context: str
    answers: list[str] | None = None
    answer_weights: torch.Tensor | None = None


@edataclass
class Batch(_Fields):
    """Samples put together. `__key__` and the like hold one entry per sample."""

    __key__: list[str] = field(default_factory=list)
    __restore_key__: Any = ()
    __subflavors__: list[dict[str, Any]] | None = None
    __sources__: tuple[SourceInfo, ...] | None = None

    @classmethod
    def from_samples(cls, samples: Sequence[Any], **own: Any) -> Self:
        """Returns a batch whose every field is that of the samples, stacked with zeros where shapes
        differ, or listed.

        `own` fields are taken as they are. ValueError for a field that has no default and that the
        samples lack.
        """
        return batch_samples(samples, cls, **own)

    @classmethod
    def derive_from(cls, base_batch: object, **own: object) -> Self:
        """Returns a batch with fields of its `own` of the same samples as `base_batch`."""
        return cls(**{**basic_sample_keys(base_batch), **own})


SAMPLE_TYPES: dict[str, type[Sample]] = {kind.__name__: kind for kind in Sample.__subclasses__()}


def basic_sample_keys(
    sample: object, additional_source_info: tuple[SourceInfo, ...] = ()
) -> dict[str, Any]:
    """Returns the fields that say where a sample came from: `TextSample(**basic_sample_keys(crude),
    text=t)`.

    `additional_source_info`: what else it was made of.
    """
    if additional_source_info:
        found = basic_sample_keys(sample)
        return {
            **found,
            "__sources__": (*(found.get("__sources__") or ()), *additional_source_info),
        }
    if isinstance(sample, dict):
        # A crude sample as it was read has them all, which takes half the time of a loop.
        with suppress(KeyError):
            return dict(zip(BASIC_KEYS, _all_basic(sample)))
    if isinstance(sample, Mapping):
        return {key: sample[key] for key in BASIC_KEYS if key in sample}
    return {key: getattr(sample, key) for key in BASIC_KEYS if hasattr(sample, key)}
