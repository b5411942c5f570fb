"""The uses that energon's users know, as they write them, apart from the import line."""

import pickle
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron import blending
from megatron.blending import (
    Batch,
    BatchDataset,
    BlendDataset,
    CaptioningSample,
    ConcatDataset,
    Cooker,
    CrudeSample,
    DatasetLoader,
    DatasetLoaderInterface,
    DefaultTaskEncoder,
    EpochizeDataset,
    FilterDataset,
    ImageSample,
    LimitDataset,
    MapDataset,
    Metadataset,
    MetadatasetV2,
    MixBatchDataset,
    RepeatDataset,
    Sample,
    SavableDataset,
    ShuffleBufferDataset,
    SkipSample,
    TaskEncoder,
    TextSample,
    VQASample,
    WeightSchedule,
    WorkerConfig,
    basic_sample_keys,
    concat_pad,
    edataclass,
    generic_concat,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
    homogeneous_concat_mix,
    load_dataset,
    stateless,
)
from megatron.blending.streams.choice import BLEND_MODES
from tests.unit_tests.blending.energon.test_source_entries import to_pth
from tests.unit_tests.blending.folders import CAPTION, write_folder, write_jsonl, write_texts

V2 = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n"


class T(DefaultTaskEncoder):
    """An encoder that changes nothing, as in the first example of every tutorial."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for name in "abc":
        write_texts(root, name, 400, f"subflavors: {{name: {name}, level: data}}\n")
    for name, width in (("im2", 2), ("im3", 3)):
        samples = [
            (
                f"{name}_{i}",
                {
                    "pth": to_pth(torch.full((1, width), i)),
                    "json": b'{"caption": "%s %d"}' % (name.encode(), i),
                },
            )
            for i in range(40)
        ]
        write_folder(root / name, {"s.tar": samples}, CAPTION, train=["s.tar"], val=["s.tar"])
    write_jsonl(root / "lines.jsonl", [{"q": f"q{i}"} for i in range(30)])
    return root


def metadataset(data, tmp_path, text):
    path = tmp_path / "m.yaml"
    path.write_text(text.replace("@", str(data) + "/"))
    return path


def take(dataset, count):
    return list(
        islice(get_loader(dataset, WorkerConfig(rank=0, world_size=1, num_workers=0)), count)
    )


def sources(batch):
    return {key.split("_")[0] for key in batch.__key__}


def test_names_are_there():
    assert all(
        [
            BatchDataset,
            ConcatDataset,
            CrudeSample,
            DatasetLoaderInterface,
            FilterDataset,
            ImageSample,
            LimitDataset,
        ]
    )
    assert all(
        [RepeatDataset, Sample, ShuffleBufferDataset, TaskEncoder, VQASample, generic_concat]
    )


def test_blend_of_batches(data):
    """Full batches of one data set each, weights normalised."""
    ds1 = get_train_dataset(
        data / "a",
        batch_size=32,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        task_encoder=T(),
    )
    ds2 = get_train_dataset(
        data / "b",
        batch_size=32,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        task_encoder=T(),
    )
    blend = BlendDataset((ds1, 0.6), (ds2, 0.4))
    assert isinstance(blend, SavableDataset)
    batches = list(islice(get_loader(blend), 50))
    assert all(len(batch.text) == 32 and len(sources(batch)) == 1 for batch in batches)
    assert Counter(name for batch in batches for name in sources(batch)) == {"a": 30, "b": 20}
    assert type(batches[0]) is TextSample
    again = list(islice(get_loader(BlendDataset(((ds1, 6), (ds2, 4)))), 50))
    assert [batch.text for batch in again] == [batch.text for batch in batches]


def test_concat_for_validation(data):
    """In order, unshuffled, once."""
    val = ConcatDataset(
        get_val_dataset(data / "a", batch_size=30), get_val_dataset(data / "b", batch_size=30)
    )
    batches = take(val, 100)
    assert [len(batch.text) for batch in batches] == [30, 30, 30, 10, 30, 30, 30, 10]
    assert [text for batch in batches for text in batch.text] == [
        f"{n}-{i}" for n in "ab" for i in range(300, 400)
    ]


def test_mix_batch(data):
    """Inside of each batch six of one and four of the other, and captions as lists of the parts."""
    ds1 = get_train_dataset(data / "im2", batch_size=1)
    ds2 = get_train_dataset(data / "im3", batch_size=1)
    mix = MixBatchDataset((ds1, 6), (ds2, 4), batch_size=30, batch_mix_fn=homogeneous_concat_mix)
    batches = take(mix, 4)
    assert [batch.image.shape for batch in batches] == [(30, 1, 3)] * 4
    assert [len(batch.caption) for batch in batches] == [30] * 4
    counts = Counter(caption[0].split()[0] for batch in batches for caption in batch.caption)
    assert counts == {"im2": 72, "im3": 48}
    assert (
        take(MixBatchDataset(((ds1, 6), (ds2, 4)), batch_size=30), 1)[0][0]
        .caption[0]
        .startswith("im")
    )


def test_mix_of_different_types(data):
    """A user's own function, with concat_pad, for batches of unlike types."""

    def mix(samples):
        images = [sample.image for sample in samples if isinstance(sample, CaptioningSample)]
        texts = [
            text for sample in samples if isinstance(sample, TextSample) for text in sample.text
        ]
        return {"images": concat_pad(images), "texts": texts}

    ds = MixBatchDataset(
        (get_train_dataset(data / "im2", batch_size=1), 1),
        (get_train_dataset(data / "im3", batch_size=1), 1),
        (get_train_dataset(data / "a", batch_size=1), 2),
        batch_size=16,
        batch_mix_fn=mix,
    )
    batch = take(ds, 1)[0]
    assert batch["images"].shape == (8, 1, 3)
    assert len(batch["texts"]) == 8


