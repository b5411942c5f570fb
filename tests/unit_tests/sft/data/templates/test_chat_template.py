"""Chat templates: what of a conversation is trained, at the price of one rendering."""

import pickle
import time
from datetime import date

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.sft.data.records.content import Conversation
from megatron.sft.data.records.images import MessageImage
from megatron.sft.data.records.messages import Message
from megatron.sft.data.records.values import SampleError
from megatron.sft.data.templates.chat_template import ChatTemplate, SlowTemplateError, Span
from megatron.sft.data.templates.sandbox import LIMITS
from megatron.sft.data.templates.writer import TemplateWriter
from tests.unit_tests.sft.data.templates.structures import (
    CHATML,
    EXAONE,
    GEMMA,
    GLM,
    LLAMA2,
    LLAMA3,
    LLAMA31,
    MARKED,
    MISTRAL,
    MISTRAL3,
    NEMO,
    PHI,
    PHI_MARKED,
    QWEN3,
    QWEN25,
    TOKENS,
    ZEPHYR,
)

SHORT = [Message("user", "q1"), Message("assistant", " a1 ")]
LONG = [*SHORT, Message("user", "q2"), Message("assistant", "a2")]
SYSTEM = [Message("system", "be kind"), *LONG]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLS = [
    Message("user", "q1"),
    Message("assistant", "", fields={"tool_calls": [CALL]}),
    Message("tool", 'r "1"'),
    Message("tool", "r2"),
    Message("assistant", "a1"),
    *LONG[2:],
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
THOUGHTS = [
    Message("user", "q1"),
    Message("assistant", "<think>\nt1\n</think>\n\na1"),
    Message("user", "q2"),
    Message("assistant", "a2", fields={"reasoning_content": "t2"}),
]


def render(source, messages, tools=None, today=None):
    """The rendering, and what of it is trained."""
    rendering = ChatTemplate(source, TOKENS, today).render(Conversation(messages, tools))
    return rendering.text, [rendering.text[span.start : span.end] for span in rendering.spans]


@pytest.mark.parametrize(
    ("source", "trained"),
    [
        (CHATML, [" a1 <|im_end|>", "a2<|im_end|>"]),
        (LLAMA2, [" a1 </s>", " a2 </s>"]),
        (LLAMA3, ["a1<|eot|>", "a2<|eot|>"]),
        (LLAMA31, ["a1<|eot|>", "a2<|eot|>"]),
        (MISTRAL, [" a1 </s>", "a2</s>"]),
        (MISTRAL3, [" a1</s>", " a2</s>"]),
        (QWEN25, [" a1 <|im_end|>", "a2<|im_end|>"]),
        (QWEN3, ["<think>\n\n</think>\n\n a1 <|im_end|>", "<think>\n\n</think>\n\na2<|im_end|>"]),
        (GEMMA, ["a1<end>", "a2<end>"]),
        (PHI, [" a1 <|end|>", "a2<|end|>"]),
        (ZEPHYR, [" a1 </s>", "a2</s>"]),
        (MARKED, [" a1 <|im_end|>", "a2<|im_end|>"]),
        (PHI_MARKED, [" a1 <|end|>\n", "a2<|end|>\n", "</s>"]),
        (GLM, ["\n<think></think>\na1<|user|>", "\n<think></think>\na2<|user|>"]),
        (EXAONE, [" a1 [|endofturn|]", "a2[|endofturn|]"]),
    ],
    ids="ChatML Llama2 Llama3 Llama3.1 Mistral Mistral3 Qwen2.5 Qwen3 Gemma Phi Zephyr marked "
    "PhiMarked GLM EXAONE".split(),
)
def test_every_turn_is_trained_to_its_end(source, trained):
    """A span off by some characters trains on headers, or never on the end of the turn: answers
    would not end.
    """
    assert render(source, LONG)[1] == trained
    assert render(source, SHORT)[1] == [trained[0], *trained[2:]]
    if source not in (GEMMA, MISTRAL):  # which know no system prompt
        text, spans = render(source, SYSTEM)
        assert spans == trained
        assert "be kind" in text


def released(source, messages, **options):
    """The rendering of transformers."""
    templates = pytest.importorskip("transformers.utils.chat_template_utils")
    conversations = [[message.as_dict() for message in messages]]
    return templates.render_jinja_template(
        conversations, chat_template=source, **TOKENS, **options
    )[0][0]


CONTENT = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=9)


