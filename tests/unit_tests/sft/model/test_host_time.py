"""What megatron-core's linear layers do for nothing is left out, and nothing else is."""

from typing import Any

import torch
from megatron.core.tensor_parallel import layers

from megatron.sft.model import host_time
from tests.unit_tests.packing.stubs import Ranks


def test_collectives_of_one_rank_alone_are_skipped() -> None:
    """Skipped over several, each rank would go on with its own part of a sum."""
    asked: list[Any] = []

    def plain(x: torch.Tensor, group: Any) -> torch.Tensor:
        asked.append(group)
        return x + 1

    skipped, x = host_time._skipped_alone(plain), torch.ones(2)
    assert skipped(x, group=Ranks()) is x
    assert asked == []
    assert torch.equal(skipped(x, group=Ranks(2)), x + 1)
    assert torch.equal(skipped(x), x + 1)
    assert asked == [Ranks(2), None]


def test_products_are_not_wrapped_for_mixed_precision() -> None:
    """Twice: an unwrapped function that is unwrapped again would be another one."""
    for _ in range(2):
        host_time.install()
        for name in host_time._PRODUCTS:
            product = getattr(layers, name)
            assert not hasattr(product.forward, "__wrapped__")
            assert "layers.py" in product.backward.__code__.co_filename
        assert hasattr(layers.copy_to_tensor_model_parallel_region, "is_skipped_alone")
