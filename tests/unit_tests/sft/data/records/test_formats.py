"""Records to what is trained: every layout, read as its authors mean it, and nothing of it lost."""

import json

import numpy as np
import pytest

from megatron.sft.data.chat_encoder import ChatEncoder, EncodedSample, SampleError
from megatron.sft.data.records.columns import READ_COLUMNS
from megatron.sft.data.records.content import Conversation, said_in
from megatron.sft.data.records.formats import read_record
from megatron.sft.data.templates.probes import MessageForm
from megatron.sft.data.tokenizer import build_tokenizer
from megatron.sft.options.data_columns import COLUMNS, parse_columns


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer("ByteLevelTokenizer")


def turns(**answers):
    """ShareGPT turns: a question for each answer, with what else stands in the answer's turn."""
    return [
        turn
        for question, (answer, more) in answers.items()
        for turn in ({"from": "human", "value": question}, {"from": "gpt", "value": answer, **more})
    ]


def chat(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


WHOLE = "<user>q<end><assistant>a<end>"
WITH_SYSTEM = "<system>s<end>" + WHOLE
TRAINED = "a<end>"
TWO = "<user>p<end><assistant>b<end>" + WHOLE

LAYOUTS = {
    "OpenAI, TRL, ms-swift": (
        {"messages": chat(("user", "q"), ("assistant", "a"))},
        WHOLE,
        TRAINED,
    ),
    "OpenAI, parts": (
        {
            "messages": chat(
                ("user", [{"type": "text", "text": "q"}]),
                ("assistant", [{"type": "text", "text": "a"}]),
            )
        },
        WHOLE,
        TRAINED,
    ),
    "OpenAI, developer": (
        {"messages": chat(("developer", "s"), ("user", "q"), ("assistant", "a"))},
        WITH_SYSTEM,
        TRAINED,
    ),
    "OpenAI, weight 0": (
        {
            "messages": [
                *chat(("user", "p")),
                {"role": "assistant", "content": "b", "weight": 0},
                *chat(("user", "q")),
                {"role": "assistant", "content": "a", "weight": 1},
            ]
        },
        TWO,
        TRAINED,
    ),
    "ShareGPT": ({"conversations": turns(q=("a", {}))}, WHOLE, TRAINED),
    "OpenHermes": (
        {
            "conversations": turns(q=("a", {"weight": None})),
            "system_prompt": "s",
            "views": 3,
            "avatarUrl": None,
        },
        WITH_SYSTEM,
        TRAINED,
    ),
    "OpenHermes, system twice": (
        {
            "conversations": [{"from": "system", "value": "s"}, *turns(q=("a", {}))],
            "system_prompt": "s",
        },
        WITH_SYSTEM,
        TRAINED,
    ),
    "OpenChat": (
        {
            "items": [],
            "conversations": [
                {"from": "human", "value": "q", "weight": 0.0},
                *turns(q=("a", {}))[1:],
            ],
        },
        WHOLE,
        TRAINED,
    ),
    "LLaMA-Factory, ShareGPT": (
        {"conversations": turns(q=("a", {})), "system": "s", "tools": ""},
        WITH_SYSTEM,
        TRAINED,
    ),
    "Axolotl, train": (
        {"conversations": turns(p=("b", {"train": False}), q=("a", {"train": True}))},
        TWO,
        TRAINED,
    ),
    "Axolotl, training": (
        {"messages": turns(p=("b", {"training": False}), q=("a", {}))},
        TWO,
        TRAINED,
    ),
    "ms-swift, loss": (
        {"messages": turns(p=("b", {"loss": False}), q=("a", {"loss": True}))},
        TWO,
        TRAINED,
    ),
    "ms-swift, loss_scale": (
        {"messages": turns(p=("b", {"loss_scale": 0}), q=("a", {"loss_scale": 1.0}))},
        TWO,
        TRAINED,
    ),
    "LLaMA-Factory, v1": (
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "value": "s"}], "loss_weight": 0.0},
                {"role": "user", "content": [{"type": "text", "value": "q"}], "loss_weight": 0.0},
                {
                    "role": "assistant",
                    "content": [{"type": "text", "value": "a", "text": None}],
                    "loss_weight": 1.0,
                },
            ],
            "extra_info": "",
        },
        WITH_SYSTEM,
        TRAINED,
    ),
    "LLaMA-Factory, loss_weight": (
        {"messages": turns(p=("b", {"loss_weight": 0.0}), q=("a", {"loss_weight": 1.0}))},
        TWO,
        TRAINED,
    ),
    "ms-swift, conversation": (
        {"system": "s", "conversation": [{"human": "q", "assistant": "a"}]},
        WITH_SYSTEM,
        TRAINED,
    ),
    "ms-swift, query": (
        {"query": "q", "response": "a", "history": [["p", "b"]]},
        TWO,
        "b<end>a<end>",
    ),
    "Alpaca": ({"instruction": "q", "input": "", "output": "a"}, WHOLE, TRAINED),
    "Alpaca, input": (
        {"instruction": "q", "input": "i", "output": "a"},
        "<user>q\n\ni<end><assistant>a<end>",
        TRAINED,
    ),
    "Alpaca, input alone": ({"instruction": "", "input": "q", "output": "a"}, WHOLE, TRAINED),
    "Alpaca, as first released": (
        {
            "instruction": "q",
            "input": "",
            "output": "a",
            "text": "Below is ...\nq\n### Response:\na",
        },
        WHOLE,
        TRAINED,
    ),
    "LLaMA-Factory, Alpaca": (
        {"instruction": "q", "output": "a", "system": "s", "history": [["p", "b"]]},
        "<system>s<end>" + TWO,
        "b<end>a<end>",
    ),
    "Dolly": (
        {"instruction": "q", "context": "c", "response": "a", "category": "closed_qa"},
        "<user>q\n\nc<end><assistant>a<end>",
        TRAINED,
    ),
    "OpenOrca": (
        {"id": "1", "system_prompt": "s", "question": "q", "response": "a"},
        WITH_SYSTEM,
        TRAINED,
    ),
    "GSM8K": ({"question": "q", "answer": "a"}, WHOLE, TRAINED),
    "UltraChat": (
        {"prompt": "q", "prompt_id": "1", "messages": chat(("user", "q"), ("assistant", "a"))},
        WHOLE,
        TRAINED,
    ),
    "TRL, prompt and completion": ({"prompt": "q ", "completion": "a"}, "q a<eod>", "a<eod>"),
    "TRL, conversational": (
        {
            "prompt": chat(("user", "p"), ("assistant", "b"), ("user", "q")),
            "completion": chat(("assistant", "a")),
        },
        TWO,
        TRAINED,
    ),
    "prompt of turns, completion of text": (
        {"prompt": chat(("system", "s"), ("user", "q")), "completion": "a"},
        WITH_SYSTEM,
        TRAINED,
    ),
    "Toucan, turns as JSON text": (
        {"messages": json.dumps(chat(("user", "q"), ("assistant", "a"))), "question": ""},
        WHOLE,
        TRAINED,
    ),
    "datasets, each turn as JSON text": (
        {"conversations": [json.dumps(turn) for turn in turns(q=("a", {}))]},
        WHOLE,
        TRAINED,
    ),
    "SQuAD's answers beside turns": (
        {"messages": chat(("user", "q"), ("assistant", "a")), "answers": "[see page 3"},
        WHOLE,
        TRAINED,
    ),
    "text": ({"text": "abc"}, "abc<eod>", "bc<eod>"),
    "tokens": ({"tokens": [97, 98, 99]}, "abc", "bc"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(tokenizer, name):
    """A field that is passed over trains on something else than its author wrote, without a
    word."""
    record, whole, trained = LAYOUTS[name]
    sample = ChatEncoder(tokenizer, 1000, "error").encode(record)
    assert isinstance(sample, EncodedSample)
    assert tokenizer.show([int(sample.tokens[0]), *sample.labels.tolist()]) == whole
    assert tokenizer.show(sample.labels[sample.loss_mask > 0].tolist()) == trained
    assert set(sample.loss_mask.tolist()) <= {0, 1}


PAIR = {"instruction": "q", "output": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLED = [("user", {}), ("assistant", {"tool_calls": [CALL]}), ("tool", {}), ("assistant", {})]
SCHEMA = {"name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("record", "tools"),
    [
        (
            {
                "messages": [
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "content": "r"},
                    {"role": "assistant", "content": "a"},
                ],
                "tools": [{"type": "function", "function": SCHEMA}],
            },
            True,
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
                    {"role": "function", "content": "r"},
                    {"role": "assistant", "content": "a"},
                ]
            },
            False,
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": None, "function_call": CALL["function"]},
                    {"role": "function", "content": "r"},
                    {"role": "assistant", "content": "a"},
                ],
                "functions": [SCHEMA],
            },
            True,
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                    {"from": "observation", "value": "r"},
                    {"from": "gpt", "value": "a"},
                ],
                "tools": '[{"name": "f", "parameters": {}}]',
            },
            True,
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "q"},
                    {"role": "tool_call", "content": '{"name": "f", "arguments": {"x": 1}}'},
                    {"role": "tool_response", "content": "r"},
                    {"role": "assistant", "content": "a"},
                ]
            },
            False,
        ),
    ],
    ids=["OpenAI, TRL", "OpenAI, function_call", "functions", "LLaMA-Factory", "ms-swift"],
)
def test_tool_calls_of_every_layout(record, tools):
    """Arguments left as text would be written as a string in a string; calls as content are no
    calls to a template.
    """
    content = read_record(record, {}).content
    assert isinstance(content, Conversation)
    read = [MessageForm().as_dict(message) for message in content.messages]
    own = {"role", "content"}
    assert [
        (one["role"], {key: one[key] for key in one if key not in own}) for one in read
    ] == CALLED
    assert [message.content for message in content.messages] == ["q", "", "r", "a"]
    assert content.tools == ([{"type": "function", "function": SCHEMA}] if tools else None)


