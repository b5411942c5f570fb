"""Metadataset files as energon's users have them: what each says reaches the right entry, and
nothing is guessed.
"""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.blending.metadatasets import tree
from megatron.blending.metadatasets.metadataset import load_metadataset
from megatron.blending.metadatasets.tree import Blend, Epochized, Join, SourceEntry, Subset

V2 = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n"
V1 = "__module__: megatron.energon\n__class__: Metadataset\nsplits:\n"


@pytest.fixture
def folder(tmp_path):
    for name in ("coyo", "cc", "vqa"):
        (tmp_path / name / ".nv-meta").mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    return tmp_path


def write(folder, text, name="m.yaml"):
    (folder / name).write_text(text)
    return str(folder / name)


def load(path, split="train"):
    return load_metadataset(path, split)


def leaves_of(node):
    return list(tree.source_entries(node))


def shown(node):
    """Shape of a tree with the file names of its entries."""
    if isinstance(node, SourceEntry):
        return node.path.rsplit("/", 1)[-1]
    return [type(node).__name__, *((shown(child), share) for child, share in node.children)]


def test_simple_file(folder):
    """The example that energon's documentation begins with."""
    text = V2 + "  train:\n    path: ./coyo\n  val:\n    path: ./coyo\n    split_part: train\n"
    path = write(folder, text)
    assert load(path) == SourceEntry(
        path=str(folder / "coyo"), split_part="train", where=f"{path}:4: splits.train"
    )
    assert load(path, "val").split_part == "train"


def test_blend_with_all_keys(folder):
    """A key that is read but not passed on would be silently without effect."""
    text = V2 + (
        "  train:\n"
        "    blend:\n"
        "      - weight: 5\n"
        "        path: coyo\n"
        "        split_part: val\n"
        "        subflavors: {augmentation_type: webdataset, n: 1}\n"
        "        shuffle_over_epochs_multiplier: 3\n"
        "        dataset_config: d.yaml\n"
        "        split_config: s.json\n"
        "        subset: {range: [10, 20]}\n"
        "        aux: {x: ./vqa, y: {fs_path: imgs}, z: {path: cc}, s: filesystem://here, t: "
        "'msc://p/q'}\n"
        "      - path: a.jsonl\n"
        "        subflavor: q\n"
        "      - {weight: 0, path: cc}\n"
    )
    path = write(folder, text)
    blend = load(path)
    assert isinstance(blend, Blend)
    assert [share for _, share in blend.children] == [5, 1, 0]
    first, second, _ = leaves_of(blend)
    assert first == SourceEntry(
        path=str(folder / "coyo"),
        split_part="val",
        subflavors={"augmentation_type": "webdataset", "n": 1},
        shuffle_over_epochs_multiplier=3,
        dataset_config="d.yaml",
        split_config="s.json",
        subset=Subset(10, 20),
        aux={
            "x": str(folder / "vqa"),
            "y": f"filesystem://{folder / 'imgs'}",
            "z": str(folder / "cc"),
            "s": f"filesystem://{folder / 'here'}",
            "t": "msc://p/q",
        },
        where=f"{path}:6: splits.train.blend[0]",
    )
    assert second.subflavors == {"__subflavor__": "q"}
    assert type(first.subflavors["augmentation_type"]) is str
    assert type(first.subflavors) is dict


def test_nested_files_inherit_from_outside_in(folder):
    """Outer subflavors win over inner ones; the split is the outer's own name unless it says
    otherwise.
    """
    write(
        folder,
        V2 + "  val:\n    blend:\n      - {path: a.jsonl, weight: 2, subflavors: {k: in, l: in}}\n"
        "      - {path: coyo, split_part: test, shuffle_over_epochs_multiplier: 5}\n",
        "inner.yaml",
    )
    path = write(
        folder,
        V2 + "  train:\n    blend:\n"
        "      - {path: inner.yaml, weight: 7, split_part: val, subflavors: {k: out},\n"
        "         shuffle_over_epochs_multiplier: 2}\n"
        "      - path: cc\n",
    )
    tree = load(path)
    assert shown(tree) == ["Blend", (["Blend", ("a.jsonl", 2), ("coyo", 1)], 7), ("cc", 1)]
    told = [
        (entry.split_part, entry.subflavors, entry.shuffle_over_epochs_multiplier)
        for entry in leaves_of(tree)
    ]
    assert told == [
        ("val", {"k": "out", "l": "in"}, 2),
        ("test", {"k": "out"}, 10),
        ("train", {}, 1),
    ]


