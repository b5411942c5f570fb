"""Options of the functions that users begin with, and the steps of an encoder, each seen in what
comes out.
"""

from collections import Counter
from itertools import islice

import pytest

from megatron.blending import (
    DefaultTaskEncoder,
    MapDataset,
    SkipSample,
    WeightSchedule,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
    load_dataset,
)
from tests.unit_tests.blending.folders import write_jsonl, write_texts

V2 = "__class__: MetadatasetV2\nsplits:\n"


@pytest.fixture
def data(tmp_path):
    for name, count in (("a", 40), ("b", 16)):
        write_texts(tmp_path, name, count)
    return tmp_path


def take(dataset, count=1000):
    return list(
        islice(get_loader(dataset, WorkerConfig(rank=0, world_size=1, num_workers=0)), count)
    )


def blend(data, entries, kind="blend", split="train"):
    path = data / "m.yaml"
    path.write_text(V2 + f"  {split}:\n    {kind}: [{entries}]\n")
    return path


def names(samples):
    return Counter(sample.text[0] for sample in samples)


def test_one_epoch(data):
    """`repeat=False`: every sample once, of a blend too, where energon fails."""
    assert len(take(get_train_dataset(data / "a", repeat=False))) == 30
    path = blend(data, "{path: a, weight: 1}, {path: b, weight: 1}")
    samples = take(get_train_dataset(path, repeat=False))
    assert names(samples) == {"a": 30, "b": 12}
    assert names(samples[:24]) == {"a": 12, "b": 12}
    assert len({sample.text for sample in samples}) == 42


def test_random_proportions(data):
    path = blend(data, "{path: a, weight: 3}, {path: b, weight: 1}")
    counts = names(take(get_train_dataset(path, proportions="random"), 4000))
    assert 2850 < counts["a"] < 3150
    exact = take(get_train_dataset(path), 4000)
    assert all(abs(names(exact[:n])["a"] - 0.75 * n) < 1 for n in range(1, 4000, 97))


def test_a_source_of_weight_zero_is_not_read(data):
    path = blend(data, "{path: a, weight: 0}, {path: b, weight: 1}")
    assert names(take(get_train_dataset(path), 100)) == {"b": 100}


def test_validation_ignores_weights_and_repetitions(data):
    for kind, share in (("blend", "weight"), ("blend_epochized", "repetitions")):
        path = blend(data, f"{{path: a, {share}: 0}}, {{path: b, {share}: 3}}", kind, "val")
        assert [sample.text for sample in take(get_val_dataset(path))] == [
            f"a-{i}" for i in range(30, 40)
        ] + [f"b-{i}" for i in range(12, 16)]


def test_limit_counts_batches(data):
    assert [len(batch.text) for batch in take(get_val_dataset(data / "a", batch_size=4))] == [
        4,
        4,
        2,
    ]
    assert [
        len(batch.text) for batch in take(get_val_dataset(data / "a", batch_size=4, limit=2))
    ] == [4, 4]
    assert len(take(get_val_dataset(data / "a", batch_size=4, batch_drop_last=True))) == 2


def test_locality_keeps_every_sample_once(data):
    dataset = get_train_dataset(data / "a", shuffle_buffer_size=8, max_samples_per_sequence=4)
    texts = [sample.text for sample in take(dataset, 60)]
    assert sorted(texts[:30]) == sorted(texts[30:]) == sorted(f"a-{i}" for i in range(30))
    assert texts[:30] != texts[30:]


def test_weights_by_tokens_need_a_blend(data):
    path = blend(data, "{path: a}", "blend_epochized")
    with pytest.raises(ValueError, match=r"m\.yaml: weights_by='tokens' is for 'blend'"):
        get_train_dataset(path, weights_by="tokens")


