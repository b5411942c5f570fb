"""What megatron-core's linear layers do for nothing is left out, and nothing else is."""

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers
from torch.utils._python_dispatch import TorchDispatchMode

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


class _Names(TorchDispatchMode):
    """Keeps the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


OPTIONS = {
    "gradient_accumulation_fusion": False,
    "allreduce_dgrad": False,
    "sequence_parallel": False,
    "grad_output_buffer": None,
    "tp_group": Ranks(),
}


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 1, 8), (3, 2, 8), (7, 8)])
def test_products_alone_are_torchs_to_the_bit(
    is_frozen: bool, has_bias: bool, shape: tuple[int, ...]
) -> None:
    """Float32 that is summed in another order would make another run of each run before."""
    plain = (
        layers.linear_with_frozen_weight
        if is_frozen
        else layers.linear_with_grad_accumulation_and_async_allreduce
    )
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(4, 8, requires_grad=not is_frozen)
    bias = torch.randn(4, requires_grad=not is_frozen) if has_bias else None
    inputs = [one for one in (x, weight, bias) if one is not None and one.requires_grad]
    ours = host_time._torch_alone(lambda *args, **kwargs: pytest.fail("not torch's own"))
    results = []
    for output in (
        plain(x, weight, bias, **OPTIONS),  # type: ignore[arg-type]
        ours(None, input=x, weight=weight, bias=bias, **OPTIONS),
    ):
        gradients = torch.autograd.grad(output.square().sum(), inputs)
        assert all(gradient.is_contiguous() for gradient in gradients)
        results.append([output, *gradients])
    for plain_one, our_one in zip(*results, strict=True):
        assert torch.equal(plain_one, our_one)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("communicates", [False, True])
def test_a_frozen_weight_meets_transposed_tokens_as_one_matrix(
    batch: int, communicates: bool
) -> None:
    """Embeddings and delta nets give [1, tokens, width] transposed. Multiplied token by token, a
    layer with an adapter took three times as long, and a run had another loss in its seventh digit.
    """
    transposed = torch.randn(batch, 5, 8).transpose(0, 1).requires_grad_()
    product = host_time._torch_alone(
        lambda layer, input, weight, bias, **_: layers.LinearWithFrozenWeight.apply(
            input, weight, bias, False, None
        )
    )
    options = OPTIONS | {"allreduce_dgrad": communicates}
    with _Names() as operations:
        output = product(None, input=transposed, weight=torch.randn(4, 8), bias=None, **options)
        output.backward(torch.ones_like(output))
    assert operations.names.count("mm") == 2
    assert "bmm" not in operations.names
    assert operations.names.count("clone") == batch - 1


@pytest.mark.parametrize(
    "other",
    [
        {"gradient_accumulation_fusion": True},
        {"allreduce_dgrad": True},
        {"sequence_parallel": True},
        {"grad_output_buffer": []},
        {"gtp_remat_size": 2},
        {"of_a_later_release": None},
    ],
)
def test_products_that_do_more_are_megatron_cores(other: dict[str, Any]) -> None:
    """Left out, a sum over ranks or a kept gradient would be missing."""
    x, weight = torch.ones(2, 1, 2), torch.ones(2, 2)
    asked: list[dict[str, Any]] = []

    def plain(layer: None, **options: Any) -> torch.Tensor:
        asked.append(options)
        return x

    product = host_time._torch_alone(plain)
    options = {**OPTIONS, **other}
    assert product(None, input=x, weight=weight, bias=None, **options) is x
    assert asked == [{"input": x, "weight": weight, "bias": None, **options}]


def test_products_are_not_wrapped_for_mixed_precision() -> None:
    """Twice: an unwrapped function that is unwrapped again would be another one."""
    for _ in range(2):
        host_time.install()
        for name in host_time._PRODUCTS:
            product = getattr(layers, name)
            assert not hasattr(product.forward, "__wrapped__")
            assert "layers.py" in product.backward.__code__.co_filename
        assert hasattr(layers.copy_to_tensor_model_parallel_region, "is_skipped_alone")
        for name in host_time._LAYERS:
            product = getattr(layers, name)._forward_impl
            assert product.__code__.co_filename == host_time.__file__
            assert product.__closure__[0].cell_contents.__code__.co_filename == layers.__file__
