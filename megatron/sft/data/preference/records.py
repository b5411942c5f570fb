"""pure. Reads a record of preference data: a prompt, and answers of which one is chosen.

    prompt, chosen, rejected                TRL, NeMo-RL; text, or turns
    chosen, rejected                        whole conversations or texts, whose common beginning is
                                            the prompt (TRL, open-instruct, UltraFeedback, which
                                            has `prompt` and `messages` beside)
    messages, rejected_response             ms-swift: the last turns of the assistant are the
      | rejected_messages                   chosen answer
    instruction | query | question          LLaMA-Factory's ranking of Alpaca records, with input,
      + chosen, rejected                    system and history
    conversations | messages                LLaMA-Factory's ranking of ShareGPT records
      + chosen, rejected
    context | prompt + completions          NeMo-RL: [{rank, completion}], the least is chosen
    instruction + completions               UltraFeedback: [{response, overall_score}]
    context | prompt                        HelpSteer: a strength, below 0 where the first is better
      + response1 | response_1, ...
    prompt | messages + answer + label      KTO: one answer, marked as good or bad
      | kto_tag
    ... + margin                            TRL: least difference of scores, of reward models

`rejected` may hold several answers: each makes a pair with the chosen one. A record becomes one of
`prompt` and `responses`, as SFT has it, so that turns, tools, calls and template variables are read
by the same code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from megatron.packing.quoting import shown
from megatron.sft.data.preference.beside import check_repeated, said_empty
from megatron.sft.data.records.columns import CONTEXT, QUESTION, TURNS, rename_fields
from megatron.sft.data.records.content import Answers, Conversation, Passage, TokenIds
from megatron.sft.data.records.formats import Reading, read_record
from megatron.sft.data.records.values import SampleError, is_empty

_MARKS = ("label", "kto_tag")
_REJECTED = ("rejected_response", "rejected_messages", "rejected_responses")
_STRENGTHS = ("preference_strength", "overall_preference")
_RESPONSES = (("response_1", "response_2"), ("response1", "response2"))
_SCORES = ("overall_score", "score", "reward", "fine-grained_score")
_IGNORED = (
    *("score_chosen", "score_rejected", "chosen_score", "rejected_score", "margin"),
    *("chosen_rating", "rejected_rating", "chosen_model", "rejected_model", "prompt_id", "source"),
)
"""Fields beside pairs that say nothing of their text."""
_PAIR_NAMES = {
    *("chosen", "rejected", "completions", *_REJECTED, *_MARKS),
    *(name for names in _RESPONSES for name in names),
}
"""Fields by which a record is one of pairs, or is refused among them."""
_MARK_NAMES = {*_MARKS, "chosen", "rejected"}
_WITHIN_ANSWERS = {
    *("assistant", "gpt", "chatgpt", "bot", "model"),
    *("tool", "function", "observation", "ipython", "tool_response", "environment"),
}
"""Roles that no conversation begins with: what they begin is an answer."""
_TRUE, _FALSE = ("true", "1", "1.0"), ("false", "0", "0.0")
_FORMS = (
    "prompt + chosen + rejected, chosen + rejected, messages + rejected_response, "
    "instruction + chosen + rejected, context + completions with ranks, or two responses with a "
    "preference strength"
)


class Preference(NamedTuple):
    """Answers to one prompt, as conversations or passages from their first turn on."""

    paths: Sequence[Conversation | Passage]
    """The chosen answer, then those that are rejected; in marked data one answer."""
    is_good: bool | None = None
    """The mark of KTO's data; None in pairs."""
    margins: tuple[float, ...] = ()
    """Least difference of scores that each rejected answer asks for; () if they were not read."""
    is_plain: bool = False
    """True for a chat to imitate, which has one path."""


class PreferenceReading(NamedTuple):
    """The content of a record, its weight, and keys with a value that were not read."""

    content: Preference
    weight: float
    unread: set[str]


def read_preference(
    record: Mapping[str, Any],
    columns: Mapping[str, str],
    *,
    is_marked: bool,
    has_margin: bool = False,
    takes_plain: bool = False,
) -> PreferenceReading:
    """Returns the content of a record. Raises SampleError if it has none of the forms above.

    Args:
        columns: as `records.formats.read_record` takes them.
        is_marked: reads one answer with its mark (KTO), not a pair.
        has_margin: reads `margin`, too: a number, or one for each rejected answer (reward models).
        takes_plain: reads records without answers to compare as chats to imitate.
    """
    fields = rename_fields(record, columns)
    of_turns = {column: name for column, name in columns.items() if name in ("role", "content")}
    is_good = None
    # A null column of a table is no column.
    empty = {columns.get(column, column) for column in record} - fields.keys()
    if takes_plain and not fields.keys() & (_MARK_NAMES if is_marked else _PAIR_NAMES):
        return _plain(read_record(fields, of_turns))
    if is_marked:
        rest, is_good = _marked(fields, empty)
    else:
        rest = _as_responses(fields, empty)
    reading = _in_own_names(rest, of_turns, fields)
    paths = _paths(reading, is_marked)
    margins = _margins(fields.get("margin"), len(paths) - 1) if has_margin else ()
    return PreferenceReading(Preference(paths, is_good, margins), reading.weight, reading.unread)