@given(
    texts=st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=5), system=st.none() | CONTENT
)
@settings(max_examples=20)
@pytest.mark.parametrize("source", [CHATML, LLAMA2, LLAMA3, QWEN25, PHI, ZEPHYR])
def test_text_is_that_of_transformers(source, texts, system):
    """Trained behind anything else than what it is generated behind, a model is off its prompt at
    every turn.
    """
    messages = [] if system is None else [Message("system", system)]
    messages += [
        Message(role, text) for pair in texts for role, text in zip(("user", "assistant"), pair)
    ]
    rendering = ChatTemplate(source, TOKENS).render(Conversation(messages))
    assert rendering.text == released(source, messages)
    turns = [number for number, message in enumerate(messages) if message.role == "assistant"]
    assert len(rendering.spans) == len(turns) == len(texts)
    for number, span in zip(turns, rendering.spans):
        assert rendering.text[: span.start] == released(
            source, messages[:number], add_generation_prompt=True
        )


def test_tools_and_calls():
    """A call that is not trained is never made."""
    text, trained = render(QWEN25, CALLS)
    assert trained == ['<call>f{"x": 1}</call><|im_end|>', "a1<|im_end|>", "a2<|im_end|>"]
    assert text == released(QWEN25, CALLS)
    one_result = [message for message in CALLS if message.content != "r2"]
    text, trained = render(LLAMA31, one_result, TOOLS)
    assert trained == ['{"name": "f", "parameters": {"x": 1}}<|eot|>', "a1<|eot|>", "a2<|eot|>"]
    assert '\n\n"r \\"1\\""<|eot|>' in text


def test_calls_without_ids_get_those_that_nemo_needs():
    """Tool data of most collections have no ids, and Mistral's templates refuse each such
    conversation.
    """

    def calls(*ids):
        return Message(
            "assistant",
            "",
            fields={"tool_calls": [{**CALL, **({"id": one} if one else {})} for one in ids]},
        )

    messages = [
        *(
            LONG[0],
            calls(None, None),
            Message("tool", "r1"),
            Message("tool", "r2"),
            calls("given6789", None),
        ),
        *(
            Message("tool", "r4", fields={"tool_call_id": "call00003"}),
            Message("tool", "r3"),
            LONG[3],
        ),
    ]
    text, trained = render(NEMO, messages)
    assert trained == [
        "[CALLS][f call00001, f call00002]</s>",
        "[CALLS][f given6789, f call00003]</s>",
        "a2</s>",
    ]
    assert [part.split("[/RESULT]")[0] for part in text.split("[RESULT]")[1:]] == [
        *("call00001 r1", "call00002 r2", "call00003 r4", "given6789 r3")
    ]
    with pytest.raises(SampleError, match="result ids have length 9"):
        render(NEMO, [*messages[:4], Message("tool", "r3")])


def test_thoughts_of_every_turn_are_trained():
    """Qwen3 as released writes the thoughts of the last turn only: others would be trained to
    answer without.
    """
    text, trained = render(QWEN3, THOUGHTS)
    assert trained == [
        "<think>\nt1\n</think>\n\na1<|im_end|>",
        "<think>\nt2\n</think>\n\na2<|im_end|>",
    ]
    assert "t1" not in released(QWEN3, THOUGHTS)
    assert text.count("<think>") == 2
    single = THOUGHTS[:2]
    assert render(QWEN3, single)[0] == released(QWEN3, single)