@pytest.mark.parametrize(
    ("outer", "inner", "both"),
    [("2", "3", 6), ("null", "3", None), ("2", "-1", -1), ("-1", "null", None)],
)
def test_multipliers_compose(folder, outer, inner, both):
    write(
        folder,
        V2 + f"  train: {{path: coyo, shuffle_over_epochs_multiplier: {inner}}}\n",
        "inner.yaml",
    )
    path = write(
        folder, V2 + f"  train: {{path: inner.yaml, shuffle_over_epochs_multiplier: {outer}}}\n"
    )
    assert load(path).shuffle_over_epochs_multiplier == both


def test_files_are_found_beside_the_file_that_names_them(folder):
    (folder / "sub").mkdir()
    write(folder, V2 + "  train: {path: ../b.jsonl}\n", "sub/inner.yaml")
    path = write(folder, V2 + "  train: {path: sub/inner.yaml}\n")
    assert load(path).path == str(folder / "b.jsonl")


def test_home_and_variables_in_paths(folder, monkeypatch):
    """A folder named `~` was looked for beside the file."""
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("KIND", "b")
    for text in ("~/b.jsonl", "${HOME}/${KIND}.jsonl", "$KIND.jsonl"):
        assert load(write(folder, V2 + f"  train: {{path: '{text}'}}\n")).path == str(
            folder / "b.jsonl"
        )
    path = write(folder, V2 + "  train: {path: '${NOT_SET}/b.jsonl'}\n")
    with pytest.raises(
        ValueError, match=rf"^{path}:4: splits\.train: .*no variable NOT_SET; export"
    ):
        load(path)


def test_blend_epochized(folder):
    text = (
        V2
        + "  train:\n    blend_epochized:\n      - {path: coyo, repetitions: 2.5}\n      - path: "
        "cc\n"
    )
    tree = load(write(folder, text))
    assert isinstance(tree, Epochized)
    assert shown(tree) == ["Epochized", ("coyo", 2.5), ("cc", 1)]


@pytest.mark.parametrize("outer", ["blend", "blend_epochized"])
def test_kinds_of_blend_do_not_mix(folder, outer):
    inner = {"blend": "blend_epochized", "blend_epochized": "blend"}[outer]
    write(folder, V2 + f"  train:\n    {inner}: [{{path: coyo}}]\n", "inner.yaml")
    path = write(folder, V2 + f"  train:\n    {outer}: [{{path: inner.yaml}}]\n")
    with pytest.raises(
        ValueError, match=rf"m\.yaml:5: splits\.train\.{outer}: holds a {inner} \(.*inner\.yaml:5"
    ):
        load(path)


def test_first_form(folder):
    text = V1 + (
        "  train:\n    datasets:\n      - {path: coyo, weight: 3, subflavor: x, subflavors: {a: "
        "1}}\n      - path: cc\n"
    )
    tree = load(write(folder, text))
    assert shown(tree) == ["Blend", ("coyo", 3), ("cc", 1)]
    assert leaves_of(tree)[0].subflavors == {"__subflavor__": "x", "a": 1}
    without_head = write(
        folder, text[len("__module__: megatron.energon\n__class__: Metadataset\n") :], "n.yaml"
    )
    assert shown(load(without_head)) == shown(tree)


def test_anchors(folder):
    text = (
        V2
        + "  train: &t\n    blend:\n      - &c {path: coyo, weight: 2}\n      - {<<: *c, weight: "
        "3}\n  val: *t\n"
    )
    path = write(folder, text)
    assert shown(load(path)) == ["Blend", ("coyo", 2), ("coyo", 3)]
    assert [entry.split_part for entry in leaves_of(load(path, "val"))] == ["val", "val"]


@pytest.mark.parametrize(
    "module", ["megatron.energon", "megatron.energon.metadataset", "megatron.blending"]
)
def test_modules_are_names_only(folder, module):
    """Neither megatron.energon nor any other module is imported because a file names it."""
    text = V2.replace("megatron.energon", module) + "  train: {path: coyo}\n"
    assert load(write(folder, text)).path == str(folder / "coyo")


def test_data_is_a_leaf(folder):
    path = str(folder / "a.jsonl")
    assert load(path) == SourceEntry(path=path, split_part="train", where=path)
    (folder / "tokens.bin").write_bytes(b"")
    assert load(folder / "tokens", "val").path == str(folder / "tokens")


