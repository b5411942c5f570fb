"""Users of energon change the import line and nothing else: each name at each place, and what was
wrong behind them.
"""

import hashlib
import importlib
import pickle
import re
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random, random

import pytest

from megatron.blending import energon
from megatron.blending.energon import (
    AugmentTaskEncoder,
    BaseWebdatasetFactory,
    Batch,
    BatchDataset,
    CrudeJsonlDatasetFactory,
    DefaultTaskEncoder,
    FilterDataset,
    PackingDataset,
    RepeatDataset,
    Sample,
    SkipSample,
    TaskEncoder,
    TextSample,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    prepare_metadataset,
    stateless,
    traverse_metadataset,
)
from tests.unit_tests.blending.folders import (
    TEXT,
    write_folder,
    write_jsonl,
    write_tar,
    write_texts,
)

DOCS = Path(__file__).resolve().parents[4] / "docs" / "coming-from" / "energon.md"


@pytest.fixture
def data(tmp_path):
    for name in "ab":
        write_texts(tmp_path, name, 40)
    return tmp_path


def take(dataset, count=1000, **config):
    with get_loader(
        dataset, WorkerConfig(**{"rank": 0, "world_size": 1, "num_workers": 0, **config})
    ) as loader:
        return list(islice(loader, count))


# Names and places.


def test_docs_say_of_each_name_what_became_of_it():
    """The table is made of the names that the module has, so that neither can change alone."""
    rows = [f"| `{name}` | {state} | {how} |" for name, (state, how) in energon.NAMES.items()]
    modules, names = DOCS.read_text().split("| name | here |")
    assert [line for line in names.splitlines() if line.startswith("| `")] == rows
    absent = re.findall(r"^\| (`.*`) \|", modules, re.MULTILINE)
    assert absent[:2] == ["`media`", "`transforms`"]
    for name in ", ".join(absent).split(", "):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"megatron.blending.energon.{name.strip('`')}")
    assert Counter(state for state, _ in energon.NAMES.values()).keys() == {
        "same",
        "differs",
        "absent",
    }


@pytest.mark.parametrize("name", energon.NAMES)
def test_names(name):
    state, how = energon.NAMES[name]
    assert (state == "same") == (how == "")
    if state != "absent":
        assert getattr(energon, name) is not None
        return
    with pytest.raises(ImportError, match=f"energon's {name} is not here: "):
        exec(f"from megatron.blending.energon import {name}")


@pytest.mark.parametrize(
    "line",
    [
        "from megatron.blending.energon.task_encoder.base import stateless, TaskEncoder",
        "from megatron.blending.energon.flavors import CaptioningSample",
        "from megatron.blending.energon.flavors.base_dataset import Sample, SavableDataset",
        "from megatron.blending.energon.wrappers.map_dataset import MapDataset",
        "from megatron.blending.energon.edataclass import edataclass",
        "from megatron.blending.energon.metadataset.loader_interface import DatasetBlendMode, "
        "LoadedDataset",
        "from megatron.blending.energon.savable_loader import SavableDataLoader",
        "from megatron.blending.energon.errors import FatalSampleError, SkipSample",
        "import megatron.blending.energon.task_encoder.cooking as c; c.Cooker",
        "from megatron.blending.energon import wrappers; wrappers.BlendDataset",
        "from megatron.blending.energon.epathlib.epath import EPath",
        "from megatron.blending.energon.epathlib import EPath",
        "from megatron.blending.energon.flavors.webdataset import DefaultDecoderWebdatasetFactory",
        "from megatron.blending.energon import *; VQASample",
    ],
)
def test_places(line):
    exec(line)


def test_a_place_that_is_not_there():
    with pytest.raises(ModuleNotFoundError, match=r"energon\.rng"):
        importlib.import_module("megatron.blending.energon.rng")
    with pytest.raises(ImportError, match="cannot import name 'TaskEncode'"):
        exec("from megatron.blending.energon.task_encoder import TaskEncode")


# Classes of users.


