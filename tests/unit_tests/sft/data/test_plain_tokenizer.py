"""Tokens counted without megatron-core must be those that training makes with it."""

import subprocess
import sys

import numpy as np
import pytest

from megatron.sft.data.chat_encoder import Message
from megatron.sft.data.plain_tokenizer import build_plain_tokenizer
from megatron.sft.data.tokenizer import build_tokenizer

CHAT = [Message("system", "Be kind ñ."), Message("user", "how are you?"), Message("assistant", "fine, thank you")]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def save_tokenizer(folder):
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["how are you today", "fine, thank you"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}'
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


@pytest.mark.parametrize("kind", ["ByteLevelTokenizer", "HuggingFaceTokenizer"])
def test_same_ids_as_training(tmp_path, kind):
    model = save_tokenizer(tmp_path) if kind == "HuggingFaceTokenizer" else None
    plain, trained = build_plain_tokenizer(kind, model, None), build_tokenizer(kind, model)
    ours, theirs = plain.encode_chat(CHAT), trained.encode_chat(CHAT)
    assert np.array_equal(ours.ids, theirs.ids)
    assert np.array_equal(ours.is_assistant, theirs.is_assistant)
    assert plain.encode("how are you ñ") == trained.encode("how are you ñ")
    assert (plain.vocab_size, plain.eod, plain.pad) == (trained.vocab_size, trained.eod, trained.pad)


def test_null_tokenizer_has_the_same_ids():
    plain, trained = build_plain_tokenizer("NullTokenizer", None, 9), build_tokenizer("NullTokenizer", None, 9)
    assert plain.encode("1 8 3") == trained.encode("1 8 3") == [1, 8, 3]
    assert (plain.vocab_size, plain.eod, plain.pad) == (trained.vocab_size, trained.eod, trained.pad)
    with pytest.raises(ValueError, match="needs --vocab-size"):
        build_plain_tokenizer("NullTokenizer", None, None)


def test_hugging_face_does_without_torch(tmp_path):
    """transformers imports torch wherever it finds it: seconds, for nothing."""
    command = (
        "import sys; from megatron.sft.data.plain_tokenizer import build_plain_tokenizer as build; "
        "build('HuggingFaceTokenizer', sys.argv[1], None); "
        "assert not {'torch', 'megatron.core'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", command, save_tokenizer(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("model", [None, "absent"])
def test_missing_folder(model):
    with pytest.raises(ValueError, match="--tokenizer-model must be the directory"):
        build_plain_tokenizer("HuggingFaceTokenizer", model, None)


def test_folder_without_a_tokenizer(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"--tokenizer-model .* cannot be read"):
        build_plain_tokenizer("HuggingFaceTokenizer", str(tmp_path), None)
