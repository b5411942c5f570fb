"""pure. Forms of pairs: each becomes a prompt and `responses`, the chosen one first.

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

`rejected` may hold several answers: each makes a pair with the chosen one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.packing.quoting import shown
from megatron.sft.data.records.columns import CONTEXT, QUESTION, TURNS
from megatron.sft.data.records.values import SampleError, is_empty

MARKS = ("label", "kto_tag")
_REJECTED = ("rejected_response", "rejected_messages", "rejected_responses")
_STRENGTHS = ("preference_strength", "overall_preference")
_RESPONSES = (("response_1", "response_2"), ("response1", "response2"))
_SCORES = ("overall_score", "score", "reward", "fine-grained_score")
_IGNORED = (
    *("score_chosen", "score_rejected", "chosen_score", "rejected_score", "margin"),
    *("chosen_rating", "rejected_rating", "chosen_model", "rejected_model", "prompt_id", "source"),
)
"""Fields beside pairs that say nothing of their text."""
PAIR_NAMES = {
    *("chosen", "rejected", "completions", *_REJECTED, *MARKS),
    *(name for names in _RESPONSES for name in names),
}
"""Fields by which a record is one of pairs, or is refused among them."""
_WITHIN_ANSWERS = {
    *("assistant", "gpt", "chatgpt", "bot", "model"),
    *("tool", "function", "observation", "ipython", "tool_response", "environment"),
}
"""Roles that no conversation begins with: what they begin is an answer."""
_FORMS = (
    "prompt + chosen + rejected, chosen + rejected, messages + rejected_response, "
    "instruction + chosen + rejected, context + completions with ranks, or two responses with a "
    "preference strength"
)


def as_responses(fields: dict[str, Any], empty: set[str]) -> dict[str, Any]:
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
        if any(key in rest for key in MARKS):
            hint = "; marked answers train with --loss kto"
        elif not rest.keys() & PAIR_NAMES and turns is not None:
            hint = "; chats without a rejected answer train beside pairs with --sft-weight 1"
        raise SampleError(
            f"{said_empty(empty & PAIR_NAMES)}has keys "
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
            _check_repeated(turns, rest.pop(turns), [rest["prompt"], *answers])
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
            _check_repeated(name, rest.pop(name), within)
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


def last_answer(turns: list[Any]) -> tuple[list[Any], list[Any]]:
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
    prompt, chosen = last_answer(whole)
    if any(_is_whole(other) for other in others):
        others = [last_answer(other)[1] if _is_whole(other) else other for other in others]
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


def said_empty(names: set[str]) -> str:
    """Returns words about columns of a record that are null or empty lists: `"chosen is empty: "`;
    "" for none.
    """
    verb = "is" if len(names) == 1 else "are"
    return f"{' and '.join(sorted(names))} {verb} empty: " if names else ""


def _check_repeated(name: str, value: Any, within: Sequence[Any]) -> None:
    """Raises SampleError if a column that repeats what chosen and rejected have holds something
    else, which would be lost.
    """
    texts = [text.strip() for text in _texts(value)]
    there = " ".join(text for one in within for text in _texts(one))
    if not all(text in there for text in texts):
        what = f"{name} that chosen and rejected do not have"
        if name not in TURNS:
            what = f"a {name} that chosen and rejected do not begin with"
        raise SampleError(
            f"has {what}; give the answers alone in chosen and rejected, or leave {name} out with "
            f"--data-columns none={name}"
        )


def _texts(value: Any) -> list[str]:
    """Returns the texts of a prompt or of turns, by whatever key, without roles."""
    if isinstance(value, Mapping):
        named = [str(value[key]) for key in ("content", "value") if key in value]
        return named or [text for text in value.values() if isinstance(text, str)]
    if isinstance(value, list):
        return [text for one in value for text in _texts(one)]
    return [] if value is None else [str(value)]
