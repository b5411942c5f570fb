"""What megatron-core's linear layers do for nothing is left out, and nothing else is."""

from megatron.core.tensor_parallel import layers

from megatron.sft.model import host_time


def test_products_are_not_wrapped_for_mixed_precision() -> None:
    """Twice: an unwrapped function that is unwrapped again would be another one."""
    for _ in range(2):
        host_time.install()
        for name in host_time._PRODUCTS:
            product = getattr(layers, name)
            assert not hasattr(product.forward, "__wrapped__")
            assert "layers.py" in product.backward.__code__.co_filename
