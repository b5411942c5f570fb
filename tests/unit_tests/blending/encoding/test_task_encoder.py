"""Encoders: only what is overridden runs, and what makes no pipeline is refused by name."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from megatron.blending.encoding.cooking import Cooker, choose_cook, cooker
from megatron.blending.encoding.samples import Batch, TextSample, edataclass
from megatron.blending.encoding.seeding import failure_tolerance_of, stateless, with_seeds
from megatron.blending.encoding.task_encoder import DefaultTaskEncoder, TaskEncoder, check_encoder
from megatron.blending.loading.load import call_hook
from megatron.blending.streams.failures import FatalSampleError

STEPS = ["encode_sample", "preencode_sample", "postencode_sample", "batch", "encode_batch", "batch_group_criterion"]


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

    assert [step for step in STEPS if More().uses(step)] == ["encode_sample", "batch", "encode_batch"]
    on_object = default()
    on_object.postencode_sample = lambda sample: sample
    assert on_object.uses("postencode_sample")
    assert DefaultTaskEncoder(encoded_sample_type=dict).uses("encode_sample")
    assert not DefaultTaskEncoder(batch_type=RawBatch).uses("encode_batch")
    assert DefaultTaskEncoder(raw_batch_type=RawBatch, batch_type=dict).uses("encode_batch")


def test_batch_without_types_is_of_the_samples_type():
    batch = DefaultTaskEncoder().batch(texts("a", "b"))
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
    with pytest.raises(FatalSampleError, match=r"Narrow has a field 'tokens' that TextSample lacks; its fields are"):
        DefaultTaskEncoder(batch_type=Narrow).batch(texts("a"))


def test_batch_type_beside_encode_batch():
    """`batch_type=RawBatch` with an `encode_batch` of one's own: it gets the raw batch, if that has room for all."""

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
        DefaultTaskEncoder(encoded_sample_type="Short")


def test_misuse_is_named_before_anything_runs():
    class Both(DefaultTaskEncoder):
        encode_sample = preencode_sample = lambda self, sample: sample

    class Selects(DefaultTaskEncoder):
        def select_samples_to_pack(self, samples):
            return [samples]

    with pytest.raises(ValueError, match=r"^task_encoder must be an object, but is the class Both; pass an instance"):
        check_encoder(Both)
    with pytest.raises(ValueError, match=r"^Both defines encode_sample and preencode_sample; keep one$"):
        check_encoder(Both())
    with pytest.raises(ValueError, match=r"^task_encoder must be a TaskEncoder, but is a str; derive it from"):
        check_encoder("x")
    with pytest.raises(ValueError, match=r"^packing_buffer_size is 8, but DefaultTaskEncoder has no select_samples_to"):
        check_encoder(DefaultTaskEncoder(), 8)
    with pytest.raises(ValueError, match=r"^packing_buffer_size is 8, but Selects has no pack_selected_samples; def"):
        check_encoder(Selects(), 8)
    check_encoder(Selects())


def test_an_encoder_need_not_call_super_init():
    class Careless(DefaultTaskEncoder):
        def __init__(self):
            pass

    assert Careless().batch(texts("a")).text == ["a"]


def test_hooks_get_what_they_take():
    def few(*, datasets, batch_size):
        return datasets, batch_size

    def all_of_them(**kwargs):
        return kwargs

    def unknown(*, datasets, colour):
        return colour

    assert call_hook(few, datasets=1, batch_size=2, worker_config=3) == (1, 2)
    assert call_hook(all_of_them, datasets=1, batch_size=2) == {"datasets": 1, "batch_size": 2}
    with pytest.raises(ValueError, match=r"unknown asks for 'colour', which is none of datasets, batch_size$"):
        call_hook(unknown, datasets=1, batch_size=2)


def test_stateless_marks():
    @stateless
    def plain(sample):
        return sample

    class Mine:
        @stateless(restore_seeds=True, failure_tolerance=3)
        def encode(self, sample):
            return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert with_seeds(plain) is plain
    assert failure_tolerance_of(Mine().encode) == 3
    assert failure_tolerance_of(plain) is None
    encode = with_seeds(Mine().encode)
    first, again, other = (encode(TextSample(__key__="k", __restore_key__=("x", n), text="")) for n in (1, 1, 2))
    assert first == again
    assert all(a != b for a, b in zip(first, other))


def test_seeds_do_not_leak():
    """The user's own random numbers must not depend on how many samples were encoded in between."""

    @stateless(restore_seeds=True)
    def draw(sample):
        return random.random()

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    with_seeds(draw)(texts("a")[0])
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


def test_the_first_matching_cooker_cooks():
    cookers = [
        Cooker(lambda sample: "ocr", has_subflavors={"kind": "ocr", "n": 1}),
        Cooker(lambda sample, **stores: stores, has_subflavors={"kind": "vqa"}),
        Cooker(lambda sample: "any"),
    ]

    def cooked(subflavors, cookers=cookers):
        return choose_cook(cookers, subflavors, {"images": "store"}, None, "m.yaml:3")

    assert cooked({"kind": "vqa", "more": 2})({}) == {"images": "store"}
    assert cooked({}, []) is None
    with pytest.raises(
        ValueError, match=r"^m\.yaml:3: no cooker is for its subflavors {'kind': 'x'}; .* {'kind': 'ocr',"
    ):
        cooked({"kind": "x"}, cookers[:2])
    with pytest.raises(ValueError, match=r"has_subflavors must be a dict, but is 'ocr'"):
        Cooker(print, has_subflavors="ocr")  # type: ignore[arg-type]


def test_cookers_may_ask_for_cache_and_primary():
    class Store:
        def get(self, name, sample=None):
            return 7, sample

    @cooker(need_cache=True, need_primary=True)
    def with_all(sample, cache, primary):
        return cache, primary

    cook = choose_cook([Cooker(with_all)], {}, {}, Store(), "")
    assert cook is not None
    cache, primary = cook({})
    assert cache.get(primary, "k") == (7, None)
    assert cache.get_lazy(primary, "k").get("sample") == (7, "sample")