@pytest.mark.parametrize("form", [json.dumps, lambda value: value])
def test_xlams_answers_are_calls(form):
    """Its questions would be refused for keys that they lack, or their calls trained as text."""
    record = {"id": 1, "query": "q", "answers": form([CALL["function"]]), "tools": form([SCHEMA])}
    reading = read_record(record, {})
    content = reading.content
    assert isinstance(content, Conversation)
    assert [(message.role, message.fields) for message in content.messages] == CALLED[:2]
    assert content.tools == [{"type": "function", "function": SCHEMA}]
    assert reading.unread == {"id"}
    with pytest.raises(SampleError, match="record has keys 'question', 'answers', but must have"):
        read_record({"question": "q", "answers": {"text": ["a"], "answer_start": [0]}}, {})


def test_calls_that_follow_one_another_are_one_turn():
    """The assistant would be trained to end its turn between two calls."""
    call = {"role": "tool_call", "content": '{"name": "f"}'}
    content = read_record({"messages": [{"role": "user", "content": "q"}, call, call]}, {}).content
    assert isinstance(content, Conversation)
    assert [len(message.fields.get("tool_calls", ())) for message in content.messages] == [0, 2]


def test_options_of_the_template():
    """TRL's way to train without thoughts would be passed over."""
    content = read_record(PAIR | {"chat_template_kwargs": {"enable_thinking": False}}, {}).content
    assert isinstance(content, Conversation)
    assert content.template_options == {"enable_thinking": False}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_by_every_name(key):
    """Thoughts would be left out of what is trained."""
    turn = {"role": "assistant", "content": "a", key: "t"}
    content = read_record({"messages": [turn]}, {}).content
    assert isinstance(content, Conversation)
    assert content.messages[0].fields == {"reasoning_content": "t"}


