"""From records to samples: the class that dataset.yaml names, cookers, parts of sources, stores,
joins.
"""

import dataclasses
import io
import json
import pickle
from typing import Any

import pytest
import torch

from megatron.blending.energon._encoding.cooking import Cooker, cooker
from megatron.blending.energon._encoding.decode import SampleDecoder
from megatron.blending.energon._encoding.default_encoder import DefaultTaskEncoder
from megatron.blending.energon._encoding.file_store import open_store
from megatron.blending.energon._encoding.samples import (
    CaptioningSample,
    CrudeSample,
    TextSample,
    VQASample,
    basic_sample_keys,
)
from megatron.blending.energon._encoding.source_entries import ReadSettings, open_samples
from megatron.blending.formats.prepared.webdataset import WebDataset
from megatron.blending.loading.sources import split_names
from megatron.blending.metadatasets.metadataset import load_metadataset
from megatron.blending.metadatasets.records import file_of
from megatron.blending.metadatasets.tree import source_entries
from megatron.blending.streams.failures import FatalSampleError, SkipSample
from megatron.blending.streams.seeding import stateless
from tests.unit_tests.blending.folders import (
    CAPTION,
    CRUDE,
    TEXT,
    write_folder,
    write_jsonl,
    write_texts,
)
from tests.unit_tests.blending.formats.test_indexed import write as write_sequences

V2 = "__class__: MetadatasetV2\nsplits:\n"


def records_of(path, split, reading):
    return open_samples(next(source_entries(load_metadataset(path, split))), reading)


def opened(path, split="train", encoder=None, allow_code=False):
    """All samples of a source in its own order."""
    reading = ReadSettings(encoder=encoder or DefaultTaskEncoder(), allow_code=allow_code)
    source, load = records_of(path, split, reading)
    source, load = pickle.loads(pickle.dumps((source, load)))
    records = source.read(range(len(source)))
    return [load(record, ("0", 7, index)) for index, record in enumerate(records)]


def refused(path, **options):
    with pytest.raises(ValueError, match=r".") as error:
        opened(path, **options)
    return str(error.value)


def test_text_samples(tmp_path):
    folder = write_texts(tmp_path, "a", 8, "subflavors: {lang: en, n: 1}\n")
    samples = opened(folder)
    assert [sample.text for sample in samples] == [f"a-{i}" for i in range(6)]
    assert type(samples[0]) is TextSample
    assert (samples[1].__key__, samples[1].__restore_key__) == ("a_0001", ("0", 7, 1))
    assert samples[0].__subflavors__ == {"lang": "en", "n": 1}
    source = samples[5].__sources__[0]
    assert (source.dataset_path, source.index, source.shard_name) == (
        str(folder),
        5,
        "shards/s_1.tar",
    )


def test_subflavors_of_the_metadataset_win(tmp_path):
    write_texts(tmp_path, "a", 4, "subflavors: {lang: en, n: 1}\n")
    path = tmp_path / "m.yaml"
    path.write_text(V2 + "  train: {path: a, subflavors: {n: 2}}\n")
    assert opened(path)[0].__subflavors__ == {"lang": "en", "n": 2}


def test_captions_and_tensors(tmp_path):
    array = torch.arange(3.0)
    parts = {"pth": to_pth(array), "json": json.dumps({"caption": "c"}).encode()}
    folder = write_folder(tmp_path / "c", {"s.tar": [("k", parts)]}, CAPTION)
    sample = opened(folder)[0]
    assert type(sample) is CaptioningSample
    assert (sample.image.tolist(), sample.caption) == ([0, 1, 2], "c")

    class Raw(DefaultTaskEncoder):
        decoder = None

    assert "a key 'caption' in json: that is no object, but of type bytes" in refused(
        folder, encoder=Raw()
    )


