"""What is written in `.nv-meta`, by hand, by energon 6 or by energon 7."""

import json

import pytest

from megatron.blending.formats.prepared.nv_meta import (
    read_dataset_config,
    read_info,
    read_split_names,
    read_split_part,
)

INFO = {
    "energon_version": "7.4.1",
    "shard_counts": {"a/s_0.tar": 3, "a/s_1.tar": 5, "a/s_10.tar": 2},
}


def write(folder, **files):
    meta = folder / ".nv-meta"
    meta.mkdir(exist_ok=True)
    for name, content in {"info_json": json.dumps(INFO), **files}.items():
        if content is not None:
            path = meta / {"info_json": ".info.json", "info_yaml": ".info.yaml"}.get(
                name, name.replace("_", ".")
            )
            path.write_text(content)
    return str(folder)


def test_split_parts_with_braces_and_exclusions(tmp_path):
    """Order of the names is order of the samples; a shard left out is not there, a sample left out
    is found by key.
    """
    split = (
        "split_parts:\n  train: ['a/s_{10,0}.tar']\nexclude: ['a/s_{1..5}.tar', "
        "a/s_0.tar/x/y, "
        "'b.tar/z']\n"
    )
    part = read_split_part(write(tmp_path, split_yaml=split), "train")
    assert part.shards == (("a/s_10.tar", 2), ("a/s_0.tar", 3))
    assert part.excluded == (("a/s_0.tar", "x/y"),)


@pytest.mark.parametrize("name", ["split_json", "info_yaml"])
def test_other_forms(tmp_path, name):
    """Energon 6 wrote .info.yaml; either wrote split.json when asked to."""
    split = {"split_parts": {"val": ["a/s_1.tar"]}}
    files: dict[str, str | None] = {"split_json": json.dumps(split)}
    if name == "info_yaml":
        files["info_yaml"] = "energon_version: 6.0.1\nshard_counts:\n  a/s_1.tar: 5\n"
        files["info_json"] = None
    root = write(tmp_path, **files)
    assert read_split_part(root, "val").shards == (("a/s_1.tar", 5),)
    assert read_info(root)["a/s_1.tar"] == 5


def test_named_split_config(tmp_path):
    """`split_config` of a metadataset."""
    root = write(tmp_path, own_yaml="split_parts:\n  train: [a/s_0.tar]\n")
    assert read_split_part(root, "train", "own.yaml").shards == (("a/s_0.tar", 3),)


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"info_json": None}, r"is not prepared; run python -m megatron\.blending prepare"),
        ({"info_json": "{"}, r"\.info\.json:1: not JSON"),
        (
            {"info_json": '{"shard_counts": {"a": "b"}}'},
            r"\.info\.json: shard_counts must map shards to numbers",
        ),
        ({}, r"\.nv-meta/split\.yaml: no such file"),
        (
            {"split_yaml": "split_part: {}"},
            r"split\.yaml: split_parts must map names of parts to lists",
        ),
        (
            {"split_yaml": "split_parts: {trian: []}"},
            r"split_parts has no 'train'; did you mean 'trian'\?",
        ),
        ({"split_yaml": "split_parts: {train: a}"}, r"split_parts\.train: must be a list of names"),
        (
            {"split_yaml": "split_parts: {train: []}\nexcludes: []"},
            r"unknown key 'excludes'; did you mean 'exclude'\?",
        ),
        (
            {"split_yaml": "split_parts: {train: [a/s_2.tar]}"},
            r"split_parts\.train: shard 'a/s_2\.tar' is not in \.info\.json; did you mean 'a/s_",
        ),
    ],
)
def test_faults_name_file_and_key(tmp_path, files, fault):
    """One line that says where to look, before anything is read."""
    with pytest.raises(ValueError, match=fault):
        read_split_part(write(tmp_path, **files), "train")


@pytest.mark.parametrize(
    ("name", "split"), [("dataset_dict.json", r"\['train'\]"), ("state.json", "")]
)
def test_a_folder_of_save_to_disk_is_named(tmp_path, name, split):
    """It was told to be prepared, which finds no shards in it."""
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=rf"by save_to_disk of .*\){split}\.to_parquet"):
        read_split_names(str(tmp_path))


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        (
            "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\nfield_map:\n  "
            "text: txt\n",
            ("megatron.energon", "TextSample", {"text": "txt"}, None, None, False),
        ),
        (
            "__class__: CaptioningWebdataset\nfield_map: {image: jpg, caption: 'json[c]'}",
            (
                "megatron.energon",
                "CaptioningSample",
                {"image": "jpg", "caption": "json[c]"},
                None,
                None,
                False,
            ),
        ),
        (
            "__module__: megatron.energon\n__class__: CrudeWebdataset\npart_filter: "
            "[txt]\nsubflavors: {a: 1}",
            ("megatron.energon", "CrudeWebdataset", {}, None, ("txt",), True),
        ),
        (
            "sample_type: {__module__: mine, __class__: Own}\nsample_loader: "
            "l.py:load\npart_filter: l.py:parts",
            ("mine", "Own", {}, "l.py:load", "l.py:parts", False),
        ),
    ],
)
def test_kinds_of_samples(tmp_path, yaml, expected):
    """Every form that energon has written."""
    kind, subflavors = read_dataset_config(write(tmp_path, dataset_yaml=yaml))
    assert (
        kind.module,
        kind.name,
        kind.field_map,
        kind.sample_loader,
        kind.part_filter,
        kind.is_crude,
    ) == expected
    assert subflavors == ({"a": 1} if kind.is_crude else {})


@pytest.mark.parametrize(
    ("yaml", "fault"),
    [
        (None, r"dataset\.yaml: no such file; write one, or run"),
        (
            "sample_typ: {}",
            r"dataset\.yaml:1: unknown key 'sample_typ'; did you mean 'sample_type'\?",
        ),
        ("sample_type: {__class__: TextSample}", r"exactly one of field_map and sample_loader"),
        ("sample_type: {__clas__: TextSample}", r"unknown key '__clas__'"),
        ("field_map: {text: txt}", r"__class__ is missing"),
        (
            "sample_type: {__class__: TextSample}\nfield_map: {text: 1}",
            r":2: field_map: text must be the name of a part",
        ),
        (
            "sample_type: {__class__: TextSample}\nfield_map: {}",
            r":2: field_map: must say where fields come from, but is empty; write text: txt",
        ),
        (
            "sample_type: {__class__: A}\nfield_map: {}\nsample_loader: a.py",
            r"exactly one of field_map and",
        ),
        (
            "__class__: CrudeWebdataset\nfield_map: {a: b}",
            r"field_map: has no meaning for a CrudeWebdataset",
        ),
        ("- a", r"must be a mapping"),
    ],
)
def test_faults_of_dataset_yaml(tmp_path, yaml, fault):
    """As above."""
    with pytest.raises(ValueError, match=fault):
        read_dataset_config(write(tmp_path, dataset_yaml=yaml))
