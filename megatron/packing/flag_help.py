"""pure. Help of a command: one screen of its common options, or all of them."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_WIDTH = 110
_INDENT = 2


@dataclass(frozen=True, kw_only=True)
class Command:
    """A program, as its help and its messages name it."""

    program: str | None = None
    """Command that the user types to start it (default: the name of the running script)."""
    about: str = ""
    """One sentence for the head of the help."""
    usage: str | None = None
    """Arguments of a typical call, for the first line of the help."""
    common: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Title of a group -> fields that --help shows; --help-all shows all options. Without any,
    --help shows all.
    """
    footer: str = ""
    """Last lines of the short help."""
    answers: Callable[[Sequence[str], Iterable[str]], dict[str, str]] | None = None
    """Takes all unknown options and the known flags; returns what to do about each of those that it
    knows.
    """

    @property
    def is_short(self) -> bool:
        """Returns whether --help leaves options to --help-all."""
        return bool(self.common)


def short_help(parser: argparse.ArgumentParser, command: Command) -> str:
    """Returns one screen: a line for each common option, by group."""
    actions = {action.dest: action for action in parser._actions}
    groups = {
        title: [(_name(actions[name]), _text(actions[name])) for name in names]
        for title, names in command.common.items()
    }
    width = max(len(name) for rows in groups.values() for name, _ in rows) + _INDENT + 2
    lines = [f"usage: {parser.prog} {command.usage or '[options]'}", "", command.about]
    for title, rows in groups.items():
        lines += ["", f"{title}:"]
        for name, text in rows:
            summary = textwrap.shorten(text, _WIDTH - width, placeholder=" ...")
            lines.append(f"{'':{_INDENT}}{name}".ljust(width) + summary)
    lines += ["", f"All options: {parser.prog} --help-all", *filter(None, [command.footer])]
    return "\n".join(lines) + "\n"


def _name(action: argparse.Action) -> str:
    """Returns `--lr X`, `--bf16`, `--data-path X ...`; a positional argument in capitals."""
    if not action.option_strings:
        return action.dest.upper()
    flag = action.option_strings[0]
    if isinstance(action, argparse.BooleanOptionalAction):
        return flag
    if action.choices is not None:
        return f"{flag} CHOICE"
    return f"{flag} {action.metavar}{' ...' * (action.nargs == '+')}"


def _text(action: argparse.Action) -> str:
    choices = f": {', '.join(map(str, action.choices))}" if action.choices is not None else ""
    text, default = split_help(action.help or "")
    return f"{text}{choices}{default}"


def split_help(text: str) -> tuple[str, str]:
    """Returns a help text up to its first full stop, without it, and its default.

    `"Steps. More of them. (default: 4)" -> ("Steps", " (default: 4)")`
    """
    default = ""
    if text.endswith(")") and (start := text.rfind(" (default: ")) >= 0:
        text, default = text[:start], text[start:]
    head = text.replace("%%", "%").split(". ")[0].rstrip(".")
    return head, default
