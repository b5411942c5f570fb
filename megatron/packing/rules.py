"""pure. Refusals as data: a `Rule` says when a run is refused, why, and the way out, in words that
every program shares.

    Rule(
        when=lambda options, layout: options.num_attention_heads % layout.tensor,
        why="{num_attention_heads} must be a multiple of {tensor}",
        way_out="lower {tensor.flag}",
    )

`when` names its facts as parameters, and a rule is evaluated by whoever knows all of them:

    options        of a group or of a whole run, by name, or megatron-core's config
    layout         sizes of a parallel layout: training, `plan`, `fit`, the search for layouts and
                   the plug-in know it
    run            what training derives from all options together
    world_size     number of processes
    device         the device at hand, and what is installed beside it
    config         megatron-core's, and `transformer_engine`, whether that computes attention

In `why` and `way_out`, `{name}` is a flag with its value as the program at hand calls it
(`--tensor-model-parallel-size 4`, `--tp 4`), `{name.flag}` and `{name.value}` are its halves. What
else they name is what `when` returns: a mapping refuses, and holds further words.

`megatron-sft rules` prints all; a check that is no rule needs a file or a built model, and says so.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from megatron.packing.flags import flag_of
from megatron.packing.stages import StageLayers

MEGATRON_FLAGS = MappingProxyType(
    {
        "tensor": "--tensor-model-parallel-size",
        "pipeline": "--pipeline-model-parallel-size",
        "virtual": "--num-virtual-stages-per-pipeline-rank",
        "context": "--context-parallel-size",
        "experts": "--expert-model-parallel-size",
    }
)
"""Flags of `Layout`'s sizes in training, `fit` and scripts of Megatron-LM."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of a parallel layout; a fact of rules."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Virtual stages of a pipeline rank or, by another flag, layers of each."""
    context: int = 1
    experts: int = 1
    sequence_parallel: bool = False
    stages: StageLayers = field(default_factory=StageLayers)
    """The layers of each stage."""
    flags: Mapping[str, str] = field(default_factory=lambda: MEGATRON_FLAGS, compare=False)
    """Flag of each size in the program that asks."""

    @classmethod
    def of(cls, config: Any) -> Layout:
        """Returns the layout of megatron-core's config, whose stages megatron-core divides."""
        return cls(
            tensor=config.tensor_model_parallel_size,
            pipeline=config.pipeline_model_parallel_size,
            context=config.context_parallel_size,
            experts=config.expert_model_parallel_size,
            sequence_parallel=config.sequence_parallel,
        )


@dataclass(frozen=True)
class Rule:
    """One refusal; see the module."""

    when: Callable[..., object]
    """Function from facts, by their names, to whether the run is refused; a mapping refuses where
    it is not empty.
    """
    why: str
    """The fault, and what is expected instead."""
    way_out: str = ""
    """Imperative: what to change. Empty where `why` says it, as a range does."""

    @cached_property
    def facts(self) -> frozenset[str]:
        """Names of the facts that `when` asks for."""
        # Parameters with a default are the rule's own, such as the option of one of several rules.
        parameters = inspect.signature(self.when).parameters.values()
        return frozenset(one.name for one in parameters if one.default is one.empty)

    def refusal(self, known: Mapping[str, Any]) -> str | None:
        """Returns why the run is refused and the way out, in one line; None where it is not, or not
        all the facts are known.
        """
        if not self.facts <= known.keys():
            return None
        found = self.when(**{name: known[name] for name in self.facts})
        return self.in_words(_Terms(known, found)) if found else None

    def in_words(self, terms: Mapping[str, Any]) -> str:
        """Returns the line with `terms` in place of names."""
        return "; ".join(filter(None, (self.why, self.way_out))).format_map(terms)


def rules_of(group: type) -> Iterator[Rule]:
    """Yields the rules of a class of options, behind those of the classes that it extends."""
    for base in reversed(group.__mro__):
        yield from vars(base).get("rules", ())


