"""pure. Frozen dataclasses <-> command line and YAML: a field is a flag, the docstring under it is the help.

`hidden_size: int` is `--hidden-size N`; `bf16: bool = False` is `--bf16` (and `--no-bf16`, to take back what a YAML
file says); a field without default is required. `--config FILE` gives options in YAML under the same names; flags on
the command line win.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml


class FlagError(ValueError):
    """A wrong option; the message is one line that says what to do."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(message)


def parse_flags(groups: Sequence[type], arguments: Sequence[str], description: str) -> list[Any]:
    """One instance of each dataclass in `groups`, from command-line `arguments`.

    Raises FlagError for unknown options (with the nearest right one), wrong values, missing ones, and what the
    dataclasses' own `__post_init__` refuse.
    """
    parser = _build_parser(groups, description)
    config_file, rest = _take_config(list(arguments))
    from_file = [] if config_file is None else _options_of_yaml(config_file, parser)
    _refuse_unknown([*from_file, *rest], parser)
    namespace = parser.parse_args([*from_file, *rest])
    try:
        return [group(**{field.name: getattr(namespace, field.name) for field in fields(group)}) for group in groups]
    except ValueError as failure:
        raise FlagError(str(failure)) from None


def _build_parser(groups: Sequence[type], description: str) -> _Parser:
    parser = _Parser(prog="pretrain_sft.py", description=description, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="YAML file with the same options; flags win")
    for group in groups:
        section = parser.add_argument_group(inspect.getdoc(group) or group.__name__)
        helps, hints = _field_docstrings(group), typing.get_type_hints(group)
        for field in fields(group):
            required = field.default is MISSING
            help_text = helps.get(field.name, "").replace("%", "%%")
            if not required and field.default not in (None, False, ()):
                help_text += f" (default: {field.default})"
            section.add_argument(
                _flag_of(field.name),
                default=None if required else field.default,
                required=required,
                help=help_text,
                **_argument_kind(hints[field.name]),
            )
    return parser


def _argument_kind(hint: Any) -> dict[str, Any]:
    """argparse's keywords for a type: bool, int, float, str, Literal, tuple[str, ...], or one of these or None."""
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": typing.get_args(hint)}
    if typing.get_origin(hint) is tuple:
        return {"nargs": "+", "type": typing.get_args(hint)[0], "metavar": "X"}
    return {"type": hint, "metavar": {int: "N", float: "X"}.get(hint, "TEXT")}


def _field_docstrings(cls: type) -> dict[str, str]:
    """The string expression under each field of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, following in zip(body.body, body.body[1:]):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = following.value if isinstance(following, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[statement.target.id] = " ".join(value.value.split())
    return found


def _take_config(arguments: list[str]) -> tuple[Path | None, list[str]]:
    for i, argument in enumerate(arguments):
        if argument == "--config" and i + 1 < len(arguments):
            return Path(arguments[i + 1]), arguments[:i] + arguments[i + 2 :]
        if argument.startswith("--config="):
            return Path(argument.removeprefix("--config=")), arguments[:i] + arguments[i + 1 :]
    return None, arguments


def _options_of_yaml(path: Path, parser: _Parser) -> list[str]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as failure:
        raise FlagError(f"--config {path}: {failure}") from None
    if not isinstance(values, dict):
        raise FlagError(f"--config {path} must be a mapping of options to values, but is {type(values).__name__}")
    options: list[str] = []
    for key, value in values.items():
        flag = _flag_of(str(key))
        if flag not in parser._option_string_actions or flag == "--config":
            raise FlagError(f"--config {path}: unknown option '{key}'{_nearest(flag, parser)}")
        if isinstance(value, bool):
            options.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            options += [flag, *map(str, value)]
        elif value is not None:
            options.append(f"{flag}={value}")
    return options


def _refuse_unknown(arguments: Sequence[str], parser: _Parser) -> None:
    for argument in arguments:
        flag = argument.split("=", 1)[0]
        if flag.startswith("--") and flag not in parser._option_string_actions:
            raise FlagError(f"unknown option {flag}{_nearest(flag, parser)}")


def _nearest(flag: str, parser: _Parser) -> str:
    close = difflib.get_close_matches(flag, parser._option_string_actions, n=1)
    return f"; did you mean {close[0]}?" if close else "; see --help"


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def exit_with(message: str, rank: int) -> NoReturn:
    """End this process with status 2; rank 0 says why, in one line."""
    if rank == 0:
        print(f"pretrain_sft.py: error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)
