"""Records to samples: each shape, each token's loss, each fault."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.sft.data.chat_encoder import ChatEncoder, Dropped, EncodedSample, SampleError
from megatron.sft.data.tokenizer import build_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

EOD, SYSTEM, USER, ASSISTANT, TOOL, END = 256, 258, 259, 260, 261, 262


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer("ByteLevelTokenizer")


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return ChatEncoder(tokenizer, seq_length=1000, over_length_policy="error")


def messages(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def ids_of(sample):
    """Return the N+1 ids that a sample was made of."""
    assert sample.tokens[1:].tolist() == sample.labels[:-1].tolist()
    return [*sample.tokens.tolist(), int(sample.labels[-1])]


def test_literal_sample(encoder):
    """A mask that follows the token and not the label trains on the token before each answer, and
    not on its end.
    """
    sample = encoder.encode(messages(("user", "u"), ("assistant", "ab")))
    assert sample.tokens.tolist() == [USER, 117, END, ASSISTANT, 97, 98]
    assert sample.labels.tolist() == [117, END, ASSISTANT, 97, 98, END]
    assert sample.loss_mask.tolist() == [0, 0, 0, 1, 1, 1]
    assert not sample.is_cut
    assert (sample.tokens.dtype, sample.labels.dtype, sample.loss_mask.dtype) == (
        "int32",
        "int32",
        "float32",
    )


def test_tokens_and_labels_share_no_memory(encoder):
    """Labels that are overwritten where masked, as is common, would change the tokens that the
    model reads.
    """
    sample = encoder.encode({"text": "abc"})
    assert not np.shares_memory(sample.tokens, sample.labels)


def test_memory_of_a_long_record(tokenizer):
    """A line of 100 MB took 2.9 GB, with a token for each byte, in each process that reads."""
    record = {"text": "a" * 1_000_000}
    encoder = ChatEncoder(tokenizer, seq_length=2_000_000, over_length_policy="truncate")
    tracemalloc.start()
    try:
        sample = encoder.encode(record)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(sample, EncodedSample)
    assert len(sample.tokens) == 1_000_000
    assert kept < 12.5e6  # three columns of four bytes
    assert peak < 14.5e6


def test_a_truncated_record_keeps_nothing_of_its_rest(tokenizer):
    """A view of ten tokens holds the millions that were cut as long as the sample waits."""
    encoder = ChatEncoder(tokenizer, seq_length=10, over_length_policy="truncate")
    sample = encoder.encode({"text": "a" * 1_000})
    assert isinstance(sample, EncodedSample)
    for column in (sample.tokens, sample.labels, sample.loss_mask):
        whole = column if column.base is None else column.base
        assert (len(column), len(whole) <= 11) == (10, True)


def test_text_is_trained_on_to_its_end(encoder):
    """Without the end of the document, a model trained on texts never stops."""
    sample = encoder.encode({"text": "abc"})
    assert ids_of(sample) == [97, 98, 99, EOD]
    assert sample.loss_mask.tolist() == [1, 1, 1]


def test_every_role(encoder):
    """A system or tool turn that is taken for the user's, or trained on, goes unnoticed in the
    loss.
    """
    sample = encoder.encode(
        {
            "conversations": [
                {"from": role, "value": ""}
                for role in ("system", "human", "gpt", "tool", "assistant", "user")
            ]
        }
    )
    assert ids_of(sample) == [
        SYSTEM,
        END,
        USER,
        END,
        ASSISTANT,
        END,
        TOOL,
        END,
        ASSISTANT,
        END,
        USER,
        END,
    ]
    assert np.flatnonzero(sample.loss_mask).tolist() == [4, 8]


TURNS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.text(max_size=9)),
    min_size=1,
)


@pytest.mark.slow
@given(turns=TURNS, weight=st.sampled_from([None, 0.25, 2]))
def test_masked_labels_are_the_answers(encoder, turns, weight):
    """Any other mask trains on words that are not the assistant's."""
    answers = [text for role, text in turns if role == "assistant"]
    sample = encoder.encode(messages(*turns) | {"weight": weight})
    if not answers:
        assert sample == Dropped("no loss token")
        return
    trained = sample.labels[sample.loss_mask > 0]
    assert trained.tolist() == [token for answer in answers for token in (*answer.encode(), END)]
    assert set(sample.loss_mask) <= {0.0, weight or 1.0}
    assert len(ids_of(sample)) == sum(len(text.encode()) + 2 for _, text in turns)


