"""Places of trained tokens by sums of bytes: a wrong one would train parts of prompts, and no loss
would show it.
"""

import random
from itertools import accumulate
from pathlib import Path

import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from megatron.sft.data.hf_tokenizer import build_hugging_face
from megatron.sft.data.templates.chat_template import Span
from megatron.sft.data.token_bytes import read_token_bytes

RELEASED = Path(__file__).parents[3] / "fixtures" / "released"
PIECES = (
    "<|im_end|>",
    "\n",
    "\n\n",
    " ",
    "  ",
    "hi",
    " there",
    "é",
    "e\u0301",
    "日本",
    "😀",
    "ﬁ",
    ">",
    "▁",
    "<0x0A>",
)


@pytest.mark.parametrize("name", ["qwen", "llama3", "gemma"])
def test_places_are_those_of_character_offsets(name):
    tokenizer = build_hugging_face(str(RELEASED / name))
    draw, num_fast = random.Random(1), 0
    for _ in range(300):
        pieces = draw.choices(PIECES[: draw.choice((7, 13, 15))], k=draw.randint(1, 30))
        borders = [0, *accumulate(map(len, pieces))]  # some lie within tokens
        text = "".join(pieces)
        places = [sorted(draw.choices(borders, k=2)) for _ in range(draw.randint(0, 2))]
        spans = [Span(start, end, 0.5) for start, end in places]
        fast = tokenizer._fast_tokens(text, spans)
        tokenizer.__dict__["_token_bytes"] = None
        slow = tokenizer._tokens(text, spans, add_special_tokens=False)
        del tokenizer.__dict__["_token_bytes"]
        if fast is not None:
            num_fast += bool(spans)
            assert fast.ids.tolist() == slow.ids.tolist()
            assert fast.weights.tolist() == slow.weights.tolist()
    assert num_fast > 20


def test_tokens_that_stand_for_other_text_have_no_bytes():
    backend = Tokenizer.from_file(str(RELEASED / "llama3" / "tokenizer.json"))
    assert read_token_bytes(backend) is not None
    backend.normalizer = normalizers.Strip()
    assert read_token_bytes(backend) is None
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert read_token_bytes(backend) is None
    gemma = Tokenizer.from_file(str(RELEASED / "gemma" / "tokenizer.json"))
    assert read_token_bytes(gemma) is not None
    gemma.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), gemma.normalizer])
    assert read_token_bytes(gemma) is None


def test_a_sequence_of_no_normalizers_changes_no_text():
    """As DeepSeek-V3 has it."""
    backend = Tokenizer.from_file(str(RELEASED / "llama3" / "tokenizer.json"))
    backend.normalizer = normalizers.Sequence([])
    assert read_token_bytes(backend) is not None
