"""pure. Stretching of rotary frequencies to longer contexts, as --rope-scaling and config.json
write it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.packing.quoting import shown
from megatron.packing.user_files import parse_json

_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "proportional": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": (
        *("factor", "short_factor", "long_factor"),
        "original_max_position_embeddings",
    ),
}
_PLAIN = {"default", None}
_SWITCHES = ("truncate", "raises_scores")
_RAMP = ("beta_fast", "beta_slow")
_LISTS = ("short_factor", "long_factor")


class RopeScaling(NamedTuple):
    """One way to stretch rotary frequencies, with the names that transformers has for its
    numbers."""

    rope_type: str
    """`linear`: positions divided by the factor; `llama3`: only slow frequencies, with a smooth
    border; `yarn`: slow ones too, and attention scores raised (arXiv 2309.00071); `longrope`: each
    by a factor of its own, of one of two lists (arXiv 2402.13753); `dynamic`: not at all up to the
    original length, beyond which it changes with each sequence and is refused;
    `proportional`: as linear, of the first pairs of a head alone, where the others stay.
    """
    factor: float
    original_max_position_embeddings: float = 0.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """True if yarn rounds the border's dimensions to whole ones."""
    raises_scores: bool = True
    """True if yarn multiplies cosines and sines by 0.1 ln(factor) + 1, and so scores by its square;
    not where `mscale` equals `mscale_all_dim`.
    """
    attention_factor: float | None = None
    """Another factor of cosines and sines than yarn's or longrope's usual one."""
    short_factor: tuple[float, ...] = ()
    """What longrope multiplies each pair's wavelength by, up to the original length."""
    long_factor: tuple[float, ...] = ()
    """The same for longer sequences."""
    partial_rotary_factor: float = 1.0
    """Share of a head's pairs that proportional rotates, of frequencies of the whole head."""

    def is_long(self, seq_length: int) -> bool:
        """Returns whether longrope takes the list for long sequences. All samples of a run have
        one list, as a server's have, which goes by the longest that it admits.
        """
        return self.rope_type == "longrope" and seq_length > self.original_max_position_embeddings

    def to_json(self) -> str:
        """Returns the text of --rope-scaling; equal for equal scalings."""
        plain = RopeScaling(self.rope_type, self.factor)._asdict()
        changed = {name: value for name, value in self._asdict().items() if value != plain[name]}
        return json.dumps({"rope_type": self.rope_type, "factor": self.factor, **changed})

    def huggingface_fields(self) -> dict[str, Any]:
        """Returns `rope_scaling` of a config.json."""
        fields: dict[str, Any] = json.loads(self.to_json())
        if not fields.pop("raises_scores", True):  # a name of ours
            fields["attention_factor"] = 1.0
        return fields


def parse_rope_scaling(text: str) -> RopeScaling:
    """Reads --rope-scaling; ValueError where it is no JSON object or holds what cannot be computed
    exactly.
    """
    try:
        fields = parse_json(text)
    except ValueError as failure:
        raise ValueError(
            f"--rope-scaling must be a JSON object, but is {shown(text)}: {failure}"
        ) from None
    scaling = rope_scaling_of(fields, "--rope-scaling") if isinstance(fields, dict) else None
    if scaling is None:
        raise ValueError(
            "--rope-scaling must be a JSON object with a rope_type other than default, but is "
            f"{shown(text)}"
        )
    return scaling


