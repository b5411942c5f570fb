"""pure. Recognises preference data where it would be imitated, and names the options that train it,
or its good answers.

    chosen, rejected       a good and a bad answer, or whole conversations (DPO)
    label, kto_tag, ...    marks of good and bad answers (KTO): true and false, 1 and 0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.sft.data.records.answers import Keys
from megatron.sft.data.records.columns import ANSWER, PREFERENCES, QUESTION, TURNS
from megatron.sft.data.records.content import Content, messages_of
from megatron.sft.data.records.values import SampleError

_ASSISTANT = ("assistant", "gpt")
_REJECTED = "none=rejected"


def preference_error(columns: str) -> SampleError:
    """Returns the error of a record with chosen and rejected answers; `columns` trains the former,
    as a value of --data-columns.
    """
    return SampleError(
        "is preference data (chosen, rejected); train pairs with --loss dpo, or the chosen answers "
        f"alone with --data-columns {columns}"
    )


def is_answer(turns: object, keys: Keys) -> bool:
    """Returns whether a value is a turn of the assistant, or turns that begin with one."""
    first = turns[0] if isinstance(turns, list) and turns else turns
    if not isinstance(first, Mapping):
        return False
    roles = [first.get(key) for key in (keys.role, "role", "from") if key is not None]
    return any(role in _ASSISTANT for role in roles if isinstance(role, str))


def columns_without_turns(fields: Mapping[str, Any], keys: Keys) -> str:
    """Returns the columns to train of a record that has no other answer than the chosen one."""
    chosen, question = fields["chosen"], next((key for key in QUESTION if key in fields), None)
    if isinstance(chosen, str):
        name = "text" if question is None else ANSWER[0]
        return f"{'completion' if 'prompt' in fields else name}=chosen,{_REJECTED}"
    if not is_answer(chosen, keys):
        return f"messages=chosen,{_REJECTED}"
    if "prompt" in fields:
        return f"completion=chosen,{_REJECTED}"
    if question is not None:
        return f"prompt={question},completion=chosen,{_REJECTED}"
    return f"messages=chosen,{_REJECTED}"


def columns_beside_turns(fields: Mapping[str, Any], content: Content, keys: Keys) -> str:
    """Returns the columns to train of a record with content beside its chosen answer."""
    turns, chosen = messages_of(content), fields["chosen"]
    key = next((key for key in TURNS if key in fields), None)
    if key is None or not turns or turns[-1].role == "assistant":
        return f"none=chosen,{_REJECTED}"
    if not is_answer(chosen, keys):
        return f"none={key},messages=chosen,{_REJECTED}"
    if isinstance(chosen, list) and len(chosen) > 1:
        return f"prompt={key},completion=chosen,{_REJECTED}"
    return f"responses=chosen,{_REJECTED}"


def check_marks(fields: Mapping[str, Any]) -> None:
    """Raises SampleError for a record of preference data whose answer is marked as good or bad:
    training on a bad one would teach it.
    """
    for key in PREFERENCES:
        mark = fields.get(key)
        if _is_mark(mark) or (_is_number_mark(mark) and not _may_be_class(key, fields)):
            good = "1" if _is_number_mark(mark) else "true"
            raise SampleError(
                f"record has {key} {str(mark).lower()} beside an answer, as preference data (KTO) "
                "marks good and bad answers, but without --loss kto all of them are taken for good "
                f"ones; pass it, or keep the records in which it is {good} and pass --data-columns "
                f"none={key}"
            )


def _is_mark(mark: object) -> bool:
    # Tables without booleans have them as text, True or true.
    is_text = isinstance(mark, str) and mark.lower() in ("true", "false")
    return isinstance(mark, bool) or is_text


def _is_number_mark(mark: object) -> bool:
    is_number = isinstance(mark, (int, float)) and not isinstance(mark, bool) and mark in (0, 1)
    return is_number or (isinstance(mark, str) and mark in ("0", "1", "0.0", "1.0"))


def _may_be_class(key: str, fields: Mapping[str, Any]) -> bool:
    """Returns whether a number is as likely the class of a text, in tables of questions and
    answers. KTO has prompts with completions, or turns.
    """
    return key == "label" and not fields.keys() & {*TURNS, "prompt"}
