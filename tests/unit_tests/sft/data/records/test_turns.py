"""Turns are trained behind what they are generated from, to transformers' tokens."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

import numpy as np
import pytest

from megatron.packing.batch.reading import read_samples
from megatron.sft.commands.show import marked, path_tokens
from megatron.sft.data.chat_encoder import ChatEncoder, ChatTokens, Dropped, EncodedSample
from megatron.sft.data.preference.encode import PairEncoder
from megatron.sft.data.records.content import Conversation
from megatron.sft.data.records.messages import Message, with_call_ids
from megatron.sft.data.records.turns import merged_turns, only_last
from megatron.sft.data.records.values import SampleError
from megatron.sft.data.templates.chat_template import ChatTemplate, ContextError
from megatron.sft.data.templates.named import NamedTemplates
from megatron.sft.data.tokenizer import build_tokenizer
from tests.unit_tests.sft.data.templates import structures
from tests.unit_tests.sft.data.templates.test_chat_template import TOOLS

RELEASED = "tests/fixtures/released"
NAMES = ("llama2", "llama3", "mistral", "gemma", "qwen", "trl")
STRUCTURES = {
    "CHATML": "kept",
    "LLAMA2": "kept",
    "LLAMA3": "kept",
    "MISTRAL": "kept",
    "MISTRAL3": "unknown",
    "QWEN25": "kept",
    "QWEN3": "differ",
    "GEMMA": "kept",
    "PHI": "kept",
    "ZEPHYR": "kept",
    "NEMO": "kept",
    "GPT_OSS": "differ",
    "GLM": "differ",
    "EXAONE": "kept",
    "SEED_OSS": "kept",
    "MINIMAX": "differ",
    "SMOLLM3": "kept",
    "GRANITE": "kept",
    "OLMO2": "kept",
    "OLMO3": "differ",
    "ERNIE": "kept",
    "MINISTRAL3": "kept",
    "MISTRAL4": "kept",
    "GLM4": "kept",
    "GEMMA4": "differ",
    "DEEPSEEK2": "kept",
    "DEEPSEEK3_SERVED": "differ",
}
"""Structure of a released template -> how its contexts relate to one rendering."""
NUM_CHATS = int(os.environ.get("NUM_CHATS", "30"))
"""For each template; 150 were compared."""


def chat(rng: random.Random) -> list[Message]:
    """A random chat with system prompts, thoughts of both kinds, calls and odd white space."""
    messages = []
    if rng.random() < 0.4:
        messages.append(Message("system", rng.choice(["be kind", "be brief"])))
    for _ in range(rng.randint(1, 4)):
        messages.append(Message("user", rng.choice(["hi", "what is 2+2?", " x \n", "née 😀"])))
        thinks = rng.random() < 0.6
        thought = f"hm {rng.randint(0, 99)}"
        if rng.random() < 0.3:
            function = {"name": "f", "arguments": {"x": rng.randint(0, 9)}}
            fields: dict[str, Any] = {"tool_calls": [{"type": "function", "function": function}]}
            if thinks:
                fields["reasoning_content"] = thought
            messages.append(Message("assistant", rng.choice(["", "let me see"]), fields=fields))
            messages.append(Message("tool", f"result {rng.randint(0, 9)}"))
        if thinks and rng.random() < 0.5:
            messages.append(Message("assistant", f"<think>\n{thought}\n</think>\n\nfour"))
        elif thinks:
            messages.append(Message("assistant", "five", fields={"reasoning_content": thought}))
        else:
            messages.append(Message("assistant", rng.choice(["yes", " four ", "no\n"])))
    return messages


def contexts_of(turns: list[ChatTokens]) -> list[list[int]]:
    """The tokens before each run of trained ones."""
    found = []
    for ids, weights in turns:
        starts = np.flatnonzero((weights[1:] != 0) & (weights[:-1] == 0)) + 1
        found += [ids[:start].tolist() for start in starts]
    return found


def with_thinking(messages: Sequence[Message]) -> list[Message]:
    """The messages as gpt-oss reads them: thoughts apart, as `thinking`."""
    read = []
    for message in messages:
        before, is_thinking, answer = message.content.partition("</think>")
        thought = message.fields.get("reasoning_content")
        if is_thinking:
            thought = before.removeprefix("<think>").strip()
            message = message._replace(content=answer.strip())
        fields = {**message.fields} if thought is None else {**message.fields, "thinking": thought}
        read.append(message._replace(fields=fields))
    return read


def with_reasoning(messages: Sequence[Message]) -> list[Message]:
    """The messages as Gemma 4 reads them: thoughts apart, as `reasoning_content`."""
    read = []
    for message in with_thinking(messages):
        fields = dict(message.fields)
        if "thinking" in fields:
            fields["reasoning_content"] = fields.pop("thinking")
        read.append(message._replace(fields=fields))
    return read


def with_blocks(messages: Sequence[Message]) -> list[Any]:
    """The messages as Ministral 3 reads them: thoughts are parts of the content."""
    read: list[Any] = []
    for message in with_thinking(messages):
        fields = dict(message.fields)
        thought = fields.pop("thinking", None)
        fields.pop("reasoning_content", None)
        message = message._replace(fields=fields)
        text = [{"type": "text", "text": message.content}] if message.content else []
        parts = [{"type": "thinking", "thinking": thought}, *text]
        read.append(message if thought is None else message._replace(content=parts))  # type: ignore[arg-type]
    return read


def with_calls_as_text(messages: Sequence[Message]) -> list[Any]:
    """The messages as DeepSeek-V3 reads them: a call has no content, and its arguments are JSON."""
    read: list[Any] = []
    for message in messages:
        fields = dict(message.fields)
        calls = [dict(call["function"]) for call in fields.get("tool_calls", ())]
        for function in calls:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        if calls:
            fields["tool_calls"] = [{"type": "function", "function": one} for one in calls]
            fields["content"] = message.content or None
        read.append(message._replace(fields=fields))
    return read


AS_READ: dict[str, Callable[[Sequence[Message]], list[Any]]] = {
    "NEMO": with_call_ids,
    "GPT_OSS": with_thinking,
    "SEED_OSS": with_thinking,
    "MINISTRAL3": with_blocks,
    "MISTRAL4": with_blocks,
    "GEMMA4": with_reasoning,
    "DEEPSEEK3_SERVED": with_calls_as_text,
}
"""What some structures need beside what the data say."""


def compare(
    ours: Any, theirs: Any, as_read: Callable[[Sequence[Message]], list[Message]] = list
) -> int:
    """Compares chats that the template takes; the number of turns."""
    rng, num_chats, num_turns = random.Random(1), 0, 0
    for _ in range(20 * NUM_CHATS):
        messages = chat(rng)
        has_calls = any("tool_calls" in message.fields for message in messages)
        tools = TOOLS if has_calls else None
        try:
            turns = ours.encode_turns(Conversation(messages, tools))
        except ValueError:
            continue
        given = as_read(messages)
        expected = [
            theirs.apply_chat_template(
                [one.as_dict() for one in given[:number]],
                tools=tools,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
            for number, message in enumerate(messages)
            if message.role == "assistant"
        ]
        assert contexts_of(turns) == [list(ids) for ids in expected]
        num_turns += len(expected)
        num_chats += 1
        if num_chats == NUM_CHATS:
            return num_turns
    raise AssertionError(f"only {num_chats} chats fit the template")


@pytest.fixture(scope="module")
def auto_tokenizer() -> Any:
    return pytest.importorskip("transformers").AutoTokenizer


@pytest.mark.parametrize("name", NAMES)
def test_contexts_of_released_tokenizers(name: str, auto_tokenizer: Any) -> None:
    """A context that differs by one token is another one than the model is asked in."""
    import transformers

    ours = build_tokenizer("HuggingFaceTokenizer", f"{RELEASED}/{name}")
    assert ours.contexts == "kept"
    # AutoTokenizer of transformers 5 reads Llama 2's in other tokens than its tokenizer.json has.
    theirs = auto_tokenizer if name != "llama2" else transformers.PreTrainedTokenizerFast
    assert compare(ours, theirs.from_pretrained(f"{RELEASED}/{name}")) > NUM_CHATS


def tokenizer_with(name: str, auto_tokenizer: Any) -> tuple[Any, Any]:
    """Our tokenizer and transformers' with the structure of a released template."""
    theirs = auto_tokenizer.from_pretrained(f"{RELEASED}/qwen")
    theirs.bos_token = "<s>"
    theirs.chat_template = getattr(structures, name)
    texts = {key: one for key, one in theirs.special_tokens_map.items() if isinstance(one, str)}
    ours = build_tokenizer("HuggingFaceTokenizer", f"{RELEASED}/qwen")
    # transformers tells its templates today's date
    template = ChatTemplate(theirs.chat_template, texts, date.today())
    return replace(ours, templates=NamedTemplates({"default": template})), theirs  # type: ignore[type-var]