def test_fields_that_are_declared_anew():
    """A plain dataclass took the parent's defaults for its own, and refused the fields behind
    them."""

    @dataclass
    class TaskSample(Sample):
        __key__: str
        __restore_key__: tuple
        __subflavors__: dict
        tokens: list

    @dataclass
    class TaskBatch(Batch):
        __key__: list
        __restore_key__: tuple
        __subflavors__: list
        tokens: list

    sample = TaskSample("k", (), {"a": 1}, [1, 2])
    assert (sample.__key__, sample.__subflavors__, sample.__sources__, sample.tokens) == (
        "k",
        {"a": 1},
        None,
        [1, 2],
    )
    made = TaskBatch.from_samples([sample, sample])
    assert (made.__key__, made.tokens) == (["k", "k"], [[1, 2], [1, 2]])
    assert Sample(__key__="x").__restore_key__ == ()


def test_samples_of_a_join_are_put_together():
    first, second = TextSample(__key__="k", text="t"), Sample(__key__="other")

    class Both(TextSample):
        pass

    made = Both.from_joined(first, None, second)
    assert (type(made), made.__key__, made.text) == (Both, "k", "t")


class Packs(DefaultTaskEncoder):
    def select_samples_to_pack(self, samples):
        kept = [sample for sample in samples if not sample.text.endswith("7")]
        return [kept[at : at + 3] for at in range(0, len(kept), 3)]

    def pack_selected_samples(self, samples):
        return TextSample(
            __key__="pack", __restore_key__=(), text="+".join(sample.text for sample in samples)
        )

    def encode_batch(self, batch):
        return {"texts": batch.text, "__restore_key__": batch.__restore_key__}


def test_samples_in_no_pack_are_dropped_and_counted(data, caplog):
    """It was fatal, where energon's users leave out on purpose what they do not want."""
    dataset = get_val_dataset(
        data / "a", split_part="train", packing_buffer_size=10, task_encoder=Packs()
    )
    loader = get_loader(dataset, WorkerConfig(rank=0, world_size=1))
    texts = [text for pack in loader for text in pack.text.split("+")]
    assert sorted(texts) == sorted(f"a-{i}" for i in range(30) if i % 10 != 7)
    assert loader.num_skipped == 3
    assert "select_samples_to_pack does not choose this sample; left out, 3 so far" in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
def test_outputs_are_made_again_from_their_keys(data, workers):
    """Keys of packs were empty, and there was no `restore_sample`."""
    write_folder(data / "c", {"s.tar": [(f"c{i}", {"txt": b"c-%d" % i}) for i in range(9)]})
    (data / "m.yaml").write_text(
        "__class__: MetadatasetV2\nsplits:\n  train:\n    blend: [{path: a}, {path: b, weight: 2}, "
        "{path: c}]\n"
    )
    for options in ({"batch_size": 2, "packing_buffer_size": 10}, {"packing_buffer_size": 10}):
        dataset = get_train_dataset(data / "m.yaml", task_encoder=Packs(), **options)
        with get_loader(dataset, WorkerConfig(rank=0, world_size=1, num_workers=workers)) as loader:
            for made in islice(loader, 20):
                if "batch_size" in options:
                    assert loader.restore_sample(made["__restore_key__"]) == made
                else:
                    assert vars(loader.restore_sample(made.__restore_key__)) == vars(made)
    assert loader.can_restore_sample()
    for key in ((), ("0", 1), (("0", 0, "x"),), None, ("9", 0, 10**9)):
        with pytest.raises(ValueError, match=r"no __restore_key__ of this stream|index must be in"):
            loader.restore_sample(key)


def test_what_generators_give_is_made_again_if_it_is_one(data):
    class Yields(DefaultTaskEncoder):
        def encode_sample(self, sample):
            yield from [sample] * (2 if sample.text == "a-3" else 1)

    loader = get_loader(get_val_dataset(data / "a", split_part="train", task_encoder=Yields()))
    samples = list(loader)
    assert vars(loader.restore_sample(samples[2].__restore_key__)) == vars(samples[2])
    with pytest.raises(ValueError, match="2 outputs were made of one; its key does not say which"):
        loader.restore_sample(samples[3].__restore_key__)