def test_join_is_kept(folder):
    text = V2 + (
        "  train:\n    join:\n      - {path: coyo, subflavors: {a: 1}}\n"
        "      - {path: cc, nonmatch: none, split_part: val}\n"
        "    joiner: {__module__: my.module, __class__: Both}\n    subset: {range: [0%, 50%]}\n    "
        "subflavors: {b: 2}\n"
    )
    join = load(write(folder, text))
    assert isinstance(join, Join)
    assert [(leg.name, leg.entry.split_part, leg.nonmatch) for leg in join.legs] == [
        (None, "train", "error"),
        (None, "val", "none"),
    ]
    assert join.joiner == ("my.module", "Both")
    assert (join.subset, join.subflavors) == (Subset(to_share=Fraction(1, 2)), {"b": 2})
    named = text.replace("- {path: coyo", "one: {path: coyo").replace(
        "- {path: cc", "two: {path: cc"
    )
    assert [leg.name for leg in load(write(folder, named, "n.yaml")).legs] == ["one", "two"]


def test_subsets_compose(folder):
    """Inner first, outer within it: half of the second half is the third quarter."""
    write(folder, V2 + "  train: {path: coyo, subset: {range: ['50%', '100%']}}\n", "inner.yaml")
    text = V2 + (
        "  train:\n    blend:\n      - {path: inner.yaml, subset: {range: ['0%', '50%']}}\n"
        "      - {path: coyo, subset: {range: [100, end]}}\n    subset: {range: ['0%', '10%']}\n"
    )
    first, second = leaves_of(load(write(folder, text)))
    assert first.subset == Subset(0, None, Fraction(1, 2), Fraction(21, 40))
    assert first.subset.of(1000) == range(500, 525)
    assert second.subset.of(1000) == range(100, 190)
    with pytest.raises(ValueError, match=r"subset \[100, 50\) is beyond the 50 samples"):
        second.subset.of(50)


