"""Samples that fail: left out, logged once, counted, and fatal when it is no longer a few."""

import itertools
import logging

import pytest

from megatron.blending import BatchDataset, BlendDataset, FilterDataset, MapDataset, PackingDataset
from megatron.blending.energon._loading.loader import get_loader
from megatron.blending.streams.failures import (
    Failure,
    FailureLog,
    Failures,
    FatalSampleError,
    SkipSample,
)
from megatron.blending.streams.seeding import stateless
from tests.unit_tests.blending.number_streams import config, endless, source_of
from tests.unit_tests.blending.trees import first_fit, is_odd


def fail_sevens(sample):
    if sample[1] % 7 == 0:
        raise ValueError("seven")
    return sample


def fail_all(sample):
    raise ValueError("all")


def test_logged_once_with_key_and_source(caplog):
    """In energon five batches with a third of the samples failing print 36 kB, the same ones again
    each epoch.
    """
    loader = get_loader(BatchDataset(MapDataset(endless("a", 20), fail_sevens), 4), config())
    with caplog.at_level(logging.WARNING):
        for _ in range(40):
            assert all(index % 7 for _, index in next(loader))
    lines = [record.getMessage() for record in caplog.records]
    assert sorted(line.split(":")[1] for line in lines) == ["0", "14", "7"]
    assert "fail_sevens: ValueError: seven [" in lines[0]
    assert "test_failures.py:" in lines[0]
    assert all("\n" not in line for line in lines)
    assert loader.num_failed > 20


def test_the_key_is_named(caplog):
    def load(record, key):
        return {"__key__": f"key {key[2]}"}

    def fail_first(sample):
        if sample["__key__"] == "key 0":
            raise KeyError("caption")
        return sample

    with caplog.at_level(logging.WARNING):
        assert (
            len(list(get_loader(MapDataset(source_of("a", 3, load=load), fail_first), config())))
            == 2
        )
    assert "a:0 (key key 0): " in caplog.text
    assert "KeyError: 'caption'" in caplog.text


@pytest.mark.slow
def test_few_lines_for_many_failures(caplog):
    loader = get_loader(source_of("a", 5000, bad=range(0, 5000, 2)), config(failure_tolerance=0))
    with caplog.at_level(logging.WARNING):
        assert len(list(loader)) == 2500
    assert loader.num_failed == 2500
    assert len(caplog.records) < 40


def test_the_log_is_of_different_samples(caplog):
    """Of several workers each tells of the sample that they share; a line says how many different
    ones there were.
    """
    log = FailureLog()
    with caplog.at_level(logging.WARNING):
        for number in [0, 0, *range(40), *range(40)]:
            log.add(Failure(3, f"a:{number}", f"a:{number}: bad"))
        log.add(Failure(4, "a:0", "a:0: bad elsewhere"))
    lines = [f"a:{number}: bad; left out, {number + 1} so far" for number in [*range(20), 31]]
    assert caplog.messages == lines


def test_what_is_remembered_is_bounded(caplog, monkeypatch):
    """A long run over data of which much fails would fill the memory."""
    monkeypatch.setattr("megatron.blending.streams.failures._REMEMBERED", 50)
    log = FailureLog()
    failures = Failures(0, None, log.add)
    with caplog.at_level(logging.WARNING):
        for number in range(5000):
            failures.leave_out(ValueError("bad"), 1, fail_all, f"a:{number}".__str__, None)
    assert (failures.num_failed, len(log._seen)) == (5000, 50)
    assert len(caplog.records) == 20 + 8


def test_a_row_of_failures_is_fatal():
    loader = get_loader(MapDataset(endless(), fail_all), config(failure_tolerance=10))
    with pytest.raises(
        FatalSampleError, match=r"a:\d+: fail_all: ValueError: all .*10 samples in a row failed"
    ):
        next(loader)
    records = get_loader(source_of("a", 100, bad=range(100)), config(failure_tolerance=10))
    with pytest.raises(FatalSampleError, match=r"RecordError: .* is bad"):
        next(records)


def test_single_failures_never_add_up():
    """1 in 7 fails: for ever, but never ten in a row."""
    loader = get_loader(MapDataset(endless("a", 50), fail_sevens), config(failure_tolerance=10))
    for _ in range(2000):
        next(loader)


def fail_always(sample):
    raise ValueError("always")


def test_a_function_may_say_its_own_tolerance():
    tolerant = stateless(failure_tolerance=3)(fail_always)
    with pytest.raises(FatalSampleError, match="3 samples in a row"):
        next(get_loader(MapDataset(endless(), tolerant), config(failure_tolerance=10)))


def test_mistakes_of_the_program_are_fatal_at_once():
    def mistake(sample):
        return undefined_name  # type: ignore[name-defined] # noqa: F821

    with pytest.raises(FatalSampleError, match="NameError: name 'undefined_name' is not defined"):
        next(get_loader(MapDataset(endless(), mistake), config()))


def test_skips_are_silent_and_counted(caplog):
    def skip(sample):
        if sample[1] % 2:
            raise SkipSample
        return sample

    loader = get_loader(
        FilterDataset(MapDataset(source_of("a", 20), skip), lambda sample: sample[1] % 4), config()
    )
    with caplog.at_level(logging.WARNING):
        assert len(list(loader)) == 5
    assert (loader.num_failed, loader.num_skipped, caplog.records) == (0, 15, [])


def test_nothing_passes(monkeypatch):
    """A filter that nothing passes would read for ever, without a word."""
    monkeypatch.setattr("megatron.blending.streams.failures._MAX_IN_SILENCE", 1000)
    with pytest.raises(
        FatalSampleError, match=r"nothing_passes left out 1,000 samples in a row, the last at a:\d+"
    ):
        next(get_loader(FilterDataset(endless(), nothing_passes), config()))