def test_a_pack_says_all_that_it_is_made_of():
    """A pack that is derived from its first sample had that one's key alone."""
    from tests.unit_tests.blending.number_streams import endless

    keyed = energon.MapDataset(
        endless("a", 9), lambda one: Sample(__key__=str(one[1]), __restore_key__=("", 0, one[1]))
    )
    packs = PackingDataset(
        keyed, 4, lambda samples: [samples], lambda samples: Sample.derive_from(samples[0])
    )
    assert all(
        len(pack.__restore_key__) == 4 for pack in islice(get_loader(packs, WorkerConfig()), 5)
    )


def test_an_encoder_that_augments_another(data):
    class Inner(Packs):
        decoder = None

        def encode_sample(self, sample):
            raise NotImplementedError

    class Outer(AugmentTaskEncoder):
        def encode_sample(self, sample):
            return TextSample.derive_from(sample, text=sample.text.decode().upper())

        def pack_selected_samples(self, samples):
            pack = super().pack_selected_samples(samples)
            pack.text = f"<{pack.text}>"
            return pack

    class Again(AugmentTaskEncoder):
        pass

    dataset = get_train_dataset(
        data / "a", packing_buffer_size=10, task_encoder=Again(Outer(Inner()))
    )
    for pack in take(dataset, 5):
        assert pack.text.startswith("<A-")

    class Draws(DefaultTaskEncoder):
        @stateless(restore_seeds=True)
        def encode_sample(self, sample):
            return {"key": sample.__key__, "drawn": random()}

    first, second = (
        take(get_train_dataset(data / "a", task_encoder=Again(Draws())), 9) for _ in range(2)
    )
    assert first == second
    assert len({sample["drawn"] for sample in first}) == 9
    assert not Again(DefaultTaskEncoder()).uses("postencode_sample")
    with pytest.raises(ValueError, match="task_encoder must be an object, but is the class Inner"):
        AugmentTaskEncoder(Inner)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
def test_indices(data, workers):
    class Numbered(DefaultTaskEncoder):
        @stateless(restore_seeds=True)
        def encode_sample(self, sample):
            return {"at": self.current_sample_index, "key": sample.__restore_key__}

        def encode_batch(self, batch):
            return {**batch, "number": self.current_batch_index}

    dataset = get_train_dataset(data / "a", batch_size=2, task_encoder=Numbered())
    batches = take(dataset, 6, rank=1, world_size=3, num_workers=workers)
    assert [batch["number"] for batch in batches] == list(range(6))
    assert all(batch["at"] == [key[1] for key in batch["key"]] for batch in batches)
    with pytest.raises(
        RuntimeError, match="current_sample_index is known in methods with @stateless"
    ):
        _ = Numbered().current_sample_index


# Options.


def test_options_that_say_what_has_no_effect(data):
    with pytest.warns(UserWarning, match="WorkerConfig: worker_debug_path has no effect"):
        config = WorkerConfig(
            rank=0,
            world_size=1,
            num_workers=0,
            worker_debug_path="x",
            worker_log_level=0,
            restore_error_handler=None,
        )
    with pytest.warns(UserWarning, match="handler has no effect"):
        dataset = get_train_dataset(data / "a", batch_size=2, worker_config=config, handler=print)
    assert len(next(iter(get_loader(dataset))).text) == 2
    with pytest.warns(
        UserWarning, match=r"sample_type has no effect; dataset\.yaml says what samples are"
    ):
        get_train_dataset(data / "a", batch_size=2, sample_type=energon.TextSample)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_train_dataset(data / "a", batch_size=2, image_decode="rgb")


def test_fields_of_samples_may_be_lazy():
    """As cookers annotate media that postencode_sample reads."""

    @energon.edataclass
    class Joined(energon.Sample):
        text: energon.Lazy[str]  # type: ignore[valid-type]  # found by __getattr__

    assert Joined.__annotations__ == {"text": energon.Lazy[str]}