def test_options_of_a_conversation_change_its_prompt():
    """Where generation starts behind an empty thought, training on it would make the model write
    another one.
    """
    off = (
        "{% if enable_thinking is defined and not enable_thinking %}{{ "
        "'<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    )
    template = ChatTemplate(
        QWEN3.replace("assistant\n' }}{% endif %}", "assistant\n' }}" + off + "{% endif %}"), TOKENS
    )
    for options, trained in ({}, "<think>\n\n</think>\n\na2"), ({"enable_thinking": False}, "a2"):
        text, spans = template.render(Conversation(LONG[2:], None, options))
        assert text[spans[0].start : spans[0].end] == trained + "<|im_end|>"


def test_system_prompt_of_mistral_is_trained_behind():
    """Mistral 0.3 as released writes it into a last message of the user, and in training none is
    the last.
    """
    single = [Message("system", "be kind"), *SHORT]
    assert "be kind" not in released(MISTRAL3, single)
    assert render(MISTRAL3, single)[0] == "<s>[INST] be kind\n\nq1[/INST] a1</s>"
    assert (
        released(MISTRAL3, single[:2], add_generation_prompt=True)
        == "<s>[INST] be kind\n\nq1[/INST]"
    )


@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_turns_have_weights(source):
    """Turns that their author left out of training would be trained."""
    messages = [LONG[0], LONG[1]._replace(weight=0.0), LONG[2], LONG[3]._replace(weight=0.5)]
    template = ChatTemplate(source, TOKENS)
    spans = template.render(Conversation(messages)).spans
    assert [span.weight for span in spans] == [0, 0.5]
    assert [span._replace(weight=1.0) for span in spans] == template.render(
        Conversation(LONG)
    ).spans


@pytest.mark.slow
@pytest.mark.parametrize("source", [CHATML, LLAMA31, QWEN25, QWEN3, MARKED])
def test_one_rendering_for_any_number_of_turns(source, monkeypatch):
    """At two renderings for each turn, long conversations cost their square: a second for 400
    turns.
    """
    template = ChatTemplate(source, TOKENS)
    template.render(Conversation(LONG))  # checks this kind of conversation, turn by turn
    written = []
    write = TemplateWriter.write

    def counted(self, *arguments, **options):
        result = write(self, *arguments, **options)
        written.append(len(result.text))
        return result

    monkeypatch.setattr(TemplateWriter, "write", counted)
    for number, turns in enumerate((2, 10, 100), 1):
        assert len(template.render(Conversation(LONG * turns)).spans) == 2 * turns
        assert len(written) == number
    template.render(Conversation(SYSTEM))
    assert len(written) <= 3 + 1 + 2 * 2, (
        "a kind that is new is checked with two renderings for each answer"
    )
    before = len(written)
    template._checked.clear()
    template.render(Conversation(LONG * 50))
    assert len(written) - before <= 1 + 2 * 8, (
        "of long ones only the first and last answers are checked"
    )


def test_time_is_linear_in_turns():
    """Anything that searches the whole text for each turn makes the square, too."""
    template = ChatTemplate(CHATML, TOKENS)
    seconds = []
    for turns in (100, 1600):
        conversation = Conversation(LONG * turns)
        template.render(conversation)
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            template.render(conversation)
            best = min(best, time.process_time() - start)
        seconds.append(best)
    assert seconds[1] < 16 * seconds[0] * 3


NO_END = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}" + (
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (
            NO_END,
            "under the chat template no end of a turn would be trained, so no answer ends; pass "
            "--chat-template",
        ),
        (
            MARKED.replace("{{ '<|im_end|>' }}{% endgen", "{% endgen"),
            "under the chat template no end of a turn",
        ),
        (
            "{{ messages | length }}" + CHATML,
            "the chat template renders turns up to number 1 again as more follow",
        ),
        (
            QWEN3.replace("loop.index0 > ns", "loop.index0 >  ns"),
            "the chat template renders turns up to number 1 again",
        ),
        ("{% for m in messages %}", "the chat template cannot be read: Unexpected end of template"),
        (
            "{{ messages.__class__ }}" + CHATML,
            "the chat template cannot be read: it uses the private name __class__",
        ),
        (
            "{{ strftime_now('%d') }}" + CHATML,
            "the chat template asks for today's date, by which samples would change",
        ),
        (
            "{{ raise_exception('never') }}",
            "the chat template refuses the conversation: never, although it is a ques",
        ),
        (
            CHATML.replace("user", "") + "{% for m in messages %}{{ m.content }}{% endfor %}",
            "the chat template writes",
        ),
    ],
)
def test_templates_that_train_wrongly_are_refused(source, fault):
    """Every answer would be trained behind what it is never generated behind, or never to its
    end."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        render(source, LONG)
    assert str(caught.value).startswith(fault)
    assert not isinstance(caught.value, SampleError)


@pytest.mark.parametrize(
    ("source", "messages", "tools", "fault"),
    [
        (GEMMA, SYSTEM, None, "the chat template refuses the conversation: no system role"),
        (
            LLAMA3,
            CALLS,
            None,
            "message 1, of the assistant, holds 'f', which the chat template leaves out; remove it",
        ),
        (LLAMA3, LONG, TOOLS, "the chat template leaves out the tool 'f'; remove tools"),
        (
            CHATML,
            THOUGHTS,
            None,
            "message 3, of the assistant, holds 't2', which the chat template leaves out",
        ),
        (LLAMA31, CALLS, TOOLS, None),
        (CHATML, [Message("user", "q"), Message("assistant", "")], None, None),
        (
            "{% for m in messages if m.role != 'tool' %}" + CHATML.split("%}", 1)[1],
            [LONG[0], Message("tool", "r1"), LONG[1]],
            None,
            "message 1, of the tool, holds 'r1', which the chat template leaves out",
        ),
        ("{{ messages[0].content + '' }}" + CHATML, [Message("assistant", "a")], None, None),
    ],
)
def test_conversations_that_lose_something_are_refused(source, messages, tools, fault):
    """A model would be trained without the tools, calls, thoughts or turns that the data hold."""
    if fault is None:
        render(source, messages, tools)
        return
    with pytest.raises(SampleError) as caught:
        render(source, messages, tools)
    assert str(caught.value).startswith(fault)


PARTS = (
    "{% if messages[0].role == 'system' %}<S>{% for p in messages[0].content %}"
    "{{ p.text or SYSTEM }}{% endfor %}<E>{% endif %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text or (TOOL if m.role == 'tool' else '<img><img>' if m == messages[3] else '<img>') }}"
    "{% endfor %}{% endif %}<E>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("system", "tool", "fault"),
    [
        ("<img>", "", "^message 4, of the tool, has 1 images, of which the chat template writes 0"),
        ("", "<img>", "^message 0, of the system, has 1 images, of which .* writes 0"),
        ("<img>", "<img>", None),
    ],
)
def test_images_are_counted_in_each_turn(system, tool, fault):
    """A template that leaves out one image and repeats another writes as many as there are."""
    image = [MessageImage(0, None)]
    messages = [
        Message("system", "s", images=image),
        Message("user", "a", images=image),
        Message("assistant", "b"),
        Message("user", "c", images=image),
        Message("tool", "d", images=image),
        Message("assistant", "e"),
    ]
    source = PARTS.replace("SYSTEM", repr(system)).replace("TOOL", repr(tool))
    conversation = Conversation(messages, placeholder="<img>")
    if fault is None:
        assert ChatTemplate(source, {}).render(conversation).text.count("<img>") == 5
        return
    with pytest.raises(SampleError, match=fault):
        ChatTemplate(source, {}).render(conversation)


def test_marks_within_a_scope_of_their_own():
    """A variable set in the marked part would change what follows it, otherwise than transformers
    renders it.
    """
    source = (
        "{% set end = '!' %}"
        + MARKED.replace("{{ m.content }}", "{% set end = '?' %}{{ m.content + end }}")
        + "{{ end }}"
    )
    text, trained = render(source, SHORT)
    assert trained == [" a1 ?<|im_end|>"]
    assert text == released(source, SHORT)


def test_templates_pickle():
    """Loader workers that are spawned could not start."""
    template = ChatTemplate(CHATML, TOKENS)
    before = template.render(Conversation(SHORT))
    copy = pickle.loads(pickle.dumps(template))
    assert copy.render(Conversation(SHORT)) == before
    assert before.spans == [
        Span(len(before.text) - len(" a1 <|im_end|>\n"), len(before.text) - 1, 1.0)
    ]


DATED = (
    "{% for message in messages %}{{ '<' ~ message.role ~ '|' ~ strftime_now('%Y-%m-%d') ~ '>' }}"
    "{% if message.thinking %}{{ '<think>' ~ message.thinking ~ '</think>' }}{% endif %}"
    "{{ message.content ~ '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant|' ~ strftime_now('%Y-%m-%d') ~ '>' }}{% endif %}"
)


def test_a_template_is_given_one_date():
    """gpt-oss asks for today's: samples of a run that goes on over midnight would change."""
    chat = Conversation([Message("user", "when?"), Message("assistant", "now")])
    with pytest.raises(ValueError, match="pass --template-date"):
        ChatTemplate(DATED, TOKENS).render(chat)
    template = pickle.loads(pickle.dumps(ChatTemplate(DATED, TOKENS, date(2025, 6, 30))))
    rendering = template.render(chat)
    assert rendering.text == "<user|2025-06-30>when?<end><assistant|2025-06-30>now<end>"
    ((start, end, _),) = rendering.spans
    assert rendering.text[start:end] == "now<end>"
    wide = DATED.replace("%Y-%m-%d", "%9d")
    with pytest.raises(ValueError, match="asks for the date as"):
        ChatTemplate(wide, TOKENS, date(2025, 6, 30)).render(chat)


def test_thoughts_stand_under_every_name():
    """LFM2.5 and gpt-oss read `thinking`, Qwen3 `reasoning_content`: under one name alone they
    would be left out of the other's turns.
    """
    thoughts = {"reasoning_content": "hm"}
    chat = Conversation([Message("user", "?"), Message("assistant", "yes", fields=thoughts)])
    text = ChatTemplate(DATED, TOKENS, date(2025, 6, 30)).render(chat).text
    assert text.endswith("<think>hm</think>yes<end>")


def test_a_template_that_takes_too_long_is_said_to():
    """As any other fault of a template, each record of the data would be tried with it."""
    template = ChatTemplate(
        "{% for i in range(500) %}{% endfor %}" + CHATML, TOKENS, limits=LIMITS._replace(passes=100)
    )
    with pytest.raises(
        SlowTemplateError, match="takes too long with the conversation: it never ends"
    ):
        template.render(Conversation([Message("user", "a")]))