def test_epochize_and_map(data):
    mix = BlendDataset(
        (get_train_dataset(data / "a", batch_size=4), 1),
        (get_train_dataset(data / "b", batch_size=4), 1),
    )
    mapped = MapDataset(mix, map_fn=lambda batch: len(batch.text))
    loader = get_loader(
        EpochizeDataset(mapped, length=5), WorkerConfig(rank=0, world_size=1, num_workers=0)
    )
    assert [list(loader), list(loader)] == [[4] * 5, [4] * 5]
    val = get_val_dataset(data / "a", batch_size=25)
    loader = get_loader(
        EpochizeDataset(val, num_epochs=10), WorkerConfig(rank=0, world_size=1, num_workers=0)
    )
    assert len(list(loader)) == 40


@edataclass
class RawBatch(Batch):
    image: torch.Tensor
    caption: list[str]
    weight: torch.Tensor


@edataclass
class WeightedCaption(CaptioningSample):
    weight: torch.Tensor


class CaptioningEncoder(DefaultTaskEncoder[CaptioningSample, WeightedCaption, RawBatch, dict]):
    """Sample weights are carried to the loss."""

    def __init__(self):
        super().__init__(batch_type=RawBatch)

    @stateless(restore_seeds=True)
    def encode_sample(self, sample):
        weight = torch.tensor(float(sample.caption.split()[1]))
        return WeightedCaption(
            **basic_sample_keys(sample), image=sample.image, caption=sample.caption, weight=weight
        )

    def encode_batch(self, batch):
        assert type(batch) is RawBatch
        return {
            "loss": (batch.image.float().mean((1, 2)) * batch.weight).sum(),
            "n": len(batch.caption),
        }


def test_task_encoder(data):
    batch = take(
        get_train_dataset(data / "im2", batch_size=40, task_encoder=CaptioningEncoder()), 1
    )[0]
    assert batch == {"loss": sum(i * i for i in range(40)), "n": 40}


def test_simple_metadataset(data, tmp_path):
    path = metadataset(
        data,
        tmp_path,
        V2 + "  train: {path: @a}\n  val: {path: @a}\n  test: {path: @a, split_part: val}\n",
    )
    texts = [batch.text for batch in take(get_train_dataset(path, batch_size=30), 10)]
    assert sorted(text for batch in texts for text in batch) == sorted(f"a-{i}" for i in range(300))
    assert len(take(get_val_dataset(path, batch_size=10), 100)) == 10
    assert len(take(get_val_dataset(path, split_part="test", batch_size=10), 100)) == 10


