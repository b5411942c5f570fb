"""What a run reads, from options and real files."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.blending.streams.choice import BlendDataset
from megatron.sft.arguments.parse import parse_config
from megatron.sft.data.datasets import build_datasets
from megatron.sft.data.source_names import short_names
from megatron.sft.data.stream import SampleStream, Share
from megatron.sft.options.images import ImageConfig
from tests.unit_tests.blending.folders import write_folder, write_jsonl
from tests.unit_tests.sft.texts import text_line, text_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def read(samples, number=None):
    """The samples at the first positions, as dicts; all of one pass by default."""
    number = len(samples) if number is None else number
    return next(SampleStream(samples, Share(0, 1, number, number)))


def loss_sum(sample):
    return int(sample["loss_mask"].sum())


BASE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 1 --seq-length 64 --train-iters 3 "
    "--lr 1e-3"
)


def build(*arguments, batch=4, seed=1234):
    common = [*BASE.split(), "--global-batch-size", str(batch), "--seed", str(seed)]
    return build_datasets(parse_config([*common, *arguments], world_size=1))


RECORDS = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a" * i}]}
    for i in range(20)
]


@pytest.fixture
def data_path(tmp_path):
    """Return a function that writes RECORDS in the format of a suffix."""

    def write(suffix):
        path = tmp_path / f"train{suffix}"
        if suffix == ".jsonl":
            write_jsonl(path, RECORDS)
        elif suffix == ".json":
            path.write_text(json.dumps(RECORDS, indent=1))
        else:
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(
                pytest.importorskip("pyarrow").Table.from_pylist(RECORDS), path, row_group_size=7
            )
        return str(path)

    return write


def test_tokenizer_model_alone_is_read(data_path):
    """Left unread, the model would be trained on bytes."""
    with pytest.raises(
        ValueError, match=r"--tokenizer-model must be the directory .* but is 'absent'"
    ):
        build("--data-path", data_path(".jsonl"), "--tokenizer-model", "absent")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_every_format_gives_the_same_samples(data_path, suffix):
    """A record that loses a turn on its way through a format trains on other text."""
    datasets = build("--data-path", data_path(suffix), "--split", "1")
    assert len(datasets.train) == len(RECORDS)
    samples = sorted(read(datasets.train), key=loss_sum)
    for i, (record, sample) in enumerate(zip(RECORDS, samples, strict=True)):
        assert (
            text_of(sample["tokens"])
            == record["messages"][0]["content"] + record["messages"][1]["content"]
        )
        assert loss_sum(sample) == i + 1  # the answer and its end
        assert sample["tokens"].max() < datasets.vocab_size


@pytest.mark.parametrize(
    ("split", "sizes"),
    [
        ("1", (20, 0, 0)),
        ("8,1,1", (16, 2, 2)),
        ("1,1", (10, 10, 0)),
        ("9,0,1", (18, 0, 2)),
        ("96,2,2", (19, 1, 0)),
    ],
)
def test_split_shares_records_out_without_overlap(data_path, split, sizes):
    """A record in two parts makes the held-out loss a training loss; one in none is lost."""
    datasets = build("--data-path", data_path(".jsonl"), "--split", split)
    parts = datasets.train, datasets.valid, datasets.test
    assert tuple(map(len, parts)) == sizes
    assert sum(sizes) == len(RECORDS)
    answers = [[loss_sum(sample) - 1 for sample in read(part)] for part in parts if len(part)]
    assert [*sorted(answers[0]), *(answer for part in answers[1:] for answer in part)] == list(
        range(20)
    )


def test_split_without_training_records_is_refused(data_path):
    """The first step would fail on an empty data set."""
    with pytest.raises(ValueError, match=r"--split 1,99 .* of 20 .*raise its first share"):
        build("--data-path", data_path(".jsonl"), "--split", "1,99")


def test_validation_files_take_the_place_of_the_split(data_path, write_lines):
    """With files of its own for validation, all of --data-path is for training."""
    datasets = build(
        "--data-path",
        data_path(".json"),
        "--valid-data-path",
        write_lines("v.jsonl", text_line("held")),
    )
    assert (len(datasets.train), len(datasets.valid), len(datasets.test)) == (20, 1, 0)
    assert text_of(read(datasets.valid)[0]["tokens"]) == "held"


@pytest.mark.parametrize(("name", "words"), [("none.jsonl", "no such file"), ("a.txt", "suffix")])
def test_file_that_cannot_be_used_is_named(write_lines, name, words):
    """Training would start, and end at the first draw."""
    path = write_lines("a.txt", "x").replace("a.txt", name)
    with pytest.raises(ValueError, match=words) as failure:
        build("--data-path", path)
    assert path in str(failure.value)


def mock_tokens(dataset, number):
    return [tuple(sample["tokens"].tolist()) for sample in read(dataset, number)]


def test_mock_validation_differs_from_training():
    """Evaluated on what it was trained on, a model looks better the more it overfits."""
    datasets = build("--mock-data", "--eval-iters", "2")
    train, valid = mock_tokens(datasets.train, 24), mock_tokens(datasets.valid, len(datasets.valid))
    assert not set(train) & set(valid)
    assert len(set(train)) == len(train)
    assert len(valid) == 2 * 4
    assert len(datasets.test) == 0


def test_mock_data_beside_images_are_said(caplog):
    """A tower that never runs would seem to cost nothing."""
    config = parse_config([*BASE.split(), "--global-batch-size", "4", "--mock-data"], world_size=1)
    build_datasets(config)
    assert not caplog.messages
    build_datasets(replace(config, images=ImageConfig(images=True)))
    assert caplog.messages == [
        "--mock-data has no images: --images does nothing, and no tower is run"
    ]


def test_mock_data_is_a_function_of_the_seed():
    """Benchmarks that claim the same data for two layouts must have it."""
    first, again, other = (
        mock_tokens(build("--mock-data", seed=seed).train, 12) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_mock_data_stays_in_the_vocabulary():
    """A token outside the embedding is an illegal memory access on CUDA."""
    for arguments, vocab_size in ((("--vocab-size", "17"), 17), ((), 1024)):
        datasets = build("--mock-data", *arguments)
        assert datasets.vocab_size == vocab_size
        assert max(map(max, mock_tokens(datasets.train, 12))) < vocab_size


def test_mock_data_without_evaluation():
    """--eval-iters 0 must mean no evaluation, and not an error about empty data."""
    assert len(build("--mock-data", "--eval-iters", "0").valid) == 0


# Blends.


def tokens_file(path, *sequences):
    """A .bin and its .idx; returns what both have in common."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    np.concatenate([np.array(sequence, np.uint16) for sequence in sequences]).tofile(f"{path}.bin")
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.int64) * 2
    bounds = np.arange(len(lengths) + 1, dtype=np.int64)
    head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8])
    numbers = len(lengths).to_bytes(8, "little") + len(bounds).to_bytes(8, "little")
    with open(f"{path}.idx", "wb") as file:
        file.write(head + numbers + lengths.tobytes() + starts.tobytes() + bounds.tobytes())
    return str(path)