def to_pth(tensor):
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def test_jsonl_is_crude(tmp_path):
    """Its key is the number in the file, also in a part of the file, as energon has it."""
    write_jsonl(tmp_path / "a.jsonl", [{"q": i} for i in range(10)])
    path = tmp_path / "m.yaml"
    path.write_text(
        V2 + "  train: {path: a.jsonl, subset: {range: ['50%', '80%']}, subflavors: {x: 1}}\n"
    )
    samples = opened(path)
    assert [(sample["__key__"], sample["json"]) for sample in samples] == [
        (str(i), {"q": i}) for i in (5, 6, 7)
    ]
    assert type(samples[0]) is CrudeSample
    assert (samples[0]["__subflavors__"], samples[0]["__shard__"]) == ({"x": 1}, "a.jsonl")


def test_cookers(tmp_path):
    @stateless
    def cook_line(sample):
        return TextSample(**basic_sample_keys(sample), text=sample["json"]["q"])

    write_jsonl(tmp_path / "a.jsonl", [{"q": "x"}])
    write_folder(
        tmp_path / "c",
        {"s.tar": [("k", {"txt": b"y", "json": b'{"a": 1}'})]},
        CRUDE + "subflavors: {n: 1}\n",
    )

    class Cooks(DefaultTaskEncoder):
        cookers = [  # noqa: RUF012
            Cooker(
                lambda s: TextSample.derive_from(s, text=f"{s['txt']} {s['json']['a']}"),
                has_subflavors={"n": 1},
            ),
            Cooker(cook_line, has_subflavors={"n": 2}),
        ]

    reading = ReadSettings(encoder=Cooks())
    source, load = records_of(tmp_path / "c", "train", reading)
    made = load(source[0], ("0", 0, 0))
    assert (made.text, made.__key__, made.__subflavors__) == ("y 1", "k", {"n": 1})
    path = tmp_path / "m.yaml"
    path.write_text(V2 + "  train: {path: a.jsonl, subflavors: {n: 2}}\n  val: {path: a.jsonl}\n")
    source, load = records_of(path, "train", reading)
    assert load(source[0], ("0", 0, 0)).text == "x"
    with pytest.raises(
        ValueError, match=r"m\.yaml:4: splits\.val: no cooker is for its subflavors {}"
    ):
        records_of(path, "val", reading)


def images_of(sample, images, primary):
    text = images.get(sample["json"]["image"], sample)
    return TextSample.derive_from(sample, text=f"{text} {primary.get('k.json')['image']}")


@pytest.mark.parametrize("store", ["media", "filesystem://plain", "{fs_path: plain}"])
def test_stores(tmp_path, store):
    """Media beside the stream, by name, from a prepared folder or a plain one."""
    write_folder(
        tmp_path / "media",
        {"a.tar": [("x", {"txt": b"no"})], "b.tar": [("dir/pic", {"v.txt": b"yes"})]},
    )
    (tmp_path / "plain" / "dir").mkdir(parents=True)
    (tmp_path / "plain" / "dir" / "pic.v.txt").write_text("yes")
    write_folder(tmp_path / "c", {"s.tar": [("k", {"json": b'{"image": "dir/pic.v.txt"}'})]}, CRUDE)
    path = tmp_path / "m.yaml"
    path.write_text(
        V2
        + f"  train: {{path: c, aux: {{images: {store!r}}}}}\n".replace("'{", "{").replace(
            "}'", "}"
        )
    )

    class Cooks(DefaultTaskEncoder):
        cookers = [Cooker(cooker(need_primary=True)(images_of))]  # noqa: RUF012

    made = opened(path, encoder=Cooks())[0]
    assert made.text == "yes dir/pic.v.txt"
    assert made.__sources__[1].file_names == ("dir/pic.v.txt",)


def test_stores_that_are_not_there(tmp_path):
    write_folder(tmp_path / "c", {"s.tar": [("k", {"json": b"{}"})]}, CRUDE)
    write_texts(tmp_path, "a", 4)
    path = tmp_path / "m.yaml"
    for store, fault in (("nowhere", "nowhere"), ("filesystem://nowhere", "no such folder")):
        path.write_text(V2 + f"  train: {{path: c, aux: {{images: {store}}}}}\n")
        assert fault in refused(path)
    path.write_text(V2 + "  train: {path: a, aux: {images: c}}\n")
    assert "aux is for crude data, but the samples are of TextSample" in refused(path)