ADVANCED = (
    V2
    + """
  train:
    blend:
      - weight: 5
        path: @a
        subflavors: {level: here, more: 1}
      - weight: 2
        path: inner.yaml
        split_part: val
        subflavors: {level: outer}
      - path: @c
        subflavor: old
  val:
    blend:
      - {path: @b, weight: 9}
      - {path: @a, weight: 1}
"""
)


def test_advanced_metadataset(data, tmp_path):
    """Train blends sample by sample by weight; val and test are read one after the other, whatever
    the weights.
    """
    inner = (
        V2 + "  val:\n    blend:\n      - {path: @b, weight: 3, split_part: train}\n      - {path: "
        "@a, weight: 1}\n"
    )
    (tmp_path / "inner.yaml").write_text(inner.replace("@", str(data) + "/"))
    path = metadataset(data, tmp_path, ADVANCED)
    batches = take(get_train_dataset(path, batch_size=32), 32)
    keys = Counter(
        (k.split("_")[0], f["level"]) for b in batches for k, f in zip(b.__key__, b.__subflavors__)
    )
    assert keys == {("a", "here"): 640, ("b", "outer"): 192, ("a", "outer"): 64, ("c", "data"): 128}
    assert {
        f["name"]
        for batch in batches
        for f in batch.__subflavors__
        if f.get("__subflavor__") == "old"
    } == {"c"}
    val = [text for batch in take(get_val_dataset(path, batch_size=32), 100) for text in batch.text]
    assert val == [f"{name}-{i}" for name in "ba" for i in range(300, 400)]


def test_blend_epochized(data, tmp_path):
    """Each source so many times per epoch, exactly."""
    text = V2 + (
        "  train:\n    blend_epochized:\n      - {path: @a, repetitions: 2}\n      - {path: @b, "
        "repetitions: 0.5}\n"
        "      - {path: @c, subset: {range: ['0%', '10%']}}\n"
    )
    path = metadataset(data, tmp_path, text)
    once = take(get_train_dataset(path, repeat=False), 10_000)
    counts = Counter(Counter(sample.__key__ for sample in once).values())
    assert counts == {2: 300, 1: 150 + 30}
    batches = take(get_train_dataset(path, batch_size=78), 20)
    for epoch in (batches[:10], batches[10:]):
        keys = [key for batch in epoch for key in batch.__key__]
        assert Counter(key.split("_")[0] for key in keys) == {"a": 600, "b": 150, "c": 30}
        assert {Counter(keys)[f"a_{i:04d}"] for i in range(300)} == {2}


def test_shuffle_over_epochs_multiplier(data, tmp_path):
    path = metadataset(
        data, tmp_path, V2 + "  train: {path: @a, shuffle_over_epochs_multiplier: 3}\n"
    )
    texts = [sample.text for sample in take(get_train_dataset(path), 900)]
    assert set(Counter(texts).values()) == {3}
    assert set(Counter(texts[:300]).values()) != {1}
    path = metadataset(
        data, tmp_path, V2 + "  train: {path: @a, shuffle_over_epochs_multiplier: null}\n"
    )
    assert [s.text for s in take(get_train_dataset(path), 301)] == [
        f"a-{i}" for i in range(300)
    ] + ["a-0"]


def test_first_form(data, tmp_path):
    text = (
        "__module__: megatron.energon\n__class__: Metadataset\nsplits:\n  train:\n    datasets:\n"
    )
    text += "      - {path: @a, weight: 3, subflavor: x}\n      - {path: @b, weight: 1}\n"
    path = metadataset(data, tmp_path, text)
    samples = take(get_train_dataset(path), 400)
    assert Counter(sample.__key__[0] for sample in samples) == {"a": 300, "b": 100}
    assert {s.__subflavors__.get("__subflavor__") for s in samples} == {"x", None}