def _in_own_names(
    rest: Mapping[str, Any], of_turns: Mapping[str, str], fields: Mapping[str, Any]
) -> Reading:
    """Returns the content of a record of `responses`, which errors call as the data do."""
    try:
        return read_record(rest, of_turns)
    except SampleError as error:
        text, rejected = str(error), fields.get("rejected")  # responses[2] -> rejected[1]
        if "chosen" not in fields or "responses[" not in text:
            raise
        text = text.replace("responses[0]", "chosen")
        if isinstance(rejected, list) and len(rest["responses"]) > 2:
            text = re.sub(r"responses\[(\d+)\]", lambda one: f"rejected[{int(one[1]) - 1}]", text)
        raise SampleError(text.replace("responses[1]", "rejected")) from None


def _plain(reading: Reading) -> PreferenceReading:
    """Returns a record as a chat to imitate."""
    content = reading.content
    if isinstance(content, TokenIds | Answers):
        raise SampleError(
            "is neither a pair of answers nor a chat with one answer, which --sft-weight trains "
            "beside pairs"
        )
    return PreferenceReading(Preference([content], is_plain=True), reading.weight, reading.unread)


def _margins(margin: Any, num_rejected: int) -> tuple[float, ...]:
    """Returns a margin for each rejected answer; 0 where the record has none."""
    values = margin if isinstance(margin, list) else [margin] * num_rejected
    if len(values) != num_rejected:
        raise SampleError(
            f"margin must be a number, or one for each of the {num_rejected} rejected answers, but "
            f"has {len(values)}"
        )
    if any(isinstance(value, bool) for value in values):
        raise SampleError(f"margin must be a number, but is {shown(margin)}")
    try:
        numbers = tuple(float(0 if value is None else value) for value in values)
    except (TypeError, ValueError):
        raise SampleError(f"margin must be a number, but is {shown(margin)}") from None
    if not all(map(isfinite, numbers)):
        raise SampleError(f"margin must be finite, but is {shown(margin)}")
    return numbers


def _paths(reading: Reading, is_marked: bool) -> Sequence[Conversation | Passage]:
    content = reading.content
    if isinstance(content, TokenIds):
        raise SampleError("holds token ids, of which nobody knows where the answer begins")
    paths = content.paths if isinstance(content, Answers) else [content]
    if is_marked and len(paths) > 1:
        raise SampleError("must have one answer beside its mark, but has several")
    return [_only_answer(path) for path in paths]


def _only_answer(path: Conversation | Passage) -> Conversation | Passage:
    """Returns a path of which all turns of the answer have weight 1, and those before have 0."""
    if isinstance(path, Passage) or any(not one.weight for one in path.messages):
        return path
    # A conversation whose turns all count, as `messages` beside a mark: its last turns are the
    # answer, behind the last turn of a user.
    last = max((n for n, one in enumerate(path.messages) if one.role == "user"), default=-1)
    return path._replace(
        messages=[
            one._replace(weight=float(number > last)) for number, one in enumerate(path.messages)
        ]
    )


def _marked(fields: dict[str, Any], empty: set[str]) -> tuple[dict[str, Any], bool]:
    key = next((key for key in _MARKS if key in fields), None)
    if key is None:
        raise SampleError(
            f"{said_empty(empty & {*_MARKS})}has no mark of its answer, label or kto_tag, which "
            "--loss kto needs; pairs (chosen, rejected) train with --loss dpo"
        )
    mark = fields[key]
    text = str(mark).lower()
    if isinstance(mark, Mapping | list) or text not in (*_TRUE, *_FALSE):
        raise SampleError(f"{key} must be true or false, but is {shown(mark)}")
    rest = {name: value for name, value in fields.items() if name not in _MARKS}
    turns = next((name for name in TURNS if name in rest), None)
    if turns is not None and isinstance(rest[turns], list) and rest[turns]:
        prompt, answer = _last_answer(rest.pop(turns))
        rest |= {"prompt": prompt, "completion": answer}
    return rest, text in _TRUE


