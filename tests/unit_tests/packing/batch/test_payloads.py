"""Payloads stay with their sequences, as tensors, as bytes and in microbatches."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.packing.batch.columns import PAYLOAD_COSTS, PAYLOADS
from megatron.packing.batch.payload_bytes import from_bytes, payloads_of_packs, to_bytes
from megatron.packing.batch.payloads import Payload, payload_of, restored_tensors
from megatron.packing.batch.reading import SampleReader
from megatron.packing.batch.samples import Samples, joined

DTYPES = [torch.float32, torch.uint8, torch.bfloat16, torch.float64, torch.bool, torch.int64]


def random_payload(seed: int) -> Payload | None:
    """Of any names, numbers, shapes and types; every third sequence has none."""
    random = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=random))

    if seed % 3 == 0:
        return None
    if seed % 7 == 0:
        return Payload(None, ("key", seed))
    tensors: dict[str, list[torch.Tensor]] = {}
    for name in ("pixels", "audio")[: 1 + below(2)]:
        tensors[name] = [
            torch.rand([below(4) for _ in range(below(4))], generator=random)
            .mul(9)
            .to(DTYPES[below(len(DTYPES))])
            for _ in range(below(3))
        ]
    return Payload(tensors, seed)


def assert_equal(found: Payload | None, expected: Payload | None) -> None:
    if expected is None or found is None:
        assert found is expected
        return
    assert found.key == expected.key
    if found.tensors is None or expected.tensors is None:
        assert found.tensors is expected.tensors
        return
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensors in expected.tensors.items():
        for one, other in zip(found.tensors[name], tensors, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize("first", range(0, 60, 6))
def test_bytes_are_the_payloads(first: int) -> None:
    """Of all types and shapes, empty ones too; arrays arrive as tensors."""
    payloads = [random_payload(seed) for seed in range(first, first + 6)]
    for found, expected in zip(from_bytes(to_bytes(payloads)), payloads, strict=True):
        assert_equal(found, expected)
    assert from_bytes(to_bytes([])) == []
    array = np.arange(6).reshape(2, 3)
    read_only = array.copy()
    read_only.flags.writeable = False
    arrays = [array, array[:, ::-1], array.T, read_only, np.array(7)]
    (arrived,) = from_bytes(to_bytes([Payload({"pixels": arrays})]))
    assert arrived is not None
    assert arrived.tensors is not None
    assert [one.tolist() for one in arrived.tensors["pixels"]] == [one.tolist() for one in arrays]


def read(items: list[dict[str, Any]]) -> tuple[Samples, list[Payload]]:
    reader = SampleReader(lambda costs: float(sum(map(sum, costs.values()))))
    reader.add(items, 0)
    return reader.samples(), reader.payloads


def test_samples_have_the_number_and_the_cost_of_their_payload() -> None:
    """A text between two images, and a key without tensors."""
    pixels = [torch.zeros(3, 4), torch.ones(2)]
    samples, payloads = read(
        [
            {"tokens": [1, 2], "payloads": {"pixels": pixels}, "costs": {"vision": [5, 6]}},
            {"tokens": [3]},
            {"tokens": [4, 5], "payload_key": ("tar", 7), "costs": {"vision": [1]}},
            {
                "tokens": [6],
                "payloads": {"audio": torch.ones(2)},
                "__restore_key__": (0, 3),
                "__key__": "a",
            },
        ]
    )
    assert samples.columns[PAYLOADS].tolist() == [0, -1, 1, 2]
    assert samples.columns[PAYLOAD_COSTS].tolist() == [11, 0, 1, 0]
    assert payloads[0] == Payload({"pixels": pixels}, None)
    assert payloads[0].num_bytes == 4 * (12 + 2)
    assert payloads[1] == Payload(None, ("tar", 7))
    assert payloads[2].key == (0, 3)
    text, none = read([{"tokens": [1, 2, 3]}])
    assert none == []
    assert text.schema == ()
    both = joined([text, samples.take(np.array([2, 0]))])
    assert both.columns[PAYLOADS].tolist() == [-1, 1, 0]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"payloads": torch.ones(2)}, "must be tensors by name"),
        ({"payloads": {"pixels": "file.jpg"}}, "'pixels' must be a tensor, .* but has str"),
        ({"payloads": {"pixels": [torch.ones(1), None]}}, "'pixels' must be .* but has NoneType"),
        ({"payloads": {"pixels": np.array(["a"])}}, "'pixels' must be dense and of numbers"),
        ({"payloads": {"pixels": np.ones(2, ">f4")}}, "'pixels' must be dense and of numbers"),
        ({"payloads": {"pixels": np.ones(2, np.longdouble)}}, "of at most 8 bytes, but is of "),
        ({"payloads": {"pixels": torch.eye(2).to_sparse()}}, "must be dense .* torch.sparse_coo"),
        ({"payloads": {"pixels": torch.empty(2, device="meta")}}, "must be dense"),
        ({"payloads": {"pixels": memoryview(b"ab")}}, "must be a tensor, .* but has memoryview"),
        ({"payload_key": lambda: 0}, "key must be picklable"),
        ({"costs": {"vision": [1]}}, "must have 'payloads' or a 'payload_key'"),
        ({"payload_key": 1, "cu_seqlens": [0, 1, 2]}, "must be one sequence"),
        ({"payload_key": 1, "tokens": np.ones((2, 3), int)}, "must be one sequence"),
    ],
)
def test_payloads_that_cannot_be_are_refused(item: dict[str, Any], message: str) -> None:
    """Images of nobody, or of the wrong sequence, would be trained on in silence."""
    with pytest.raises(ValueError, match=message):
        read([{"tokens": [1, 2], **item}])


def test_a_run_without_a_store_refuses_payloads() -> None:
    """They were left out with a warning before, and placeholders trained as words."""
    with pytest.raises(ValueError, match=r"nothing to move and bound them; pass plugin\.install"):
        SampleReader().add({"tokens": [1], "payloads": {"pixels": torch.ones(1)}}, 0)


def test_what_restores_may_return_a_sample() -> None:
    """A dict, an object with `payloads`, or the tensors themselves."""
    one = torch.ones(2)
    for given in ({"pixels": one}, {"payloads": {"pixels": [one]}, "tokens": [1]}):
        assert restored_tensors(given) == {"pixels": [one]}
    assert restored_tensors(SimpleNamespace(payloads={"pixels": one})) == {"pixels": [one]}
    with pytest.raises(ValueError, match="that is restored must have 'payloads', but has none"):
        restored_tensors({"tokens": [1], "loss_mask": [0]})


def test_payloads_have_any_names() -> None:
    """Codes of audio may be called tokens: they were taken for a sample without images."""
    codes = torch.arange(3)
    for given in ({"tokens": codes}, {"payloads": codes, "input_ids": [codes]}):
        payload = payload_of({"tokens": [1], "payloads": given}, 1)
        assert payload is not None
        assert payload.tensors is not None
        assert payload.tensors.keys() == given.keys()
        assert restored_tensors({"payloads": given}) == payload.tensors


def test_each_microbatch_has_those_of_its_sequences_in_order() -> None:
    """An image of the sequence before would stand in the next one's placeholders."""
    ones = [torch.full((n,), float(n)) for n in range(6)]
    payloads = [
        Payload({"pixels": [ones[0], ones[1]]}),
        None,
        Payload({"audio": [ones[2]]}),
        Payload({"pixels": [ones[3]], "audio": [ones[4]]}),
        None,
    ]
    first, empty, last = payloads_of_packs(payloads, np.array([2, 0, 3]))
    assert {name: [len(one) for one in its] for name, its in first.tensors.items()} == {
        "pixels": [0, 1]
    }
    assert first.segments["pixels"].tolist() == [0, 0]
    assert empty == ({}, {})
    assert [len(one) for one in last.tensors["pixels"]] == [3]
    assert [len(one) for one in last.tensors["audio"]] == [2, 4]
    assert {name: its.tolist() for name, its in last.segments.items()} == {
        "audio": [0, 1],
        "pixels": [1],
    }