def test_dataset_config_and_split_config(data, tmp_path):
    folder = write_texts(tmp_path, "d", 8)
    meta = folder / ".nv-meta"
    (meta / "images.yaml").write_text(
        (meta / "dataset.yaml").read_text().replace("Text", "Image").replace("text:", "image:")
    )
    (meta / "other.yaml").write_text(
        "split_parts: {train: [shards/s_2.tar]}\nexclude: [shards/s_2.tar/d_0006]\n"
    )
    text = (
        V2 + f"  train: {{path: {folder}, dataset_config: images.yaml, split_config: other.yaml}}\n"
    )
    sample = take(get_train_dataset(metadataset(data, tmp_path, text)), 1)[0]
    assert (type(sample), sample.image) == (ImageSample, "d-7")
    sample = take(
        get_train_dataset(folder, dataset_config="images.yaml", split_config="other.yaml"), 1
    )[0]
    assert (type(sample), sample.image) == (ImageSample, "d-7")


def test_hook_of_the_training_blend(data, tmp_path):
    """It is called with what its signature takes; `datasets` unpack; `self.build_batch` is
    there."""
    text = (
        V2 + "  train:\n    blend:\n      - {path: @a, weight: 3}\n      - {path: @b, weight: 1}\n"
    )
    seen = {}

    class Custom(DefaultTaskEncoder):
        def encode_sample(self, sample):
            return TextSample(**basic_sample_keys(sample), text=sample.text.upper())

        def build_train_datasets(
            self,
            *,
            datasets,
            worker_config,
            batch_size,
            batch_drop_last=False,
            virtual_epoch_length=0,
        ):
            seen["weights"] = [float(weight) for _, weight in datasets]
            dataset = BlendDataset(
                *[(dataset, weight) for dataset, weight in datasets], worker_config=worker_config
            )
            dataset = self.build_batch(
                dataset,
                batch_size=batch_size,
                batch_drop_last=batch_drop_last,
                worker_config=worker_config,
            )
            if virtual_epoch_length > 0:
                dataset = EpochizeDataset(
                    dataset, length=virtual_epoch_length, worker_config=worker_config
                )
            return dataset

    path = metadataset(data, tmp_path, text)
    dataset = get_train_dataset(path, batch_size=8, virtual_epoch_length=3, task_encoder=Custom())
    batches = list(get_loader(dataset, WorkerConfig(rank=0, world_size=1, num_workers=0)))
    assert seen["weights"] == [0.75, 0.25]
    assert Counter(text[0] for batch in batches for text in batch.text) == {"A": 18, "B": 6}
    assert len(batches) == 3


def test_a_dataset_iterates_without_worker_config(data):
    for number, batch in enumerate(get_train_dataset(data / "a", batch_size=8)):
        assert len(batch.text) == 8
        if number == 3:
            break


def test_worker_config_everywhere(data):
    worker_config = WorkerConfig(rank=1, world_size=2, num_workers=0)
    ds = get_train_dataset(
        data / "a",
        split_part="train",
        worker_config=worker_config,
        batch_size=8,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        parallel_shard_iters=4,
        virtual_epoch_length=4,
    )
    mine = [batch.text for batch in get_loader(ds)]
    assert len(mine) == 4
    first = WorkerConfig(rank=0, world_size=2, num_workers=0)
    others = [
        batch.text
        for batch in get_loader(
            get_train_dataset(data / "a", batch_size=8, virtual_epoch_length=4), first
        )
    ]
    texts = [text for batch in mine + others for text in batch]
    assert len(set(texts)) == 64


def test_savable_loader(data, tmp_path):
    path = metadataset(
        data,
        tmp_path,
        V2 + "  train:\n    blend: [{path: @a, weight: 2}, {path: @im2}, {path: @c}]\n",
    )
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)

    def loader():
        return get_savable_loader(
            get_train_dataset(path, worker_config=config, task_encoder=Keys())
        )

    class Keys(DefaultTaskEncoder):
        def encode_sample(self, sample):
            return sample.__key__

    first = loader()
    iterator = iter(first)
    _ = list(islice(iterator, 37))
    state = first.save_state_rank()
    expected = list(islice(iterator, 50))
    second = loader()
    second.restore_state_rank(state)
    assert list(islice(iter(second), 50)) == expected