def _as_responses(fields: dict[str, Any], empty: set[str]) -> dict[str, Any]:
    """Returns the record with `prompt` and `responses`, of which the first is the chosen one.

    empty: names of columns without a value.
    """
    rest = {name: value for name, value in fields.items() if name not in _IGNORED}
    if "completions" in rest:
        return _ranked(rest)
    for first, second in _RESPONSES:
        if {first, second} <= rest.keys():
            return _by_strength(rest, rest.pop(first), rest.pop(second))
    rejected = next((key for key in _REJECTED if key in rest), None)
    turns = next((key for key in TURNS if key in rest), None)
    if rejected is not None and turns is not None and "chosen" not in rest:
        return _swift(rest, turns, rejected)
    if not {"chosen", "rejected"} <= rest.keys():
        hint = ""
        if any(key in rest for key in _MARKS):
            hint = "; marked answers train with --loss kto"
        elif not rest.keys() & _PAIR_NAMES and turns is not None:
            hint = "; chats without a rejected answer train beside pairs with --sft-weight 1"
        raise SampleError(
            f"{said_empty(empty & _PAIR_NAMES)}has keys "
            f"{', '.join(map(repr, fields)) or '(none)':.300}, but a pair must have {_FORMS}{hint}"
        )
    chosen, rejected_answers = rest.pop("chosen"), _several(rest.pop("rejected"))
    return _explicit(rest, [chosen, *rejected_answers])


def _several(rejected: Any) -> list[Any]:
    """Returns the rejected answers: a list of texts or of lists of turns has several."""
    is_list = isinstance(rejected, list) and bool(rejected)
    if is_list and any(isinstance(one, (str, list)) for one in rejected):
        return rejected
    return [rejected]


def _explicit(rest: dict[str, Any], answers: list[Any]) -> dict[str, Any]:
    """Returns the record of answers with a prompt beside them, or within them."""
    question = next((key for key in QUESTION if key in rest), None)
    turns = next((key for key in TURNS if key in rest), None)
    are_whole = [_is_whole(answer) for answer in answers]
    if all(are_whole) or ("prompt" not in rest and question is None and turns is None):
        return _implicit(rest, answers, turns, question)
    if any(are_whole):
        raise SampleError(
            "has chosen or rejected as a conversation with its question, and the other as an "
            "answer alone; give both alike"
        )
    if "prompt" in rest:
        if turns is not None:  # a copy of the chosen conversation
            check_repeated(turns, rest.pop(turns), [rest["prompt"], *answers])
        return _with_prompt(rest, rest.pop("prompt"), answers)
    if turns is not None:
        return _with_prompt(rest, rest.pop(turns), answers)
    return _with_question(rest, answers)


def _with_prompt(rest: dict[str, Any], prompt: Any, answers: list[Any]) -> dict[str, Any]:
    if isinstance(prompt, str) and any(not isinstance(answer, str) for answer in answers):
        prompt = [{"role": "user", "content": prompt}]
    return {**rest, "prompt": prompt, "responses": answers}


def _with_question(rest: dict[str, Any], answers: list[Any]) -> dict[str, Any]:
    """Returns the record of an Alpaca question: as turns, since SFT gives it a template, too."""
    history = rest.pop("history", [])
    turns: list[Any] = []
    for number, pair in enumerate(history if isinstance(history, list) else [history]):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise SampleError(f"history[{number}] must be [question, answer], but is {shown(pair)}")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    names = (next((key for key in keys if rest.get(key)), None) for keys in (QUESTION, CONTEXT))
    parts = [rest[name] for name in names if name is not None]
    if not parts or not all(isinstance(part, str) for part in parts):
        raise SampleError(f"instruction and input must be text, but are {shown(parts)}")
    rest = {name: value for name, value in rest.items() if name not in (*QUESTION, *CONTEXT)}
    turns.append({"role": "user", "content": "\n\n".join(parts)})
    return {**rest, "prompt": turns, "responses": answers}


def _is_whole(answer: Any) -> bool:
    """Returns whether an answer is a conversation with its question."""
    first = answer[0] if isinstance(answer, list) and answer else None
    if not isinstance(first, Mapping):
        return False
    roles = {first.get(key) for key in ("role", "from") if isinstance(first.get(key), str)}
    return bool(roles) and not roles & _WITHIN_ANSWERS


