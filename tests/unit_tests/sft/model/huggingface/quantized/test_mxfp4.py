"""Values of MXFP4 weights, by the standard and as transformers reads them."""

import pytest
import torch

from megatron.sft.model.huggingface.quantized.mxfp4 import from_mxfp4


def test_literal_values():
    """A swapped half of a byte, or a scale off by one, is another model with a higher loss."""
    blocks = torch.zeros(1, 2, 16, dtype=torch.uint8)
    blocks[0, 0, :8] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE])
    blocks[0, 1, 15] = 0x2F
    values = from_mxfp4(blocks, torch.tensor([[127, 128]], dtype=torch.uint8))
    assert values.dtype == torch.bfloat16
    assert values.shape == (1, 64)
    assert values[0, :8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert values[0, 8:16].tolist() == [-0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert values[0, 62:].tolist() == [-12, 2]
    assert not values[0, 16:62].any()


def test_is_what_transformers_reads():
    """To the bit, for all bytes and usual scales; transformers transposes the result."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(100, 140, (2, 6, 3), generator=generator).to(torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(from_mxfp4(blocks, scales).transpose(1, 2), theirs)


@pytest.mark.parametrize(
    ("blocks", "scales"),
    [
        (torch.zeros(2, 3, 16, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8)),
        (torch.zeros(2, 3, 8, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8)),
        (torch.zeros(2, 3, 16), torch.zeros(2, 3, dtype=torch.uint8)),
    ],
)
def test_other_shapes_are_refused(blocks, scales):
    with pytest.raises(ValueError, match="MXFP4 blocks"):
        from_mxfp4(blocks, scales)