def test_weights_by_tokens_name_a_source_without_any(data):
    write_jsonl(data / "x.jsonl", [{"n": 1}] * 3)

    class Fails(DefaultTaskEncoder):
        def encode_sample(self, sample):
            raise KeyError("tokens")

    path = blend(data, "{path: a}, {path: x.jsonl}")
    with pytest.raises(
        ValueError, match=r"m\.yaml:4: .*none of 30 probed samples has tokens; the last: KeyError"
    ):
        get_train_dataset(path, weights_by="tokens", task_encoder=Fails())


def test_samples_that_a_function_made_are_not_encoded_again(data):
    class Custom(DefaultTaskEncoder):
        def encode_sample(self, sample):
            return {"text": sample.text.upper()}

        def build_train_datasets(self, *, datasets, batch_size):
            dataset = MapDataset(datasets[0][0], map_fn=lambda sample: self.encode_sample(sample))
            return self.build_batch(dataset, batch_size=batch_size)

    assert (
        take(get_train_dataset(data / "a", batch_size=2, task_encoder=Custom()), 1)[0]["text"][0][0]
        == "A"
    )


def test_encode_sample_may_give_several(data):
    class Twice(DefaultTaskEncoder):
        def encode_sample(self, sample):
            for copy in range(2):
                yield {"text": f"{sample.text} {copy}"}

    samples = take(get_train_dataset(data / "a", task_encoder=Twice(), repeat=False))
    assert sorted(sample["text"] for sample in samples) == sorted(
        f"a-{i} {c}" for i in range(30) for c in range(2)
    )


def test_groups_share_a_batch(data):
    class Groups(DefaultTaskEncoder):
        def batch_group_criterion(self, sample):
            return len(sample.text), None

    batches = take(get_train_dataset(data / "a", batch_size=5, task_encoder=Groups()), 12)
    assert all(len(batch.text) == 5 and len(set(map(len, batch.text))) == 1 for batch in batches)


def test_post_encoding_without_packing(data):
    class Post(DefaultTaskEncoder):
        def preencode_sample(self, sample):
            return sample.text

        def postencode_sample(self, sample):
            return {"text": f"<{sample}>"}

    assert take(get_train_dataset(data / "a", task_encoder=Post()), 1)[0]["text"].startswith("<a-")


class Packs(DefaultTaskEncoder):
    """Packs of at most 12 characters; texts have 3 or 4."""

    capacity = 12

    def preencode_sample(self, sample):
        return sample.text

    def select_samples_to_pack(self, samples):
        packs: list[list[str]] = []
        pack: list[str] = []
        for sample in samples:
            if len(sample) > self.capacity:
                continue
            if len("".join(pack)) + len(sample) > self.capacity:
                packs.append(pack)
                pack = []
            pack.append(sample)
        return packs

    def pack_selected_samples(self, samples):
        return "+".join(samples)


def test_samples_that_are_not_chosen_are_offered_again(data):
    """energon drops them: with a buffer of 7 every second pack would lose its last samples."""
    packs = take(
        get_train_dataset(data / "a", packing_buffer_size=7, task_encoder=Packs(), repeat=False)
    )
    chosen = [text for pack in packs for text in pack.split("+")]
    assert len(chosen) == len(set(chosen)) >= 27
    assert all(len(pack.replace("+", "")) <= 12 for pack in packs)


