"""Whole runs of pretrain_sft.py on a metadataset: proportions as asked for, and losses by source in
any layout.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.blending.energon._prepare import Preparation, prepare_webdataset
from tests.functional_tests.forked_runs import train_forked
from tests.functional_tests.test_run import EXACT, MODEL, steps_of, train

WEIGHTS = {"chats": 5, "alpaca": 2, "texts": 2, "docs": 1}
PATHS = {"chats": "chats.jsonl", "alpaca": "alpaca.parquet", "texts": "texts", "docs": "docs"}
SAMPLE_WEIGHTS = {"alpaca": 0.5, "docs": 0.25}
BATCH = ("--global-batch-size", "8", "--eval-iters", "2", "--eval-interval", "3")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a metadataset of a JSONL file, a Parquet file, a prepared WebDataset and a
    token file.
    """
    folder = tmp_path_factory.mktemp("data")
    write_lines(
        folder / "chats.jsonl",
        [{"instruction": f"{i}?", "output": "yes " * (1 + i * 7 % 19)} for i in range(50)],
    )
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {"instruction": f"q{i}", "output": "no " * (1 + i % 17), "weight": 0.5} for i in range(25)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "alpaca.parquet")
    (folder / "texts").mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"texts/shard_{shard}.tar", "w") as tar:
            for number in range(12):
                text = (f"text {number} " * (1 + number % 5)).encode()
                member = tarfile.TarInfo(f"{shard}_{number:03d}.txt")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
    asked = Preparation(split_ratio=(1, 1, 0), sample_type="TextSample", field_map={"text": "txt"})
    prepare_webdataset(str(folder / "texts"), asked)
    write_documents(folder / "docs", [[i % 250 for i in range(5 + 3 * n)] for n in range(12)])
    write_metadataset(folder / "blend.yaml", WEIGHTS)
    return folder


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_documents(path: Path, documents: list[list[int]]) -> None:
    """A .bin and its .idx, as Megatron's tools write them: uint16 tokens."""
    lengths = np.array([len(document) for document in documents], np.int32)
    np.concatenate(documents).astype(np.uint16).tofile(f"{path}.bin")
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.int64) * 2
    bounds = np.arange(len(lengths) + 1, dtype=np.int64)
    counts = np.array([len(lengths), len(bounds)], np.uint64).tobytes()
    head = b"MMIDIDX\0\0" + np.uint64(1).tobytes() + bytes([8])
    Path(f"{path}.idx").write_bytes(
        head + counts + lengths.tobytes() + starts.tobytes() + bounds.tobytes()
    )


def write_metadataset(path: Path, weights: dict[str, int], **changes: Any) -> Path:
    blend = [{"weight": weight, "path": PATHS[name]} for name, weight in weights.items()]
    blend[-1]["subflavors"] = {"sample_weight": 0.25}
    splits = {
        "train": {"blend": blend},
        "val": {"blend": [{"path": "texts"}, {"path": "alpaca.parquet"}]},
        **changes,
    }
    path.write_text(
        json.dumps(
            {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}
        )
    )
    return path


def options(data: Path, folder: Path, train_iters: int = 6) -> list[str]:
    return [
        *(
            "--data-path",
            str(data / "blend.yaml"),
            "--train-iters",
            str(train_iters),
            "--run-dir",
            str(folder),
            *BATCH,
        ),
        *(
            "--save",
            str(folder / "checkpoints"),
            "--save-interval",
            "2",
            "--load",
            str(folder / "checkpoints"),
        ),
    ]