@pytest.mark.parametrize("name", STRUCTURES)
def test_contexts_of_the_structures_of_released_templates(name: str, auto_tokenizer: Any) -> None:
    """Thoughts of earlier turns must be there exactly where the template serves them."""
    ours, theirs = tokenizer_with(name, auto_tokenizer)
    assert ours.contexts == STRUCTURES[name]
    assert compare(ours, theirs, AS_READ.get(name, list)) > NUM_CHATS


def encoder(name: str, auto_tokenizer: Any, **options: Any) -> ChatEncoder:
    ours, _ = tokenizer_with(name, auto_tokenizer)
    return replace(ChatEncoder(ours, 200, "error"), **options)


def encoded(record: dict[str, Any], encoder: ChatEncoder) -> EncodedSample:
    sample = encoder.encode(record)
    assert isinstance(sample, EncodedSample)
    return sample


RECORD = {
    "messages": [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1", "reasoning_content": "t1"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "a2", "reasoning_content": "t2"},
    ]
}


def test_served_turns_are_a_tree(auto_tokenizer: Any) -> None:
    """The second turn stands behind the first answer without its thoughts, as it is served."""
    made = encoder("QWEN3", auto_tokenizer, train_turns="served")
    sample = encoded(RECORD, made)
    assert sample.tree is not None
    samples = read_samples(
        [{"tokens": sample.tokens, "labels": sample.labels, **sample.tree._asdict()}]
    )
    assert samples.lengths.tolist() == [len(sample.tokens)]
    assert samples.sizes.rows("node").tolist() == [3], "the first question, and two branches"
    start, middle, end = sample.tree.cu_seqlens[1:]

    def show(ids: Any) -> str:
        return made.tokenizer.show(ids.tolist())

    assert show(sample.tokens[:start]).startswith("<|im_start|>user\nq1<|im_end|>\n")
    assert "t1" in show(sample.tokens[start:middle])
    second = show(sample.tokens[middle:end])
    assert "a1" in second
    assert "t1" not in second
    assert "t2" in second
    trained = show(sample.labels[middle:end][sample.loss_mask[middle:end] > 0])
    assert trained == "<think>\nt2\n</think>\n\na2<|im_end|>"