@pytest.fixture
def sources(tmp_path):
    """A folder with chats.jsonl, texts/ (prepared) and docs.bin/.idx, whose samples are 5, 5 and 3
    tokens long.
    """
    write_jsonl(tmp_path / "chats.jsonl", [{"instruction": "q", "output": "a"} for _ in range(40)])
    samples = [(f"k{i}", {"txt": b"text!"}) for i in range(8)]
    shards = {"s_0.tar": samples[:6], "s_1.tar": samples[6:]}
    write_folder(tmp_path / "texts", shards, train=["s_0.tar"], val=["s_1.tar"], test=[])
    tokens_file(tmp_path / "docs", *[[7, 8, 9, 10]] * 10)
    return tmp_path


def metadataset(folder, train, val=None):
    path = folder / "blend.yaml"
    splits = {"train": train} | ({} if val is None else {"val": val})
    path.write_text(
        json.dumps(
            {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}
        )
    )
    return str(path)


def blend(kind="blend", key="weight", shares=(5, 3, 2)):
    paths = ("chats.jsonl", "texts", "docs")
    return {kind: [{key: share, "path": path} for share, path in zip(shares, paths)]}


def source_counts(samples, number):
    counts = [0] * len(samples.names)
    for sample in read(samples, number):
        counts[sample["source"]] += 1
    return counts


def test_blend_of_every_format(sources):
    """A source whose records become other tokens, or that is drawn out of proportion, trains
    another model.
    """
    datasets = build("--data-path", metadataset(sources, blend(), {"path": "texts"}))
    assert isinstance(datasets.train.dataset, BlendDataset)
    assert datasets.train.names == ["chats", "texts", "docs"]
    assert source_counts(datasets.train, 100) == [50, 30, 20]
    assert list(map(len, datasets.train.dataset.children)) == [40, 6, 10]
    document = next(sample for sample in read(datasets.train, 10) if sample["source"] == 2)
    assert (document["tokens"].tolist(), document["labels"].tolist()) == ([7, 8, 9], [8, 9, 10])
    assert document["loss_mask"].tolist() == [1, 1, 1]
    assert [text_of(sample["tokens"]) for sample in read(datasets.valid)] == ["text!"] * 2
    assert len(datasets.test) == 0


