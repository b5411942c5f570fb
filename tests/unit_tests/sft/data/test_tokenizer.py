"""Tokenizers: ids that do not collide, and whose turn each token is."""

import json
import pickle
import subprocess
import sys

import pytest

from megatron.sft.data.chat_encoder import Message, SampleError
from megatron.sft.data.tokenizer import build_tokenizer

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
    """Return a function that writes a byte-level BPE tokenizer with a given chat template and returns its place."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = byte_level
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<|im_start|>", "<|im_end|>", "<s>"], initial_alphabet=byte_level.alphabet()
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
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad, tokenizer.chat_template) == (264, 256, 257, None)
    assert tokenizer.encode("h\x00é") == [104, 0, 195, 169]
    assert tokenizer.decode([256, 258, 104, 195, 169, 257, 263]) == "hé"


def test_byte_level_chat():
    """With the loss on a marker, or none on the end of a turn, a model speaks for the user or never stops."""
    ids, is_assistant = build_tokenizer("ByteLevelTokenizer").encode_chat(
        [
            Message("system", "s"),
            Message("user", "u"),
            Message("assistant", "ab"),
            Message("tool", ""),
            Message("assistant", ""),
        ]
    )
    assert ids.tolist() == [258, 115, 262, 259, 117, 262, 260, 97, 98, 262, 261, 262, 260, 262]
    assert ids[is_assistant].tolist() == [97, 98, 262, 262]
    assert (ids.dtype, is_assistant.dtype) == ("int64", "bool")


def test_null_tokenizer():
    """An id beyond the vocabulary would be read from beyond the embedding table."""
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (101, 100, 100)
    assert tokenizer.encode("3 99") == [3, 99]
    assert tokenizer.decode([3, 99]) == "3 99"
    ids, is_assistant = tokenizer.encode_chat([Message("user", "1 2"), Message("assistant", "3")])
    assert ids[is_assistant].tolist() == [3, 100]
    assert ids.tolist() == [1, 2, 100, 3, 100]
    with pytest.raises(SampleError, match=r"NullTokenizer cannot read 'hello': invalid literal for int"):
        tokenizer.encode("hello")
    with pytest.raises(SampleError, match=r"token ids must be in range\(101\), but span 1 to 101"):
        tokenizer.encode("1 101")


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_template_trains_on_the_assistant_only(save_tokenizer, template):
    """A span that is off by some characters trains on headers and users' words, or never on the end of the turn."""
    directory = save_tokenizer(template)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", directory)
    # Theirs, as it shows special tokens.
    transformers_tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(directory)
    ids, is_assistant = tokenizer.encode_chat(CONVERSATION)
    assert transformers_tokenizer.decode(ids[is_assistant]) == "fine, thank you 😀 <|im_end|>yes<|im_end|><|im_end|>"
    assert transformers_tokenizer.decode(ids) == "".join(
        f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in CONVERSATION
    )
    assert (ids.dtype, is_assistant.dtype) == ("int64", "bool")


def test_hugging_face_special_ids(save_tokenizer):
    """Padding falls back on the end token, and a start token must not appear in the midst of a packed text."""
    tokenizer = build_tokenizer("HuggingFaceTokenizer", save_tokenizer(PLAIN, bos_token="<s>"))
    assert (tokenizer.eod, tokenizer.pad, tokenizer.chat_template) == (1, 1, PLAIN)
    ids = tokenizer.encode("how are you\n")
    assert 2 not in ids
    assert tokenizer.vocab_size > max(ids)
    assert tokenizer.decode(ids) == "how are you\n"
    assert build_tokenizer("HuggingFaceTokenizer", save_tokenizer(None, pad_token="<s>")).pad == 2