def test_answers_stand_behind_what_they_are_generated_from(auto_tokenizer: Any) -> None:
    """Each of several answers is served behind the first one without its thoughts, which is trained
    once, with them.
    """
    made = encoder("QWEN3", auto_tokenizer, train_turns="served")
    answers = [{**RECORD["messages"][3], "content": f"a{number}"} for number in (2, 3)]
    sample = encoded({"messages": RECORD["messages"][:3], "responses": answers}, made)
    assert sample.tree is not None
    shown = {"tokens": sample.tokens, "labels": sample.labels, **sample.tree._asdict()}
    text = marked(shown, made.tokenizer.show, "[", "]")
    assert text.count("[<think>\n| t1\n| </think>") == 1
    assert text.count("a1<|im_end|>\n| <|im_start|>user\n| q2") == 1
    assert all(f"| | [{end}<|im_end|>]" in text for end in ("2", "3"))
    trained = sample.labels[sample.loss_mask > 0].tolist()
    assert made.tokenizer.show(trained).count("t1") == 1
    one = encoder("QWEN3", auto_tokenizer, train_turns="last")
    last = encoded({"messages": RECORD["messages"][:3], "responses": answers}, one)
    assert made.tokenizer.show(last.labels[last.loss_mask > 0].tolist()).count("a1") == 0