class PackingEncoder(DefaultTaskEncoder):
    def preencode_sample(self, sample):
        return sample.text

    def select_samples_to_pack(self, samples):
        return [samples[i : i + 4] for i in range(0, len(samples), 4)]

    @stateless
    def pack_selected_samples(self, samples):
        return "+".join(samples)


def test_packing(data):
    dataset = get_train_dataset(
        data / "a", packing_buffer_size=8, batch_size=2, task_encoder=PackingEncoder()
    )
    batch = take(dataset, 1)[0]
    assert [len(pack.split("+")) for pack in batch] == [4, 4]


def test_cookers_of_jsonl(data, tmp_path):
    class Cooks(DefaultTaskEncoder):
        cookers = [  # noqa: RUF012
            Cooker(
                lambda crude: TextSample(**basic_sample_keys(crude), text=crude["json"]["q"]),
                {"kind": "q"},
            )
        ]

    text = (
        V2 + "  train: {path: @lines.jsonl, subflavors: {kind: q}}\n  val: {path: @lines.jsonl}\n"
    )
    path = metadataset(data, tmp_path, text)
    texts = [
        text
        for batch in take(get_train_dataset(path, batch_size=10, task_encoder=Cooks()), 3)
        for text in batch.text
    ]
    assert sorted(texts) == sorted(f"q{i}" for i in range(30))
    with pytest.raises(
        ValueError, match=r"m\.yaml:5: splits\.val: no cooker is for its subflavors {}"
    ):
        get_val_dataset(path, batch_size=10, task_encoder=Cooks())
    crude = take(get_train_dataset(data / "lines.jsonl", subflavors={"kind": "q"}), 1)[0]
    assert isinstance(crude, CrudeSample)
    assert crude["__subflavors__"] == {"kind": "q"}


def test_skip_sample(data):
    class Skips(DefaultTaskEncoder):
        def encode_sample(self, sample):
            if sample.text.endswith("7"):
                raise SkipSample
            return sample

    batches = take(get_train_dataset(data / "a", batch_size=10, task_encoder=Skips()), 30)
    assert all(len(batch.text) == 10 for batch in batches)
    assert not any(text.endswith("7") for batch in batches for text in batch.text)


def test_val_datasets_one_by_one(data, tmp_path):
    path = metadataset(data, tmp_path, V2 + "  val: {blend: [{path: @a}, {path: @b}]}\n")
    streams = get_val_datasets(path, batch_size=50, limit=1)
    assert [take(stream, 9)[0].text[0] for stream, _ in streams] == ["a-300", "b-300"]
    assert [len(take(stream, 9)) for stream, _ in streams] == [1, 1]
    assert [len(source) for _, source in streams] == [100, 100]


def test_load_dataset(data, tmp_path):
    path = metadataset(
        data, tmp_path, V2 + "  train:\n    blend: [{path: @a, weight: 3}, {path: @b}]\n"
    )
    loader = load_dataset(path)
    assert isinstance(loader, MetadatasetV2)
    datasets, mode = loader.get_datasets(training=True, split_part="train")
    assert mode == "dataset_weight"
    assert [weight for _, weight in datasets] == [0.75, 0.25]
    assert len(take(get_train_dataset(loader, batch_size=4), 3)) == 3
    assert isinstance(load_dataset(data / "a"), DatasetLoader)
    given = Metadataset(
        tmp_path / "x.yaml", {"train": {"datasets": [{"path": str(data / "a"), "weight": 2}]}}
    )
    assert len(take(get_train_dataset(given, batch_size=4), 3)) == 3
    given = MetadatasetV2(path=tmp_path / "x.yaml", splits={"train": {"path": str(data / "a")}})
    assert take(get_train_dataset(given), 1)[0].text.startswith("a-")