def test_weights_of_turns_multiply_the_records(tokenizer):
    """A turn of half weight in a record of half weight would count as whole."""
    record = {
        "conversations": turns(p=("b", {"weight": 0.5}), q=("a", {"weight": 3})),
        "weight": 0.5,
    }
    sample = ChatEncoder(tokenizer, 1000, "error").encode(record, 2.0)
    assert isinstance(sample, EncodedSample)
    assert sample.loss_mask[sample.loss_mask > 0].tolist() == [0.5, 0.5, 3, 3]


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        (
            {"prompt": "p", "answer": "a"},
            "record has keys 'prompt', 'answer', but must have messages | conversations | ",
        ),
        (
            {"prompt": "p", "chosen": "a", "rejected": "b"},
            "is preference data (chosen, rejected); train pairs with --loss dpo",
        ),
        ({}, "record has keys (none), but must have messages"),
        (
            {"instruction": "q", "output": None},
            "record has keys 'instruction' (empty: 'output'), but must have",
        ),
        (
            PAIR | {"response": "b"},
            "record has response, which would be lost beside what is read; name its meaning",
        ),
        (PAIR | {"input": "i", "context": "c"}, "record has context, which would be lost"),
        (PAIR | {"text": "another"}, "record has text, which would be lost"),
        (PAIR | {"reasoning": "r"}, "record has reasoning, which would be lost"),
        (PAIR | {"chosen": "c"}, "record has chosen, which would be lost"),
        (PAIR | {"images": ["1.png"]}, "record has images, which would be lost"),
        ({"text": "a", "system": "s"}, "record has system, which would be lost"),
        ({"text": "a", "tools": [SCHEMA]}, "record has tools, which would be lost"),
        (
            {"messages": chat(("system", "t"), ("user", "q"), ("assistant", "a")), "system": "s"},
            "record has two system prompts, system and another one; leave one out, as by "
            "none=system",
        ),
        (PAIR | {"history": [["p"]]}, "history[0] must be [question, answer], but is ['p']"),
        (
            PAIR | {"chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs must be an object with",
        ),
        (PAIR | {"tools": "{"}, "tools must be JSON, but is '{'"),
        (
            PAIR | {"tools": [SCHEMA], "functions": [SCHEMA]},
            "record has tools and functions; leave one out, as by none=functions",
        ),
        (
            {"messages": "[{'role': 'user', 'content': 'q'}]"},
            "messages must be JSON, but is \"[{'role': 'user', 'content': 'q'}]\": Expecting "
            "property name enclosed in double quotes: line 1 column 3 (char 2); it is Python's "
            "spelling, so write it by json.dumps",
        ),
        (
            PAIR | {"tools": '[{"name": NaN}]'},
            "tools must be JSON, but is '[{\"name\": NaN}]': JSON ",
        ),
        (PAIR | {"tools": {"a": 1}}, "tools must be a list of JSON schemas, but is {'a': 1}"),
        (
            {"prompt": "q", "completion": chat(("user", "q"), ("assistant", "a"))},
            "prompt must be a list of at least one message",
        ),
        ({"instruction": "q", "input": 3, "output": "a"}, "input must be a string, but is 3"),
        ({"instruction": "q", "output": 0}, "output must be a string, but is 0"),
        ({"text": ["a"]}, "text must be a string, but is ['a']"),
        ({"text": "ab\ud800"}, "text holds half of a surrogate pair at character 2; remove it"),
        ({"text": "a", "weight": "2"}, "weight must be a number from 0 to 10,000, but is '2'"),
        ({"text": "a", "weight": 3e38}, "weight must be a number from 0 to 10,000, but is 3e+38"),
        ({"text": "a", "weight": 10**400}, "weight must be a number from 0 to 10,000, but is 1000"),
        ({"text": "a", "weight": -1}, "weight must be a number from 0 to 10,000, but is -1"),
        (
            {"text": "a", "weight": float("nan")},
            "weight must be a number from 0 to 10,000, but is nan",
        ),
        ({"text": "a", "weight": True}, "weight must be a number from 0 to 10,000, but is True"),
    ],
)
def test_what_would_be_lost_is_explained(record, fault):
    """A record that is half understood trains on something else than was written, without a
    word."""
    with pytest.raises(SampleError) as caught:
        read_record(record, {})
    assert str(caught.value).startswith(fault)