def answers_as(form: str) -> list[dict[str, Any]]:
    """Two answers with thoughts that begin alike, under a key, in tags, or none."""
    found = []
    for thought, answer in (("so 4", "4"), ("so 5", "5")):
        turn: dict[str, Any] = {"role": "assistant", "content": answer}
        if form == "key":
            turn["reasoning_content"] = thought
        if form == "tags":
            turn["content"] = f"<think>\n{thought}\n</think>\n\n{answer}"
        found.append(turn)
    return found


@pytest.mark.parametrize("form", ["key", "tags", "none"])
@pytest.mark.parametrize("is_implicit", [False, True])
def test_pairs_of_answers_with_thoughts_are_as_served(
    form: str, is_implicit: bool, auto_tokenizer: Any
) -> None:
    """Both answers stand behind the prompt that is served, without the thoughts of earlier turns,
    and are trained with their own. Prompt, and what thoughts begin alike with, are computed once.
    """
    made = encoder("QWEN3", auto_tokenizer, preferences=PairEncoder())
    theirs = tokenizer_with("QWEN3", auto_tokenizer)[1]
    prompt = RECORD["messages"][:3]
    chosen, rejected = answers_as(form)
    record: dict[str, Any] = {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]}
    if is_implicit:
        record = {"chosen": [*prompt, chosen], "rejected": [*prompt, rejected]}
    sample = encoded(record, made)
    served = theirs.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    assert "t1" not in served
    assert sample.tree is not None
    assert sample.tree.parents.tolist() == [-1, 0, 0]
    start, middle, end = sample.tree.cu_seqlens[1:]
    for number, (answer, part) in enumerate(
        zip((chosen, rejected), (slice(start, middle), slice(middle, end)))
    ):
        whole = theirs.apply_chat_template([*prompt, answer], tokenize=False)
        assert whole.startswith(served)
        ids = [*sample.tokens[:start], *sample.tokens[part], sample.labels[part][-1]]
        assert theirs.decode(ids) == whole.removesuffix("\n")
        trained = [
            *sample.labels[:start][sample.loss_mask[:start] > 0],
            *sample.labels[part][sample.loss_mask[part] > 0],
        ]
        assert theirs.decode(trained) == whole.removeprefix(served).removesuffix("\n")
        assert sample.fields["path_answer_tokens"][number] == len(trained)


def test_a_tree_is_shown_as_one(auto_tokenizer: Any) -> None:
    """Whoever looks at samples must see which context an answer is trained in."""
    made = encoder("QWEN3", auto_tokenizer, train_turns="served")
    sample = encoded(RECORD, made)
    assert sample.tree is not None
    shown = {"tokens": sample.tokens, "labels": sample.labels, **sample.tree._asdict()}
    lines = marked(shown, made.tokenizer.show, "[", "]").split("\n")
    assert lines == [
        "<|im_start|>user",
        "q1<|im_end|>",
        "<|im_start|>assistant",
        "| [<think>",
        "| t1",
        "| </think>",
        "| ",
        "| a1<|im_end|>]",
        "| a1<|im_end|>",
        "| <|im_start|>user",
        "| q2<|im_end|>",
        "| <|im_start|>assistant",
        "| [<think>",
        "| t2",
        "| </think>",
        "| ",
        "| a2<|im_end|>]",
    ]
    trunk = int(sample.tree.cu_seqlens[1])
    assert path_tokens(shown) == len(sample.tokens) + trunk