def test_weights_by_tokens_and_schedules(data, tmp_path):
    write_jsonl(tmp_path / "long.jsonl", [{"t": "x" * 300}] * 50)
    write_jsonl(tmp_path / "short.jsonl", [{"t": "y" * 100}] * 50)

    class Counts(DefaultTaskEncoder):
        def encode_sample(self, sample):
            return {"tokens": sample["json"]["t"]}

    path = metadataset(
        data, tmp_path, V2 + "  train:\n    blend: [{path: long.jsonl}, {path: short.jsonl}]\n"
    )
    samples = take(get_train_dataset(path, task_encoder=Counts(), weights_by="tokens"), 400)
    assert Counter(sample["tokens"][0] for sample in samples) == {"x": 100, "y": 300}
    schedule = WeightSchedule(points=((0, (1, 0)), (10, (0, 1))), outputs_per_step=10)
    samples = take(get_train_dataset(path, task_encoder=Counts(), weight_schedule=schedule), 200)
    assert [sample["tokens"][0] for sample in samples] == ["x"] * 100 + ["y"] * 100
    # 300 and 100 tokens: 5 and 1 shares of tokens are 5 and 3 of samples, then only the second.
    schedule = WeightSchedule(points=((0, (5, 1)), (3, (0, 1))), outputs_per_step=7)
    given = get_train_dataset(
        path, task_encoder=Counts(), weights_by="tokens", weight_schedule=schedule
    )
    texts = [sample["tokens"][0] for sample in take(given, 60)]
    assert texts[:21].count("x") in (13, 14)
    assert set(texts[21:]) == {"y"}
    with pytest.raises(ValueError, match=r"DefaultTaskEncoder must define num_tokens"):
        get_train_dataset(path, weights_by="tokens")


def test_weights_by_tokens_of_lengths_that_differ_wildly(tmp_path):
    """The mean of 64 of such lengths is a third off; the bytes of all records, which the index has,
    mend that.
    """
    even, wild = (
        np.full(2000, 400),
        np.random.default_rng(5).lognormal(5, 1.5, 2000).astype(int) + 1,
    )
    for name, lengths in (("even", even), ("wild", wild)):
        write_jsonl(
            tmp_path / f"{name}.jsonl",
            [{"name": name, "tokens": [7] * length} for length in lengths.tolist()],
        )

    class Counts(DefaultTaskEncoder):
        def num_tokens(self, sample):
            return len(sample["json"]["tokens"])

    text = (
        V2 + "  train:\n    blend: [{path: even.jsonl}, {path: wild.jsonl, subset: {range: [10%, "
        "100%]}}]\n"
    )
    path = metadataset(tmp_path, tmp_path, text)
    counts: Counter[str] = Counter()
    for sample in take(
        get_train_dataset(path, batch_size=None, task_encoder=Counts(), weights_by="tokens"), 8000
    ):
        counts[sample["json"]["name"]] += len(sample["json"]["tokens"])
    assert 0.47 < counts["wild"] / counts.total() < 0.53


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, but is 0"),
        (
            {"task_encoder": T},
            "task_encoder must be an object, but is the class T; pass an instance of it",
        ),
        (
            {"packing_buffer_size": 8},
            "packing_buffer_size is 8, but DefaultTaskEncoder has no select_samples_to_pack",
        ),
        ({"split_part": "trian"}, "split_parts has no 'trian'; did you mean 'train'?"),
        ({"dataset_confg": "x"}, "unknown option 'dataset_confg'; did you mean 'dataset_config'?"),
        ({"bacth_size": 4}, "unknown option 'bacth_size'; did you mean 'batch_size'?"),
        ({"split_part": None}, "split_part must be the name of a split, but is None"),
        ({"subflavors": 3}, "subflavors must be a dict of names and values, but is 3"),
        ({"weight_schedule": 5}, "weight_schedule must be a WeightSchedule, but is 5"),
        (
            {"worker_config": 4},
            "worker_config must be a WorkerConfig, but is 4; write WorkerConfig(num_workers=...)",
        ),
        (
            {"proportions": "even"},
            f"proportions must be one of {', '.join(BLEND_MODES)}, but is 'even'",
        ),
        ({"weights_by": "words"}, "weights_by must be one of samples, tokens, but is 'words'"),
        ({"max_samples_per_sequence": 1.5}, "max_samples_per_sequence must be a whole number"),
    ],
)
def test_misuse_raises_at_construction(data, options, fault):
    """One line that names what is wrong, before the first sample is read."""
    with pytest.raises(ValueError, match=r".") as error:
        get_train_dataset(data / "a", **options)
    assert fault in str(error.value)
    assert "\n" not in str(error.value)