@given(
    size=st.integers(0, 10**12),
    cuts=st.lists(st.integers(0, 10000), max_size=5),
    start=st.integers(0, 50),
)
def test_adjoining_subsets_share_nothing_and_leave_nothing_out(size, cuts, start):
    """A sample in both the training and the validation part of a source would spoil every
    validation loss.
    """
    edges = [Fraction(cut, 10000) for cut in sorted({0, *cuts, 10000})]
    whole = Subset(start, None)
    parts = [
        whole.within(Subset(from_share=a, to_share=b)).of(size + start) for a, b in pairwise(edges)
    ]
    assert parts[0].start == start
    assert parts[-1].stop == size + start
    assert all(a.stop == b.start for a, b in pairwise(parts))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            V2 + "  train: {blnd: [{path: coyo}]}\n",
            "4: splits.train: unknown key 'blnd'; did you mean 'blend'?",
        ),
        (
            V2 + "  train: {zzz: 1}\n",
            "4: splits.train: unknown key 'zzz'; the keys here are path, blend, blend_epochized",
        ),
        (V2 + "  train: {pth: coyo}\n", "4: splits.train: unknown key 'pth'; did you mean 'path'?"),
        (
            V2 + "  train:\n    blend:\n      - path: coyo\n        wieght: 3\n",
            "7: splits.train.blend[0]: unknown key",
        ),
        (
            V2 + "  train: {path: coyo, weight: 2}\n",
            "4: splits.train: unknown key 'weight'; the keys here are path",
        ),
        (
            V2 + "  train:\n    blend: [{path: coyo, repetitions: 2}]\n",
            "5: splits.train.blend[0]: unknown key 'rep",
        ),
        (
            V2 + "  train: {path: coya}\n",
            "4: splits.train: {}/coya: no such file or folder; did you mean 'coyo'?",
        ),
        (
            V2 + "  train: {path: cyo/x/y}\n",
            "4: splits.train: {}/cyo/x/y: no such file or folder; did you mean 'co",
        ),
        (V2 + "  trian: {path: coyo}\n", " {}/m.yaml has no split 'train'; did you mean 'trian'?"),
        (
            V2.replace("V2", "V3") + "  train: {path: coyo}\n",
            "2: __class__: unknown class 'MetadatasetV3'; did you m",
        ),
        (
            V2.replace("megatron.energon", "os") + "  train: {}\n",
            "1: __module__: 'os' is not imported because",
        ),
        (
            V2.replace("splits", "split") + "  train: {path: coyo}\n",
            "3: unknown key 'split'; did you mean 'splits'?",
        ),
        ("__class__: MetadatasetV2\n", "1: has no key 'splits'"),
        ("", "1: must be a mapping (key: value), but is empty"),
        ("- a\n", "1: must be a mapping (key: value), but is a list"),
        (V2 + "  train: coyo\n", "4: splits.train: must be a mapping (key: value), but is 'coyo'"),
        (V2 + "  train: {}\n", "4: splits.train: has no 'path'"),
        (
            V2 + "  train: {path: 12}\n",
            "4: splits.train.path: must be a word, but is 12; put it in quotes",
        ),
        (V2 + "  train:\n    blend: []\n", "5: splits.train.blend: has no sources"),
        (V2 + "  train:\n    blend: {path: coyo}\n", "5: splits.train.blend: must be a list"),
        (
            V2 + "  train: {blend: [{path: coyo}], path: cc}\n",
            "4: splits.train: has both 'path' and 'blend'",
        ),
        (
            V2 + "  train: {blend: [{path: coyo, weight: -1}]}\n",
            "4: splits.train.blend[0].weight: must be a number",
        ),
        (
            V2 + "  train: {blend: [{path: coyo, weight: '1'}]}\n",
            "4: splits.train.blend[0].weight: must be a number",
        ),
        (
            V2 + "  train: {blend: [{path: coyo, weight: yes}]}\n",
            "4: splits.train.blend[0].weight: must be a number",
        ),
        (
            V2 + "  train: {blend: [{path: coyo, weight: 1e999}]}\n",
            "4: splits.train.blend[0].weight: must be a nu",
        ),
        (
            V2 + "  train: {blend: [{path: coyo, weight: 0}]}\n",
            "4: splits.train.blend: every weight is 0; raise one",
        ),
        (
            V2 + "  train: {blend: [{blend: [{path: coyo}]}]}\n",
            "4: splits.train.blend[0]: a blend within a blend",
        ),
        (
            V2 + "  train: {datasets: [{path: coyo}]}\n",
            "4: splits.train: has 'datasets', which is of the first form",
        ),
        (
            V1 + "  train: {blend: [{path: coyo}]}\n",
            "4: splits.train: is of the second form; begin the file with",
        ),
        (
            V1 + "  train: {datasets: [{path: coyo, subset: {}}]}\n",
            "4: splits.train.datasets[0]: unknown key 'subset'",
        ),
        (
            V2 + "  train: {path: a.jsonl, dataset_config: x}\n",
            "4: splits.train: 'dataset_config' is for folders",
        ),
        (
            V2 + "  train: {path: coyo, shuffle_over_epochs_multiplier: 0}\n",
            "4: splits.train.shuffle_over_epochs_mul",
        ),
        (
            V2 + "  train: {path: coyo, subset: {range: [5]}}\n",
            "4: splits.train.subset.range: must be [start, end]",
        ),
        (
            V2 + "  train: {path: coyo, subset: {range: [5, 5]}}\n",
            "4: splits.train.subset.range: is empty: [5, 5]",
        ),
        (
            V2 + "  train: {path: coyo, subset: {range: [0%, 101%]}}\n",
            "4: splits.train.subset.range: must be perce",
        ),
        (
            V2 + "  train: {path: coyo, subset: {range: [0.5, 1.0]}}\n",
            "4: splits.train.subset.range: must be perce",
        ),
        (
            V2 + "  train: {path: coyo, subset: {range: [10%, 50]}}\n",
            "4: splits.train.subset.range: must be two p",
        ),
        (
            V2 + "  train: {path: coyo, subset: {rnge: [1, 2]}}\n",
            "4: splits.train.subset: unknown key 'rnge'; did",
        ),
        (
            V2 + "  train: {path: coyo, subset: [1, 2]}\n",
            "4: splits.train.subset: must be a mapping",
        ),
        (
            V2 + "  train: {blend: [{path: coyo}], subset: {range: [1, 2]}}\n",
            "4: splits.train.blend: subset of a",
        ),
        (
            V2 + "  train: {path: coyo, aux: {a: {pth: x}}}\n",
            "4: splits.train.aux.a: unknown key 'pth'; did you",
        ),
        (
            V2 + "  train: {join: [{path: coyo}]}\n",
            "4: splits.train.join: must join at least two sources",
        ),
        (
            V2 + "  train: {join: [{path: coyo}, {path: cc}]}\n",
            "4: splits.train: has a 'join' but no 'joiner'",
        ),
        (
            V2 + "  train: {join: [{path: coyo}, {path: cc, nonmatch: x}]}\n",
            "4: splits.train.join[1].nonmatch: must",
        ),
        (V2 + "  train: {path: coyo}\n  val: {pth: x}\n", "5: splits.val: unknown key 'pth'"),
    ],
)
def test_misuse_is_named(folder, text, fault):
    """Anything that the grammar does not have is an error of one line: file, line, key, and what
    was probably meant.
    """
    path = write(folder, text)
    with pytest.raises(ValueError, match=r".") as error:
        load(path)
    assert str(error.value).startswith(f"{path}:{fault.format(folder)}")
    assert "\n" not in str(error.value)