def test_no_code_runs_because_a_file_names_it(tmp_path):
    """A data set from the net must not be able to run its code on who reads it."""
    ran = tmp_path / "ran"
    code = (
        f"open({str(ran)!r}, 'w')\ndef sample_loader(raw):\n    return dict(text=raw['txt'] + "
        "raw['__key__'])\n"
    )
    named = (
        "sample_type: {__module__: megatron.energon, __class__: TextSample}\nsample_loader: "
        "sample_loader.py\n"
    )
    folder = write_folder(tmp_path / "c", {"s.tar": [("k", {"txt": b"y"})]}, named)
    (folder / ".nv-meta" / "sample_loader.py").write_text(code)
    assert "allow_code" in refused(folder)
    assert not ran.exists()
    assert opened(folder, allow_code=True)[0].text == "yk"
    assert ran.exists()
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        TEXT.replace("megatron.energon", "tests.mine")
    )
    assert "tests.mine.TextSample, which is not imported; pass allow_code=True" in refused(folder)
    assert "cannot be imported" in refused(folder, allow_code=True)


def test_mistakes_in_dataset_yaml_are_named(tmp_path):
    folder = write_folder(
        tmp_path / "c", {"s.tar": [("k", {"txt": b"y"})]}, TEXT.replace("TextSample", "TextSampel")
    )
    assert "dataset.yaml" in refused(folder)
    assert "unknown class 'TextSampel'; did you mean 'TextSample'?" in refused(folder)
    (folder / ".nv-meta" / "dataset.yaml").write_text(TEXT.replace("text: txt", "txt: txt"))
    assert "field_map: TextSample has no field 'txt'; did you mean 'text'?" in refused(folder)
    (folder / ".nv-meta" / "dataset.yaml").write_text(TEXT.replace("text: txt", "text: tx"))
    assert (
        "dataset.yaml:1: field_map: text: none of 1 samples that were read has a part 'tx'; did "
        "you mean 'txt'?" in refused(folder)
    )


def test_a_part_that_some_samples_lack_is_no_mistake(tmp_path):
    """What the first sample lacks may be in others; and what one cannot read is said when it is
    used.
    """
    samples = [("a", {"other": b"y"}), ("b", {"txt": b"y"})]
    reading = ReadSettings(encoder=DefaultTaskEncoder())
    source, load = records_of(
        str(write_folder(tmp_path / "c", {"s.tar": samples}, TEXT)), "train", reading
    )
    assert load(source[1], ("0", 7, 1)).text == "y"
    folder = write_folder(tmp_path / "d", {"s.tar": [("k", {"txt": b"y"})]}, TEXT)
    (folder / "s.tar").unlink()
    records_of(str(folder), "train", reading)


def write_json_samples(tmp_path, samples, source):
    """Samples of JSON alone, whose text is to come from `source`."""
    named = [
        (f"k{i}", {"json": sample if type(sample) is bytes else json.dumps(sample).encode()})
        for i, sample in enumerate(samples)
    ]
    return write_folder(
        tmp_path / "c", {"s.tar": named}, TEXT.replace("text: txt", f"text: {source}")
    )


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("json[captoin]", "a key 'captoin' in json; did you mean 'caption'?"),
        ("'txt,json[captoin]'", "a key 'captoin' in json; did you mean 'caption'?"),
        ("json[q]", "a key 'q' in json; keys are caption, meta, turns"),
        ("json[meta][langs]", "a key 'langs' in json[meta]; did you mean 'lang'?"),
        ("json[turns][0][txt]", "a key 'txt' in json[turns][0]; did you mean 'text'?"),
        ("json[turns][text]", "a key 'text' in json[turns]: that is no object, but of type list"),
        ("json[caption][0]", "a key '0' in json[caption]: that is no object, but of type str"),
        ("'txt,text'", "a part 'txt'; parts are json"),
    ],
)
def test_a_key_that_no_sample_has_is_refused_at_once(tmp_path, source, fault):
    """Each sample would fail when it is read: in the workers, hours of queueing later."""
    sample = {"caption": "c", "meta": {"lang": "en"}, "turns": [{"text": "t"}]}
    folder = write_json_samples(tmp_path, [sample] * 20, source)
    told = refused(folder)
    assert told.endswith(
        f"dataset.yaml:1: field_map: text: none of 20 samples that were read has {fault}"
    )
    assert "\n" not in told