@pytest.mark.parametrize("is_good", [True, False])
@pytest.mark.parametrize(
    ("record", "key"),
    [
        ({"prompt": "q", "completion": "a"}, "label"),
        ({"prompt": chat(("user", "q")), "completion": chat(("assistant", "a"))}, "label"),
        ({"messages": chat(("user", "q"), ("assistant", "a"))}, "label"),
        ({"conversations": turns(q=("a", {}))}, "kto_tag"),
        (PAIR, "chosen"),
    ],
)
def test_answers_marked_as_good_or_bad_are_refused(record, key, is_good):
    """KTO's bad answers would be trained as good ones. Its good ones are refused, too, since most
    files begin with one and hold both.
    """
    with pytest.raises(
        SampleError, match=rf"record has {key} {str(is_good).lower()} .*--data-columns none={key}$"
    ):
        read_record({**record, key: is_good}, {})
    read_record({**record, key: is_good}, {key: "none"})
    if key != "chosen":
        with pytest.raises(SampleError, match="preference data"):
            read_record({**record, key: str(is_good)}, {})  # of a CSV file
        assert read_record({**record, key: 3}, {}).unread == {key}  # a class, or whatever else


def test_labels_of_texts_are_not_preferences():
    """Data for classifiers could not be trained on as texts."""
    assert read_record({"text": "a", "label": False}, {}).unread == {"label"}


