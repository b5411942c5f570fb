"""Records that were tokenized before: what is trained of them, and what they must not hold."""

import numpy as np
import pytest

from megatron.sft.data.chat_encoder import ChatEncoder, EncodedSample
from megatron.sft.data.records.values import SampleError
from megatron.sft.data.tokenizer import build_tokenizer

IDS = [5, 6, 7, 8]


def encode(record):
    return ChatEncoder(build_tokenizer("ByteLevelTokenizer"), 100, "error").encode(record)


@pytest.mark.parametrize(
    ("columns", "trained"),
    [
        ({}, [6, 7, 8]),
        ({"labels": [-100, -100, 7, 8]}, [7, 8]),
        ({"labels": [-100, -100, 7, 8], "attention_mask": [1, 1, 1, 1]}, [7, 8]),
        ({"labels": [5, 6, 7, -100], "attention_mask": [True, True, True, False]}, [6, 7]),
        ({"labels": IDS, "attention_mask": [0, 1, 1, 1]}, [7, 8]),
        ({"completion_mask": [0, 0, 1, 1]}, [7, 8]),
        ({"assistant_masks": [0, 1, 0, 1], "position_ids": [0, 1, 2, 3]}, [6, 8]),
        ({"labels": [-100, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}, [7, 8]),
        ({"labels": np.array(IDS, np.int64), "token_type_ids": [0] * 4}, [6, 7, 8]),
        ({"labels": [-100.0, -100.0, 7.0, 8.0], "seq_lengths": [4]}, [7, 8]),
        ({"labels": "[-100, -100, 7, 8]"}, [7, 8]),
    ],
)
def test_labels_and_masks(columns, trained):
    """The prompt would be trained as well, or each label one place beside its token."""
    sample = encode({"input_ids": IDS, **columns})
    assert isinstance(sample, EncodedSample)
    assert sample.labels[sample.loss_mask > 0].tolist() == trained
    assert [int(sample.tokens[0]), *sample.labels] == [
        one for one, kept in zip(IDS, columns.get("attention_mask", [1] * 4)) if kept
    ]


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        (
            {"labels": [-100, 7, 8]},
            "labels must have one number for each of 4 input_ids, but has 3",
        ),
        (
            {"labels": [6, 7, 8, -100]},
            "labels must be those of input_ids or -100, but number 0 is 6",
        ),
        (
            {"labels": [-100, 6, 9, 8]},
            "labels must be those of input_ids or -100, but number 2 is 9",
        ),
        ({"labels": []}, "labels must be at least one whole number, but is []"),
        ({"labels": ["a"] * 4}, "labels must be at least one whole number, but is ['a',"),
        ({"labels": [0.5] * 4}, "labels must be at least one whole number, but is [0.5"),
        ({"input_ids": [[5, 6]]}, "input_ids must be at least one whole number, but is [[5, 6]]"),
        ({"input_ids": [5, 999]}, "input_ids must be from 0 to 263, but are from 5 to 999"),
        ({"attention_mask": [1, 0, 1, 1]}, "attention_mask must be 1 but for padding at the ends"),
        ({"attention_mask": [0] * 4}, "attention_mask must be 1 but for padding at the ends"),
        ({"attention_mask": [1, 1, 2, 2]}, "attention_mask says that input_ids are several"),
        ({"position_ids": [0, 1, 0, 1]}, "position_ids says that input_ids are several sequences"),
        ({"seq_lengths": [2, 2]}, "seq_lengths says that input_ids are several sequences"),
        ({"completion_mask": [0, 2, 1, 1]}, "completion_mask must be 0 or 1, but is 2"),
        ({"loss_mask": [0, 1, 1, 1]}, "record has loss_mask beside input_ids, which would be lost"),
        (
            {"input_ids": None, "tokens": IDS, "loss_mask": [0, 1, 1, 1]},
            "record has loss_mask beside tokens, which would be lost; write it as labels",
        ),
        (
            {"input_ids": None, "tokens": IDS, "labels": [-100, 6, 7, 8]},
            "record has labels beside tokens, which would be lost; rename the ids, input_ids=tok",
        ),
    ],
)
def test_what_would_be_trained_otherwise_is_refused(columns, fault):
    """Packed sequences would read each other, and shifted labels teach the token after the next."""
    with pytest.raises(SampleError) as caught:
        encode({"input_ids": IDS, **columns})
    assert str(caught.value).startswith(fault)
    assert "one ahead" in str(caught.value) or columns.get("labels") != [6, 7, 8, -100]
