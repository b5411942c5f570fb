"""pure. Reads the `quantization_config` of a config.json, and refuses by name the kinds that are
not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from megatron.packing.quoting import shown

_NAMES = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "bitsandbytes_4bit": "bitsandbytes",
    "bitsandbytes_8bit": "bitsandbytes",
    "fbgemm_fp8": "FBGEMM fp8",
    "modelopt": "NVIDIA ModelOpt",
}
"""`quant_method` of kinds that are not read -> their names in messages."""
_READ = "fp8, MXFP4 of gpt-oss, and fp8 and int4 of compressed-tensors are"
_FORMATS = (None, "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
"""Values of `format` in compressed-tensors that are read."""
_CODES = (("float", 8), ("int", 4))
"""Values of `type` and `num_bits` of weights in compressed-tensors that are read."""


class Method(NamedTuple):
    """The kind of quantization of a folder."""

    name: str
    """Value of `quant_method`."""
    block: tuple[int, int] | None = None
    """Rows and columns of a weight that share a scale; None if shapes alone say it."""


def read_method(config: Mapping[str, Any], where: str = "config.json") -> Method | None:
    """Returns the kind of quantization that a config.json or its `text_config` says; None for a
    folder that is not quantized. Raises ValueError, naming `where`, for kinds that are not read.
    """
    text = config.get("text_config")
    both = [config, text if isinstance(text, Mapping) else {}]
    found = [one["quantization_config"] for one in both if one.get("quantization_config")]
    # transformers takes the one at the top, and that of text_config if there is no other.
    return _method(found[0], where) if found else None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the same model with all weights in one type: that of the file, or
    bfloat16 if it names none.
    """
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    text = config.get("text_config")
    if isinstance(text, Mapping) and "quantization_config" in text:
        plain["text_config"] = without_quantization(text)
    if plain.keys() == config.keys() and plain.get("text_config") == text:
        return plain
    if plain.get("dtype") is None and plain.get("torch_dtype") is None:
        plain["dtype"] = "bfloat16"
    return plain


def _method(quantization: Mapping[str, Any], where: str) -> Method:
    name = quantization.get("quant_method")
    if name is None and (quantization.get("load_in_8bit") or quantization.get("load_in_4bit")):
        name = "bitsandbytes"  # as its first versions wrote it
    if name == "mxfp4":
        return Method("mxfp4")
    if name == "fp8":
        block = quantization.get("weight_block_size", (128, 128))
        return Method("fp8", None if block is None else _block(block, "weight_block_size", where))
    if name in ("compressed-tensors", "compressed_tensors"):
        return _compressed_tensors(quantization, where)
    shown_name = _NAMES.get(name, "") if isinstance(name, str) else ""
    raise ValueError(_refusal(shown_name or f"quant_method {shown(name)}", where))


def _compressed_tensors(quantization: Mapping[str, Any], where: str) -> Method:
    """Returns the method of the compressed-tensors library, whose groups of layers may differ."""
    layout, groups = quantization.get("format"), quantization.get("config_groups")
    for part in ("sparsity_config", "transform_config"):
        if quantization.get(part) and _format_of(quantization[part]) != "dense":
            raise ValueError(_refusal(f"compressed-tensors with a {part}", where))
    block = None
    for group in _groups(groups, where):
        weights = group.get("weights") or {}
        for form in (layout, group.get("format")):
            if form not in _FORMATS:
                raise ValueError(_refusal(f"compressed-tensors in format {shown(form)}", where))
        codes = (weights.get("type"), weights.get("num_bits"))
        if weights and codes not in _CODES:
            kind = f"weights of type {shown(codes[0])} with num_bits {shown(codes[1])}"
            raise ValueError(_refusal(f"compressed-tensors with {kind}", where))
        if weights.get("symmetric", True) is not True:
            raise ValueError(_refusal("compressed-tensors with zero points", where))
        if weights.get("actorder") not in (None, False, "static", "weight"):
            raise ValueError(_refusal("compressed-tensors with reordered columns", where))
        if weights.get("block_structure") is not None:
            block = _block(weights["block_structure"], "block_structure", where)
    return Method("compressed-tensors", block)


def _groups(groups: Any, where: str) -> Iterator[Mapping[str, Any]]:
    values: Iterable[Any] = groups.values() if isinstance(groups, Mapping) else (groups,)
    for group in values:
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping | None):
            raise ValueError(
                f"{where} has a quantization_config of compressed-tensors whose config_groups are "
                "no mapping of names to groups with weights; copy it again from where it came"
            )
        yield group


def _format_of(part: object) -> object:
    return part.get("format") if isinstance(part, Mapping) else part


def _block(value: object, key: str, where: str) -> tuple[int, int]:
    if (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(type(size) is int and size > 0 for size in value)
    ):
        return value[0], value[1]
    raise ValueError(
        f"{where} has {key} {shown(value)} in its quantization_config, but it must be two positive "
        "integers; copy it again from where it came"
    )


def _refusal(kind: str, where: str) -> str:
    return (
        f"{where} has a quantization_config of {kind}, which is not read ({_READ}); give the "
        "folder of the model before quantization"
    )
