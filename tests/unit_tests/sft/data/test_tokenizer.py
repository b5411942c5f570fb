"""Tokenizers: ids that do not collide, and whose turn each token is."""

import json
import pickle
import subprocess
import sys
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.sft.data.records.content import Conversation, Passage
from megatron.sft.data.records.messages import Message
from megatron.sft.data.records.values import SampleError
from megatron.sft.data.tokenizer import build_tokenizer
from megatron.sft.options.chat_template import TemplateChoice

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TURN_START = "<|im_start|>{{ m.role }}\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = "{% for m in messages %}" + TURN_START + "{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
MARKED = (
    "{% for m in messages %}" + TURN_START + "{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}" + PROMPT
)
CONVERSATION = [
    Message("system", "be kind"),
    Message("user", "how are you"),
    Message("assistant", "fine, thank you 😀 "),
    Message("user", "is that ñ?"),
    Message("assistant", "yes"),
    Message("user", "sure?"),
    Message("assistant", ""),
]


@pytest.fixture(scope="module")
def save_tokenizer(tmp_path_factory):
    """Return a function that writes a byte-level BPE tokenizer with a given chat template and
    returns its place.
    """
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = byte_level
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|im_start|>", "<|im_end|>", "<s>"],
        initial_alphabet=byte_level.alphabet(),
    )
    bpe.train_from_iterator(["how are you today", "fine, thank you, and are you fine"], trainer)

    def save(chat_template, **config):
        directory = tmp_path_factory.mktemp("tokenizer")
        bpe.save(str(directory / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"} | config
        if chat_template is not None:
            config["chat_template"] = chat_template
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        return str(directory)

    return save


def test_byte_level_ids_do_not_collide():
    """Were documents ended with a byte, or padded with one, text would hold ends and padding."""
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad, tokenizer.chat_template) == (
        264,
        256,
        257,
        None,
    )
    assert tokenizer.encode("h\x00é") == [104, 0, 195, 169]
    assert tokenizer.decode([256, 258, 104, 195, 169, 257, 263]) == "hé"


def test_byte_level_chat():
    """With the loss on a marker, or none on the end of a turn, a model speaks for the user or never
    stops.
    """
    turns = [("system", "s"), ("user", "u"), ("assistant", "ab"), ("tool", ""), ("assistant", "")]
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    ids, weights = tokenizer.encode_chat(Conversation([Message(*turn) for turn in turns]))
    assert ids.tolist() == [258, 115, 262, 259, 117, 262, 260, 97, 98, 262, 261, 262, 260, 262]
    assert ids[weights > 0].tolist() == [97, 98, 262, 262]
    assert (ids.dtype, weights.dtype) == ("int32", "float32")
    assert tokenizer.show(ids.tolist()[:6]) == "<system>s<end><user>u<end>"


def test_byte_level_has_no_place_for_tools():
    """Tools and calls would be left out of what is trained."""
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    question = Message("user", "q")
    with pytest.raises(
        SampleError, match="tools would be lost, as ByteLevelTokenizer has no chat template"
    ):
        tokenizer.encode_chat(Conversation([question], [{}]))
    with pytest.raises(
        SampleError,
        match="tool_calls of message 1 would be lost, as ByteLevelTokenizer has no chat",
    ):
        tokenizer.encode_chat(
            Conversation([question, Message("assistant", "", fields={"tool_calls": [{}]})])
        )


def test_fingerprints_tell_tokenizers_apart(save_tokenizer):
    """A checkpoint would go on with other tokens, from the loss of random weights."""
    plain, renamed = (
        build_tokenizer("HuggingFaceTokenizer", save_tokenizer(None, **more))
        for more in ({}, {"additional_special_tokens": ["<|another|>"]})
    )
    again = build_tokenizer("HuggingFaceTokenizer", save_tokenizer(PLAIN))
    assert plain.fingerprint == again.fingerprint
    built = [
        build_tokenizer("ByteLevelTokenizer"),
        *(build_tokenizer("NullTokenizer", None, n) for n in (99, 100)),
    ]
    assert (
        len({plain.fingerprint, renamed.fingerprint, *(other.fingerprint for other in built)}) == 5
    )


def test_null_tokenizer():
    """An id beyond the vocabulary would be read from beyond the embedding table."""
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (101, 100, 100)
    assert tokenizer.encode("3 99") == [3, 99]
    assert tokenizer.decode([3, 99]) == "3 99"
    ids, weights = tokenizer.encode_chat(
        Conversation([Message("user", "1 2"), Message("assistant", "3")])
    )
    assert ids[weights > 0].tolist() == [3, 100]
    assert ids.tolist() == [1, 2, 100, 3, 100]
    with pytest.raises(
        SampleError, match=r"NullTokenizer cannot read 'hello': invalid literal for int"
    ):
        tokenizer.encode("hello")
    with pytest.raises(SampleError, match=r"token ids must be in range\(101\), but span 1 to 101"):
        tokenizer.encode("1 101")


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_template_trains_on_the_assistant_only(save_tokenizer, template):
    """A span that is off by some characters trains on headers and users' words, or never on the end
    of the turn.
    """
    directory = save_tokenizer(template)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", directory)
    # Theirs, as it shows special tokens.
    transformers_tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(
        directory
    )
    ids, weights = tokenizer.encode_chat(Conversation(CONVERSATION))
    assert (
        transformers_tokenizer.decode(ids[weights > 0])
        == "fine, thank you 😀 <|im_end|>yes<|im_end|><|im_end|>"
    )
    assert transformers_tokenizer.decode(ids) == "".join(
        f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content, *_ in CONVERSATION
    )
    assert (ids.dtype, weights.dtype) == ("int32", "float32")


def test_places_of_tokens_are_not_listed(save_tokenizer):
    """Lists of where each token stands took 200 bytes a token, and a third of the time."""
    tokenizer = build_tokenizer("HuggingFaceTokenizer", save_tokenizer(PLAIN))
    messages = [Message("user", "how are you " * 10_000), Message("assistant", "fine")]
    tokenizer.encode_chat(Conversation(messages[1:]))
    tracemalloc.start()
    try:
        ids, _ = tokenizer.encode_chat(Conversation(messages))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(ids) > 20_000
    assert peak < 80 * len(ids)


def test_code_of_a_folder_is_never_run(tmp_path, monkeypatch):
    """transformers asks on a terminal, where a `y` would run what somebody else wrote, on each
    rank.
    """
    pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    settings = {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": ["odd.Odd", "odd.Odd"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "odd.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Odd: pass\n")
    with pytest.raises(
        ValueError, match=r"needs Python code of its own \(auto_map\), which is never run"
    ):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_hugging_face_special_ids(save_tokenizer):
    """Padding falls back on the end token, and a start token must not appear in the midst of a
    packed text.
    """
    tokenizer = build_tokenizer("HuggingFaceTokenizer", save_tokenizer(PLAIN, bos_token="<s>"))
    assert (tokenizer.eod, tokenizer.pad, tokenizer.chat_template) == (1, 1, PLAIN)
    ids = tokenizer.encode("how are you\n")
    assert 2 not in ids
    assert tokenizer.vocab_size > max(ids)
    assert tokenizer.decode(ids) == "how are you\n"
    assert build_tokenizer("HuggingFaceTokenizer", save_tokenizer(None, pad_token="<s>")).pad == 2


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2", "gemma"])
def test_folder_without_tokenizer_files_is_refused(tmp_path, model_type):
    """transformers 5 makes a tokenizer of config.json alone, to which every text is empty or
    unknown: a run would train on ends of turns only.
    """
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(
        ValueError,
        match=rf"--tokenizer-model {tmp_path} has an empty vocabulary, .*tokenizer\.json",
    ):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


def test_turn_that_ends_without_a_mark_keeps_its_white_space(save_tokenizer):
    """Where a line end alone closes the turn, a model not trained on it never stops."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    tokenizer = build_tokenizer("HuggingFaceTokenizer", save_tokenizer(template))
    ids, weights = tokenizer.encode_chat(Conversation(CONVERSATION[1:3]))
    assert tokenizer.decode(ids[weights > 0].tolist()) == " fine, thank you 😀 \n\n"


def test_a_panic_is_a_fault_of_the_record(save_tokenizer, monkeypatch):
    """A pattern of a released tokenizer gives up on 12 million spaces: a panic of Rust, which is no
    Exception, ended the run without the file and the line, and --skip-bad-samples did not help.
    """
    tokenizer = build_tokenizer("HuggingFaceTokenizer", save_tokenizer(None))
    panic = type("PanicException", (BaseException,), {})

    def fail(*_: object, **__: object) -> None:
        raise panic("Regex search error: retry-limit-in-match over")

    monkeypatch.setitem(vars(tokenizer), "_token_bytes", None)
    monkeypatch.setitem(vars(tokenizer), "_backend", SimpleNamespace(encode=fail))
    with pytest.raises(SampleError, match=r"the tokenizer fails on the text: Regex search error"):
        tokenizer.encode_passage(Passage("", " "))
    leave = SimpleNamespace(encode=lambda *_, **__: sys.exit(3))
    monkeypatch.setitem(vars(tokenizer), "_backend", leave)
    with pytest.raises(SystemExit):
        tokenizer.encode_passage(Passage("", " "))


def test_token_over_the_border_is_the_assistants(save_tokenizer):
    """The first word of each answer would never be trained on where a space before it is part of
    its token.
    """
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = build_tokenizer("HuggingFaceTokenizer", save_tokenizer(template))
    ids, weights = tokenizer.encode_chat(
        Conversation([Message("user", "are"), Message("assistant", "you")])
    )
    assert ids[weights > 0].tolist() == [*tokenizer.encode(" you"), tokenizer.eod]
    assert len(tokenizer.encode(" you")) == 1


def test_documents_begin_as_the_post_processor_says(save_tokenizer):
    """Without its start token a base model reads each document as the midst of one; with two it
    reads what is none.
    """
    tokenizer = build_tokenizer("HuggingFaceTokenizer", save_tokenizer(PLAIN))
    ids, weights = tokenizer.encode_passage(Passage("", "how are"))
    assert ids.tolist() == [2, *tokenizer.encode("how are"), tokenizer.eod]
    assert weights[1:].tolist() == [1] * (len(ids) - 1)
    ids, weights = tokenizer.encode_passage(Passage("how", " are"))
    assert ids.tolist() == [2, *tokenizer.encode("how are"), tokenizer.eod]
    assert ids[weights > 0].tolist() == [*tokenizer.encode(" are"), tokenizer.eod]
    # A text that a template has rendered begins with the start token.
    tokenizer = build_tokenizer("HuggingFaceTokenizer", save_tokenizer(PLAIN, bos_token="<s>"))
    for passage in (Passage("", "<s>how are<|im_end|>"), Passage("<s>how", " are<|im_end|>")):
        ids, _ = tokenizer.encode_passage(passage)
        assert ids.tolist() == [2, *tokenizer.encode("how are"), tokenizer.eod]
    ids, _ = tokenizer.encode_passage(Passage("", "how<s>"))
    assert ids.tolist() == [2, *tokenizer.encode("how"), 2, tokenizer.eod]


def test_template_of_a_file(save_tokenizer, tmp_path):
    """The tokenizer's own template would be trained with, although another was given."""
    file = tmp_path / "chat.jinja"
    file.write_text(MARKED.replace("im_start", "im_end"))
    tokenizer = build_tokenizer(
        "HuggingFaceTokenizer", save_tokenizer(PLAIN), template=TemplateChoice(str(file))
    )
    assert tokenizer.chat_template == file.read_text()
    assert tokenizer.show(
        tokenizer.encode_chat(Conversation(CONVERSATION)).ids.tolist()
    ).startswith("<|im_end|>system")
    with pytest.raises(
        ValueError, match=r"--chat-template absent.jinja cannot be read: .*No such file"
    ):
        build_tokenizer(
            "HuggingFaceTokenizer",
            save_tokenizer(PLAIN),
            template=TemplateChoice("absent.jinja"),
        )


def test_variables_of_the_run_are_those_of_each_record_without_its_own(save_tokenizer):
    """A small Qwen3.5 thinks only where it is told to: each record would have to say so."""
    template = "{{ mood }}" + PLAIN
    choice = TemplateChoice(variables={"mood": "calm"})
    tokenizer: Any = build_tokenizer(
        "HuggingFaceTokenizer", save_tokenizer(template), template=choice
    )

    def text(**own):
        told = Conversation(CONVERSATION, None, own)
        return tokenizer.show(tokenizer.encode_chat(told).ids.tolist())

    again = pickle.loads(pickle.dumps(tokenizer.templates))  # for workers
    assert (again.by_name["default"].variables, again.by_name["default"].source) == (
        {"mood": "calm"},
        template,
    )
    assert text().startswith("calm<|im_start|>")
    assert text(mood="loud").startswith("loud<|im_start|>")


def test_missing_template_is_a_fault_of_the_run(save_tokenizer):
    """Every sample would be skipped as bad, one by one."""
    tokenizer = build_tokenizer("HuggingFaceTokenizer", save_tokenizer(None))
    with pytest.raises(ValueError, match="has no chat template") as caught:
        tokenizer.encode_chat(Conversation(CONVERSATION))
    assert not isinstance(caught.value, SampleError)


def test_wrong_flags(save_tokenizer, tmp_path):
    """A typo would be looked up on the network, or end in an error that names no flag."""
    with pytest.raises(
        ValueError, match=r"--tokenizer-type must be ByteLevelTokenizer, HuggingFace.* but is 'Foo'"
    ):
        build_tokenizer("Foo")
    with pytest.raises(
        ValueError, match=r"--vocab-size must be at least 1 .* NullTokenizer, but is None"
    ):
        build_tokenizer("NullTokenizer")
    for model in (None, str(tmp_path / "absent")):
        with pytest.raises(
            ValueError,
            match=f"--tokenizer-model must be the directory .* but is {model!r}; download",
        ):
            build_tokenizer("HuggingFaceTokenizer", model)
    with pytest.raises(ValueError, match="has no eos_token; set it in tokenizer_config"):
        build_tokenizer("HuggingFaceTokenizer", save_tokenizer(PLAIN, eos_token=None))
    with pytest.raises(ValueError, match=r"--tokenizer-model .* cannot be read"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


@pytest.mark.slow
def test_tokens_are_counted_without_torch(save_tokenizer):
    """transformers imports torch wherever it finds it: seconds for the planner, for nothing."""
    command = (
        "import sys; from megatron.sft.data.tokenizer import build_tokenizer as build; "
        "build('HuggingFaceTokenizer', sys.argv[1]).encode('how are you'); assert not {'torch', "
        "'megatron.core'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", command, save_tokenizer(PLAIN)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_pickles(save_tokenizer):
    """Loader workers that are spawned could not start."""
    for tokenizer in (
        build_tokenizer("ByteLevelTokenizer"),
        build_tokenizer("HuggingFaceTokenizer", save_tokenizer(PLAIN)),
    ):
        copy = pickle.loads(pickle.dumps(tokenizer))
        ids = [
            one.encode_chat(Conversation(CONVERSATION)).ids.tolist() for one in (copy, tokenizer)
        ]
        assert ids[0] == ids[1]