@pytest.mark.parametrize(
    "source",
    [
        "json[q]",
        "json[m][q]",
        "json[l][1]",
        "json[once]",
        "'json[q],json[other]'",
        "'json[other],json'",
    ],
)
def test_a_key_that_some_sample_may_have_is_no_mistake(tmp_path, source):
    """The last one has it here, or a longer list, or one of 60; data sets that a few samples fail
    in are trained on as before.
    """
    samples: list[Any] = [{"m": None, "l": [0]}] * 59 + [{"q": "x", "m": {"q": "x"}, "l": [0, "x"]}]
    samples[41] = {**samples[41], "once": "x"}
    folder = write_json_samples(tmp_path, samples, source)
    records, load = records_of(str(folder), "train", ReadSettings(encoder=DefaultTaskEncoder()))
    at = 41 if "once" in source else 59
    assert load(records[at], ("0", 7, at)).text in ("x", samples[at])


def test_of_many_keys_some_are_listed(tmp_path):
    """An object with a key per image or user would fill the screen, on every rank."""
    folder = write_json_samples(
        tmp_path, [{f"{number:04}": 0 for number in range(3000)}], "json[caption]"
    )
    assert ", 0048, 0049 and 2950 more" in refused(folder)


def test_samples_that_cannot_be_read_decide_nothing(tmp_path):
    """They are counted when they are used; of the others some may still be right, or all wrong."""
    reading = ReadSettings(encoder=DefaultTaskEncoder())
    records_of(str(write_json_samples(tmp_path, [b"{broken"] * 3, "json[q]")), "train", reading)
    folder = write_json_samples(tmp_path, [b"{broken", {"a": 1}, {"a": 1}], "json[q]")
    assert "none of 2 samples that were read has a key 'q' in json; keys are a" in refused(folder)

    class Own(DefaultTaskEncoder):
        @staticmethod
        def decoder(name, content):
            raise LookupError(name)

    records_of(str(folder), "train", ReadSettings(encoder=Own()))


def test_few_samples_are_read_to_find_it(tmp_path, monkeypatch):
    """Of a good data set one, however large it is."""
    reads, read = [], WebDataset.read

    def counted(self, indices):
        reads.append(list(indices))
        return read(self, indices)

    monkeypatch.setattr(WebDataset, "read", counted)
    records_of(
        str(write_json_samples(tmp_path, [{"q": "x"}] * 100, "json[q]")),
        "train",
        ReadSettings(encoder=DefaultTaskEncoder()),
    )
    assert reads == [[0]]
    reads.clear()
    told = refused(write_json_samples(tmp_path, [{"q": "x"}] * 100, "json[r]"))
    assert len(reads) == 64
    assert reads[::9] == [[index] for index in (0, 14, 28, 42, 56, 70, 84, 99)]
    # A field that only samples between those have is refused too: the message says the way out.
    assert told.endswith(
        "none of 64 samples that were read has a key 'r' in json; keys are q. If some others do, "
        "name an alternative behind a comma"
    )
    for at, alternative in ((2, "json[r],json[q]"), (14, "json[r]")):
        samples = [{"q": "x"}] * at + [{"q": "x", "r": "y"}] + [{"q": "x"}] * (99 - at)
        source, load = records_of(
            str(write_json_samples(tmp_path, samples, f"'{alternative}'")),
            "train",
            ReadSettings(encoder=DefaultTaskEncoder()),
        )
        assert load(source[at], ("0", 7, at)).text == "y"


