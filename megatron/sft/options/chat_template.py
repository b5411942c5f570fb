"""pure. Options of chat templates: --chat-template, --template-date and --chat-template-kwargs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from typing import Any, NamedTuple

from megatron.packing.quoting import shown
from megatron.packing.user_files import parse_json

_WRITTEN_BY_THE_RUN = {"messages", "tools", "add_generation_prompt"}


class TemplateChoice(NamedTuple):
    """A template and its variables."""

    file: str | None = None
    """Path of a template to use instead of the tokenizer's."""
    today: date | None = None
    variables: Mapping[str, Any] = {}
    """Variables of all conversations. A record's own variables of the same name go first."""


AS_RELEASED = TemplateChoice()


def read_date(text: str | None) -> date | None:
    """Returns the date of --template-date. Raises ValueError unless it is YYYY-MM-DD."""
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"--template-date must be a date such as 2025-06-30, but is {shown(text)}"
        ) from None


def read_variables(text: str | None) -> dict[str, Any]:
    """Returns the variables of --chat-template-kwargs. Raises ValueError if it is not a JSON object
    of allowed names.
    """
    try:
        found = {} if text is None else parse_json(text)
    except ValueError as failure:
        raise ValueError(
            f"--chat-template-kwargs must be a JSON object, but is {shown(text)}: {failure}"
        ) from None
    if not are_variables(found):
        raise ValueError(
            '--chat-template-kwargs must be a JSON object such as {"enable_thinking": false}, '
            f"without {', '.join(sorted(_WRITTEN_BY_THE_RUN))}, but is {shown(text)}"
        )
    variables: dict[str, Any] = found
    return variables


def are_variables(value: object) -> bool:
    """Returns whether a value is an object with allowed names of template variables."""
    return isinstance(value, Mapping) and not value.keys() & _WRITTEN_BY_THE_RUN


def to_json(variables: Mapping[str, Any]) -> str:
    """Returns the variables as JSON text, which is equal for equal variables."""
    return json.dumps(variables, sort_keys=True, ensure_ascii=False)
