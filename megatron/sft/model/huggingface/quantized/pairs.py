"""pure. Joins the codes and the scales of quantized weights, two tensors in files, to one tensor.

fp8     NAME [n, k], NAME_scale_inv or NAME_scale [], [1], [n, 1] or one scale for each block
int4    NAME_packed int32 [n, k / 8], NAME_scale [n, k / group], NAME_shape
MXFP4   NAME_blocks uint8 [experts, rows, groups, 16], NAME_scales [experts, rows, groups]
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from megatron.sft.model.huggingface.headers import Quantized, Stored
from megatron.sft.model.huggingface.quantized.methods import Method

MXFP4, INT4, FP8 = "MXFP4", "INT4", "F8_E4M3"
"""Types of joined tensors."""
_OF_ACTIVATIONS = re.compile(r"\.(?:activation|input|output|k|v|q)_scale$")
"""Tensors that serve to quantize activations and keys and values. Weights do not depend on them."""
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
_PER_WORD = 8
"""Codes of 4 bits in an int32."""


def join_pairs(tensors: Mapping[str, Stored], method: Method | None) -> dict[str, Stored]:
    """Returns the tensors with codes and scales as one, named as if it were not quantized. Raises
    ValueError if the shapes of the two do not belong together.

    method: that of config.json. Without one only MXFP4 is joined: scales that config.json says
    nothing of may be of any kind.
    """
    joined = dict(tensors)
    for name, stored in tensors.items():
        if name.endswith("_blocks") and stored.dtype == "U8" and len(stored.shape) == 4:
            _join_mxfp4(joined, name, stored)
        elif method is None:
            continue
        elif stored.dtype == FP8 and len(stored.shape) in (2, 3):
            _join_fp8(joined, name, stored, method)
        elif name.endswith("_packed") and stored.dtype == "I32" and len(stored.shape) == 2:
            _join_int4(joined, name, stored)
    if method is None:
        return joined
    return {name: stored for name, stored in joined.items() if not _OF_ACTIVATIONS.search(name)}


def _join_mxfp4(joined: dict[str, Stored], name: str, blocks: Stored) -> None:
    """Blocks of [experts, rows, groups, 16] bytes have two values per byte, 32 values per group.
    The matrices are stored transposed, so that their shape is [experts, 32 * groups, rows].
    """
    whole = name.removesuffix("_blocks")
    scales = joined.get(f"{whole}_scales")
    if scales is None:
        return
    experts, rows, groups, _ = blocks.shape
    shape, quantized = (experts, groups * 32, rows), Quantized(scales, (32, 1))
    joined[whole] = blocks._replace(dtype=MXFP4, shape=shape, quantized=quantized)
    del joined[name], joined[f"{whole}_scales"]


def _join_fp8(joined: dict[str, Stored], name: str, codes: Stored, method: Method) -> None:
    for suffix in ("_scale_inv", "_scale"):
        scales = joined.get(name + suffix)
        if scales is not None:
            quantized = Quantized(scales, _block(codes, scales, method))
            joined[name] = codes._replace(quantized=quantized)
            del joined[name + suffix]
            return


def _block(codes: Stored, scales: Stored, method: Method) -> tuple[int, int]:
    """Returns the rows and columns that share a scale.

    Blocks count from the first row and column, and the last one may be smaller: 192 rows in blocks
    of 128 have 2 scales, of 128 and of 64 rows. (transformers 5.24 dequantizes them as 2 blocks of
    96, and multiplies in blocks of 128.)
    """
    *experts, num_rows, num_columns = codes.shape
    if math.prod(scales.shape) == 1 and not experts:
        return num_rows, num_columns
    *lead, down, across = scales.shape if len(scales.shape) >= 2 else (-1, -1)
    if scales.dtype in _SCALE_DTYPES and lead == experts and down > 0 and across > 0:
        if method.block is not None:
            rows, columns = method.block
            if (down, across) == (-(-num_rows // rows), -(-num_columns // columns)):
                return method.block
        if num_rows % down == 0 and num_columns % across == 0:
            return num_rows // down, num_columns // across
    blocks = "" if method.block is None else f" in blocks of {list(method.block)}"
    raise ValueError(
        f"{codes.path} holds {codes.name} of shape {list(codes.shape)}{blocks} and its scales "
        f"{scales.name} of type {scales.dtype} and shape {list(scales.shape)}, which do not belong "
        "together; copy weights and config.json from one and the same release"
    )


def _join_int4(joined: dict[str, Stored], name: str, words: Stored) -> None:
    whole = name.removesuffix("_packed")
    scales = joined.get(f"{whole}_scale")
    if scales is None:
        return
    shape = (words.shape[0], words.shape[1] * _PER_WORD)
    # Shapes decide on blocks here. Those of the model are compared with them later.
    quantized = Quantized(scales, _block(words._replace(shape=shape), scales, Method("")))
    joined[whole] = words._replace(dtype=INT4, shape=shape, quantized=quantized)
    del joined[name], joined[f"{whole}_scale"]
    joined.pop(f"{whole}_shape", None)


def describe(stored: Stored) -> str:
    """Returns the type of a tensor for a reader: `F8_E4M3 by 128 x 128`, `BF16`."""
    if stored.quantized is None or stored.dtype == MXFP4:
        return stored.dtype
    rows, columns = stored.quantized.block
    if (rows, columns) == stored.shape[-2:]:
        return f"{stored.dtype} by tensor"
    return (
        f"{stored.dtype} by row"
        if columns == stored.shape[-1]
        else (f"{stored.dtype} by {rows} x {columns}")
    )
