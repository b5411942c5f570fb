"""Answers are trained to the ends that generation stops at, where a template has several of them,
or leaves its end for the next message to write.

The templates have the structure of released ones; beside each stands what TRL marks in its variant
of that template for training (trl/chat_templates/*_training.jinja at f2cd577).
"""

from __future__ import annotations

from datetime import date

import pytest

from megatron.sft.data.records.formats import Conversation
from megatron.sft.data.records.messages import Message
from megatron.sft.data.records.values import SampleError
from megatron.sft.data.templates.chat_template import ChatTemplate
from tests.unit_tests.sft.data.templates.structures import (
    ERNIE,
    EXAONE,
    GLM,
    GLM4,
    GPT_OSS,
    GRANITE,
    MINIMAX,
    MINISTRAL3,
    OLMO2,
    SEED_OSS,
    SMOLLM3,
    TOKENS,
)
from tests.unit_tests.sft.data.templates.test_chat_template import CALL, TOOLS, released, render


def said(content: str, **fields: object) -> Message:
    """The assistant's message."""
    return Message("assistant", content, fields=fields)


QUESTION, ANSWER = Message("user", "q"), said("a")
THINKING = said("a", reasoning_content="hm")
CALLING, THINKING_CALL = (
    said("", tool_calls=[CALL]),
    said("", tool_calls=[CALL], reasoning_content="hm"),
)
RESULT = Message("tool", "r")
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
GPT_CALL = ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>'
GLM_CALL = (
    "\n<think></think>\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("source", "messages", "trained"),
    [
        (GPT_OSS, [QUESTION, ANSWER], [f"{FINAL}a<|return|>"]),
        (
            GPT_OSS,
            [QUESTION, THINKING],
            [f"{ANALYSIS}hm<|end|><|start|>assistant{FINAL}a<|return|>"],
        ),
        # An earlier answer's <|end|>, which the template writes once the conversation goes on, is
        # never generated: trained, generation would not stop there.
        (GPT_OSS, [QUESTION, ANSWER, QUESTION, ANSWER], [f"{FINAL}a", f"{FINAL}a<|return|>"]),
        (GPT_OSS, [QUESTION, CALLING, RESULT, ANSWER], [GPT_CALL, f"{FINAL}a<|return|>"]),
        (GPT_OSS, [QUESTION, CALLING, RESULT, CALLING], [GPT_CALL, GPT_CALL]),
        (GLM, [QUESTION, THINKING], ["\n<think>hm</think>\na<|user|>"]),
        (
            GLM,
            [QUESTION, CALLING, RESULT, RESULT, ANSWER],
            [f"{GLM_CALL}<|observation|>", "\n<think></think>\na<|user|>"],
        ),
        (
            EXAONE,
            [QUESTION, CALLING, RESULT, ANSWER],
            ['<tool_call>f{"x": 1}</tool_call>[|endofturn|]', "a[|endofturn|]"],
        ),
    ],
)
def test_each_turn_ends_where_generation_does(
    source: str, messages: list[Message], trained: list[str]
) -> None:
    """These templates were refused, but for one turn of gpt-oss."""
    tools = TOOLS if CALLING in messages and source is not EXAONE else None
    if source is GLM:
        tools = None
    text, found = render(source, messages, tools)
    assert found == trained
    end = {GLM: "<|user|>"}.get(source, "")  # which the next message would write
    assert text == released(source, messages, tools=tools) + end


def test_a_context_is_served_with_the_thoughts_that_led_to_a_call() -> None:
    """Rendered as a whole, gpt-oss leaves them out before the answer that they led to."""
    messages = [QUESTION, THINKING_CALL, RESULT, THINKING, QUESTION, ANSWER]
    with pytest.raises(SampleError, match="or --train-turns served"):
        render(GPT_OSS, messages)
    turns = ChatTemplate(GPT_OSS, TOKENS).render_turns(Conversation(messages))
    thought = f"{ANALYSIS}hm<|end|><|start|>assistant"
    assert [turn.answer for turn in turns] == [
        f"{thought}{GPT_CALL}",
        f"{thought}{FINAL}a<|return|>",
        f"{FINAL}a<|return|>",
    ]
    for turn, number in zip(turns, (1, 3, 5)):
        assert turn.prompt == released(GPT_OSS, messages[:number], add_generation_prompt=True)
    assert ANALYSIS in turns[1].prompt
    assert ANALYSIS not in turns[2].prompt


def test_served_turns_of_glm_end_with_what_it_generates() -> None:
    """Each answer is the last one where it is generated, so nothing follows that writes its end."""
    messages = [QUESTION, THINKING_CALL, RESULT, THINKING, QUESTION, ANSWER]
    turns = ChatTemplate(GLM, TOKENS).render_turns(Conversation(messages))
    assert [turn.answer.rpartition(">\n")[2] for turn in turns] == [
        "</tool_call><|observation|>",
        "a<|user|>",
        "a<|user|>",
    ]
    assert "<think>hm</think>" in turns[1].prompt
    assert "<think>hm</think>" not in turns[2].prompt


@pytest.mark.parametrize("content", ["<think>\nhm\n</think>\n\na", "<think>hm</think>a"])
def test_thoughts_in_tags_are_read_by_a_template_that_has_them_apart(content: str) -> None:
    """gpt-oss would be trained to say tags to the user."""
    assert render(GPT_OSS, [QUESTION, said(content)]) == render(GPT_OSS, [QUESTION, THINKING])