@pytest.mark.parametrize(
    ("turn", "fault"),
    [
        ("hi", "messages[0] must be {role, content} or {from, value}, but is 'hi'"),
        (
            {"content": "hi"},
            "messages[0] must have role and content, or from and value, but has keys ['content']",
        ),
        (
            {"from": "gpt"},
            "messages[0] must have role and content, or from and value, but has keys ['from']",
        ),
        (
            {"role": "robot", "content": "r"},
            "messages[0].role must be one of system, developer, user, ",
        ),
        ({"role": "user", "content": None}, "messages[0].content must be a string, but is None"),
        (
            {"role": "user", "content": [{"type": "image"}]},
            "record has images, which would be lost; pass --images",
        ),
        (
            {"role": "user", "content": [{"type": "video", "video": "a.mp4"}]},
            'messages[0].content must hold parts {"type": "text", ',
        ),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "messages[0].content part must be a string, but is None",
        ),
        (
            {"role": "user", "content": "q", "train": True},
            "messages[0].train asks to train on a turn of the user",
        ),
        (
            {"role": "user", "content": "q", "loss_weight": 1.0},
            "messages[0].loss_weight asks to train on a turn of the ",
        ),
        (
            {"role": "user", "content": [{"type": "text", "value": 3}]},
            "messages[0].content part must be a string, but is 3",
        ),
        (
            {"role": "assistant", "content": "a", "train_detail": [{}]},
            "messages[0].train_detail would be lost",
        ),
        ({"role": "user", "content": "q", "images": ["1.png"]}, "messages[0].images would be lost"),
        (
            {"role": "assistant", "content": "a", "weight": -1},
            "messages[0].weight must be a number from 0 to 10,000",
        ),
        (
            {"role": "assistant", "content": "a", "loss": "no"},
            "messages[0].loss must be a number from 0 to 10,000",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{}]},
            "messages[0].tool_calls must hold calls {name, ",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": {"a": 1}},
            "messages[0].tool_calls must be a list",
        ),
        (
            {"from": "function_call", "value": "f(x)"},
            "messages[0].value must be JSON, but is 'f(x)'",
        ),
        (
            {"role": "assistant", "content": "a", "thinking": "t", "reasoning": "r"},
            "messages[0] has reasoning and th",
        ),
    ],
)
def test_wrong_turns_are_explained(turn, fault):
    """A turn that is half understood trains on something else than was written, without a word."""
    with pytest.raises(SampleError) as caught:
        read_record({"messages": [turn]}, {})
    assert str(caught.value).startswith(fault)


