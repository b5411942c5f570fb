"""Numbers of 4 bits as compressed-tensors packs them, by the definition of the format."""

import torch

from megatron.sft.model.huggingface.quantized.int4 import from_int4


def test_literal_words():
    """Numbers in another order, or without their offset, are another model."""
    words = torch.tensor([[0x0000009F, 0x76543210], [-1, 0]], dtype=torch.int32)
    values = torch.empty(2, 16)
    from_int4(words, values)
    assert values.tolist() == [
        [7, 1, -8, -8, -8, -8, -8, -8, -8, -7, -6, -5, -4, -3, -2, -1],
        [7] * 8 + [-8] * 8,
    ]


def test_columns_that_begin_within_a_word():
    """Tensor-parallel ranks may begin at any column."""
    words = torch.randint(-(2**31), 2**31, (3, 4), dtype=torch.int32)
    whole, part = torch.empty(3, 32), torch.empty(3, 13)
    from_int4(words, whole)
    from_int4(words[:, 1:], part, 3)
    assert torch.equal(part, whole[:, 11:24])
