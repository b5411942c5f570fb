"""The default encoder: only what is overridden runs, and types say what becomes of samples and
batches.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron.blending.energon._encoding.default_encoder import DefaultTaskEncoder
from megatron.blending.energon._encoding.samples import Batch, TextSample, edataclass
from megatron.blending.energon._encoding.task_encoder import TaskEncoder
from megatron.blending.streams.failures import FatalSampleError

STEPS = [
    "encode_sample",
    "preencode_sample",
    "postencode_sample",
    "batch",
    "encode_batch",
    "batch_group_criterion",
]


@edataclass
class RawBatch(Batch):
    text: list[str]


@edataclass
class Narrow(Batch):
    text: list[str]
    tokens: torch.Tensor


def default(**types) -> Any:
    return DefaultTaskEncoder(**types)


def texts(*words):
    return [TextSample(__key__=str(i), text=word) for i, word in enumerate(words)]


def test_the_default_encoder_does_nothing():
    """Each step that is there without need costs a call per sample."""
    assert [step for step in STEPS if DefaultTaskEncoder().uses(step)] == ["batch"]
    assert [step for step in STEPS if TaskEncoder().uses(step)] == []


def test_overridden_steps_are_used():
    class Mine(DefaultTaskEncoder):
        def encode_sample(self, sample):
            return sample

    class More(Mine):
        def encode_batch(self, batch):
            return batch

    assert [step for step in STEPS if More().uses(step)] == [
        "encode_sample",
        "batch",
        "encode_batch",
    ]
    on_object = default()
    on_object.postencode_sample = lambda sample: sample
    assert on_object.uses("postencode_sample")
    assert DefaultTaskEncoder(encoded_sample_type=dict).uses("encode_sample")
    assert not DefaultTaskEncoder(batch_type=RawBatch).uses("encode_batch")
    assert DefaultTaskEncoder(raw_batch_type=RawBatch, batch_type=dict).uses("encode_batch")


def test_batch_without_types_is_of_the_samples_type():
    batch: Any = DefaultTaskEncoder().batch(texts("a", "b"))
    assert type(batch) is TextSample
    assert (batch.text, batch.__key__) == (["a", "b"], ["0", "1"])


def test_batch_of_dicts_tensors_and_words():
    encoder = default()
    assert encoder.batch([{"a": 1}, {"a": 2}]) == {"a": [1, 2]}
    assert encoder.batch([torch.ones(1), torch.ones(2)]).tolist() == [[1, 0], [1, 1]]
    assert encoder.batch(["a", "b"]) == ["a", "b"]


def test_batch_type():
    encoder = default(batch_type=RawBatch)
    assert type(encoder.batch(texts("a"))) is RawBatch
    assert type(DefaultTaskEncoder(raw_batch_type=RawBatch).batch(texts("a"))) is RawBatch
    both = default(raw_batch_type=RawBatch, batch_type=dict)
    assert both.encode_batch(both.batch(texts("a", "b")))["text"] == ["a", "b"]
    with pytest.raises(
        FatalSampleError, match=r"Narrow has a field 'tokens' that TextSample lacks; its fields are"
    ):
        DefaultTaskEncoder(batch_type=Narrow).batch(texts("a"))


def test_batch_type_beside_encode_batch():
    """`batch_type=RawBatch` with an `encode_batch` of one's own: it gets the raw batch, if that has
    room for all.
    """

    class Mine(DefaultTaskEncoder[TextSample, TextSample, RawBatch, dict]):
        def __init__(self, kind):
            super().__init__(batch_type=kind)

        def encode_batch(self, batch):
            return {"kind": type(batch).__name__, "text": batch.text}

    for kind, got in ((RawBatch, "RawBatch"), (Narrow, "TextSample")):
        encoder = Mine(kind)
        assert encoder.encode_batch(encoder.batch(texts("a"))) == {"kind": got, "text": ["a"]}


def test_encoded_sample_type():
    @dataclass
    class Short:
        text: str

    assert DefaultTaskEncoder(encoded_sample_type=Short).encode_sample(texts("a")[0]) == Short("a")
    with pytest.raises(ValueError, match="encoded_sample_type must be a class, but is 'Short'"):
        DefaultTaskEncoder(encoded_sample_type="Short")  # type: ignore[arg-type]


def test_an_encoder_need_not_call_super_init():
    class Careless(DefaultTaskEncoder):
        def __init__(self):
            pass

    assert Careless().batch(texts("a")).text == ["a"]
