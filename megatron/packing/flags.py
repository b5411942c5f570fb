"""pure. Frozen dataclasses <-> command line and YAML: a field is a flag, the docstring under it is
the help.

`hidden_size: int` is `--hidden-size N`; `bf16: bool = False` is `--bf16` (and `--no-bf16`, to take
back what a YAML file says); a field without default is required; one with metadata `{"positional":
True}` has no dashes, a list with `{"repeatable": True}` gathers what its repeated flag gives (else
the last one counts), text with `{"is_json": True}` may be a mapping in YAML. `--config FILE` gives
options in YAML under the same names; flags on the command line win. Where the help says NAMES,
metadata `{"names": ...}` has them. `flag_needs` reads those of options that act only with others.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from megatron.packing.flag_faults import FlagError as FlagError
from megatron.packing.flag_faults import stray_value, unknown_options
from megatron.packing.flag_help import Command, short_help
from megatron.packing.flag_needs import check_needs
from megatron.packing.quoting import shown
from megatron.packing.user_files import read_yaml

_type_hints = cache(typing.get_type_hints)
_NOT_IN_YAML = ("help", "help_all", "version", "config")
_HELP = ("-h", "--help", "--help-all")


_VALUE_OF_SWITCH = re.compile(r"argument (--[\w-]+)/(--no-[\w-]+): ignored explicit argument (.*)")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fault = _VALUE_OF_SWITCH.fullmatch(message)
        if fault is not None:
            message = (
                f"{fault[1]} takes no value, but has {fault[3]}; pass {fault[1]} or {fault[2]}"
            )
        raise FlagError(message)


def parse_flags(
    groups: Sequence[type],
    arguments: Sequence[str],
    command: Command,
    *,
    passes_over_unknown: bool = False,
    imply: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    notes: list[str] | None = None,
) -> list[Any]:
    """Returns one instance of each dataclass in `groups`, from command-line `arguments` of
    `command`.

    passes_over_unknown: whether the YAML file may have other options, as that of another program
    does; imply: receives the options that the user gave, by field name (also the unknown ones of
    the YAML file), and returns values for others, in place of their defaults; notes: receives a
    line for each given option that has no effect.

    Raises FlagError for unknown options (with the nearest right one), wrong values, missing ones,
    options without the one that they need (see `flag_needs`), and what the dataclasses' own
    `__post_init__` refuse.
    """
    parser = build_parser(groups, command, shows_help=not set(_HELP).isdisjoint(arguments))
    if command.is_short and not {"-h", "--help"}.isdisjoint(arguments):
        print(short_help(parser, command), end="")
        parser.exit()
    config_file, rest = _take_config(arguments)
    given: set[str] = set()
    of_others: dict[str, Any] = {}
    if config_file is not None:
        for action, value in _values_of_yaml(
            config_file, parser, of_others if passes_over_unknown else None, command
        ):
            action.default, action.required = value, False
            given.add(action.dest)
    flags = [argument.split("=", 1)[0] for argument in rest if argument.startswith("--")]
    known = parser._option_string_actions
    if unknown := [flag for flag in flags if flag not in known]:
        raise unknown_options("", unknown, known, command)
    given |= {known[flag].dest for flag in flags}
    try:
        if imply is not None:
            _take_implied(parser, imply, (given, of_others), rest)
        values = _values(parser, rest)
        idle = check_needs([field for group in groups for field in fields(group)], given, values)
        if notes is not None:
            notes.extend(idle)
        return [
            group(**{field.name: values[field.name] for field in fields(group)}) for group in groups
        ]
    except ValueError as failure:
        raise FlagError(str(failure)) from None


def _values(parser: _Parser, arguments: Sequence[str]) -> dict[str, Any]:
    parsed, stray = parser.parse_known_args(arguments)
    if stray:
        raise stray_value(stray[0], arguments, parser._option_string_actions)
    values = vars(parsed)
    for name, value in values.items():
        for number in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(number, int) and not -(2**63) <= number < 2**63:
                raise FlagError(f"{flag_of(name)} must fit 64 bits, but is {shown(number)}")
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


def _take_implied(
    parser: _Parser,
    imply: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    given_by_user: tuple[set[str], Mapping[str, Any]],
    rest: Sequence[str],
) -> None:
    """Makes what `imply` answers the defaults; what the user gave stays.

    given_by_user: names of fields, and the YAML file's options that are no fields.
    """
    given, of_others = given_by_user
    required = [action for action in parser._actions if action.required]
    for action in required:
        action.required = False
    values = _values(parser, rest)
    positionals = {action.dest for action in parser._actions if not action.option_strings}
    given |= {name for name in positionals if values[name] is not None}
    implied = imply({**of_others, **{name: values[name] for name in given if name in values}})
    for action in required:
        action.required = action.dest not in implied
    parser.set_defaults(**{name: value for name, value in implied.items() if name not in given})


class _Version(argparse.Action):
    """Prints the versions that a report of a fault should name."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from megatron.packing.versions import package_version

        names = ("megatron-sft", "megatron-core", "torch")
        print(*(f"{name} {package_version(name)}" for name in names), sep=", ")
        parser.exit()