def check_rules(rules: Iterable[Rule], **known: Any) -> None:
    """Raises ValueError with the words of the first rule that refuses.

    known: facts by name, such as options=, layout=. A rule that asks for others is passed over.
        origin= is where values of options are from but from flags, as in " (the default model's)".
    """
    for rule in rules:
        refusal = rule.refusal(known)
        if refusal is not None:
            raise ValueError(refusal)


def in_range(low: float, high: float | None, *names: str) -> Iterator[Rule]:
    """Yields the rules of options that are absent, or finite and from `low` to `high`."""
    limits = f"at least {low}" if high is None else f"from {low} to {high}"
    top = sys.float_info.max if high is None else high
    for name in names:
        yield Rule(
            when=lambda options, name=name: (
                getattr(options, name) is not None and not low <= getattr(options, name) <= top
            ),
            why=f"{{{name}.flag}} must be {limits}, but is {{{name}.value}}",
        )


def at_least(low: float, *names: str) -> Iterator[Rule]:
    """Yields the rules of options that are absent, or finite and at least `low`."""
    yield from in_range(low, None, *names)


def above_zero(*names: str) -> Iterator[Rule]:
    """Yields the rules of options that are absent, or finite and above 0."""
    for name in names:
        yield Rule(
            when=lambda options, name=name: (
                getattr(options, name) is not None
                and not 0 < getattr(options, name) <= sys.float_info.max
            ),
            why=f"{{{name}.flag}} must be above 0, but is {{{name}.value}}",
        )


def from_zero_to_below_one(*names: str) -> Iterator[Rule]:
    """Yields the rules of options that are absent, or shares below 1."""
    for name in names:
        yield Rule(
            when=lambda options, name=name: (
                getattr(options, name) is not None and not 0 <= getattr(options, name) < 1
            ),
            why=f"{{{name}.flag}} must be from 0 to below 1, but is {{{name}.value}}",
        )


def needs(option: str, *others: str) -> Iterator[Rule]:
    """Yields the rules of an option that is nothing without each of `others`."""
    for other in others:
        yield Rule(
            when=lambda options, other=other: (
                getattr(options, option) and _is_off(getattr(options, other))
            ),
            why=f"{{{option}.flag}} needs {{{other}.flag}}",
            way_out="pass it",
        )


def exclude(option: str, other: str, way_out: str = "drop one") -> Rule:
    """Returns the rule of two options that must not be given together."""
    return Rule(
        when=lambda options: getattr(options, option) and getattr(options, other),
        why=f"{{{option}.flag}} and {{{other}.flag}} exclude one another",
        way_out=way_out,
    )


def belong_together(option: str, other: str, way_out: str = "pass both or none") -> Rule:
    """Returns the rule of two options of which neither is given alone."""
    return Rule(
        when=lambda options: _is_off(getattr(options, option)) != _is_off(getattr(options, other)),
        why=f"{{{option}.flag}} and {{{other}.flag}} belong together",
        way_out=way_out,
    )


def _is_off(value: object) -> bool:
    return value is None or value is False or value == ()


@dataclass(frozen=True)
class _Term:
    """An option in words."""

    flag: str
    value: Any
    origin: str = ""

    def __str__(self) -> str:
        if self.value is True:
            return self.flag
        values = self.value if isinstance(self.value, (tuple, list)) else (self.value,)
        return " ".join((self.flag, *map(str, values))) + self.origin


class _Terms(dict[str, Any]):
    """The names that a rule's words may have, looked up in its facts."""

    def __init__(self, known: Mapping[str, Any], found: object) -> None:
        super().__init__(found if isinstance(found, Mapping) else {})
        self._known = {"origin": "", **known}

    def __missing__(self, name: str) -> object:
        layout = self._known.get("layout")
        if layout is not None and name in layout.flags:
            return _Term(layout.flags[name], getattr(layout, name))
        if name in self._known:
            return self._known[name]
        value = getattr(self._known["options"], name)
        return _Term(flag_of(name), value, self._known["origin"])
