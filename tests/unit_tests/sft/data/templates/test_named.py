"""Several chat templates of a tokenizer: each conversation gets the one that transformers takes."""

import json
import logging
from pathlib import Path

import pytest

from megatron.sft.data.records.content import Conversation
from megatron.sft.data.templates.chat_template import ChatTemplate
from megatron.sft.data.templates.named import render_alike
from megatron.sft.data.tokenizer import build_tokenizer
from megatron.sft.options.chat_template import TemplateChoice
from tests.unit_tests.sft.data.templates.structures import IDEFICS3, TOKENS
from tests.unit_tests.sft.data.test_tokenizer import CONVERSATION, PLAIN, save_tokenizer

assert save_tokenizer  # a fixture
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
TOOL_USE = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + PLAIN
DICT = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOL_USE}]
PLAIN_CHAT, TOOL_CHAT = Conversation(CONVERSATION), Conversation(CONVERSATION, TOOLS)


def texts(folder, **choice):
    """The rendering of a conversation without tools, and of one with them."""
    tokenizer = build_tokenizer(
        "HuggingFaceTokenizer", str(folder), template=TemplateChoice(**choice)
    )
    return [tokenizer.show(tokenizer.encode_chat(c).ids.tolist()) for c in (PLAIN_CHAT, TOOL_CHAT)]


@pytest.mark.parametrize("where", ["list", "files"])
def test_tool_use_renders_conversations_with_tools(save_tokenizer, tmp_path, caplog, where):
    """Records with tools were refused, or trained in a form that no server writes."""
    source = save_tokenizer(DICT if where == "list" else None)
    if where == "files":
        folder = Path(source)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_text(TOOL_USE)
        (folder / "chat_template.jinja").write_text(PLAIN)
    with caplog.at_level(logging.WARNING):
        plain, with_tools = texts(source)
    assert with_tools == "f" + plain
    (line,) = [one for one in caplog.messages if "chat template" in one]
    assert line == (
        "chat templates default, tool_use: tool_use renders records with tools, default all others"
    )
    (tmp_path / "own.jinja").write_text("!" + TOOL_USE)
    assert texts(source, file=str(tmp_path / "own.jinja")) == ["!" + plain, "!f" + plain]


def test_a_missing_default_is_said(save_tokenizer):
    """The first record without tools would be the fault."""
    source = save_tokenizer([{"name": "tool_use", "template": TOOL_USE}])
    with pytest.raises(ValueError, match="chat templates tool_use, but none named default"):
        texts(source)


def test_the_template_of_a_processor_is_used_where_there_is_no_other(save_tokenizer, caplog):
    """LLaVA's older folders were told to have none, although they are served by it."""
    source = save_tokenizer(None)
    (Path(source) / "chat_template.json").write_text(json.dumps({"chat_template": PLAIN}))
    plain, _ = texts(source)
    assert plain.startswith("<|im_start|>")
    assert "the tokenizer has no chat template: that of its processor is used" in caplog.messages


def test_templates_that_render_alike():
    """A processor's own may also place images, and must stay; another would serve other text."""
    of_text = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{{ m.role.capitalize() ~ ': ' ~ m.content }}<end>\n"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
        TOKENS,
    )
    assert render_alike(of_text, IDEFICS3)
    assert not render_alike(of_text, IDEFICS3.replace("'Assistant:'", "'A:'"))
