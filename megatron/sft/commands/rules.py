"""mcore. `megatron-sft rules`: prints what is refused, and the way out (see `packing.rules`).

What is not in it needs a file or a built model: data, checkpoints, model folders.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import chain, groupby
from typing import Any

from megatron.packing.flag_help import Command
from megatron.packing.flags import FlagError, flag_of, parse_flags
from megatron.packing.model.layout_rules import LAYOUT_RULES
from megatron.packing.model.parts import known_parts
from megatron.packing.plugin_rules import PASS_RULES, PLUGIN_RULES, TRAINING_RULES
from megatron.packing.rules import MEGATRON_FLAGS, Rule, rules_of
from megatron.planner.lengths import LengthOptions
from megatron.planner.plan_options import LayoutOptions, ModelOptions, PlanOptions
from megatron.sft.environment import exit_with_message, outlive_output, silence_warnings
from megatron.sft.options.config import GROUPS
from megatron.sft.options.parallel import WORLD_RULES
from megatron.sft.options.run_rules import KERNEL_RULES, RUN_RULES

_SOMETIMES = {"also", "times", "origin"}
"""Words of rules that add something in some runs."""
_WRAPPER = textwrap.TextWrapper(
    100, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
)


@dataclass(frozen=True, kw_only=True)
class RulesOptions:
    """Rules."""

    word: str | None = field(default=None, metadata={"positional": True})
    """Only rules that name this word, such as lora or context-parallel-size."""


def main(arguments: Sequence[str], program: str) -> None:
    """Prints all rules, or those that name a word."""
    outlive_output()
    silence_warnings(0)  # of megatron-core, whose config calibrate's options are for
    about = "Print what is refused before anything is built, and the way out."
    try:
        command = Command(program=program, about=about, usage="[WORD]")
        (options,) = parse_flags((RulesOptions,), arguments, command)
        word = options.word or ""
        found = {
            title: [line for line in lines if word in line] for title, lines in sections().items()
        }
        if not any(found.values()):
            raise ValueError(f"no rule names {word}; see all without a word")
        for title, lines in found.items():
            if lines:
                print(f"{title}\n")
            for line in lines:
                print(_WRAPPER.fill(line))
            if lines:
                print()
    except (FlagError, ValueError, OSError) as failure:
        exit_with_message(program, failure)


def sections() -> dict[str, list[str]]:
    """Returns the rules in words, by who asks: N and words in capitals stand for what a run has.

    Sizes of layouts have training's flags; `megatron-sft plan` has its own.
    """
    from megatron.sft.model.needs import DEVICE_RULES

    parts = {
        f"Layers that are {part.title} (training, fit, plan, plug-in)": part.rules
        for part in known_parts()
    }
    made: dict[str, Iterable[Rule]] = {
        "Parallel layouts (training, fit, plan)": LAYOUT_RULES,
        "Processes (training, fit, plan)": WORLD_RULES,
        **parts,
        "Options together (training, fit)": RUN_RULES,
        **{f"{title_of(group)} (training, fit)": rules_of(group) for group in GROUPS},
        "What a device must have (training)": DEVICE_RULES,
        "megatron-core's config (plug-in)": (*PLUGIN_RULES, *PASS_RULES, *TRAINING_RULES),
        **{
            f"{title_of(group)} ({name})": vars(group).get("rules", ())
            for name, groups in of_commands().items()
            for group in groups
        },
    }
    lines = {title: list(joined(map(in_words, rules))) for title, rules in made.items()}
    lines["Fused kernels (training, fit, calibrate)"] = [
        f"{flag_of(kernel)} {in_words(rule)}"
        for kernel, rules in KERNEL_RULES.items()
        for rule in rules
    ]
    return {title: said for title, said in lines.items() if said}


def title_of(group: type) -> str:
    """Returns the title of a group of options in --help and documents."""
    return re.split(r"\.|:| \(", inspect.getdoc(group) or "")[0]


def in_words(rule: Rule) -> str:
    """Returns a rule in words, without a run."""
    return rule.in_words(_Names())


def joined(lines: Iterable[str]) -> Iterator[str]:
    """Yields lines, neighbours joined that say the same of several options.

    "--a must be at least 1, but is N", "--b must be at least 1, but is N"
        -> "--a, --b must be at least 1, but is N"
    """
    for (_, rest), same in groupby(_halves(lines), key=lambda half: (half[2], half[1])):
        yield f"{', '.join(half[0] for half in same)} {rest}"


def _halves(lines: Iterable[str]) -> Iterator[tuple[str, str, object]]:
    for number, line in enumerate(lines):
        first, rest = line.split(" ", 1)
        yield first, rest, "range" if rest.startswith("must be") and "N" in rest else number


class _Names(dict[str, Any]):
    """What the words of rules name, where no values are known."""

    def __missing__(self, name: str) -> object:
        if name in MEGATRON_FLAGS:
            return _Name(MEGATRON_FLAGS[name])
        if name in _option_names():
            return _Name(flag_of(name))
        return "" if name in _SOMETIMES else name.upper().replace("_", " ")


@cache
def of_commands() -> dict[str, tuple[type, ...]]:
    """Returns command -> its own groups of options."""
    from megatron.packing.doctor.command import DoctorOptions
    from megatron.planner.calibrate import CalibrateOptions
    from megatron.sft.commands.chat import ChatOptions
    from megatron.sft.commands.export import ExportOptions
    from megatron.sft.commands.fit import FitOptions
    from megatron.sft.commands.plan_layout import LayoutSearchOptions
    from megatron.sft.commands.show import ShowConfig

    return {
        "plan": (LengthOptions, ModelOptions, LayoutOptions, PlanOptions, LayoutSearchOptions),
        "fit": (FitOptions,),
        "calibrate": (CalibrateOptions,),
        "show": (ShowConfig,),
        "chat": (ChatOptions,),
        "doctor": (DoctorOptions,),
        "export": (ExportOptions,),
    }


@cache
def _option_names() -> set[str]:
    groups: Iterable[Any] = (*GROUPS, *chain.from_iterable(of_commands().values()))
    return {option.name for group in groups for option in fields(group)}


@dataclass(frozen=True)
class _Name:
    """An option in words, without its value."""

    flag: str
    value: str = "N"

    def __str__(self) -> str:
        return f"{self.flag} {self.value}"