@given(turns=TURNS, seq_length=st.integers(1, 40))
def test_policies_agree_on_what_is_too_long(tokenizer, turns, seq_length):
    """A sample one token over seq_length would fail later, in a pack; a cut one must be a prefix of
    the whole one.
    """
    whole = ChatEncoder(tokenizer, 10**6, "error").encode(messages(*turns))
    cut = ChatEncoder(tokenizer, seq_length, "truncate").encode(messages(*turns))
    dropped = ChatEncoder(tokenizer, seq_length, "drop").encode(messages(*turns))
    if isinstance(whole, Dropped):
        assert whole == cut == dropped
    elif len(whole.tokens) <= seq_length:
        assert isinstance(cut, EncodedSample)
        assert ids_of(whole) == ids_of(cut) == ids_of(dropped)
        assert not cut.is_cut
    else:
        assert dropped == Dropped("over length")
        if isinstance(cut, Dropped):
            assert cut == Dropped("no loss token left after truncation")
            assert not whole.loss_mask[:seq_length].any()
        else:
            assert isinstance(cut, EncodedSample)
            assert cut.is_cut
            for field in ("tokens", "labels", "loss_mask"):
                assert getattr(cut, field).tolist() == getattr(whole, field)[:seq_length].tolist()


def test_truncation_literally(tokenizer):
    """Cut one token too late or too early, every truncated sample would differ from what seq_length
    says.
    """
    record = messages(("user", "u"), ("assistant", "ab"))
    sample = ChatEncoder(tokenizer, 4, "truncate").encode(record)
    assert isinstance(sample, EncodedSample)
    assert (ids_of(sample), sample.loss_mask.tolist(), sample.is_cut) == (
        [USER, 117, END, ASSISTANT, 97],
        [0, 0, 0, 1],
        True,
    )
    assert ChatEncoder(tokenizer, 3, "truncate").encode(record) == Dropped(
        "no loss token left after truncation"
    )
    with pytest.raises(
        SampleError,
        match=r"^sample is 6 tokens long, but --seq-length is 5; raise it or pass "
        r"--over-length-policy truncate\|drop$",
    ):
        ChatEncoder(tokenizer, 5, "error").encode(record)


@pytest.mark.parametrize(
    "record", [{"text": ""}, {"text": "abc", "weight": 0}, messages(("user", "u"))]
)
def test_nothing_to_learn_is_dropped(encoder, record):
    """A sample without loss costs a forward pass and, alone in a batch, divides by zero tokens."""
    assert encoder.encode(record) == Dropped("no loss token")


def test_wrong_flags(tokenizer):
    """A policy that is mistyped would be taken for another."""
    with pytest.raises(
        ValueError, match=r"--over-length-policy must be error\|truncate\|drop, but is 'cut'"
    ):
        ChatEncoder(tokenizer, 10, "cut")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--seq-length must be at least 1, but is 0"):
        ChatEncoder(tokenizer, 0, "error")


def test_null_tokenizer_conversation():
    """Benchmarks would train on other tokens than they were given."""
    encoder = ChatEncoder(build_tokenizer("NullTokenizer", vocab_size=10), 100, "error")
    sample = encoder.encode(messages(("user", "1 2"), ("assistant", "3 4")))
    assert isinstance(sample, EncodedSample)
    assert ids_of(sample) == [1, 2, 10, 3, 4, 10]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 1]