class _Extend(argparse.Action):
    """A list whose flag may be repeated; the first one replaces what a YAML file says."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        given = getattr(namespace, self.dest)
        setattr(namespace, self.dest, list(values) if given is self.default else [*given, *values])


def build_parser(groups: Sequence[type], command: Command, *, shows_help: bool) -> _Parser:
    """Returns argparse's parser of the fields; without `shows_help` it knows no help texts, which
    take 0.1 s to read.
    """
    parser = _Parser(prog=command.program, description=command.about, allow_abbrev=False)
    if command.usage is not None and not command.is_short:
        parser.usage = f"{parser.prog} {command.usage}".replace("%", "%%")
    # Where --help shows all, --help-all does so, too.
    help_all = "show all options and exit" if command.is_short else argparse.SUPPRESS
    parser.add_argument("--help-all", action="help", help=help_all)
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the installed versions and exit"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with the same options, ~ and ${VARIABLE} expanded; flags win",
    )
    for group in groups:
        section = parser.add_argument_group((inspect.getdoc(group) or group.__name__).rstrip("."))
        add_fields(section, group, shows_help=shows_help)
    return parser


def add_fields(
    section: argparse._ActionsContainer,
    group: type,
    *,
    shows_help: bool = True,
    skipped: Container[str] = (),
) -> None:
    """Adds the flag of each field of a dataclass to a parser, or a section of one.

    shows_help: whether the flags have help texts. skipped: flags that are not added.
    """
    helps = field_docstrings(group) if shows_help else {}
    hints = _type_hints(group)
    for field in fields(group):
        required = field.default is MISSING
        help_text = helps.get(field.name, "").replace("%", "%%")
        help_text = help_text.replace("NAMES", ", ".join(field.metadata.get("names", ())))
        if not required and field.default not in (None, False, ()):
            help_text += f" (default: {field.default})"
        if field.metadata.get("positional"):
            section.add_argument(field.name, nargs="?", default=field.default, help=help_text)
            continue
        kind = _argument_kind(hints[field.name])
        if field.metadata.get("is_json"):
            kind |= {"type": _json_text, "metavar": "JSON"}
        if field.metadata.get("repeatable"):
            kind["action"] = _Extend
        flag = flag_of(field.name)
        if flag not in skipped:
            default = None if required else field.default
            section.add_argument(flag, default=default, required=required, help=help_text, **kind)


def _argument_kind(hint: Any) -> dict[str, Any]:
    """Returns argparse's keywords for a type: bool, int, float, str, Literal, tuple[str, ...], or
    one of these or None.
    """
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": typing.get_args(hint)}
    if typing.get_origin(hint) is tuple:
        return {"nargs": "+", "type": typing.get_args(hint)[0], "metavar": "X"}
    return {"type": hint, "metavar": {int: "N", float: "X"}.get(hint, "TEXT")}


def _json_text(text: str) -> str:
    """Returns the text of an option that is JSON; in a YAML file it may be a mapping."""
    return text


def field_docstrings(cls: type) -> dict[str, str]:
    """Returns the string expression under each field of a dataclass; one that it inherits may be
    documented there.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        found |= _own_docstrings(base)
    return found


