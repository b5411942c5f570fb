"""The form in which a template reads contents and calls, found by rendering short conversations."""

import json

import pytest

from megatron.sft.data.records.content import Conversation
from megatron.sft.data.records.messages import read_turns
from megatron.sft.data.templates.chat_template import ChatTemplate
from megatron.sft.data.templates.probes import LEFT_OUT, MessageForm
from megatron.sft.data.templates.writer import TemplateWriter
from tests.unit_tests.sft.data.templates.structures import (
    CHATML,
    DEEPSEEK3,
    GLM,
    IDEFICS3,
    QWEN25,
    TOKENS,
)

ARGUMENTS = '{"city":"Paris"}'
GUARDED = QWEN25.replace(
    "call.function.arguments | tojson",
    "(call.function.arguments if call.function.arguments is string else "
    "call.function.arguments | tojson)",
)


def chat(arguments, **content):
    """A question, a call, its result and an answer."""
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return Conversation(
        read_turns(
            [
                {"role": "user", "content": "w?"},
                {"role": "assistant", **content, "tool_calls": [call]},
                {"role": "tool", "content": "sunny"},
                {"role": "assistant", "content": "s"},
            ],
            "messages",
        ).messages
    )


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (CHATML, MessageForm()),
        (QWEN25, MessageForm(null=None)),
        (GUARDED, MessageForm(null=None)),
        # As the key, a null would be written as "None".
        (QWEN25.replace("m.content %}{{ '\n' +", "'content' in m %}{{ '\n' ~"), None),
        (DEEPSEEK3, MessageForm(arguments_are_text=True, null=None, empty=None)),
        (IDEFICS3, MessageForm(text_is_parts=True)),
    ],
)
def test_forms(source, form):
    """Objects that are joined to text raise an error; a call beside "" is left out by DeepSeek-V3,
    and beside a missing content by transformers 5.
    """
    form = MessageForm(null=LEFT_OUT) if form is None else form
    assert TemplateWriter(source, TOKENS)._form == form


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
@pytest.mark.parametrize("arguments", [ARGUMENTS, json.loads(ARGUMENTS)])
def test_calls_of_deepseek_are_trained_as_served(content, arguments):
    """Every form of them was refused. The record's own text of the arguments is kept, and a single
    call gets the end that the template writes behind several.
    """
    template = ChatTemplate(DEEPSEEK3, TOKENS)
    assert template.contexts == "differ"
    calling, answering = template.render_turns(chat(arguments, **content))
    text = ARGUMENTS if isinstance(arguments, str) else json.dumps(arguments)
    assert calling.prompt == "<s><User>w?<Assistant>"
    assert calling.answer == f"<calls><call>weather\n{text}</call></calls><eos>"
    # What is served next has no such end.
    assert answering.prompt == (
        f"<s><User>w?<Assistant><calls><call>weather\n{text}</call><output>sunny</outputs>"
    )
    assert answering.answer == "s<eos>"


def test_objects_are_given_where_both_can_be_read():
    """Text would be written as the record spaces it, unlike what is trained today."""
    text = ChatTemplate(GUARDED, TOKENS).render(chat(ARGUMENTS, content=None)).text
    assert '<call>weather{"city": "Paris"}</call>' in text


@pytest.mark.parametrize("arguments", [None, "", " "])
def test_a_call_without_arguments_has_none(arguments):
    """Servers read an empty text as no arguments; JSON it is not."""
    text = ChatTemplate(QWEN25, TOKENS).render(chat(arguments, content=None)).text
    assert "<call>weather{}</call>" in text


def test_a_null_content_is_not_written():
    """GLM's template would write "None" into the answer."""
    template = ChatTemplate(GLM.replace("m.content.strip()", "m.content"), TOKENS)
    assert "None" not in template.render(chat(ARGUMENTS, content=None)).text


def test_templates_of_processors_read_parts():
    """A text is a list of characters to them: all of it was left out, or an error was raised."""
    conversation = Conversation(
        read_turns(
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "messages"
        ).messages
    )
    rendering = ChatTemplate(IDEFICS3, TOKENS).render(conversation)
    assert rendering.text == "<s>User: q<end>\nAssistant: a<end>\n"
    assert [rendering.text[span.start : span.end] for span in rendering.spans] == [" a<end>"]
