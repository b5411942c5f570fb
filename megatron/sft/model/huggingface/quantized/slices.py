"""tensor. Reads blocks of tensors in safetensors files, quantized ones as the values that they
stand for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron.sft.model.huggingface.headers import Quantized, Stored
from megatron.sft.model.huggingface.quantized.fp8 import UNIT, from_fp8
from megatron.sft.model.huggingface.quantized.int4 import from_int4
from megatron.sft.model.huggingface.quantized.mxfp4 import from_mxfp4
from megatron.sft.model.huggingface.quantized.pairs import INT4, MXFP4
from megatron.sft.model.huggingface.quantized.scales import dequantize, widened

_PER_WORD = 8


class OpenFiles:
    """Safetensors files, each opened once."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}

    def slice_of(self, stored: Stored, dtype: torch.dtype) -> Any:
        """Returns an object whose `[rows]` and `[rows, columns]` read a block of a tensor.

        dtype: type of the values of a quantized tensor. Others have their own.
        """
        codes = self._file(stored.path).get_slice(stored.name)
        if stored.quantized is None:
            return codes
        of_scales = stored.quantized.scales
        file = self._file(of_scales.path)
        # Scales of a stack of experts are read expert by expert, others whole.
        is_stack = len(of_scales.shape) >= 3
        scales = (file.get_slice if is_stack else file.get_tensor)(of_scales.name)
        return DequantizedSlice(stored, stored.quantized, codes, scales, dtype)

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt")
        return self._files[path]


class DequantizedSlice:
    """A quantized tensor in a file, read by slices of rows and columns, or of experts.

    Memory beside the result: the codes of the slice, and half a million values in float32.
    """

    def __init__(
        self, stored: Stored, quantized: Quantized, codes: Any, scales: Any, dtype: torch.dtype
    ) -> None:
        self._stored, self._quantized = stored, quantized
        self._codes, self._scales, self._dtype = codes, scales, dtype

    def __getitem__(self, index: slice | tuple[slice, slice]) -> Tensor:
        if len(self._stored.shape) == 2:
            rows, columns = index if isinstance(index, tuple) else (index, slice(None))
            return self._matrix(None, rows, columns)
        assert isinstance(index, slice)  # of experts
        if self._stored.dtype == MXFP4:
            return from_mxfp4(self._codes[index], self._scales[index]).transpose(1, 2)
        experts = range(*index.indices(self._stored.shape[0]))
        return torch.stack([self._matrix(e, slice(None), slice(None)) for e in experts])

    def fill(self, out: Tensor, rows: slice, columns: slice) -> None:
        """Reads a rectangle of a matrix into `out`, which must be on the CPU and of its shape."""
        self._fill(out, None, rows, columns)

    def _matrix(self, expert: int | None, rows: slice, columns: slice) -> Tensor:
        shape = (
            len(range(*held.indices(size)))
            for held, size in zip((rows, columns), self._stored.shape[-2:])
        )
        out = torch.empty(*shape, dtype=self._dtype)
        self._fill(out, expert, rows, columns)
        return out

    def _fill(self, out: Tensor, expert: int | None, rows: slice, columns: slice) -> None:
        top, bottom, _ = rows.indices(self._stored.shape[-2])
        left, right, _ = columns.indices(self._stored.shape[-1])
        scales = self._scales if expert is None else self._scales[expert : expert + 1][0]
        scales = scales.reshape(scales.shape if scales.dim() == 2 else (1, 1))
        block, first = self._quantized.block, (top, left)
        if self._stored.dtype == INT4:
            begin = left // _PER_WORD
            words = self._codes[top:bottom, begin : -(-right // _PER_WORD)]

            def decode_int4(first: int, end: int, values: Tensor) -> None:
                from_int4(words[first:end], values, left - begin * _PER_WORD)

            # Rounded to the type of the scales, as compressed-tensors does.
            dequantize(decode_int4, widened(scales), block, first, out, scales.dtype)
            return
        codes = (
            self._codes[top:bottom, left:right]
            if expert is None
            else self._codes[expert : expert + 1, top:bottom, left:right][0]
        )

        def decode_fp8(first: int, end: int, values: Tensor) -> None:
            from_fp8(codes[first:end], values)

        # A power of two: the product has the same bits.
        dequantize(decode_fp8, widened(scales) / UNIT, block, first, out)