def test_decoding_by_options(data):
    """A misspelt one is still refused, and one that contradicts the encoder's own."""
    assert take(get_train_dataset(data / "a", auto_decode=False), 1)[0].text[:2] == b"a-"
    assert (
        take(get_val_dataset(data / "a", image_decode="pil", av_decode="torch"), 1)[0].text[:2]
        == "a-"
    )
    with pytest.raises(
        ValueError, match="unknown option 'image_decod'; did you mean 'image_decode'"
    ):
        get_train_dataset(data / "a", image_decod="pil")
    with pytest.raises(ValueError, match="image_decode must be one of"):
        get_train_dataset(data / "a", image_decode="pill8")
    with pytest.raises(ValueError, match="image_decode is given, but Bytes has a decoder"):
        get_train_dataset(
            data / "a",
            image_decode="pil",
            task_encoder=type("Bytes", (Packs,), {"decoder": None})(),
        )


class OwnError(Exception):
    def __init__(self, first, second):
        super().__init__(first, second)


class Unsendable(Exception):
    def __init__(self, only, key):
        super().__init__(only)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("made", "caught"),
    [(lambda: OwnError("a", "b"), OwnError), (lambda: StopIteration("x"), RuntimeError)],
)
def test_what_a_handler_raises_is_what_the_loop_gets(data, workers, made, caught):
    """With workers it was a RuntimeError, so that `except OwnError` of a training loop never met
    it.
    """

    def handler(error, sample, sources):
        assert (type(error), sample.text[:2]) == (KeyError, "a-")
        assert sources[0].dataset_path.endswith("/a")
        raise made()

    class Fails(DefaultTaskEncoder):
        def encode_sample(self, sample):
            raise KeyError("bad")

    if caught is RuntimeError and not workers:
        return  # which without workers is an exhausted iterator, as anywhere in Python
    with pytest.raises(caught) as found:
        take(
            get_train_dataset(data / "a", task_encoder=Fails()),
            num_workers=workers,
            global_error_handler=handler,
        )
    if workers:
        assert "worker 0 of rank 0" in str(found.value.__cause__ or found.value)


def test_an_error_that_cannot_be_sent(data):
    def handler(error, sample, sources):
        raise Unsendable("only", key=1)

    class Fails(DefaultTaskEncoder):
        def encode_sample(self, sample):
            raise KeyError("bad")

    dataset = get_train_dataset(data / "a", task_encoder=Fails())
    with pytest.raises(RuntimeError, match="Unsendable: only"):
        take(dataset, num_workers=1, global_error_handler=handler)
    with pytest.raises(KeyError, match="bad"):
        take(dataset, global_error_handler=energon.reraise_exception)


# What data says, and what is saved of it.


def test_multipliers_make_no_pass_longer(data):
    """`len` was tripled, one of two sources of an epoch read three times, and so was all of a
    validation.
    """
    (data / "m.yaml").write_text(
        "__class__: MetadatasetV2\nsplits:\n"
        "  train:\n    blend_epochized: [{path: a, shuffle_over_epochs_multiplier: 3}, {path: b}]\n"
        "  val: {path: a, shuffle_over_epochs_multiplier: 3}\n"
    )
    assert len(get_loader(get_train_dataset(data / "a", shuffle_over_epochs_multiplier=3))) == 30
    read = Counter(
        sample.text[0] for sample in take(get_train_dataset(data / "m.yaml", repeat=False))
    )
    assert read == {"a": 30, "b": 30}
    assert [sample.text for sample in take(get_val_dataset(data / "m.yaml"))] == [
        f"a-{i}" for i in range(30, 40)
    ]
    three = take(get_train_dataset(data / "a", shuffle_over_epochs_multiplier=3), 90)
    assert set(Counter(sample.text for sample in three).values()) == {3}