def test_over_long_samples(data):
    class Small(Packs):
        capacity = 3
        over_long = "drop"

    packs = take(get_train_dataset(data / "a", packing_buffer_size=7, task_encoder=Small()), 40)
    assert set(packs) == {f"a-{i}" for i in range(10)}


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (2, 2), (3, 0)])
def test_a_metadataset_goes_on_with_other_ranks_and_workers(data, ranks, workers):
    """Cooked, encoded, packed and batched, with samples that are left out: the same packs, each
    once, saved in the middle of an epoch.
    """
    write_jsonl(data / "x.jsonl", [{"t": f"x-{i}"} for i in range(20)])
    entries = "{path: a, repetitions: 2}, {path: b}, {path: x.jsonl}"
    path = blend(data, entries, "blend_epochized")

    class Mixed(Packs):
        def preencode_sample(self, sample):
            text = sample.text if hasattr(sample, "text") else sample["json"]["t"]
            if text.endswith("3"):
                raise SkipSample
            return text

    def loader(rank, world_size, workers):
        config = WorkerConfig(rank, world_size, num_workers=workers)
        dataset = get_train_dataset(
            path,
            batch_size=2,
            packing_buffer_size=8,
            task_encoder=Mixed(),
            repeat=False,
        )
        return get_savable_loader(dataset, config)

    expected = [pack for batch in loader(0, 1, 0) for pack in batch]
    assert not any("3+" in pack or pack.endswith("3") for pack in expected)
    first = loader(0, 1, 0)
    batches = iter(first)
    found = [pack for batch in islice(batches, 9) for pack in batch]
    states = [first.state_dict()]
    for rank in range(ranks):
        with loader(rank, ranks, workers) as restored:
            restored.load_state_dict(states)
            found += [pack for batch in restored for pack in batch]
    assert len(expected) > 25
    assert sorted(found) == sorted(expected)


def test_what_a_hook_does_not_take_is_not_lost(data):
    """A signature without `packing_buffer_size` would train on single samples, and say nothing."""

    class Hooked(Packs):
        def build_train_datasets(self, *, datasets, batch_size):
            return self.build_batch(datasets[0][0], batch_size=batch_size)

    message = (
        r"packing_buffer_size is given, but .*Hooked\.build_train_datasets does not take it; add it"
    )
    with pytest.raises(ValueError, match=message):
        get_train_dataset(data / "a", packing_buffer_size=4, task_encoder=Hooked())
    schedule = WeightSchedule(points=((0, (1,)),))
    with pytest.raises(
        ValueError, match="weight_schedule is for a 'blend' of several sources; remove it"
    ):
        get_train_dataset(data / "a", weight_schedule=schedule)
    with pytest.raises(
        ValueError, match="option 'subflavors' is for a path; give it to load_dataset"
    ):
        get_train_dataset(load_dataset(data / "a"), subflavors={})
    with pytest.raises(ValueError, match="virtual_epoch_length must be at least 0, but is -1"):
        get_train_dataset(data / "a", virtual_epoch_length=-1)


def test_repetitions_that_come_to_nothing_are_named(data):
    """It was said of a RepeatDataset, in no file."""
    path = data / "few.yaml"
    path.write_text(
        "__class__: MetadatasetV2\nsplits:\n  train:\n    blend_epochized:\n      - {path: a, "
        "repetitions: 0.0001}\n"
    )
    told = (
        r"few\.yaml:5: splits\.train\.blend_epochized\[0\]: repetitions: 0\.0001 times "
        r"\d+ samples is none; raise it"
    )
    with pytest.raises(ValueError, match=told):
        get_train_dataset(path, batch_size=2)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"limit": "5"}, "limit must be a whole number, but is '5'"),
        ({"limit": True}, "limit must be a whole number, but is True"),
        ({"batch_drop_last": "no"}, "batch_drop_last must be True or False, but is 'no'"),
        ({"allow_code": "no"}, "allow_code must be True or False, but is 'no'"),
    ],
)
def test_options_of_other_types_are_refused(data, options, fault):
    """A text is true, whatever it says: batches would be dropped, or code run, for a "no"."""
    for get in (get_val_dataset, get_val_datasets):
        with pytest.raises(ValueError, match=fault):
            get(data / "a", batch_size=4, **options)
    if "limit" not in options:
        with pytest.raises(ValueError, match=fault):
            get_train_dataset(data / "a", batch_size=4, **options)
    with pytest.raises(ValueError, match="repeat must be True or False, but is 'no'"):
        get_train_dataset(data / "a", repeat="no")