def test_the_last_turn_alone_is_a_sequence(auto_tokenizer: Any) -> None:
    """Earlier answers are context: a weight on them would train them in a context of their own."""
    made = encoder("QWEN3", auto_tokenizer, train_turns="last")
    sample = encoded(RECORD, made)
    assert sample.tree is None
    text = made.tokenizer.show(sample.tokens.tolist())
    assert "a1" in text
    assert "t1" not in text
    trained = made.tokenizer.show(sample.labels[sample.loss_mask > 0].tolist())
    assert trained == "<think>\nt2\n</think>\n\na2<|im_end|>"


def test_weights_scale_their_turns(auto_tokenizer: Any) -> None:
    """A turn that its record leaves out would be trained after all."""
    messages: list[dict[str, Any]] = [{**one} for one in RECORD["messages"]]
    messages[1]["weight"], messages[3]["weight"] = 0, 0.5
    made = encoder("QWEN3", auto_tokenizer, train_turns="served")
    sample = encoded({"messages": messages, "weight": 3}, made)
    assert sample.tree is None
    assert set(sample.loss_mask.tolist()) == {0, 1.5}
    messages[3]["weight"] = 0
    assert made.encode({"messages": messages}) == Dropped("no loss token")


def test_a_template_that_prompts_otherwise_than_it_writes_is_refused(auto_tokenizer: Any) -> None:
    """The system prompt moves: no context that is trained would be the one that is served."""
    made = encoder("MISTRAL3", auto_tokenizer, train_turns="served")
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "q1"}]
    with pytest.raises(ContextError, match="--train-turns all"):
        made.encode({"messages": [*messages, {"role": "assistant", "content": "a1"}]})


def test_what_a_context_loses_beside_thoughts_is_an_error(auto_tokenizer: Any) -> None:
    """A template without tool calls would answer calls that nobody made."""
    made = encoder("LLAMA3", auto_tokenizer, train_turns="served")
    with pytest.raises(SampleError, match="which the chat template leaves out"):
        made.encode({"messages": [{"role": "user", "content": "q"}, RECORD["messages"][1]]})


TURNS = [
    ChatTokens(np.array([1, 2, 3, 4]), np.array([0, 0, 1, 1], np.float32)),
    ChatTokens(np.array([1, 2, 5, 6, 7, 8]), np.array([0, 0, 0, 0, 0, 1], np.float32)),
]


def test_over_long_paths_are_treated_alone() -> None:
    """A long conversation has short turns, too."""
    with pytest.raises(SampleError, match="5 tokens long, but --seq-length is 4"):
        merged_turns(TURNS, 1.0, 4, "error")
    merged, num_over, is_cut = merged_turns(TURNS, 1.0, 4, "drop")
    assert merged is not None
    assert (merged.tokens.tolist(), num_over, is_cut) == ([1, 2, 3], 1, True)
    merged, num_over, is_cut = merged_turns(TURNS[1:], 1.0, 4, "truncate")
    assert (merged, num_over, is_cut) == (None, 1, True), "its trained token is cut off"
    assert merged_turns([], 1.0, 4, "error").merged is None


def test_only_the_last_answer_keeps_its_weight() -> None:
    """Users' weights stay what they are."""
    messages = [Message("user", "q"), Message("assistant", "a"), Message("assistant", "b", 0.5)]
    assert [one.weight for one in only_last(Conversation(messages)).messages] == [1, 0, 0.5]