def test_blend_without_val_is_split_source_by_source(sources):
    """A held-out part of the first source alone would say nothing of the others; a shared record,
    too much.
    """
    datasets = build("--data-path", metadataset(sources, blend()), "--split", "5,4,1")
    assert list(map(len, datasets.train.dataset.children)) == [20, 3, 5]
    assert datasets.valid.names == ["chats", "texts", "docs"]
    assert source_counts(datasets.valid, 22) == [16, 2, 4]
    assert source_counts(datasets.test, 6) == [4, 1, 1]
    assert source_counts(datasets.train, 100) == [50, 30, 20]
    with pytest.raises(
        ValueError, match=r"--split 1,99 leaves no record of 40 of .*blend\[0\] for training"
    ):
        build("--data-path", metadataset(sources, blend()), "--split", "1,99")


def test_epochized_blend_reads_each_source_so_often(sources):
    """Repetitions are of records per epoch; taken for weights they would read small sources much
    more often.
    """
    path = metadataset(
        sources, blend("blend_epochized", "repetitions", (1, 2, 0.5)), {"path": "texts"}
    )
    datasets = build("--data-path", path)
    assert source_counts(datasets.train, 40 + 12 + 5) == [40, 12, 5]
    assert source_counts(datasets.train, 2 * (40 + 12 + 5)) == [80, 24, 10]
    with pytest.raises(ValueError, match="blend_epochized"):
        build("--data-path", path, "--blend-weights-by", "tokens")


def test_weights_by_tokens(sources):
    """Shares of samples are not shares of what is trained on: long samples would take most of
    it."""
    path = metadataset(sources, blend(shares=(1, 1, 1)), {"path": "texts"})
    train = build("--data-path", path, "--blend-weights-by", "tokens").train
    lengths = [5, 5, 3]
    tokens = [count * length for count, length in zip(source_counts(train, 3000), lengths)]
    assert max(tokens) - min(tokens) <= 2 * max(lengths)


def test_folder_and_token_file_without_a_metadataset(sources):
    """The parts that a prepared folder has are its own: a --split of it would train on its
    validation part.
    """
    datasets = build("--data-path", str(sources / "texts"))
    assert (len(datasets.train), len(datasets.valid), len(datasets.test)) == (6, 2, 0)
    datasets = build(
        "--data-path", str(sources / "docs"), str(sources / "chats.jsonl"), "--split", "1"
    )
    assert datasets.train.names == ["docs", "chats"]
    assert source_counts(datasets.train, 50) == [10, 40]
    with pytest.raises(
        ValueError, match=r"texts has data to hold out, but .*docs has none; pass --valid-data-path"
    ):
        build("--data-path", str(sources / "texts"), str(sources / "docs"))
    datasets = build(
        *("--data-path", str(sources / "texts"), str(sources / "docs")),
        *("--valid-data-path", str(sources / "texts")),
    )
    assert (len(datasets.train), len(datasets.valid)) == (16, 2)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (
            {"blend": [{"weight": 1, "path": "chats.json"}]},
            r"blend.yaml:1: .*blend\[0\].*chats\.jsonl",
        ),
        ({"blend": [{"wieght": 1, "path": "docs"}]}, "blend.yaml.*'wieght'.*weight"),
        (
            {"blend": [{"weight": 1, "path": "texts", "split_part": "tarin"}]},
            "texts.*'tarin'.*train",
        ),
        (
            {"path": "docs", "subflavors": {"sample_weight": -1}},
            "blend.yaml.*sample_weight must be a number above 0",
        ),
    ],
)
def test_wrong_metadataset_is_one_line(sources, train, words):
    """The model would be built on every rank, and the first step fail."""
    with pytest.raises(ValueError, match=words) as failure:
        build("--data-path", metadataset(sources, train, {"path": "texts"}))
    assert "\n" not in str(failure.value)


def test_metadataset_without_train_is_refused(sources):
    """Validation data would be trained on, or nothing."""
    path = sources / "only.yaml"
    path.write_text("__class__: MetadatasetV2\nsplits: {val: {path: docs}}\n")
    with pytest.raises(ValueError, match=r"only\.yaml has no split 'train'"):
        build("--data-path", str(path))


def test_another_seed_is_another_order(sources):
    """Equal runs under different seeds would be taken for evidence."""
    path = metadataset(sources, blend(), {"path": "texts"})
    trained = [build("--data-path", path, seed=seed).train for seed in (1, 1, 2)]
    orders = [[sample["source"] for sample in read(samples, 50)] for samples in trained]
    assert orders[0] == orders[1] != orders[2]