def nothing_passes(sample):
    return False


def test_an_own_handler():
    seen = []

    def handler(error, sample, sources):
        seen.append((str(error), sample, sources))

    loader = get_loader(
        MapDataset(source_of("a", 8), fail_sevens), config(global_error_handler=handler)
    )
    assert len(list(loader)) == 6
    assert sorted(seen) == [("seven", ("a", 0), None), ("seven", ("a", 7), None)]


def test_failures_of_batches_and_packs():
    """A batch that cannot be made costs its samples; the next ones make the next."""

    def batch(samples):
        if ("a", 3) in samples:
            raise ValueError("three")
        return samples

    loader = get_loader(BatchDataset(source_of("a", 12, shuffle=False), 2, batch), config())
    assert [samples[0][1] for samples in loader] == [0, 4, 6, 8, 10]
    assert loader.num_failed == 1

    packs = get_loader(
        PackingDataset(source_of("a", 40), 10, first_fit, batch, sample_encoder=fail_sevens),
        config(),
    )
    left = {index for pack in packs for _, index in pack}
    assert all(index % 7 for index in left)
    assert 3 not in left
    assert packs.num_failed == 7


@pytest.mark.parametrize("error", [StopIteration, ValueError])
def test_a_selection_that_fails_costs_its_buffer(error, caplog):
    """StopIteration ended the epoch in silence, anything else the run, where energon tolerates a
    hundred.
    """

    def select(samples):
        if ("a", 13) in samples:
            raise error("thirteen")
        return [samples]

    loader = get_loader(
        PackingDataset(source_of("a", 40, shuffle=False), 10, select, list), config()
    )
    with caplog.at_level(logging.WARNING):
        assert sorted(index for pack in loader for _, index in pack) == [*range(10), *range(20, 40)]
    assert loader.num_failed == 1
    assert (
        f"a:10: test_a_selection_that_fails_costs_its_buffer.<locals>.select: {error.__name__}: "
        "thir" in caplog.text
    )

    def select_nothing(samples):
        raise error("never")

    packs = get_loader(
        PackingDataset(endless(), 3, select_nothing, list), config(failure_tolerance=5)
    )
    with pytest.raises(FatalSampleError, match="5 samples in a row failed, the limit"):
        next(packs)


def test_a_filter_that_fails():
    def odd_but_seven(sample):
        if sample[1] == 7:
            raise ValueError("seven")
        return is_odd(sample)

    loader = get_loader(FilterDataset(source_of("a", 10), odd_but_seven), config())
    assert sorted(index for _, index in loader) == [1, 3, 5, 9]
    assert (loader.num_failed, loader.num_skipped) == (1, 5)


def fail_b(sample):
    if sample[0] == "b":
        raise ValueError("b")
    return sample


def fail_thirds_of_a(sample):
    if sample[0] == "a" and sample[1] % 3 == 0:
        raise ValueError("third")
    return sample


def fail_most_of_b(sample):
    if sample[0] == "b" and sample[1] % 10:
        raise ValueError("most of b")
    return sample


def blend_of(weight, **options):
    return BlendDataset((endless("a", 300), weight), (endless("b", 100), 1), **options)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_source_that_only_fails_is_fatal(batch_size):
    """What came of the other sources ended the row each time: a dead source went unnoticed, and its
    share to others.
    """
    tree = BatchDataset(MapDataset(blend_of(3), fail_b), batch_size)
    told = r"b:\d+: fail_b: ValueError: b .*; 5 samples in a row failed, the limit"
    with pytest.raises(FatalSampleError, match=told):
        list(itertools.islice(get_loader(tree, config(failure_tolerance=5)), 400))


@pytest.mark.parametrize("batch_size", [1, 8])
def test_other_sources_end_no_row_but_their_own(batch_size):
    """A rare source of which most fail."""
    tree = BatchDataset(MapDataset(blend_of(9), fail_most_of_b), batch_size)
    loader = get_loader(tree, config(failure_tolerance=95))
    seen = {sample for _ in range(3000 // batch_size) for sample in next(loader)}
    assert loader.num_failed > 95
    assert {index for name, index in seen if name == "b"} == set(range(0, 100, 10))


def test_a_source_that_only_fails_is_passed_over_where_nothing_is_fatal():
    loader = get_loader(MapDataset(blend_of(3), fail_b), config(failure_tolerance=0))
    assert {next(loader)[0] for _ in range(100)} == {"a"}


@pytest.mark.parametrize("skipped", ["a", "b"])
def test_an_endless_source_that_skips_shortens_no_batch(skipped):
    """A long row of samples that are skipped was taken for the end of the data: here about 1,000
    before each that is not, or all of a source of small weight.
    """

    def skip(sample):
        if sample[0] == skipped:
            raise SkipSample
        return sample

    blend = BlendDataset((endless("a", 300), 1), (endless("b", 100), 1e-3))
    loader = get_loader(BatchDataset(MapDataset(blend, skip), 4), config())
    batches = [next(loader) for _ in range(3 if skipped == "a" else 600)]
    assert {len(batch) for batch in batches} == {4}
    assert {name for batch in batches for name, _ in batch} == {"a", "b"} - {skipped}


def test_failures_of_finite_sources_leave_all_that_does_not_fail():
    tree = MapDataset(
        BlendDataset((source_of("a", 300), 1), (source_of("b", 20), 1)), fail_thirds_of_a
    )
    found = list(get_loader(tree, config()))
    assert sorted(found) == [("a", i) for i in range(300) if i % 3] + [("b", i) for i in range(20)]