@cache
def _own_docstrings(cls: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, following in zip(body.body, body.body[1:]):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = following.value if isinstance(following, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[statement.target.id] = " ".join(value.value.split())
    return found


def _take_config(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Returns the value of --config, and the other arguments."""
    finder = _Parser(allow_abbrev=False, add_help=False)
    finder.add_argument("--config", action="append")
    found, rest = finder.parse_known_args(arguments)
    if found.config is None:
        return None, rest
    if len(found.config) > 1 or not found.config[0]:
        raise FlagError("--config takes one file; put all options into it")
    return Path(found.config[0]), rest


def _values_of_yaml(
    path: Path, parser: _Parser, of_others: dict[str, Any] | None, command: Command
) -> Iterator[tuple[argparse.Action, Any]]:
    """Yields each option that a YAML file gives, with its value as the command line would make it.

    of_others: receives the options that are unknown; None: they are refused.
    """
    try:
        options = read_yaml(path)
    except ValueError as failure:
        cause = str(failure)
        raise FlagError(
            f"--config {path}{cause if cause.startswith(':') else f': {cause}'}"
        ) from None
    if not isinstance(options, dict):
        raise FlagError(
            f"--config {path} must map options to values, but "
            + ("is empty" if options is None else f"holds {type(options).__name__}")
        )
    actions = {
        action.dest.replace("_", "-"): action
        for action in parser._actions
        if action.dest not in _NOT_IN_YAML
    }
    unknown = [key for key in options if str(key).replace("_", "-") not in actions]
    if unknown and of_others is None:
        names = [str(key) for key in unknown]
        raise unknown_options(f"--config {path}: ", names, actions, command)
    for key, value in options.items():
        name = str(key).replace("_", "-")
        if name not in actions and of_others is not None:
            of_others[name.replace("-", "_")] = value
            continue
        if value is not None:
            try:
                yield actions[name], _value_of_yaml(actions[name], value)
            except (TypeError, ValueError):
                wanted = _wanted(actions[name])
                raise FlagError(
                    f"--config {path}: '{key}' must be {wanted}, but is {shown(value)}"
                ) from None


def _value_of_yaml(action: argparse.Action, value: object) -> Any:
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise TypeError
        return value
    if action.nargs == "+":
        items = value if isinstance(value, list) else [value]
        if not items:
            raise ValueError
        return [_scalar(action, item) for item in items]
    return _scalar(action, value)


def _scalar(action: argparse.Action, value: object) -> Any:
    if isinstance(value, date):  # YAML reads 2025-06-30 as one
        value = value.isoformat()
    if isinstance(value, str) and action.type is not _json_text:  # as a shell does
        value = os.path.expanduser(os.path.expandvars(value))
    if isinstance(value, dict) and action.type is _json_text:
        value = json.dumps(value)
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        raise TypeError
    converted = action.type(str(value)) if callable(action.type) else value
    if action.choices is not None and converted not in action.choices:
        raise ValueError
    return converted


def _wanted(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        return "true or false"
    if action.choices is not None:
        return f"one of {', '.join(map(str, action.choices))}"
    kind = {int: "a whole number", float: "a number"}.get(action.type, "text")  # type: ignore[call-overload]
    return f"a list of at least one {kind}" if action.nargs == "+" else kind


def given_flags(options: Any, arguments: Sequence[str]) -> list[str]:
    """Returns the flags of `options`, an instance of `parse_flags`, that the user gave: those in
    `arguments`, and those that are not at their default, as YAML may have them.
    """
    named = {argument.split("=", 1)[0].replace("--no-", "--", 1) for argument in arguments}
    return [
        flag_of(field.name)
        for field in fields(options)
        if not field.metadata.get("positional")
        and (flag_of(field.name) in named or getattr(options, field.name) != field.default)
    ]


def flag_of(name: str) -> str:
    """`hidden_size -> --hidden-size`."""
    return "--" + name.replace("_", "-")