def test_weights_over_steps(sources):
    """A curriculum that does not change trains on what it began with."""
    path = metadataset(sources, blend(), {"path": "texts"})
    schedule = json.dumps({"points": [[0, [1, 0, 0]], [10, [0, 1, 1]]]})
    train = build("--data-path", path, "--blend-weight-schedule", schedule, batch=4).train
    assert source_counts(train, 40) == [40, 0, 0]
    assert source_counts(train, 60) == [40, 10, 10]
    plain = build("--data-path", path).train
    assert plain.identity != train.identity
    linear = json.dumps({"kind": "linear", "points": [[0, [1, 0, 0]], [5, [0, 1, 0]]]})
    train = build("--data-path", path, "--blend-weight-schedule", linear, batch=20).train
    assert [source_counts(train, 20 * step)[0] for step in range(1, 7)] == [18, 32, 42, 48, 50, 50]
    abrupt = json.dumps({"points": [[0, [5, 3, 1]], [3, [0, 1, 0]]]})
    by_tokens = ("--blend-weights-by", "tokens")
    train = build(
        "--data-path", path, *by_tokens, "--blend-weight-schedule", abrupt, batch=20
    ).train
    before, after = (source_counts(train, 20 * steps) for steps in (3, 8))
    assert [late - early for early, late in zip(before, after)] == [0, 100, 0]
    assert before[0] > 0
    assert before[2] > 0
    with pytest.raises(ValueError, match="2 weights for 3 data sets"):
        build("--data-path", path, "--blend-weight-schedule", '{"points": [[0, [1, 1]]]}')


@pytest.mark.parametrize(
    "arguments",
    [
        ("--blend-mode", "random"),
        ("--blend-weights-by", "tokens"),
        ("--blend-weight-schedule", '{"points": [[0, [1]]]}'),
    ],
)
def test_options_of_blends_need_one(data_path, arguments):
    """They would have no effect on files that are read one after the other."""
    with pytest.raises(ValueError, match=f"{arguments[0]} needs weights or a metadataset"):
        build("--data-path", data_path(".jsonl"), *arguments)


def test_metadataset_among_other_paths_is_refused(sources):
    """Nobody has said in what proportion they are to be mixed."""
    path = metadataset(sources, blend(), {"path": "texts"})
    with pytest.raises(ValueError, match="must be the only one; name the others in it"):
        build("--data-path", str(sources / "docs"), path)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["data/chats.jsonl"], ["chats"]),
        (["data/a/chats.jsonl", "data/b/chats.jsonl", "web/"], ["a/chats", "b/chats", "web"]),
        (["chats.jsonl", "chats.parquet", "v1.2"], ["chats.jsonl", "chats.parquet", "v1.2"]),
        (["/x/chats.jsonl", "/x/chats.jsonl"], ["chats", "chats#2"]),
        (["s3://bucket/a/docs.bin", "docs/b/docs"], ["docs.bin", "docs"]),
        ([], []),
    ],
)
def test_short_names(paths, names):
    """Names that nobody can tell apart, or whole paths in every log line."""
    assert short_names(paths) == names


@given(
    st.lists(
        st.lists(st.sampled_from(["a", "b", "a.jsonl", "b.json"]), min_size=1, max_size=3),
        max_size=6,
    )
)
def test_no_two_names_alike(parts):
    """Two sources under one name would be one source in the metrics."""
    names = short_names(["/".join(path) for path in parts])
    assert len(set(names)) == len(names) == len(parts)


def test_weights_before_paths_are_a_blend(tmp_path):
    """Megatron's way to blend would need a metadataset written for it."""
    for name in "ab":
        write_jsonl(
            tmp_path / f"{name}.jsonl", [{"text": f"{name}{number}"} for number in range(40)]
        )
    (tmp_path / "blend.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        "      - {weight: 3, path: a.jsonl}\n      - {weight: 1, path: b.jsonl}\n"
    )
    paths = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    weighted = build("--data-path", "3", paths[0], "1", paths[1], "--split", "9,1")
    told = build("--data-path", str(tmp_path / "blend.yaml"), "--split", "9,1")
    texts = [text_of(sample["tokens"]) for sample in read(weighted.train, 40)]
    assert texts == [text_of(sample["tokens"]) for sample in read(told.train, 40)]
    assert sum(text.startswith("a") for text in texts) == 30
    assert len(weighted.valid) == len(told.valid) == 8
    with pytest.raises(ValueError, match=r"leaves no record of 40 of \S*a.jsonl for training"):
        build("--data-path", "3", paths[0], "1", paths[1], "--split", "1,999")


def test_unread_keys_are_listed_before_processes_read(write_lines, caplog):
    """Each process that reads would list them again; a broken first record must not end a run that
    skips such.
    """
    path = write_lines("train.jsonl", text_line("abc", id=7), text_line("abd", id=8))
    broken = write_lines("broken.jsonl", "{", text_line("abc", url="u"))
    build("--data-path", path, broken, "--split", "1")
    assert caplog.messages == ["not read of records: id"]