def test_circles_are_refused(folder):
    """Two files that name one another would be followed until the stack ends."""
    write(folder, V2 + "  train: {path: m.yaml}\n", "other.yaml")
    path = write(folder, V2 + "  train: {path: other.yaml}\n")
    other = folder / "other.yaml"
    with pytest.raises(
        ValueError, match=rf"other\.yaml:4: .* in a circle: {path} -> {other} -> {path}"
    ):
        load(path)


def test_a_file_may_name_another_split_of_itself(folder):
    path = write(folder, V2 + "  val: {path: coyo}\n  train: {path: m.yaml, split_part: val}\n")
    assert load(path).split_part == "val"


def test_metadatasets_take_no_dataset_config(folder):
    write(folder, V2 + "  train: {path: coyo}\n", "inner.yaml")
    for key in ("dataset_config: x", "split_config: x", "aux: {a: coyo}"):
        path = write(folder, V2 + f"  train: {{path: inner.yaml, {key}}}\n")
        with pytest.raises(
            ValueError, match=rf"m\.yaml:4: splits\.train: '{key.split(':')[0]}' is for data"
        ):
            load(path)
    path = write(folder, V2 + "  train: {path: inner.yaml, subset: {range: [0, 1]}}\n")
    with pytest.raises(ValueError, match="subset of a metadataset must be percentages"):
        load(path)


def test_many_sources_are_read_once(folder):
    """A file that is named a thousand times is parsed once; a thousand sources take tenths of a
    second.
    """
    write(folder, V2 + "  train: {path: coyo}\n", "inner.yaml")
    lines = "".join(f"      - {{path: inner.yaml, weight: {i + 1}}}\n" for i in range(1000))
    tree = load(write(folder, V2 + "  train:\n    blend:\n" + lines))
    assert len(leaves_of(tree)) == 1000


def test_urls_are_kept(folder):
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://blends/m.yaml", "wb") as file:
        file.write((V2 + "  train: {path: ../data/x.jsonl}\n").encode())
    assert load("memory://blends/m.yaml").path == "memory://data/x.jsonl"


def test_shares_are_exact(folder):
    """Each level is normalised by its sum: shares of shares, as fractions, so that no rounding adds
    up.
    """
    write(
        folder,
        V2 + "  train:\n    blend: [{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 0.1}]\n",
        "inner.yaml",
    )
    path = write(
        folder,
        V2
        + "  train:\n    blend: [{path: inner.yaml, weight: 0.3}, {path: c.jsonl, weight: 0.6}]\n",
    )
    kind, shares = tree.flattened(load(path))
    assert kind is Blend
    assert [share for _, share in shares] == [Fraction(20, 63), Fraction(1, 63), Fraction(2, 3)]
    write(
        folder,
        V2 + "  train:\n    blend_epochized: [{path: a.jsonl, repetitions: 1.5}]\n",
        "inner.yaml",
    )
    path = write(
        folder,
        V2
        + "  train:\n    blend_epochized: [{path: inner.yaml, repetitions: 3}, {path: c.jsonl}]\n",
    )
    kind, shares = tree.flattened(load(path))
    assert kind is Epochized
    assert [share for _, share in shares] == [Fraction(9, 2), 1]
    assert tree.flattened(load(folder / "a.jsonl"))[0] is SourceEntry


def test_parts_of_joins(folder):
    """The order is the first source's, and so are parts of it; a part of another source would be
    without effect.
    """
    text = V2 + (
        "  train:\n    join:\n      - {path: coyo, subset: {range: [0, 10]}, "
        "shuffle_over_epochs_multiplier: 2}\n"
        "      - {path: cc}\n    joiner: {__module__: m, __function__: f}\n    subset: {range: "
        "[50%, 100%]}\n"
    )
    join = load(write(folder, text))
    assert (join.subset.of(100), join.shuffle_over_epochs_multiplier) == (range(5, 10), 2)
    with pytest.raises(
        ValueError, match=r"m\.yaml:7: splits\.train\.join\[1\]: subset is for the first source"
    ):
        load(write(folder, text.replace("{path: cc}", "{path: cc, subset: {range: [0, 10]}}")))
