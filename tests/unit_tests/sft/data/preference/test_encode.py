"""Pairs as trees: what counts, what is cut, and that no pair is torn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron.sft.data.chat_encoder import ChatEncoder, Dropped, EncodedSample
from megatron.sft.data.preference.encode import PairEncoder
from megatron.sft.data.preference.partners import with_answer_of
from megatron.sft.data.preference.sides import is_blank
from megatron.sft.data.records.content import Conversation
from megatron.sft.data.records.messages import Message
from megatron.sft.data.records.values import SampleError
from megatron.sft.data.tokenizer import build_tokenizer
from megatron.sft.options.data import TemplateChoice

TOKENIZER = build_tokenizer("NullTokenizer", None, 99, TemplateChoice())
EOD = TOKENIZER.eod


def encode(
    record: dict[str, Any], seq_length: int = 64, policy: Any = "error", **options: Any
) -> EncodedSample | Dropped:
    encoder = PairEncoder(**options)
    return ChatEncoder(TOKENIZER, seq_length, policy, preferences=encoder).encode(record)


def made(record: dict[str, Any], **options: Any) -> EncodedSample:
    sample = encode(record, **options)
    assert isinstance(sample, EncodedSample), sample
    return sample


PAIR = {"prompt": "7 8", "chosen": "1 2", "rejected": "3"}


def test_a_pair_is_one_tree_with_a_row_per_answer() -> None:
    """Two trees could come into two packs; ranks exchanged would train the rejected answer."""
    sample = made(PAIR)
    assert sample.tree is not None
    assert sample.tokens.tolist() == [7, 8, 1, 2, 8, 3]
    assert sample.labels.tolist() == [8, 1, 2, EOD, 3, EOD]
    assert sample.loss_mask.tolist() == [0, 1, 1, 1, 1, 1]
    assert sample.tree.parents.tolist() == [-1, 0, 0]
    assert sample.fields["path_rank"].tolist() == [0, 1]
    assert sample.fields["path_answer_tokens"].tolist() == [3, 2]
    assert "answer_index" not in sample.fields


def test_ranks_follow_the_answers_through_the_tree() -> None:
    """Paths stand in the order of the tree: the rejected one first, where the chosen goes on."""
    sample = made({"prompt": "7 8", "chosen": f"1 {EOD} 5", "rejected": "1"})
    assert sample.fields["path_rank"].tolist() == [1, 0]
    assert sample.fields["path_answer_tokens"].tolist() == [2, 4]
    assert sample.tree is not None
    assert len(sample.tree.parents) == 1


def test_several_rejected_answers_are_one_tree() -> None:
    """Each of them makes a pair with the chosen one, whose tokens are computed once."""
    sample = made(PAIR | {"rejected": ["3", "4 5"]})
    assert sample.fields["path_rank"].tolist() == [0, 1, 2]
    assert sample.tree is not None
    assert sample.tree.parents.tolist() == [-1, 0, 0, 0]
    with pytest.raises(SampleError, match="give each pair as a record"):
        made(PAIR | {"prompt": " ".join(["7"] * 50), "rejected": [str(n) for n in range(3, 30)]})


def test_the_prompt_counts_apart_where_a_loss_has_it() -> None:
    """ORPO's cross entropy has the prompt, its odds do not: one mask for both would be wrong."""
    sample = made(PAIR, trains_prompt=True)
    assert sample.loss_mask.tolist() == [2, 1, 1, 1, 1, 1]
    assert sample.fields["answer_index"].tolist() == [-1, 0, 1, 2, 0, 1]
    assert sample.fields["first_path"].tolist() == [0, 0, 0, 0, 1, 1]