def test_other_keys_are_listed_once(tokenizer, caplog):
    """A column that the user thought was trained would go unnoticed; one line per record would hide
    all others.
    """
    encoder = ChatEncoder(tokenizer, 1000, "error")
    for _ in range(3):
        encoder.encode(
            {"messages": turns(q=("a", {"rating": 5})), "id": 7, "topic": "t", "views": None}
        )
    encoder.encode({"text": "abc", "id": 8, "url": "u"})
    assert caplog.messages == ["not read of records: id, rating, topic", "not read of records: url"]
    encoder.encode({"text": "abc", **{f"{number:0>99}": 1 for number in range(99)}, "k" * 9999: 1})
    assert len(caplog.messages[-1]) < 350


def test_columns_that_are_read_may_have_other_names():
    """A key that is read, but has no name for --data-columns, must be renamed in the file."""
    assert set(COLUMNS) == {*READ_COLUMNS, "role", "content", "none"}


@pytest.mark.parametrize(
    ("record", "column"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "completion"),
        ({"chosen": turns(q=("a", {})), "rejected": turns(q=("b", {}))}, "messages"),
        ({"chosen": "q a", "rejected": "q b"}, "text"),
        ({"question": "q", "system": "s", "chosen": "a", "rejected": "b"}, "output"),
        (
            {
                "prompt": "q",
                "chosen": chat(("user", "q"), ("assistant", "a")),
                "rejected": chat(("user", "q"), ("assistant", "b")),
            },
            "messages",
        ),
        (
            {
                "conversations": chat(("user", "q")),
                "chosen": {"from": "gpt", "value": "a"},
                "rejected": {"from": "gpt", "value": "b"},
            },
            "responses",
        ),
        (
            {
                "messages": chat(("user", "q"), ("assistant", "a")),
                "chosen": chat(("user", "q"), ("assistant", "a")),
                "rejected": chat(("user", "q"), ("assistant", "b")),
            },
            "none",
        ),
    ],
)
def test_preference_data_have_a_way_out(record, column):
    """A list of formats does not say that one column of the three can be trained."""
    with pytest.raises(SampleError, match=f"--data-columns {column}=chosen,none=rejected$"):
        read_record(record, {})
    content = read_record(record, {"chosen": column, "rejected": "none"}).content
    assert said_in(content)[-1].endswith("a")


def test_odd_names_of_columns(tokenizer):
    """A data set with names of its own would have to be rewritten."""
    columns = parse_columns("messages=dialogue, role=speaker,content=utterance,none=text")
    dialogue = [{"speaker": "user", "utterance": "q"}, {"speaker": "assistant", "utterance": "a"}]
    encoder = ChatEncoder(tokenizer, 1000, "error", columns)
    sample = encoder.encode({"dialogue": dialogue, "text": "left out"})
    assert isinstance(sample, EncodedSample)
    assert tokenizer.show([int(sample.tokens[0]), *sample.labels.tolist()]) == WHOLE
    assert np.flatnonzero(sample.loss_mask).size == 2
    chosen = read_record(
        {"prompt": "p", "chosen": "c", "rejected": "r"},
        parse_columns("completion=chosen,none=rejected"),
    )
    assert chosen.content == ("p", "c")
    with pytest.raises(
        SampleError, match="record has messages twice, by --data-columns; add none=COLUMN"
    ):
        read_record({"messages": chat(("user", "q")), "dialogue": dialogue}, columns)
