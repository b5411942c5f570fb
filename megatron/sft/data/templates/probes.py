"""pure. Short conversations, by which `ChatTemplate.contexts` finds out how a template renders
turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.sft.data.records.messages import Message

_CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}, "id": "abcdefghi"}
_QUESTION, _ANSWER = Message("user", "q"), Message("assistant", "a")
PROBES: Sequence[Sequence[Message]] = (
    (_QUESTION, _ANSWER, _QUESTION, _ANSWER),
    (Message("system", "s"), _QUESTION, _ANSWER, _QUESTION, _ANSWER),
    (_QUESTION, Message("assistant", "<think>\nt\n</think>\n\na"), _QUESTION, _ANSWER),
    (
        _QUESTION,
        Message("assistant", "a", fields={"reasoning_content": "t"}),
        _QUESTION,
        Message("assistant", "a", fields={"reasoning_content": "t"}),
    ),
    (
        _QUESTION,
        Message("assistant", "", fields={"tool_calls": [_CALL]}),
        Message("tool", "r", fields={"tool_call_id": "abcdefghi"}),
        _ANSWER,
        _QUESTION,
        _ANSWER,
    ),
)
"""Conversations whose earlier turns some templates render in another way as more turns follow."""