def _implicit(
    rest: dict[str, Any], answers: list[Any], turns: str | None, question: str | None
) -> dict[str, Any]:
    """Returns the record whose prompt is what its answers begin with. A prompt beside them repeats
    that, as UltraFeedback's does.
    """
    if all(isinstance(answer, str) for answer in answers):
        size = _common(answers)
        # The space before an answer is the answer's, as in TRL: tokens have their spaces in front.
        size -= size > 0 and answers[0][size - 1] == " " and any(len(a) > size for a in answers)
        prompt = answers[0][:size]
        return {**rest, "prompt": prompt, "responses": [answer[size:] for answer in answers]}
    if not all(isinstance(answer, list) and answer for answer in answers):
        raise SampleError(
            "chosen and rejected without a prompt must be texts, or lists of turns, but are "
            f"{shown(answers)}"
        )
    size = _common(answers)
    trunk = answers[0][:size]
    if not size:
        raise SampleError(
            "chosen and rejected have no common first turn, which would be the prompt; give the "
            "prompt as a column"
        )
    for name, within in (("prompt", [trunk]), (question, [trunk]), (turns, answers)):
        if name in rest:
            check_repeated(name, rest.pop(name), within)
    return {**rest, "prompt": trunk, "responses": [answer[size:] for answer in answers]}


def _common(answers: Sequence[Any]) -> int:
    """Returns how many turns or characters all begin with; of equal ones all but the last, so that
    each has an answer.
    """
    least = min(map(len, answers))
    size = next(
        (at for at in range(least) if any(one[at] != answers[0][at] for one in answers)), least
    )
    return max(0, min(size, least - 1))


def _last_answer(turns: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the turns before the last ones of the assistant, and these."""
    last = len(turns)
    while last > 1 and _is_assistant(turns[last - 1]):
        last -= 1
    if last == len(turns):
        raise SampleError("messages must end with a turn of the assistant, the answer")
    return turns[:last], turns[last:]


def _is_assistant(turn: Any) -> bool:
    return isinstance(turn, Mapping) and not _is_whole([turn])


def _swift(rest: dict[str, Any], turns: str, rejected: str) -> dict[str, Any]:
    others = _several(rest.pop(rejected))
    whole = rest.pop(turns)
    if not isinstance(whole, list):
        raise SampleError(f"{turns} must be a list of turns, but is {shown(whole)}")
    prompt, chosen = _last_answer(whole)
    if any(_is_whole(other) for other in others):
        others = [_last_answer(other)[1] if _is_whole(other) else other for other in others]
    return {**rest, "prompt": prompt, "responses": [chosen, *others]}


def _ranked(rest: dict[str, Any]) -> dict[str, Any]:
    """Returns the record of answers with ranks or scores, the best first."""
    given = rest.pop("completions")
    if not isinstance(given, list) or len(given) < 2:
        raise SampleError(f"completions must be a list of two or more, but is {shown(given)}")
    ranked: list[tuple[float, Any]] = []
    for number, one in enumerate(given):
        if not isinstance(one, Mapping):
            raise SampleError(f"completions[{number}] must be an object, but is {shown(one)}")
        score = next((one[key] for key in _SCORES if not is_empty(one.get(key))), None)
        order = one.get("rank", None if score is None else -_number(score, number))
        answer = one.get("completion", one.get("response"))
        if order is None or answer is None:
            raise SampleError(
                f"completions[{number}] must have rank and completion, or overall_score and "
                f"response, but has {', '.join(map(str, one))}"
            )
        ranked.append((_number(order, number), answer))
    ranked.sort(key=lambda one: one[0])
    best = [answer for order, answer in ranked if order == ranked[0][0]]
    if len(best) > 1:
        raise SampleError("completions have no single best one: several have the best rank")
    answers = [answer for _, answer in ranked]
    if not rest.keys() & {"prompt", *TURNS, *QUESTION}:
        rest["prompt"] = rest.pop("context", None)
    return _explicit(rest, answers)


def _number(value: Any, number: int) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise SampleError(
            f"the rank or score of completions[{number}] must be a number, but is {shown(value)}"
        ) from None


def _by_strength(rest: dict[str, Any], first: Any, second: Any) -> dict[str, Any]:
    """Returns the record of two answers with a strength, below 0 where the first is better."""
    strength = next((rest.pop(key) for key in _STRENGTHS if key in rest), None)
    if strength is None or not _number(strength, 0):
        raise SampleError(
            "must say which of its responses is better, by preference_strength or "
            f"overall_preference below or above 0, but has {shown(strength)}"
        )
    answers = [first, second] if _number(strength, 0) < 0 else [second, first]
    if not rest.keys() & {"prompt", *TURNS}:
        rest["prompt"] = rest.pop("context", None)
    turns = next((key for key in TURNS if key in rest), None)
    prompt = rest.pop("prompt", None) or rest.pop(turns or "", None)
    if prompt is None:
        raise SampleError("has two responses, but no prompt, context or messages before them")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return {**rest, "prompt": prompt, "responses": answers}