def test_only_what_is_read_of_a_data_set_counts(tmp_path):
    """A subset of records without the key fails as a whole; and a split without samples is nobody's
    mistake.
    """
    write_json_samples(tmp_path, [{"a": "x"}] * 50 + [{"q": "x"}] * 50, "json[q]")
    path = tmp_path / "m.yaml"
    path.write_text(V2 + "  train: {path: c, subset: {range: ['0%', '50%']}}\n")
    assert "a key 'q' in json; keys are a" in refused(path)
    path.write_text(V2 + "  train: {path: c, subset: {range: ['50%', '100%']}}\n")
    assert len(opened(path)) == 50
    (tmp_path / "c" / ".nv-meta" / "split.yaml").write_text(
        "split_parts: {train: [s.tar], val: []}\nexclude: []\n"
    )
    reading = ReadSettings(encoder=DefaultTaskEncoder())
    assert len(records_of(str(tmp_path / "c"), "train", reading)[0]) == 100


class Both(TextSample):
    @classmethod
    def from_joined(cls, *samples, **named):
        texts = [sample and sample.text for sample in samples]
        texts += [f"{name}={sample and sample.text}" for name, sample in named.items()]
        return cls.derive_from(samples[0] if samples else named["one"], text=str(texts))


def write_join(tmp_path, legs, class_name="Both"):
    samples = [(key, {"txt": key.encode()}) for key in "abcd"]
    write_folder(tmp_path / "one", {"s.tar": samples}, one=["s.tar"], train=["s.tar"])
    others = [(key, {"txt": key.upper().encode()}) for key in "zca"]
    write_folder(
        tmp_path / "two", {"t.tar": others[:1], "u.tar": others[1:]}, train=["u.tar"], val=["t.tar"]
    )
    path = tmp_path / "m.yaml"
    joiner = (
        f"    joiner: {{__module__: {__name__}, __class__: {class_name}}}\n    subflavors: "
        f"{{j: 1}}\n"
    )
    path.write_text(V2 + "  train:\n    join:\n" + legs + joiner)
    return path


def test_join_skips_or_fills(tmp_path):
    """Keys that stand in another split of the second source are not there: energon shared one index
    over splits.
    """
    path = write_join(tmp_path, "      - {path: one}\n      - {path: two, nonmatch: none}\n")
    samples = opened(path, allow_code=True)
    assert [sample.text for sample in samples] == [
        "['a', 'A']",
        "['b', None]",
        "['c', 'C']",
        "['d', None]",
    ]
    assert (samples[0].__key__, samples[0].__subflavors__, samples[2].__restore_key__) == (
        "a",
        {"j": 1},
        ("0", 7, 2),
    )
    path = write_join(tmp_path, "      one: {path: one}\n      two: {path: two, nonmatch: none}\n")
    assert opened(path, allow_code=True)[0].text == "['one=a', 'two=A']"
    assert "names Python code" in refused(path)


def test_fields_of_joined_data_sets_are_looked_at_too(tmp_path):
    path = write_join(tmp_path, "      - {path: one}\n      - {path: two, nonmatch: none}\n")
    (tmp_path / "two" / ".nv-meta" / "dataset.yaml").write_text(
        TEXT.replace("text: txt", "text: tx")
    )
    assert (
        "two/.nv-meta/dataset.yaml:1: field_map: text: none of 2 samples that were read"
        in refused(path, allow_code=True)
    )