def rope_scaling_of(fields: Mapping[str, Any], where: str) -> RopeScaling | None:
    """Returns the scaling that `rope_scaling` or `rope_parameters` of a config.json says; None for
    plain rotary embeddings.

    ValueError, naming `where` it stands, for kinds and numbers that cannot be computed exactly
    here.
    """
    kind = fields.get("rope_type", fields.get("type"))
    if not isinstance(kind, str | None):
        raise ValueError(f"{where} has rope_type {shown(kind)}, but it must be a name")
    if kind in _PLAIN:
        _check_not_nested(fields, where)
        return None
    if kind not in _NEEDED:
        raise ValueError(
            f"{where} has rope_type {shown(kind)}, but only default, "
            f"{', '.join(_NEEDED)} are supported"
        )
    if kind == "proportional":
        fields = {"factor": 1.0, **fields}
    missing = [name for name in _NEEDED[kind] if fields.get(name) is None]
    if missing:
        raise ValueError(
            f"{where} has rope_type {shown(kind)} without {', '.join(missing)}; add them"
        )
    scaling = _scaling_of(kind, fields, where)
    if kind == "longrope":
        written = fields.get("attention_factor")
        return scaling._replace(attention_factor=None if written is None else float(written))
    if kind != "yarn":
        return scaling
    usual, factor = mscale(scaling.factor), _attention_factor(fields, scaling.factor, where)
    is_usual, is_one = abs(factor - usual) <= 1e-12, abs(factor - 1.0) <= 1e-12
    return scaling._replace(
        raises_scores=is_usual or not is_one,
        attention_factor=None if is_usual or is_one else factor,
    )


def _check_not_nested(fields: Mapping[str, Any], where: str) -> None:
    nested = [name for name, value in fields.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(
            f"{where} has one rope per kind of layer ({', '.join(nested)}), which is not supported"
        )


def _scaling_of(kind: str, fields: Mapping[str, Any], where: str) -> RopeScaling:
    known = {
        name: fields[name]
        for name in RopeScaling._fields
        if fields.get(name) is not None and name not in ("rope_type", "attention_factor")
    }
    if kind != "proportional":  # elsewhere it is the model's --rotary-percent
        known.pop("partial_rotary_factor", None)
    elif known.get("partial_rotary_factor", 1.0) > 1:
        raise ValueError(
            f"{where} must have a partial_rotary_factor of at most 1, but it is "
            f"{shown(known['partial_rotary_factor'])}"
        )
    lists = {name: known.pop(name) for name in _LISTS if name in known}
    for name, value in lists.items():
        if not (isinstance(value, list) and value and all(map(is_positive, value))):
            raise ValueError(
                f"{where} must have a list of numbers above 0 as {name}, but has {shown(value)}"
            )
    for name in _RAMP:  # transformers takes 0 for a missing one
        if known.get(name) == 0:
            del known[name]
    for name in sorted({*known, "attention_factor"} - set(_SWITCHES)):
        if fields.get(name) is not None and not is_positive(fields[name]):
            raise ValueError(
                f"{where} must have numbers above 0, but {name} is {shown(fields[name])}"
            )
    values: dict[str, Any] = {name: float(v) for name, v in known.items() if name not in _SWITCHES}
    values |= {name: tuple(map(float, value)) for name, value in lists.items()}
    values |= {name: bool(known.get(name, True)) for name in _SWITCHES}
    return RopeScaling(kind, **values)


def is_positive(value: object) -> bool:
    """Returns whether a value is a finite number above 0, which a float can hold."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0 < value <= sys.float_info.max
    )


def _attention_factor(fields: Mapping[str, Any], factor: float, where: str) -> float:
    """Returns what yarn multiplies cosines and sines by, as `attention_factor` or the quotient of
    two scales says.
    """
    written = fields.get("attention_factor")
    if written is not None:
        return float(written)
    scales = fields.get("mscale"), fields.get("mscale_all_dim")
    if not fields.get("raises_scores", True):
        return 1.0
    if not all(scales):
        return mscale(factor)
    for scale in scales:
        if not is_positive(scale):
            raise ValueError(f"{where} must have numbers above 0, but has mscale {shown(scale)}")
    above, below = (mscale(factor, float(scale)) for scale in scales)  # type: ignore[arg-type]
    return above / below


def mscale(factor: float, scale: float = 1.0) -> float:
    """Returns yarn's factor of contexts that are `factor` times as long."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def factor_of_turns(scaling: RopeScaling) -> float:
    """Returns what cosines and sines are multiplied by, and so attention scores by its square."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.rope_type == "longrope" and scaling.factor > 1:
        original = scaling.original_max_position_embeddings
        return math.sqrt(1 + math.log(scaling.factor) / math.log(original))
    raises = scaling.rope_type == "yarn" and scaling.raises_scores
    return mscale(scaling.factor) if raises else 1.0