def test_thoughts_that_a_prompt_rules_out_are_refused_with_the_way_out() -> None:
    """EXAONE 4 and small Qwen3.5 think where they are told to; else an empty thought stands in the
    prompt.
    """
    options = {"enable_thinking": True, "skip_think": False}
    template = ChatTemplate(EXAONE, TOKENS)
    chat = Conversation([QUESTION, THINKING], None, options)
    ((start, end, _),) = template.render(chat).spans
    assert template.render(chat).text[start:end] == "hm\n</think>\n\na[|endofturn|]"
    (turn,) = template.render_turns(chat)
    assert turn.answer == "hm\n</think>\n\na[|endofturn|]"
    with pytest.raises(SampleError, match='"enable_thinking": true'):
        template.render_turns(chat._replace(template_options={"skip_think": False}))


def marked(source: str) -> str:
    """A template as TRL marks it."""
    if source is GPT_OSS:
        source = source.replace("== 'assistant' %}{% if", "== 'assistant' %}{% generation %}{% if")
        return source.replace(
            "+ '<|end|>' }}{% endif %}\n{%- elif message.role == 'tool'",
            "+ '<|end|>' }}{% endif %}{% endgeneration %}\n{%- elif message.role == 'tool'",
        )
    # The role's token is the answer's end, and the next message leaves it out.
    source = source.replace(
        "{% if m.role == 'user' %}{{ '<|user|>\n'",
        "{% if m.role == 'user' %}{% if loop.first or messages[loop.index0 - 1].role != "
        "'assistant' %}<|user|>{% endif %}{{ '\n'",
    )
    source = source.replace("{{ '<|assistant|>' }}", "{{ '<|assistant|>' }}{% generation %}")
    source = source.replace("{%- if messages[loop.index0 - 1].role != 'tool' %}", "")
    return source.replace(
        "{{ '</tool_call>' }}{% endfor %}",
        "{{ '</tool_call>' }}{% endfor %}{{ '<|observation|>' if m.tool_calls else '<|user|>' }}"
        "{% endgeneration %}",
    ).replace(
        "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}", ""
    )


@pytest.mark.parametrize("source", [GPT_OSS, GLM])
@pytest.mark.parametrize(
    "messages",
    [
        [QUESTION, THINKING],
        [Message("system", "s"), QUESTION, ANSWER, QUESTION, ANSWER],
        [QUESTION, CALLING, RESULT, ANSWER],
        [QUESTION, ANSWER, QUESTION, CALLING, RESULT, THINKING],
    ],
)
def test_masks_are_those_of_marked_templates(source: str, messages: list[Message]) -> None:
    """But for what gpt-oss does not generate: the header, which is its prompt, and the end of
    earlier answers.
    """
    text, trained = render(source, messages)
    assert "{% endgeneration %}" in marked(source)
    of_trl, marked_parts = render(marked(source), messages)
    assert of_trl == text
    if source is GPT_OSS:
        marked_parts = [
            part.removeprefix("<|start|>assistant").removesuffix("<|end|>") for part in marked_parts
        ]
    assert trained == marked_parts


@pytest.mark.parametrize(
    ("source", "trained"),
    [
        (SEED_OSS, ["a", "<seed:think>hm</seed:think>\na"]),
        (SMOLLM3, ["a", "<think>\nhm\n</think>\n\na"]),
        (GRANITE, ["a", "<think>\nhm\n</think>\n\na"]),
        (OLMO2, ["a", "<think>\nhm\n</think>\n\na"]),
        (ERNIE, ["a", "<think>\nhm\n</think>\n\na"]),
        (MINISTRAL3, ["a", "[THINK]hm[/THINK]a"]),
        (GLM4, ["\na", "\n<think>\nhm\n</think>\n\na"]),
    ],
    ids="SeedOSS SmolLM3 Granite OLMo2 ERNIE Ministral3 GLM4".split(),
)
def test_answers_of_further_families(source: str, trained: list[str]) -> None:
    """Behind two questions: all of an answer up to its end, thoughts as the template has them."""
    messages = [QUESTION, ANSWER, QUESTION, said("<think>\nhm\n</think>\n\na")]
    (turn,) = ChatTemplate(source, TOKENS, date(2025, 6, 30)).render_turns(
        Conversation([QUESTION, ANSWER])
    )
    end = turn.answer.removeprefix(trained[0])
    assert end != ""
    assert end != turn.answer
    _, found = render(source, messages, today=date(2025, 6, 30))
    assert found == [answer + end for answer in trained]


def test_what_a_prompt_opens_must_be_there() -> None:
    """MiniMax-M2 is prompted within a thought: an answer without one is never generated."""
    template = ChatTemplate(MINIMAX, TOKENS)
    (turn,) = template.render_turns(Conversation([QUESTION, THINKING]))
    assert (turn.prompt[-8:], turn.answer) == ("<think>\n", "hm\n</think>\n\na[e~[")
    with pytest.raises(SampleError, match="opens a thought, but the answer has none; give the"):
        template.render_turns(Conversation([QUESTION, ANSWER]))


def test_a_model_that_is_told_not_to_think() -> None:
    """SmolLM3's prompt closes an empty thought then; and it asks for the date."""
    template = ChatTemplate(SMOLLM3, TOKENS, date(2025, 6, 30), {"enable_thinking": False})
    (turn,) = template.render_turns(Conversation([QUESTION, ANSWER]))
    assert turn.prompt.endswith("<think>\n\n</think>\n")
    assert "Today Date: 30 June 2025\nReasoning Mode: /no_think" in turn.prompt