def evaluations_of(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "evaluation"]


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps on two data-parallel ranks, never stopped, with a checkpoint at every
    second.
    """
    folder = tmp_path_factory.mktemp("whole")
    output = train(2, *options(data, folder))
    assert " | chats " in output
    assert "source chats" in output
    return folder


def test_counts_follow_the_weights_and_losses_sum_up(whole: Path) -> None:
    """A source drawn too often, or a loss under another source's name, changes no loss curve that
    anyone looks at.
    """
    drawn, position = dict.fromkeys(WEIGHTS, 0), 0
    for step in steps_of(whole).values():
        position += 8
        sources = step["sources"]
        for name, source in sources.items():
            drawn[name] += source["sequences"]
        for name, weight in WEIGHTS.items():
            assert abs(drawn[name] - position * weight / 10) < 1 + 1e-9
        assert sum(source["sequences"] for source in sources.values()) == step["sequences"] == 8
        assert sum(source["tokens"] for source in sources.values()) == step["tokens"]
        assert (
            sum(source["num_loss_tokens"] for source in sources.values()) == step["num_loss_tokens"]
        )
        weighted = {
            name: source["loss"] * source["num_loss_tokens"] for name, source in sources.items()
        }
        total = sum(loss * SAMPLE_WEIGHTS.get(name, 1) for name, loss in weighted.items())
        assert total == pytest.approx(step["loss"] * step["num_loss_tokens"], rel=1e-6)
    first = steps_of(whole)[1]["sources"]
    assert first["docs"]["loss"] == pytest.approx(
        first["chats"]["loss"], rel=0.1
    )  # whatever its samples weigh
    assert [list(evaluation["sources"]) for evaluation in evaluations_of(whole)] == [
        ["texts", "alpaca"]
    ] * 3


LAYOUTS = {
    "context": "--context-parallel-size 2",
    "pipeline": "--pipeline-model-parallel-size 2",
}


def assert_same_sources(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, source in found.items():
        counts = ("sequences", "tokens", "num_loss_tokens")
        assert [source[column] for column in counts] == [
            expected[name][column] for column in counts
        ]
        assert source["loss"] == pytest.approx(expected[name]["loss"], rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_by_source_are_those_of_any_layout(
    data: Path, whole: Path, tmp_path: Path, layout: str
) -> None:
    """Shards of a sequence, or a stage that does not know the sources, would put losses under the
    wrong name.
    """
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").write_text("2")
    train(2, *options(data, tmp_path / "run"), *LAYOUTS[layout].split())
    expected, found = steps_of(whole), steps_of(tmp_path / "run")
    assert list(found) == list(expected)
    for iteration in range(3, 7):
        assert_same_sources(found[iteration]["sources"], expected[iteration]["sources"])
    for evaluation, reference in zip(
        evaluations_of(tmp_path / "run")[1:], evaluations_of(whole)[1:], strict=True
    ):
        assert_same_sources(evaluation["sources"], reference["sources"])


def test_padded_run_has_the_same_losses_by_source(data: Path, whole: Path, tmp_path: Path) -> None:
    """The baseline must be compared source by source, too."""
    flags = [flag for flag in MODEL if flag != "--sequence-packing"]
    status, output = train_forked(
        2, [*flags, *options(data, tmp_path, 2), "--micro-batch-size", "2"]
    )
    assert status == 0, output
    for iteration, step in steps_of(tmp_path).items():
        assert_same_sources(step["sources"], steps_of(whole)[iteration]["sources"])


def test_continues_to_the_bit(data: Path, whole: Path, tmp_path: Path) -> None:
    """A source whose place is off by one trains on a record twice; nothing else would show it."""
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").write_text("4")
    train(2, *options(data, tmp_path / "run"))
    for iteration, step in steps_of(tmp_path / "run").items():
        expected = steps_of(whole)[iteration]
        assert {name: step[name] for name in (*EXACT, "sources")} == {
            name: expected[name] for name in (*EXACT, "sources")
        }


def test_another_blend_is_refused_by_name(data: Path, whole: Path, tmp_path: Path) -> None:
    """Energon takes swapped sources without a word, and trains on the wrong ones."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    other = write_metadataset(data / "other.yaml", {"alpaca": 2, "chats": 4, "texts": 2, "docs": 1})
    arguments = [*MODEL, *options(data, folder, 8), "--data-path", str(other)]
    status, output = train_forked(1, arguments)
    assert status != 0
    assert (
        "the order of the sources was chats, alpaca, texts, docs, is alpaca, chats, texts, docs"
        in output
    )
    assert (
        "the weight of chats was 5/10, is 4/9" in output
        or "the weight of chats was 1/2, is 4/9" in output
    )
    output = train(1, *options(data, folder, 8), "--data-path", str(other), "--allow-changed-data")
    assert list(steps_of(folder)) == list(range(1, 9))
    assert "was trained on other data" in output


def test_mistakes_are_told_at_once(data: Path, tmp_path: Path) -> None:
    """A model is built for minutes, and then the misspelt key of a YAML file ends the run."""
    wrong = write_metadataset(data / "wrong.yaml", WEIGHTS, val={"pth": "texts"})
    arguments = [*MODEL, *options(data, tmp_path), "--data-path", str(wrong)]
    status, output = train_forked(1, arguments)
    assert status == 2
    (line,) = output.strip().splitlines()
    assert line.startswith(f"pretrain_sft.py: error: {wrong}:1: ")
    assert "'pth'" in line
    assert "path" in line


def test_a_broken_source_ends_all_ranks(data: Path, tmp_path: Path) -> None:
    """Skipped one by one, a source that is broken altogether would silently be no part of the
    blend.
    """
    for name in ("alpaca.parquet", "texts", "docs.bin", "docs.idx"):
        (tmp_path / name).symlink_to(data / name)
    lines = (data / "chats.jsonl").read_text().splitlines()
    (tmp_path / "chats.jsonl").write_text("\n".join(["{broken"] * 40 + lines[40:]) + "\n")
    write_metadataset(tmp_path / "blend.yaml", WEIGHTS)
    arguments = [*MODEL, *options(tmp_path, tmp_path / "run", 30), "--skip-bad-samples"]
    status, output = train_forked(2, [*arguments, "--max-bad-samples-in-a-row", "4"])
    assert status != 0
    assert output.count("4 samples in a row failed, the limit; see --max-bad-samples-in-a-row") == 1
    status, output = train_forked(2, [*arguments, "--train-iters", "6"])
    assert status == 0, output
    dropped = [step["dropped"] for step in steps_of(tmp_path / "run").values()]
    number = sum(step["chats"]["bad sample"] for step in dropped)
    assert 15 <= number <= 30
    assert set().union(*dropped) == {"chats"}
    assert f"{number} dropped ({number} bad sample of chats)" in output
    assert 15 <= output.count("; left out, ") <= number  # each once: an epoch is 50 records