@pytest.mark.slow
def test_weights_by_tokens_hold_for_archives(tmp_path):
    """By the mean of 64 samples alone, few long ones among many short led shares of a half to
    0.62."""
    random = Random(3)
    for name, sizes in {
        "u": [100] * 500,
        "v": [int(random.paretovariate(1.1) * 50) for _ in range(500)],
    }.items():
        samples = [(f"{name}{i}", {"txt": b"x" * size}) for i, size in enumerate(sizes)]
        write_folder(
            tmp_path / name,
            {"s.tar": samples[:100], "t.tar": samples[100:350], "w.tar": samples[350:]},
        )
    (tmp_path / "m.yaml").write_text(
        "__class__: MetadatasetV2\nsplits:\n  train:\n    blend: [{path: u}, {path: v}]\n"
    )

    class Texts(DefaultTaskEncoder):
        def num_tokens(self, sample):
            return len(sample.text)

    tokens: Counter[str] = Counter()
    for sample in take(
        get_train_dataset(tmp_path / "m.yaml", weights_by="tokens", task_encoder=Texts()), 20_000
    ):
        tokens[sample.__key__[0]] += len(sample.text)
    assert abs(tokens["u"] / tokens.total() - 0.5) < 0.02


def test_bytes_of_parts_of_an_archive(tmp_path):
    from megatron.blending.formats.prepared.webdataset import open_webdataset

    samples = [(f"k{i}", {"txt": b"x" * (700 * i)}) for i in range(7)]
    write_folder(tmp_path, {"s.tar": samples[:3], "t.tar": samples[3:5], "u.tar": samples[5:]})
    source = open_webdataset(str(tmp_path), split_part="train")
    each = [source.num_bytes(range(at, at + 1)) or 0 for at in range(7)]
    assert each == [512 * (1 + -(-700 * i // 512)) for i in range(7)]
    assert all(
        source.num_bytes(range(a, b)) == sum(each[a:b]) for a in range(8) for b in range(a, 8)
    )


@pytest.mark.parametrize("change", ["text: json,txt", "text: txt\npart_filter: [txt]"])
def test_what_dataset_yaml_says_is_part_of_the_state(data, change):
    """A changed field map went on in silence, with other samples."""
    loader = get_savable_loader(get_train_dataset(data / "a"))
    next(loader)
    state = loader.state_dict()
    loader.load_state_dict(state)
    other = TEXT.replace("text: txt", change)
    (data / "a/.nv-meta/dataset.yaml").write_text(other)
    with pytest.raises(
        ValueError, match=r"the data of '.*/a train' changed; or what its dataset\.yaml says"
    ):
        get_savable_loader(get_train_dataset(data / "a")).load_state_dict(state)


def test_split_config_in_dataset_yaml(data):
    meta = data / "a/.nv-meta"
    (meta / "dataset.yaml").write_text(TEXT + "split_config: mine.yaml\n")
    (meta / "split.yaml").rename(meta / "mine.yaml")
    assert len(get_train_dataset(data / "a")) == 30
    (meta / "dataset.yaml").write_text(TEXT + "split_config: 3\n")
    with pytest.raises(ValueError, match=r"dataset\.yaml:\d+: split_config"):
        get_train_dataset(data / "a")


def test_folders_are_prepared_as_users_do(tmp_path):
    for number in range(4):
        write_tar(
            tmp_path / f"parts/data-{number}.tar",
            [(f"{number}-{i}", {"txt": b"t", "cls": b"1"}) for i in (1, 2)],
        )
    parts = BaseWebdatasetFactory.prepare_dataset(
        tmp_path,
        ["parts/data-{0..2}.tar"],
        split_parts_ratio=[("big", 2), ("small", 1)],
        shuffle_seed=None,
        workers=1,
    )
    assert parts == {"txt", "cls"}
    (tmp_path / ".nv-meta/dataset.yaml").write_text(TEXT)
    assert [len(get_val_dataset(tmp_path, split_part=part)) for part in ("big", "small")] == [4, 2]
    path = write_jsonl(tmp_path / "x.jsonl", [{"a": 1}] * 3)
    assert CrudeJsonlDatasetFactory.prepare_dataset(path) == 3
    assert len(get_train_dataset(path)) == 3
    with pytest.raises(ValueError, match="fix_duplicates is not supported"):
        BaseWebdatasetFactory.prepare_dataset(tmp_path, ["parts/data-0.tar"], fix_duplicates=True)
    with pytest.raises(TypeError, match="TextWebdataset is not made by hand here"):
        energon.TextWebdataset(tmp_path)


def test_sources_of_a_metadataset(data):
    (data / "inner.yaml").write_text(
        "__class__: MetadatasetV2\nsplits:\n  train:\n    blend: [{path: a, subflavors: {x: 1}}, "
        "{path: b}]\n"
    )
    path = data / "m.yaml"
    path.write_text(
        "__class__: MetadatasetV2\nsplits:\n  train: {path: inner.yaml, subflavors: {y: 2}}\n"
    )
    found = traverse_metadataset(path, split_part="train")
    assert [(Path(one.path).name, one.split_part, dict(one.subflavors)) for one in found] == [
        ("a", "train", {"x": 1, "y": 2}),
        ("b", "train", {"y": 2}),
    ]
    prepare_metadataset(path)
    path.write_text("__class__: MetadatasetV2\nsplits:\n  val: {path: gone}\n")
    with pytest.raises(ValueError, match=r"m\.yaml:3"):
        prepare_metadataset(path)


def test_states_of_all_ranks_without_torch_distributed(data):
    dataset = get_train_dataset(data / "a")
    alone = get_savable_loader(dataset, WorkerConfig(rank=0, world_size=1))
    next(alone)
    saved = alone.save_state_global(0)
    again = get_savable_loader(dataset, WorkerConfig(rank=0, world_size=1))
    again.restore_state_global(saved)
    assert next(again).text == next(alone).text
    with pytest.raises(
        ValueError,
        match=r"save_state_global gathers states of 2 ranks over torch\.distributed, which is",
    ):
        get_savable_loader(dataset, WorkerConfig(rank=0, world_size=2)).save_state_global(0)
    with pytest.raises(ValueError, match="restore_state_global takes the list"):
        again.restore_state_global(saved[0])


def test_what_shares_are_of(data):
    """docs/coming-from/energon.md says it: shares are of samples read; what an encoder skips is
    not made up for by its source.
    """
    (data / "m.yaml").write_text(
        "__class__: MetadatasetV2\nsplits:\n  train:\n    blend: [{path: a}, {path: b}]\n"
    )

    class Skips(DefaultTaskEncoder):
        def encode_sample(self, sample):
            if sample.text.startswith("b") and int(sample.text[2:]) % 2:
                raise SkipSample
            return sample

    read = Counter(
        sample.text[0]
        for sample in take(get_train_dataset(data / "m.yaml", task_encoder=Skips()), 3000)
    )
    assert abs(read["b"] / read.total() - 1 / 3) < 0.01


def test_caches_and_stores(tmp_path):
    """A cooker that is asked for a cache got one without `to_cache`; what it gives goes through
    workers.
    """
    (tmp_path / "a.txt").write_bytes(b"bytes")
    cache, store = (
        energon.FileStoreCachePool(parent_cache_dir=tmp_path),
        energon.SystemFileStore(tmp_path),
    )
    assert cache.get(store, "a.txt") == cache.get_lazy(store, "a.txt").get() == b"bytes"
    kept = pickle.loads(pickle.dumps(cache.to_cache([1, 2], "name")))
    assert (kept.fname, kept.get()) == ("name", [1, 2])
    assert energon.MockLazy("n", str.upper).get() == "N"
    cache.close()


def test_arguments_as_energon_takes_them(data):
    from megatron.blending.energon import (
        EpochizeDataset,
        GroupBatchDataset,
        MapDataset,
        ShuffleBufferDataset,
    )

    source, config = get_val_dataset(data / "a"), WorkerConfig(rank=0, world_size=1)
    made = RepeatDataset(source, repeats=2, worker_config=config)
    made = FilterDataset(made, filter_fn=bool, filter_fn_config={}, worker_config=config)
    made = MapDataset(
        made,
        len_of,
        stateless_map_fn=True,
        map_fn_config={},
        failure_tolerance=3,
        worker_config=config,
    )
    made = ShuffleBufferDataset(made, size=4, worker_config=config)
    packs = {"final_packer_stateless": True, "sample_encoder_stateless": True, "packer_config": {}}
    tolerances = {"pre_packer_failure_tolerance": 1, "final_packer_failure_tolerance": 1}
    made = PackingDataset(
        made, 4, lambda held: [held], sum, worker_config=config, **packs, **tolerances
    )
    made = GroupBatchDataset(
        made, 2, lambda one: (one, None), list, batcher_stateless=True, worker_config=config
    )
    made = EpochizeDataset(made, 10**6, config)
    made = BatchDataset(made, batch_size=1, batcher=list, batcher_config={}, worker_config=config)
    batches = islice(get_loader(made, worker_config=config), 100)
    assert {length for batch in batches for group in batch for length in group} == {16}


def len_of(sample: TextSample) -> int:
    return len(sample.text)


def test_star_imports_no_torch():
    """A script that prepares data waited for it for seconds."""
    code = "import sys; from megatron.blending.energon import *; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


class Notes(TaskEncoder):
    """Notes in each sample where it was encoded."""

    def encode_sample(self, sample):
        active = WorkerConfig.active_worker_config
        return {
            "__key__": sample.__key__,
            "worker": active.rank_worker_id(),
            "of_all": active.global_worker_id(),
            "seed": active.worker_seed(),
            "global_rank": active.global_rank(),
        }

    def batch(self, samples):
        return samples


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "start_method"), [(0, None), (2, "fork"), (2, "spawn")])
def test_workers_know_who_they_are(data, num_workers, start_method):
    """energon's methods of a WorkerConfig, which encoders call to draw numbers of their own."""
    config = WorkerConfig(
        rank=1, world_size=2, num_workers=num_workers, seed_offset=3, start_method=start_method
    )
    dataset = get_train_dataset(
        data / "a", batch_size=1, task_encoder=Notes(), worker_config=config
    )
    with get_loader(dataset, config) as loader:
        found = [one for (one,) in islice(loader, 6)]
    workers = sorted({one["worker"] for one in found})
    assert workers == list(range(max(1, num_workers)))
    for one in found:
        worker = one["worker"]
        assert one["of_all"] == num_workers + worker
        assert one["seed"] == config.worker_seed(worker)
        assert one["global_rank"] == 1
    # Literally energon's: the last four bytes of the SHA-1 of "worker,offset".
    of_first = hashlib.sha1(f"{num_workers or 1},3".encode()).digest()
    assert config.worker_seed(0) == int.from_bytes(of_first, "big") & 0xFFFFFFFF
    assert not config.should_log(1)


def test_active_worker_config_is_set_and_taken_back():
    config = WorkerConfig(rank=0, world_size=1)
    config.worker_activate(sample_index=5)
    assert WorkerConfig.active_worker_config is config
    config.assert_worker()
    config.worker_deactivate()
    assert WorkerConfig.active_worker_config is None


def test_wrappers_are_told_from_sources(data):
    """Code that walks through a tree asks so; what runs over an iterator has a way out."""
    from megatron.blending.energon.wrappers.base import BaseWrapperDataset

    dataset = get_train_dataset(data / "a", batch_size=2, worker_config=WorkerConfig())
    assert isinstance(dataset, BaseWrapperDataset)
    assert not isinstance(5, BaseWrapperDataset)

    class Own(BaseWrapperDataset[int]):
        pass

    with pytest.raises(TypeError, match=r"Own runs over an iterator, .* use MapDataset"):
        Own(dataset, worker_config=WorkerConfig())