def test_turn_that_ends_without_a_mark_keeps_its_white_space(save_tokenizer):
    """Where a line end alone closes the turn, a model not trained on it never stops."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    tokenizer = build_tokenizer("HuggingFaceTokenizer", save_tokenizer(template))
    ids, is_assistant = tokenizer.encode_chat(CONVERSATION[1:3])
    assert tokenizer.decode(ids[is_assistant].tolist()) == " fine, thank you 😀 \n\n"


def test_token_over_the_border_is_the_assistants(save_tokenizer):
    """The first word of each answer would never be trained on where a space before it is part of its token."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = build_tokenizer("HuggingFaceTokenizer", save_tokenizer(template))
    ids, is_assistant = tokenizer.encode_chat([Message("user", "are"), Message("assistant", "you")])
    assert ids[is_assistant].tolist() == [*tokenizer.encode(" you"), tokenizer.eod]
    assert len(tokenizer.encode(" you")) == 1


def test_unstable_template_is_refused(save_tokenizer):
    """A template that rewrites earlier turns would put the loss on other characters than the assistant's."""
    template = "{{ messages | length }}" + PLAIN
    tokenizer = build_tokenizer("HuggingFaceTokenizer", save_tokenizer(template))
    with pytest.raises(ValueError, match=r"put {% generation %} \.\.\. {% endgeneration %} around them"):
        tokenizer.encode_chat(CONVERSATION)


def test_faults_of_one_conversation_are_sample_errors(save_tokenizer):
    """One conversation that the template refuses would end the run although bad samples are skipped."""
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN
    tokenizer = build_tokenizer("HuggingFaceTokenizer", save_tokenizer(template))
    with pytest.raises(SampleError, match="the chat template refuses the conversation: no system role"):
        tokenizer.encode_chat(CONVERSATION)
    with pytest.raises(SampleError, match="the assistant speaks first"):
        tokenizer.encode_chat(CONVERSATION[2:])


def test_missing_template_is_a_fault_of_the_run(save_tokenizer):
    """Every sample would be skipped as bad, one by one."""
    tokenizer = build_tokenizer("HuggingFaceTokenizer", save_tokenizer(None))
    with pytest.raises(ValueError, match="has no chat template") as caught:
        tokenizer.encode_chat(CONVERSATION)
    assert not isinstance(caught.value, SampleError)


def test_wrong_flags(save_tokenizer, tmp_path):
    """A typo would be looked up on the network, or end in an error that names no flag."""
    with pytest.raises(ValueError, match=r"--tokenizer-type must be ByteLevelTokenizer, HuggingFace.* but is 'Foo'"):
        build_tokenizer("Foo")
    with pytest.raises(ValueError, match=r"--vocab-size must be at least 1 .* NullTokenizer, but is None"):
        build_tokenizer("NullTokenizer")
    for model in (None, str(tmp_path / "absent")):
        with pytest.raises(ValueError, match=f"--tokenizer-model must be the directory .* but is {model!r}; download"):
            build_tokenizer("HuggingFaceTokenizer", model)
    with pytest.raises(ValueError, match="has no eos_token; set it in tokenizer_config"):
        build_tokenizer("HuggingFaceTokenizer", save_tokenizer(PLAIN, eos_token=None))
    with pytest.raises(ValueError, match=r"--tokenizer-model .* cannot be read"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


def test_tokens_are_counted_without_torch(save_tokenizer):
    """transformers imports torch wherever it finds it: seconds for the planner, for nothing."""
    command = (
        "import sys; from megatron.sft.data.tokenizer import build_tokenizer as build; "
        "build('HuggingFaceTokenizer', sys.argv[1]).encode('how are you'); "
        "assert not {'torch', 'megatron.core'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", command, save_tokenizer(PLAIN)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_pickles(save_tokenizer):
    """Loader workers that are spawned could not start."""
    for tokenizer in (
        build_tokenizer("ByteLevelTokenizer"),
        build_tokenizer("HuggingFaceTokenizer", save_tokenizer(PLAIN)),
    ):
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert copy.encode_chat(CONVERSATION).ids.tolist() == tokenizer.encode_chat(CONVERSATION).ids.tolist()
