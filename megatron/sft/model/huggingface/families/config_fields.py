"""pure. A config.json, read with defaults and checks that name the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.packing.quoting import shown
from megatron.sft.options.model import ModelConfig
from megatron.sft.options.rope_scaling import (
    is_positive,
    parse_rope_scaling,
    rope_scaling_of,
)

_MOST = 1 << 24
_MAX_LAYERS = 10_000


@dataclass(frozen=True)
class ConfigFields:
    """The config.json of a language model."""

    values: Mapping[str, Any]
    where: str
    """The file's path, for messages."""

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value; `default` where it is missing or null."""
        value = self.values.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        """Returns a whole number of at least 1; ValueError for anything else."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        most = _MAX_LAYERS if name == "num_hidden_layers" else _MOST
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(
                f"{self.where} must have {name}, a whole number of at least 1, but has "
                f"{shown(value)}"
            )
        return value

    def positive(self, name: str, default: float) -> float:
        """Returns a number above 0; ValueError for anything else."""
        value = self.get(name, default)
        if not is_positive(value):
            raise ValueError(
                f"{self.where} has {name} {shown(value)}, but it must be a number above 0"
            )
        return float(value)

    def refuse(self, *names: str) -> None:
        """Raises ValueError where one of these is there and not off."""
        for name in names:
            if self.values.get(name):
                raise ValueError(
                    f"{self.where} has {name} {shown(self.values[name])}, which is not supported"
                )

    def require(self, name: str, *allowed: object, default: object = None) -> None:
        """Raises ValueError unless a value is one of `allowed`."""
        if self.get(name, default) not in allowed:
            raise ValueError(
                f"{self.where} has {name} {shown(self.values.get(name))}, but only "
                f"{' or '.join(map(repr, allowed))} is supported for this model_type"
            )

    def layers(self, name: str, kind: str) -> tuple[int, ...] | None:
        """Returns for each layer 1 if a list such as `layer_types` says `kind`, else 0; None where
        there is no list.
        """
        found = self.get(name)
        if found is None:
            return None
        num_layers = self.number("num_hidden_layers")
        if len(found) < num_layers:
            raise ValueError(
                f"{self.where} has {name} of {len(found)} layers, but num_hidden_layers is "
                f"{num_layers}"
            )
        return tuple(int(one == kind) for one in found[:num_layers])

    def rope(self, kind: str | None = None) -> dict[str, Any]:
        """Returns `rope_parameters` of transformers 5, or `rope_scaling` of 4; of layers of `kind`,
        where they differ. ValueError where both are written and do not say the same.
        """
        new, old = (
            _without_nulls(self.get(name, {})) for name in ("rope_parameters", "rope_scaling")
        )
        rope = new or old
        if new and old and not self._say_the_same(new, old):
            raise ValueError(
                f"{self.where} has rope_parameters and rope_scaling, which are not the same, and "
                "transformers takes the latter alone, without the base of the former; write one "
                "rope_parameters with rope_theta, rope_type and what else rope_scaling has"
            )
        if kind is None:
            return rope
        has_kinds = isinstance(rope.get(kind), dict)
        fields = _without_nulls(rope[kind]) if has_kinds else rope
        # transformers reads `truncate` beside the kinds of layers, not within one.
        return {**fields, "truncate": bool(rope.get("truncate", True)) if has_kinds else True}

    def with_rope(self, default: Mapping[str, Any]) -> ConfigFields:
        """Returns these fields with a default rope where none is written."""
        if self.get("rope_parameters") is not None or self.get("rope_scaling"):
            return self
        return ConfigFields({**self.values, "rope_parameters": default}, self.where)

    def rope_options(self, rope_theta: float, kind: str | None = None) -> dict[str, Any]:
        """Returns base and scaling of rotary embeddings.

        rope_theta: the base where none is written. kind: of `layer_types`.
        """
        fields = self.rope(kind)
        base = self.rope_base(fields.pop("rope_theta", None), rope_theta)
        scaling = rope_scaling_of(self._filled(fields), f"{self.where}: rope_scaling")
        return {
            "rotary_base": base,
            "rope_scaling": None if scaling is None else scaling.to_json(),
        }

    def rope_per_kind(self, rope_theta: float, local_base: object) -> dict[str, Any]:
        """Returns base and scaling of layers that see all tokens, and the base of layers with a
        window, of families whose ropes differ between these; ValueError where layers with a window
        have a scaling.

        rope_theta: the base of the former where none is written. local_base: of the latter.
        """
        flat = {k: v for k, v in self.rope().items() if not isinstance(v, dict)}
        is_flat = bool(self.get("rope_parameters")) and flat.keys() - {"truncate"}
        if is_flat and flat != {"rope_type": "default"}:
            raise ValueError(
                f"{self.where} has rope_parameters for all layers, which transformers ignores for "
                "this model_type; write those of full_attention and sliding_attention in it"
            )
        older = self.get("rope_scaling") or {}
        if older.get("type", "default") != "default" and "rope_type" not in older:
            raise ValueError(
                f"{self.where} has a rope_scaling of type {shown(older['type'])}, which "
                "transformers ignores for this model_type; write rope_type instead of type"
            )
        local = self.rope("sliding_attention") if self.get("rope_parameters") else {}
        if _rope_type(local) != "default":
            raise ValueError(
                f"{self.where} stretches rotary embeddings of layers with a window "
                f"(rope_type {shown(_rope_type(local))}), which is not supported"
            )
        base = local.get("rope_theta")
        return {
            **self.rope_options(rope_theta, "full_attention"),
            "window_rotary_base": self.positive_base(local_base if base is None else base),
        }

    def _say_the_same(self, new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
        """Returns whether two ropes scale alike: defaults may be in one alone."""
        whole = new.get("full_attention")
        if isinstance(whole, dict) and not any(isinstance(value, dict) for value in old.values()):
            # The older spelling has one rope: that of layers without a window (`older_rope`).
            return self._say_the_same(_without_nulls(whole), old)
        new, old = _without_base(new), _without_base(old)
        if new == old:
            return True
        has_kinds = any(isinstance(value, dict) for value in (*new.values(), *old.values()))
        if has_kinds or _rope_type(new) != _rope_type(old):
            return False
        where = f"{self.where}: rope_parameters or rope_scaling"
        of_new, of_old = (
            # What is read of a rope beside its base: its scaling, and Ministral's scale of queries.
            (rope_scaling_of(self._filled(rope), where), rope.get("llama_4_scaling_beta"))
            for rope in (new, old)
        )
        return of_new == of_old

    def _filled(self, rope: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a rope with what transformers takes from beside it: the length that the model was
        trained for, and the factor of yarn and longrope.
        """
        kind, longest = _rope_type(rope), self.get("max_position_embeddings")
        if kind == "dynamic":  # stays as it is up to this length, whatever it was made from
            return {
                **rope,
                "original_max_position_embeddings": self.number("max_position_embeddings"),
            }
        if kind not in ("llama3", "yarn", "longrope"):
            return rope
        filled = {"original_max_position_embeddings": longest, **rope}
        beside = self.get("original_max_position_embeddings")
        if beside is not None:
            filled["original_max_position_embeddings"] = beside
        original = filled["original_max_position_embeddings"]
        if "factor" not in rope and is_positive(longest) and is_positive(original):
            filled["factor"] = longest / original
        return filled

    def rope_base(self, written: object, default: float) -> float:
        """Returns the base that a rope has `written`, else the model's, else `default`."""
        base = next(
            (base for base in (written, self.get("rope_theta")) if base is not None), default
        )
        return self.positive_base(base)

    def positive_base(self, base: object) -> float:
        """Returns a base; ValueError for anything but a number above 0."""
        if not is_positive(base):
            raise ValueError(
                f"{self.where} has rope_theta {shown(base)}, but it must be a number above 0"
            )
        return float(base)  # type: ignore[arg-type]

    def rotary_percent(self, default: float | None) -> float:
        """Returns the share of a head's channels that are rotated; 1 for families whose plain ropes
        rotate all (`default` None), where ValueError is raised for others with a share.
        """
        rope = self.rope()
        share = rope.get("partial_rotary_factor", self.get("partial_rotary_factor"))
        if share is not None and not (is_positive(share) and share <= 1):
            raise ValueError(
                f"{self.where} has partial_rotary_factor {shown(share)}, but it must be a number "
                "above 0 and at most 1"
            )
        if default is not None:
            share = float(default if share is None else share)
            if share < 1 and _rope_type(rope) == "proportional":
                # Its frequencies are those of the whole head, whose share would be taken twice.
                raise ValueError(
                    f"{self.where} has rope_type 'proportional' and partial_rotary_factor "
                    f"{shown(share)}, which is not supported together for this model_type"
                )
            return share
        if share not in (None, 1) and _rope_type(rope) != "default":
            raise ValueError(
                f"{self.where} has a partial_rotary_factor, which is not supported for this "
                "model_type"
            )
        return 1.0

    def every(self, interval: int, num_layers: int | None = None) -> tuple[int, ...]:
        """Returns 0 for each `interval`-th layer, and 1 for those between: 3 -> 1 1 0 1 1 0."""
        layers = self.number("num_hidden_layers") if num_layers is None else num_layers
        return tuple(int((layer + 1) % interval != 0) for layer in range(layers))

    def windows(
        self, window: int | None, has_window: tuple[int, ...] | None = None
    ) -> dict[str, Any]:
        """Returns the options of layers that attend to `window` tokens, themselves included.

        has_window: 1 for each layer that has it; None: what `layer_types` says, or all.
        """
        if has_window is None:
            has_window = self.layers("layer_types", "sliding_attention")
        if window is None or (has_window is not None and not any(has_window)):
            return {}
        if type(window) is not int or window < 1:
            raise ValueError(
                f"{self.where} has sliding_window {shown(window)}, but it must be a whole number "
                "of at least 1"
            )
        freq = () if has_window is None or all(has_window) else has_window
        return {"window_size": (window - 1, 0), "window_attn_skip_freq": freq}


def windows_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the keys of config.json for the windows of a model's layers."""
    window = model.window_size[0] + 1 if model.window_size else None
    kinds = [
        "full_attention" if kind.window is None else "sliding_attention"
        for kind in model.layer_kinds()
    ]
    return {"sliding_window": window, "layer_types": kinds}


def rope_fields(model: ModelConfig) -> dict[str, Any]:
    """Returns `rope_scaling` of config.json; the default kind for models without."""
    if model.rope_scaling is None:
        return {"rope_type": "default"}
    return parse_rope_scaling(model.rope_scaling).huggingface_fields()


def _rope_type(rope: Mapping[str, Any]) -> Any:
    """Returns the kind of a rope; `type` is its name in transformers 4."""
    return rope.get("rope_type", rope.get("type", "default"))


def _without_nulls(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a rope says; a `truncate` of null is false, others of null are missing."""
    switch = {"truncate": bool(rope["truncate"])} if "truncate" in rope else {}
    return {key: value for key, value in rope.items() if value is not None} | switch


def _without_base(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a rope says but its base and the share that is rotated."""
    others = ("rope_theta", "partial_rotary_factor")
    return {key: value for key, value in rope.items() if key not in others}
