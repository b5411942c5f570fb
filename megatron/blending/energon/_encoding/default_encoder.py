"""pure. DefaultTaskEncoder, the base of most task encoders: converts samples and batches to given
types.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.blending.arguments import shown
from megatron.blending.energon._encoding.fields import FieldError, converted, is_made_of
from megatron.blending.energon._encoding.task_encoder import (
    T_batch,
    T_encoded_sample,
    T_raw_batch,
    T_sample,
    TaskEncoder,
)
from megatron.blending.streams.failures import FatalSampleError


class DefaultTaskEncoder(TaskEncoder[T_sample, T_encoded_sample, T_raw_batch, T_batch]):
    """A task encoder that converts samples and batches to the given types, by the names of their
    fields. Without a type it leaves them as they are.
    """

    _encoded_sample_type: Any = None
    _raw_batch_type: Any = None
    _batch_type: Any = None

    def __init__(
        self,
        *,
        encoded_sample_type: type | None = None,
        raw_batch_type: type | None = None,
        batch_type: type | None = None,
    ) -> None:
        for name in ("encoded_sample_type", "raw_batch_type", "batch_type"):
            kind = locals()[name]
            if kind is not None and not isinstance(kind, type):
                raise ValueError(
                    f"{type(self).__name__}: {name} must be a class, but is {shown(kind)}"
                )
            setattr(self, f"_{name}", kind)

    def encode_sample(self, sample: T_sample) -> T_encoded_sample:
        if self._encoded_sample_type is None or type(sample) is self._encoded_sample_type:
            return sample  # type: ignore[return-value]
        with types_must_fit():
            return converted(sample, self._encoded_sample_type)

    def batch(self, samples: list[T_encoded_sample]) -> T_raw_batch:
        """Returns a batch of samples. Its type is the first of these that is given:
        `raw_batch_type`, `batch_type`, the samples' own.

        `batch_type` is skipped here if a subclass defines `encode_batch`, which then makes it, and
        the fields of the samples are not exactly those of `batch_type`.
        """
        kind = self._raw_batch_type
        if kind is None and (not self._makes_batch() or is_made_of(self._batch_type, samples[0])):
            kind = self._batch_type
        if kind is None:
            return self._batch(samples, type(samples[0]))
        with types_must_fit():
            return self._batch(samples, kind)

    def encode_batch(self, batch: T_raw_batch) -> T_batch:
        if self._batch_type is None or type(batch) is self._batch_type:
            return batch  # type: ignore[return-value]
        with types_must_fit():
            return converted(batch, self._batch_type)

    def uses(self, step: str) -> bool:
        if step == "encode_sample" and not self._has_own(step):
            return self._encoded_sample_type is not None
        if step == "encode_batch" and not self._has_own(step):
            return self._batch_type is not None and (
                self._raw_batch_type is not None or self._has_own("batch")
            )
        return super().uses(step)

    def _has_own(self, step: str) -> bool:
        return step in vars(self) or getattr(type(self), step) is not getattr(
            DefaultTaskEncoder, step
        )

    def _makes_batch(self) -> bool:
        return self._has_own("encode_batch")


@contextmanager
def types_must_fit() -> Iterator[None]:
    """Context that turns FieldError into FatalSampleError, which ends the run. Types that do not
    fit concern all samples, so that no sample must be skipped for it.
    """
    try:
        yield
    except FieldError as error:
        raise FatalSampleError(str(error)) from None
