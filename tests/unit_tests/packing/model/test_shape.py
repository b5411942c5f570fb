"""Widths by Megatron's rules."""

from megatron.packing.model.shape import ffn_hidden_size


def test_ffn_hidden_size():
    """A width other than Megatron's makes a model of another size under the same options."""
    assert ffn_hidden_size(64, is_gated=False) == 256
    assert ffn_hidden_size(64, is_gated=True) == 128  # 8/3 of 64 is 170, down to a multiple of 64
    assert ffn_hidden_size(4096, is_gated=True) == 10880
    assert ffn_hidden_size(16, is_gated=True) == 64