def test_join_partners_that_are_missing(tmp_path):
    """`error` ends the run, where any other failing sample would be logged and left out."""
    reading = ReadSettings(encoder=DefaultTaskEncoder(), allow_code=True)
    for nonmatch, fault in (("error", FatalSampleError), ("skip", SkipSample)):
        legs = (
            f"      - {{path: one, subset: {{range: [1, 3]}}}}\n      - {{path: two, nonmatch: "
            f"{nonmatch}}}\n"
        )
        source, load = records_of(write_join(tmp_path, legs), "train", reading)
        with pytest.raises(
            fault, match=r"s\.tar sample 1: 'b' is not in .*two" if nonmatch == "error" else None
        ):
            load(source[0], ("0", 0, 0))
        assert load(source[1], ("0", 0, 1)).text == "['c', 'C']"


def test_fields_that_a_data_set_lacks_have_their_defaults(tmp_path):
    """Samples are made without calling the class, which would take three times as long."""
    text = (
        "__module__: megatron.energon\n__class__: VQASample\nfield_map: {image: txt, context: "
        "txt}\n"
    )
    folder = write_folder(
        tmp_path / "v",
        {"s.tar": [("k", {"txt": b"q"})]},
        text.replace("VQASample", "VQAWebdataset"),
    )
    sample = opened(folder)[0]
    same = VQASample(
        __key__="k",
        __restore_key__=("0", 7, 0),
        __subflavors__={},
        image="q",  # type: ignore[arg-type]
        context="q",
    )
    same.__sources__ = sample.__sources__
    assert dataclasses.asdict(sample) == dataclasses.asdict(same)
    assert repr(sample) == repr(same)
    (folder / ".nv-meta" / "dataset.yaml").write_text(text.replace("image: txt, ", ""))
    assert "field_map: VQASample needs a field 'image'" in refused(folder)


@pytest.mark.parametrize("name", ["t", "t.bin", "t.idx"])
def test_token_sequences_are_named_by_either_file_or_what_both_have_in_common(tmp_path, name):
    """Of a URL without suffix it was said that it is not prepared, and of an .idx that it should be
    renamed.
    """
    system = pytest.importorskip("fsspec").filesystem("memory")
    write_sequences(tmp_path)
    system.put(str(tmp_path), "/sequences", recursive=True)
    for place in (tmp_path, f"file://{tmp_path}", "memory://sequences"):
        found = opened(f"{place}/{name}")
        assert [sample["tokens"].tolist() for sample in found] == [[7, 65535, 9], [], [4, 5]]
        assert found[0]["__shard__"] == "t.bin"
    assert split_names("memory://sequences/t") == set()
    system.rm("/sequences", recursive=True)


def test_a_folder_stays_a_folder(tmp_path):
    """Also beside a .bin of its name."""
    (tmp_path / "t").mkdir()
    write_sequences(tmp_path)
    assert file_of(str(tmp_path / "t")) is file_of(f"file://{tmp_path}/t") is None
    assert file_of("memory://nothing/there") is None
    assert file_of("memory://nothing/there.jsonl") == "memory://nothing/there.jsonl"


@pytest.mark.parametrize(
    "name", ["../secret.txt", "a/../../secret.txt", "/etc/hostname", "file:///etc/hostname"]
)
def test_a_store_gives_nothing_outside_its_folder(tmp_path, name):
    """A record that somebody else wrote would read any file of the machine into a data set."""
    (tmp_path / "media").mkdir()
    (tmp_path / "secret.txt").write_text("x")
    store = open_store(f"filesystem://{tmp_path / 'media'}", lambda key, content: content, "here")
    with pytest.raises(ValueError, match="is not a file below this folder"):
        store.get(name)


class OfImages(DefaultTaskEncoder):
    decoder = SampleDecoder(image_decode="pilrgb")


def test_allowed_code_holds_for_an_encoders_own_decoder(tmp_path):
    """Heard for the default decoder alone, it would look like a mistake of the data."""
    shard = {"s.tar": [("k", {"pkl": pickle.dumps({"a": 1})})]}
    folder = write_folder(tmp_path / "c", shard, CRUDE)
    (sample,) = opened(folder, encoder=OfImages(), allow_code=True)
    assert sample["pkl"] == {"a": 1}
    with pytest.raises(ValueError, match="pickles run code"):
        opened(folder, encoder=OfImages())
