"""pure. Refusals as data: a `Rule` says when a run is refused, why, and the way out, in words that
every program shares.

    Rule(
        when=lambda options, layout: options.num_attention_heads % layout.tensor,
        why="{num_attention_heads} must be a multiple of {tensor}",
        way_out="lower {tensor.flag}",
    )

`when` names its facts as parameters, and a rule is evaluated by whoever knows all of them: rules of
`options` alone when these are read, those of a `layout` by training, `plan`, `fit`, the search for
layouts and the plug-in, those of a `device` where there is one. In `why` and `way_out`, `{name}` is
a flag with its value as the program at hand calls it (`--tensor-model-parallel-size 4`, `--tp 4`),
`{name.flag}` and `{name.value}` are its halves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from megatron.packing.flags import flag_of

MEGATRON_FLAGS = MappingProxyType(
    {
        "tensor": "--tensor-model-parallel-size",
        "pipeline": "--pipeline-model-parallel-size",
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
    context: int = 1
    experts: int = 1
    flags: Mapping[str, str] = field(default_factory=lambda: MEGATRON_FLAGS, compare=False)
    """Flag of each size in the program that asks."""

    @classmethod
    def of(cls, config: Any) -> Layout:
        """Returns the layout of anything with megatron-core's names, such as its config."""
        return cls(
            tensor=config.tensor_model_parallel_size,
            pipeline=config.pipeline_model_parallel_size,
            context=config.context_parallel_size,
            experts=config.expert_model_parallel_size,
        )


@dataclass(frozen=True)
class Rule:
    """One refusal; see the module."""

    when: Callable[..., object]
    """Function from facts, by their names, to whether the run is refused."""
    why: str
    """The fault, and what is expected instead."""
    way_out: str
    """Imperative: what to change."""

    @cached_property
    def facts(self) -> frozenset[str]:
        """Names of the facts that `when` asks for."""
        # Parameters with a default are the rule's own, such as the option of one of several rules.
        parameters = inspect.signature(self.when).parameters.values()
        return frozenset(one.name for one in parameters if one.default is one.empty)

    def refuses(self, known: Mapping[str, Any]) -> bool:
        """Returns whether the facts that are known are all that it asks for, and refused."""
        return self.facts <= known.keys() and bool(
            self.when(**{name: known[name] for name in self.facts})
        )

    def words(self, known: Mapping[str, Any]) -> str:
        """Returns the refusal, in one line."""
        return f"{self.why}; {self.way_out}".format_map(_Terms(known))


def check_rules(rules: Iterable[Rule], **known: Any) -> None:
    """Raises ValueError with the words of the first rule that refuses.

    known: facts by name, such as options=, layout=. A rule that asks for others is passed over.
    """
    for rule in rules:
        if rule.refuses(known):
            raise ValueError(rule.words(known))


def at_least(low: int, *names: str) -> Iterator[Rule]:
    """Yields the rules of options that are absent, or at least `low`."""
    for name in names:
        yield Rule(
            when=lambda options, name=name: (
                getattr(options, name) is not None and getattr(options, name) < low
            ),
            why=f"{{{name}.flag}} must be at least {low}, but is {{{name}.value}}",
            way_out="raise it",
        )


def needs(option: str, *others: str) -> Iterator[Rule]:
    """Yields the rules of an option that is nothing without each of `others`."""
    for other in others:
        yield Rule(
            when=lambda options, other=other: (
                getattr(options, option) and getattr(options, other) is None
            ),
            why=f"{{{option}.flag}} needs {{{other}.flag}}",
            way_out="pass it",
        )


@dataclass(frozen=True)
class _Term:
    """An option in words."""

    flag: str
    value: Any

    def __str__(self) -> str:
        if self.value is True:
            return self.flag
        values = self.value if isinstance(self.value, (tuple, list)) else (self.value,)
        return " ".join((self.flag, *map(str, values)))


class _Terms(dict[str, _Term]):
    """The names that a rule's words may have, looked up in its facts."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        super().__init__()
        self._known = known

    def __missing__(self, name: str) -> _Term:
        layout = self._known.get("layout")
        if layout is not None and name in layout.flags:
            return _Term(layout.flags[name], getattr(layout, name))
        return _Term(flag_of(name), getattr(self._known["options"], name))
