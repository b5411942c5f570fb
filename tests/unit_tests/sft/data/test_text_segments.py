"""Tokens of texts by what lies between their added tokens: one id that differs from those of the
whole text would train a model on prompts that no server gives it.
"""

import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from megatron.sft.data import text_segments
from megatron.sft.data.text_segments import read_segments

RELEASED = Path(__file__).parents[3] / "fixtures" / "released"
WORDS = (
    "hi",
    " there",
    "\n",
    "\n\n",
    "  ",
    "é",
    "e\u0301",
    "\u0301",
    "<",
    "|",
    "im_end",
    "12",
    "▁",
    "ﬁ",
)


def _segments(backend):
    segments = read_segments(backend)
    assert segments is not None
    return segments


def _backend(name):
    return Tokenizer.from_file(str(RELEASED / name / "tokenizer.json"))


@pytest.mark.parametrize("name", ["qwen", "llama3", "gemma"])
def test_segments_have_the_ids_of_the_whole_text(name, monkeypatch):
    monkeypatch.setattr(text_segments, "_MOST_CACHED", 20)
    backend, draw = _backend(name), random.Random(1)
    segments = _segments(backend)
    added = [one.content for one in backend.get_added_tokens_decoder().values()]
    for _ in range(300):
        pieces = [draw.choice(added if draw.random() < 0.3 else WORDS) for _ in range(12)]
        text = "".join(pieces[: draw.randint(0, 12)])
        expected = backend.encode(text, add_special_tokens=False).ids
        assert segments.ids(text).tolist() == expected, text


def test_a_segment_is_tokenized_once_until_it_is_forgotten(monkeypatch):
    backend = _backend("qwen")
    segments, seen = _segments(backend), []

    class Watched:
        def encode_batch_fast(self, texts, **options):
            seen.extend(texts)
            return backend.encode_batch_fast(texts, **options)

    monkeypatch.setattr(segments, "_backend", Watched())
    turn = "<|im_start|>user\nhi<|im_end|>"
    segments.ids(turn + "\n" + turn)
    segments.ids(turn + "\n<|im_start|>assistant\n")
    assert seen == ["user\nhi", "\n", "assistant\n"]
    segments.forget()
    segments.ids(turn)
    assert seen[3:] == ["user\nhi"]


def test_texts_that_share_little_are_tokenized_whole_for_a_while(monkeypatch):
    monkeypatch.setattr(text_segments, "_LOOKED_AT", 2)
    monkeypatch.setattr(text_segments, "_LEFT_WHOLE", 2)
    backend = _backend("qwen")
    segments, seen = _segments(backend), []

    def cut(text):
        seen.append(text)
        return [text]

    monkeypatch.setattr(segments, "_cut", cut)
    for text in ("one", "two", "three", "three", "four", "four", "five", "six", "six"):
        assert segments.ids(text).tolist() == backend.encode(text, add_special_tokens=False).ids
    assert seen == ["one", "two", "four", "four", "five", "six"]


def _with_token(backend, content="<b>", **options):
    backend.add_tokens([AddedToken(content, **{"normalized": False, **options})])


def _with_spaces(backend):
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")


def _with_dropout(backend):
    backend.model.dropout = 0.5


def _with_special_tokens_as_text(backend):
    backend.encode_special_tokens = True


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: _with_token(backend, lstrip=True),
        lambda backend: _with_token(backend, single_word=True),
        _with_spaces,
        _with_dropout,
        _with_special_tokens_as_text,
    ],
)
def test_texts_stay_whole_where_segments_might_have_other_tokens(change):
    backend = _backend("qwen")
    change(backend)
    assert read_segments(backend) is None


@pytest.mark.parametrize(("other", "is_cut"), [("<b>", True), ("|><b>", False), ("b<|", False)])
def test_of_many_added_tokens_those_that_share_no_characters_cut(other, is_cut, monkeypatch):
    backend = _backend("qwen")
    special = [one for one in backend.get_added_tokens_decoder().values() if one.special]
    monkeypatch.setattr(text_segments, "_MOST_ADDED", len(special))
    _with_token(backend, other)
    assert (read_segments(backend) is not None) == is_cut
