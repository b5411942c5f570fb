"""Encoders: what makes no pipeline is refused by name, and what marks and cookers ask for is
done."""

import random
from types import GeneratorType

import numpy as np
import pytest
import torch

from megatron.blending.energon._encoding.cooking import Cooker, choose_cook, cooker
from megatron.blending.energon._encoding.default_encoder import DefaultTaskEncoder
from megatron.blending.energon._encoding.samples import TextSample
from megatron.blending.energon._encoding.task_encoder import check_encoder
from megatron.blending.energon._loading.load import call_hook
from megatron.blending.streams.failures import failure_tolerance_of
from megatron.blending.streams.seeding import UserFunction, stateless


def test_misuse_is_named_before_anything_runs():
    class Both(DefaultTaskEncoder):
        encode_sample = preencode_sample = lambda self, sample: sample

    class Selects(DefaultTaskEncoder):
        def select_samples_to_pack(self, samples):
            return [samples]

    with pytest.raises(
        ValueError,
        match=r"^task_encoder must be an object, but is the class Both; pass an instance",
    ):
        check_encoder(Both)
    with pytest.raises(
        ValueError, match=r"^Both defines encode_sample and preencode_sample; keep one$"
    ):
        check_encoder(Both())
    with pytest.raises(
        ValueError, match=r"^task_encoder must be a TaskEncoder, but is a str; derive it from"
    ):
        check_encoder("x")
    with pytest.raises(
        ValueError,
        match=r"^packing_buffer_size is 8, but DefaultTaskEncoder has no select_samples_to",
    ):
        check_encoder(DefaultTaskEncoder(), 8)
    with pytest.raises(
        ValueError,
        match=r"^packing_buffer_size is 8, but Selects has no pack_selected_samples; def",
    ):
        check_encoder(Selects(), 8)
    check_encoder(Selects())


def test_hooks_get_what_they_take():
    def few(*, datasets, batch_size):
        return datasets, batch_size

    def all_of_them(**kwargs):
        return kwargs

    def unknown(*, datasets, colour):
        return colour

    assert call_hook(few, datasets=1, batch_size=2, worker_config=3) == (1, 2)
    assert call_hook(all_of_them, datasets=1, batch_size=2) == {"datasets": 1, "batch_size": 2}
    with pytest.raises(
        ValueError, match=r"unknown asks for 'colour', which is none of datasets, batch_size$"
    ):
        call_hook(unknown, datasets=1, batch_size=2)


def test_stateless_marks():
    @stateless
    def plain(sample):
        return sample

    class Mine:
        @stateless(restore_seeds=True, failure_tolerance=3)
        def encode(self, sample):
            return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert not UserFunction(plain).is_seeded
    assert failure_tolerance_of(Mine().encode) == 3
    assert failure_tolerance_of(plain) is None
    encode = UserFunction(Mine().encode)
    first, again, other = (
        encode(TextSample(__key__="k", __restore_key__=("x", n), text=""), 0) for n in (1, 1, 2)
    )
    assert first == again
    assert all(a != b for a, b in zip(first, other))


def test_seeds_of_a_generator_function():
    """The body runs after the call: it would draw from the generators of whoever takes its
    values."""

    @stateless(restore_seeds=True)
    def draw(sample):
        first = random.random()
        for _ in range(2):
            yield first, random.random(), float(np.random.rand()), float(torch.rand(()))

    def drawn(restore_key):
        values = UserFunction(draw)(
            TextSample(__key__="k", __restore_key__=restore_key, text=""), 0
        )
        assert type(values) is GeneratorType  # what streams know as several outputs
        found = []
        for value in values:
            found.append(value)
            random.random(), np.random.rand(), torch.rand(())
        return found

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = [random.random() for _ in range(3)][2]
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    found = drawn(("x", 1))
    assert random.random() == expected  # the two draws here, and none of those in there
    assert len({value for values in found for value in values}) == 7
    assert drawn(("x", 1)) == found
    assert all(a != b for pair, other in zip(found, drawn(("x", 2))) for a, b in zip(pair, other))


def test_seeds_do_not_leak():
    """The user's own random numbers must not depend on how many samples were encoded in between."""

    @stateless(restore_seeds=True)
    def draw(sample):
        return random.random()

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    UserFunction(draw)(TextSample(__key__="0", text="a"), 0)
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
        ValueError,
        match=r"^m\.yaml:3: no cooker is for its subflavors {'kind': 'x'}; .* {'kind': 'ocr',",
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