def test_arguments_of_another_type_are_named(data):
    """They were taken as they are, or ended in an AttributeError of some line within."""
    dataset = get_train_dataset(data / "a", batch_size=2)
    for call, fault in (
        (lambda: get_loader(dataset, 4), "worker_config must be a WorkerConfig, but is 4"),
        (lambda: WorkerConfig(num_workers=2.5), "num_workers must be a whole number, but is 2.5"),
        (lambda: WorkerConfig(seed="x"), "seed must be a whole number, but is 'x'"),
        (
            lambda: WorkerConfig(slow_worker_seconds=0),
            "slow_worker_seconds must be a number above 0, but is 0",
        ),
        (lambda: EpochizeDataset(dataset, length=2.5), "length must be a whole number, but is 2.5"),
        (lambda: LimitDataset(dataset, "3"), "length must be a whole number, but is '3'"),
        (
            lambda: RepeatDataset(dataset, "3"),
            "repeats must be above 0, or None for ever, but is '3'",
        ),
        (
            lambda: BlendDataset((dataset, 1), schedule=5),
            "schedule of a blend must be a WeightSchedule, but is 5",
        ),
        (
            lambda: get_savable_loader(dataset).load_state_dict(None),
            "load_state_dict takes what state_dict",
        ),
    ):
        with pytest.raises(ValueError, match=r".") as error:
            call()
        assert fault in str(error.value)


def test_paths_that_are_not_there(data):
    with pytest.raises(ValueError, match=r"/aa: no such file or folder; did you mean 'a'\?"):
        get_train_dataset(data / "aa", batch_size=3)
    with pytest.raises(
        ValueError, match=r"is not prepared; run python -m megatron\.blending prepare"
    ):
        get_train_dataset(data, batch_size=3)
    with pytest.raises(
        ValueError, match="path must be a path or what load_dataset returns, but is 3"
    ):
        get_train_dataset(3)


def test_no_public_name_is_that_of_a_module():
    """Importing the module would put it in the place of the function: `from megatron.blending
    import ...` gets it.
    """
    package = Path(blending.__file__).parent
    assert not {path.stem for path in package.glob("*.py")} & set(blending.__all__)


def test_the_package_is_cheap_to_import():
    """Loader workers, reports and command lines import it; torch takes seconds."""
    code = (
        "import sys, megatron.blending as b; b.get_train_dataset; b.DefaultTaskEncoder; "
        "b.BlendDataset; b.TextSample\n"
        "assert dir(b)\nprint([m for m in ('torch', 'pyarrow', 'fsspec') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="has no attribute 'get_trian_dataset'"):
        blending.get_trian_dataset  # noqa: B018


def test_datasets_travel_to_workers(data, tmp_path):
    """What spawned workers get is pickled: encoders, sources, decoders and all."""
    text = (
        V2 + "  train:\n    blend: [{path: @im2}, {path: @im3, subset: {range: [3, 9]}}, {path: "
        "@lines.jsonl}]\n"
    )
    path = metadataset(data, tmp_path, text)
    dataset = get_train_dataset(
        path, batch_size=4, task_encoder=PackingEncoder(), packing_buffer_size=8
    )
    assert len(pickle.dumps(dataset)) < 20_000
    dataset = get_train_dataset(data / "im2", batch_size=40, task_encoder=CaptioningEncoder())
    assert take(pickle.loads(pickle.dumps(dataset)), 1) == take(dataset, 1)
