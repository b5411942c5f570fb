"""pure. Sample classes and batches, with the fields of energon.

All of them have four fields about their origin:

    __key__           name of the sample in its source
    __restore_key__   (number of the source in the blend, position in its stream, record)
    __subflavors__    values that the metadataset gives to the source
    __sources__       files that the bytes come from
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
    """Decorator of a sample or batch class: a dataclass with keyword-only fields, compared by
    identity.

    Defaults are removed from the class attributes. A plain `@dataclass` derived from it may then
    declare the same fields again without defaults.
    """
    made: Any = dataclass(cls, kw_only=True, eq=False)
    for one in fields(made):
        if one.name in vars(made):
            delattr(made, one.name)
    return made


class _Fields:
    """Methods that samples and batches have in common."""

    def pin_memory(self) -> Self:
        """Returns a copy with its tensors in page-locked memory."""
        return map_tensors(self, lambda tensor: tensor.pin_memory())

    def to_device(self, device: torch.device | str | int) -> Self:
        """Returns a copy with its tensors on `device`. It does not wait for the transfer."""
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))

    @classmethod
    def extend(cls, src: object, **changes: object) -> Self:
        """Returns an object of this class with the fields of `src`, an object of a parent class,
        and with `changes`.
        """
        has = {name: getattr(src, name) for name in field_names(cls) if hasattr(src, name)}
        return cls(**{**has, **changes})


@edataclass
class Sample(_Fields):
    """Base of sample classes: the origin of a sample, without content."""

    __key__: str
    __restore_key__: tuple[Any, ...] = ()
    __subflavors__: dict[str, Any] | None = None
    __sources__: tuple[SourceInfo, ...] | None = None

    @classmethod
    def derive_from(cls, base_sample: object, **own: object) -> Self:
        """Returns a sample with the fields `own` and the origin of `base_sample`."""
        return cls(**{**basic_sample_keys(base_sample), **own})

    @classmethod
    def from_joined(cls, *samples: object, **named_samples: object) -> Self:
        """Returns the joined sample. The metadataset decides whether samples are positional or
        named.

        By default it has the fields of all samples; of fields with the same name that of the last
        sample. Its key is that of the first.
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
    """Decoded parts of a record by name, for a cooker or for `encode_sample`."""


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
    """Base of batches. `__key__` and the other fields of origin have one entry per sample."""

    __key__: list[str] = field(default_factory=list)
    __restore_key__: Any = ()
    __subflavors__: list[dict[str, Any]] | None = None
    __sources__: tuple[SourceInfo, ...] | None = None

    @classmethod
    def from_samples(cls, samples: Sequence[Any], **own: Any) -> Self:
        """Returns a batch of samples: tensors are stacked, padded with zeros to the same shape, and
        other values become lists. The fields `own` are used as they are.

        Raises ValueError if the samples lack a field without a default.
        """
        return batch_samples(samples, cls, **own)

    @classmethod
    def derive_from(cls, base_batch: object, **own: object) -> Self:
        """Returns a batch with the fields `own` and the origin of `base_batch`."""
        return cls(**{**basic_sample_keys(base_batch), **own})


SAMPLE_TYPES: dict[str, type[Sample]] = {kind.__name__: kind for kind in Sample.__subclasses__()}


def basic_sample_keys(
    sample: object, additional_source_info: tuple[SourceInfo, ...] = ()
) -> dict[str, Any]:
    """Returns the fields about a sample's origin: `TextSample(**basic_sample_keys(crude), text=t)`.

    additional_source_info: further files that the sample was made of.
    """
    if additional_source_info:
        found = basic_sample_keys(sample)
        return {
            **found,
            "__sources__": (*(found.get("__sources__") or ()), *additional_source_info),
        }
    if isinstance(sample, dict):
        # A crude sample as it was read has all four: one lookup takes half the time of a loop.
        with suppress(KeyError):
            return dict(zip(BASIC_KEYS, _all_basic(sample)))
    if isinstance(sample, Mapping):
        return {key: sample[key] for key in BASIC_KEYS if key in sample}
    return {key: getattr(sample, key) for key in BASIC_KEYS if hasattr(sample, key)}
