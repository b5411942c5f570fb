"""Data, blends, models, adapters and checkpoints, told in a few lines."""

import json
from pathlib import Path

import pytest

from megatron.sft.commands.inspect import lines_of, main, size

RELEASED = Path(__file__).parents[3] / "fixtures" / "released"
BLEND = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n"
ONE_A, ONE_B = "{weight: 1, path: a.jsonl}", "{weight: 1, path: b.jsonl}"
ONE_INNER = "{weight: 1, path: inner.yaml}"


@pytest.fixture
def data(tmp_path):
    for name, count in (("a", 4), ("b", 2)):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "x"}\n' * count)
    (tmp_path / "inner.yaml").write_text(f"{BLEND}  train: {{blend: [{ONE_B}, {ONE_A}]}}\n")
    (tmp_path / "blend.yaml").write_text(
        f"{BLEND}  train: {{blend: [{{weight: 3, path: a.jsonl}}, {ONE_INNER}]}}\n"
        "  val: {path: b.jsonl}\n"
    )
    return tmp_path


def test_a_blend_has_shares_sizes_and_its_tree(data):
    """Weights of nested files multiply; whoever trusts the numbers in one file is wrong."""
    lines = list(lines_of(str(data / "blend.yaml")))
    assert "split train: 3 sources, 10 records, blended by weight" in lines[0]
    assert [line.split()[0] for line in lines[1:4]] == ["75.0%", "12.5%", "12.5%"]
    assert lines[4:6] == ["  weight 3: a.jsonl", "  weight 1: b.jsonl, a.jsonl"]
    assert "split val: 1 source, 2 records" in lines[6]
    assert len(lines) == 8


def test_a_folder_and_a_pattern_stand_for_their_files(data):
    """--data-path takes them; whoever looks first was told to prepare the folder."""
    (data / "blend.yaml").unlink()
    for path in (data, data / "*.jsonl"):
        head, *files = lines_of(str(path))
        assert head == f"{path}: 2 files, 6 records, read one after the other"
        assert [line.split()[0] for line in files] == ["66.7%", "33.3%"]
    assert "split train: 1 source, 2 records" in next(lines_of(str(data / "b*.jsonl")))
    (data / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: has no file that ends in \.jsonl"):
        list(lines_of(str(data / "empty")))


def test_a_model_says_whether_it_trains_here(tmp_path):
    """Else the answer comes after the model was downloaded to eight nodes."""
    assert "  trains     yes" in next(
        line for line in lines_of(str(RELEASED / "qwen")) if "trains" in line
    )
    config = json.loads((RELEASED / "qwen" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "t5"}))
    (tmp_path / "model.safetensors").write_bytes(
        (RELEASED / "qwen" / "model.safetensors").read_bytes()
    )
    assert list(lines_of(str(tmp_path)))[-1].startswith("  trains     no: ")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert list(lines_of(str(tmp_path)))[-1].endswith(" --tokenizer-model FOLDER")
    sparse = {"model_type": "qwen3_moe", "output_router_logits": True}
    (tmp_path / "config.json").write_text(json.dumps(config | sparse))
    assert "--moe-aux-loss-coeff" in list(lines_of(str(tmp_path)))[-1]
    scored = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (tmp_path / "config.json").write_text(json.dumps(config | scored))
    first, *_, last = lines_of(str(tmp_path))
    assert first.endswith(", a reward model")
    assert "lacks score.weight" in last


def test_an_adapter_names_its_base():
    """An adapter beside another base gives nonsense."""
    lines = list(lines_of(str(RELEASED / "trl-adapter")))
    assert lines[1] == (
        "  rank 4, alpha 8, on down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"
    )
    assert lines[2] == "  base model qwen"


def test_a_long_word_of_a_file_is_shortened(tmp_path, capsys):
    """An adapter's type of 20,000 characters pushed its base model out of the terminal."""
    config = {"peft_type": "Q" * 20_000, "r": "Q" * 20_000}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    main([str(tmp_path)], "inspect")
    assert max(map(len, capsys.readouterr().out.splitlines())) < 500


def test_checkpoints_are_listed(tmp_path):
    """Which one is continued, and which was the best, is in two small files."""
    for step in (10, 20):
        folder = tmp_path / f"iter_{step:07d}"
        folder.mkdir()
        (folder / "checksums.json").write_text('{"crc32": {"a": [1, 2], "b": [3, 4]}}')
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    (tmp_path / "best_checkpointed_iteration.txt").write_text("10")
    lines = list(lines_of(str(tmp_path)))
    assert lines[1].split() == ["step", "10", "37", "bytes", "best"]
    assert lines[2].split() == ["step", "20", "37", "bytes", "newest"]
    assert lines[3].endswith("37 bytes, 2 files with checksums")
    assert lines[-1] == f"  continue with --load {tmp_path}"


@pytest.mark.parametrize("arguments", [[], ["no-such-folder"], [__file__], ["--path", "x"]])
def test_what_is_nothing_of_that_is_one_line(arguments, capsys):
    """A traceback hides what was wrong with the path."""
    with pytest.raises(SystemExit) as end:
        main(arguments, "megatron-sft inspect")
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-sft inspect: error: ")


@pytest.mark.parametrize(
    ("num_bytes", "told"), [(999, "999 bytes"), (2_500_000, "2.5 MB"), (3 * 10**12, "3.0 TB")]
)
def test_sizes(num_bytes, told):
    """A factor of a thousand is easily lost."""
    assert size(num_bytes) == told
