"""Samples and batches: the fields that energon's users name, in classes that they derive."""

import pickle
from dataclasses import dataclass

import pytest
import torch

from megatron.blending.energon._encoding.samples import (
    Batch,
    CaptioningSample,
    CrudeSample,
    Sample,
    SourceInfo,
    TextSample,
    VQASample,
    basic_sample_keys,
    edataclass,
)
from megatron.blending.energon._encoding.source_info import Sources


def caption(key, width, text):
    return CaptioningSample(
        __key__=key, __restore_key__=("c", 1), image=torch.ones(3, width), caption=text
    )


@dataclass
class RawBatch(Batch):
    image: torch.Tensor
    caption: list[str]
    weight: float = 1.0


def test_from_samples_stacks():
    """In energon 7.4.1 `Batch.from_samples` leaves the tensors a list."""
    batch = RawBatch.from_samples([caption("a", 2, "x"), caption("b", 4, "y")])
    assert batch.image.shape == (2, 3, 4)
    assert batch.image[0, 0].tolist() == [1, 1, 0, 0]
    assert (batch.caption, batch.weight) == (["x", "y"], 1.0)
    assert (batch.__key__, batch.__restore_key__) == (["a", "b"], (("c", 1), ("c", 1)))
    assert batch.__subflavors__ is None


def test_from_samples_takes_fields_as_given():
    batch = RawBatch.from_samples([caption("a", 2, "x")], image=5, weight=2)
    assert (batch.image, batch.weight, batch.caption) == (5, 2, ["x"])


def test_from_samples_names_the_field_that_is_missing():
    @edataclass
    class Wrong(Batch):
        images: torch.Tensor

    message = r"Wrong has a field 'images' that CaptioningSample lacks; did you mean 'image'\?"
    with pytest.raises(ValueError, match=message):
        Wrong.from_samples([caption("a", 2, "x")])


def test_users_derive_samples_by_either_decorator():
    @dataclass
    class Plain(Sample):
        tokens: list[int]

    @edataclass
    class Ours(CaptioningSample):
        weight: float = 1.0

    assert Plain([1], __key__="a").tokens == [1]
    assert Ours(__key__="a", image=torch.ones(1), caption="x").weight == 1.0


def test_derive_from():
    base = TextSample(__key__="k", __restore_key__=("t", 3), __subflavors__={"a": 1}, text="t")
    made = VQASample.derive_from(base, image=None, context="q")
    assert (made.__key__, made.__restore_key__, made.__subflavors__) == ("k", ("t", 3), {"a": 1})
    crude = CrudeSample({"__key__": "k", "json": {}, "__restore_key__": (1,)})
    assert basic_sample_keys(crude) == {"__key__": "k", "__restore_key__": (1,)}
    assert TextSample.extend(base, text="u").text == "u"
    assert Batch.derive_from(Batch.from_samples([base, base])).__key__ == ["k", "k"]


def test_sources_are_gathered():
    samples = [
        TextSample(__key__="k", text="", __sources__=(SourceInfo("p", i, "s"),)) for i in range(2)
    ]
    assert [source.index for source in Batch.from_samples(samples).__sources__ or ()] == [0, 1]


@pytest.mark.parametrize(
    "sources", [(), (SourceInfo("p", 0, "s"), SourceInfo("q", "k", "t", ("f",))), ("not ours",)]
)
def test_sources_of_a_batch_are_sent_as_they_are(sources):
    """A worker sends them by columns."""
    sent = pickle.loads(pickle.dumps(Sources(sources)))
    assert type(sent) is Sources
    assert sent == sources


def test_to_device_keeps_the_type():
    moved = RawBatch.from_samples([caption("a", 2, "x")]).to_device("cpu")
    assert type(moved) is RawBatch
    assert moved.caption == ["x"]