def test_heads_are_of_the_shorter_answer() -> None:
    """A length of its own for each answer would make ld_alpha another loss."""
    sample = made(PAIR, has_head=True)
    assert sample.fields["path_head_tokens"].tolist() == [2, 2]
    assert sample.fields["answer_index"].tolist() == [-1, 0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("record", "options", "reason"),
    [
        (PAIR | {"rejected": "1 2"}, {}, "equal answers"),
        (PAIR | {"rejected": ["1 2", "1 2"]}, {}, "equal answers"),
        (PAIR | {"chosen": ""}, {}, "empty answer"),
        (PAIR | {"chosen": " \n", "rejected": ["3", "4"]}, {}, "empty answer"),
        (PAIR | {"rejected": ""}, {"scores_last": True}, "empty answer"),
        (PAIR | {"rejected": ["", " "]}, {}, "empty answer"),
        ({"prompt": "7 8", "completion": " ", "label": True}, {"is_marked": True}, "empty answer"),
        (PAIR, {"seq_length": 3, "policy": "drop"}, "over length"),
        (PAIR, {"seq_length": 1, "policy": "truncate"}, "no loss token left after truncation"),
        (PAIR, {"capacity": 5, "policy": "drop"}, "over length"),
    ],
)
def test_what_cannot_be_compared_is_dropped_whole(
    record: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    """Half a pair, or two equal answers after a cut, would count in the mean without a gradient."""
    assert encode(record, **options) == Dropped(reason)  # type: ignore[arg-type]


def test_a_pair_of_several_is_dropped_alone() -> None:
    """One rejected answer that is empty or equal took the other pairs with it, or trained the end
    of an answer alone. Ranks and margins that moved up would be those of other answers.
    """
    several = PAIR | {"rejected": ["1 2", "3", "", "4"], "margin": [1, 2, 3, 4]}
    sample = made(several, scores_last=True)
    assert sample.fields["path_rank"].tolist() == [0, 2, 4]
    assert sample.fields["path_margin"].tolist() == [0, 2, 4]
    assert sample.dropped == (
        "empty answer in one of several pairs",
        "equal answers in one of several pairs",
    )
    assert made(PAIR | {"rejected": ["3", "4"]}).dropped == ()
    # The cut makes the first one equal; the second differs before it.
    cut = PAIR | {"rejected": ["1 2 3", "4"]}
    sample = made(cut, seq_length=3, policy="truncate")
    assert sample.fields["path_rank"].tolist() == [0, 2]
    assert sample.dropped == ("equal answers in one of several pairs",)


@pytest.mark.parametrize(
    ("turn", "is_left_out"),
    [
        ({"content": " "}, True),
        ({"content": "", "reasoning_content": "1"}, False),
        ({"content": "1"}, False),
        ({"content": "", "tool_calls": [{"function": {"name": "1", "arguments": {}}}]}, False),
    ],
)
def test_an_answer_of_turns_is_empty_without_text_thought_or_call(
    turn: dict[str, Any], is_left_out: bool
) -> None:
    """A call has no text, and is what the model shall learn."""
    message = Message("assistant", turn.pop("content"), fields=turn)
    assert is_blank(Conversation([Message("user", "7"), message])) == is_left_out


@pytest.mark.parametrize(
    ("options", "words"),
    [({"seq_length": 3}, "4 tokens long"), ({"capacity": 5}, "1 tokens more than a pack")],
)
def test_what_is_too_long_is_an_error_by_default(options: dict[str, Any], words: str) -> None:
    """A cut that nobody asked for."""
    with pytest.raises(SampleError, match=words):
        encode(PAIR, **options)


def test_both_answers_are_cut_alike() -> None:
    """Only the chosen answer obeyed the length, in other trainers."""
    long = {"prompt": "7 8", "chosen": "1 2 3 4", "rejected": "5 6 7 9"}
    sample = made(long, seq_length=4, policy="truncate")
    assert sample.is_cut
    assert sample.fields["path_answer_tokens"].tolist() == [3, 3]
    # 1 shared token, two branches of 5 without a limit; a pack of 8 leaves 3 each.
    sample = made(long, policy="truncate", capacity=8)
    assert len(sample.tokens) <= 8
    assert sample.fields["path_answer_tokens"].tolist() == [3, 3]
    padded = made(long, policy="truncate", capacity=12, unit=4)
    assert sum(-(-n // 4) * 4 for n in np.diff(padded.tree.cu_seqlens)) <= 12  # type: ignore[union-attr]


def test_a_prompt_of_one_token_is_refused() -> None:
    """Its answers would be two trees, which may come into different packs."""
    with pytest.raises(SampleError, match="less than two tokens"):
        encode(PAIR | {"prompt": "7"})


def test_a_marked_answer_gets_one_of_another_record() -> None:
    """KTO's divergence would be that of the answer itself, and pull it back to the reference."""
    own, other = (
        made({"prompt": prompt, "completion": text, "label": False}, is_marked=True)
        for prompt, text in (("7 8", "1 2"), ("9 9 9", "3"))
    )
    assert own.fields["path_good"].tolist() == [0]
    both = with_answer_of(own, other, 64)
    assert both.tokens.tolist() == [7, 8, 1, 2, 8, 3]
    assert both.labels.tolist() == [8, 1, 2, EOD, 3, EOD]
    assert both.fields["path_rank"].tolist() == [0, 1]
    assert both.fields["path_answer_tokens"].tolist() == [3, 2]
    assert with_answer_of(own, own, 64) is own
    assert with_answer_of(own, other, 3).fields["path_answer_tokens"].tolist() == [3, 2]


def test_a_reward_model_scores_the_last_token_of_each_answer() -> None:
    """A path without its last token, or with padding behind it, would be scored elsewhere than
    transformers does.
    """
    sample = made(PAIR | {"rejected": ["3", "1"], "margin": [0.5, 2]}, scores_last=True)
    assert sample.tree is not None
    # The end token is this tokenizer's padding, so that the token before it is scored.
    assert sample.tokens.tolist() == sample.labels.tolist() == [7, 8, 1, 2, 3, 1]
    assert sample.loss_mask.tolist() == [0, 0, 0, 1, 1, 1]
    order = sample.fields["path_rank"].tolist()
    assert sorted(order) == [0, 1, 2]
    assert [sample.fields["path_margin"][order.index(rank)] for rank in range(3)] == [0, 0.5, 2]
    with pytest.raises(SampleError, match="margin must be a number, but is 'much'"):
        made(PAIR | {"margin": "much"}, scores_last=True)
    with pytest.raises(SampleError, match="one for each of the 1 rejected"):
        made(PAIR | {"margin": [1, 2]}, scores_last=True)


def test_a_chat_beside_pairs_is_no_pair() -> None:
    """Taken for one, it would be compared with another record's answer."""
    chat = {"prompt": "7 8", "completion": "1 2", "weight": 0.5}
    with pytest.raises(SampleError, match="a pair must have"):
        made(chat)
    sample = made(chat, takes_plain=True, has_head=True)
    assert sample.fields["path_rank"].tolist() == [-1]
    assert sample.fields["path_weight"].tolist() == [0.5]
    assert sample.tokens.tolist() == [7, 8, 1, 2]
    assert sample.loss_mask.tolist() == [0, 1, 1, 1]
    assert made(chat, takes_plain=True, is_marked=True).fields["path_good"].tolist() == [0]
    assert made(PAIR, takes_plain=True).fields["path_rank"].tolist() == [0, 1]
    with pytest.raises(SampleError, match="a pair must have"):
        made({"prompt": "7 8", "chosen": "1"}, takes_plain=True)
