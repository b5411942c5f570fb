"""Options of `megatron-sft fit`; what it prints is in tests/functional_tests."""

from types import SimpleNamespace

import pytest

from megatron.packing.flags import FlagError
from megatron.sft.commands.fit import host_fits, parse, way_line
from megatron.sft.data.datasets import MOCK_VOCAB_SIZE
from megatron.sft.fit.save_bytes import SaveBytes
from megatron.sft.fit.vocabulary import vocab_size_of
from megatron.sft.memory_estimate import WayOut

GIB = 1 << 30


def test_a_command_without_a_model_names_the_short_way():
    """A list of missing numbers lets a stranger look them up; a released model has them all."""
    with pytest.raises(FlagError, match=r"--num-layers, .*; or pass --pretrained-checkpoint"):
        parse([], "megatron-sft fit")


def test_a_way_out_says_whether_it_is_enough():
    """Three ways that save little looked like three solutions."""
    way = WayOut("--context-parallel-size 2", 47 * GIB)
    # 73 GiB of tensors, 5 % between them and 2 GiB of libraries: 78.65. Without it 128.
    line = "  --context-parallel-size 2  49.35 GiB less, "
    assert way_line(way, 120 * GIB, 80 * GIB) == line + "then it fits"
    assert way_line(way, 120 * GIB, 78 * GIB) == line + "still 0.65 too much"


def test_an_estimate_without_data_has_the_tokenizer_s_words(tmp_path):
    """It took the 1,024 of mock data: 11 GiB for 26, and "fits"."""
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64"

    def words_of(more):
        return vocab_size_of(parse([*shape.split(), *more.split()], "fit")[0])

    assert words_of("--tokenizer-type NullTokenizer --vocab-size 999") == 999
    assert words_of("--tokenizer-type ByteLevelTokenizer") < 300
    assert words_of("--mock-data") == MOCK_VOCAB_SIZE
    with pytest.raises(FlagError, match="size of the vocabulary is missing: pass --vocab-size"):
        words_of("")
    with pytest.raises(ValueError, match="--data-path"):
        words_of("--valid-data-path valid.jsonl")


@pytest.mark.parametrize(
    ("flags", "memory", "way_out"),
    [
        ("", "8GiB", ""),  # 4 ranks of a node, 2 GiB each
        ("", "7GiB", "; take more nodes"),
        ("--save s --async-save", "19GiB", "; drop --async-save, or take more nodes"),
    ],
)
def test_a_host_that_is_too_small_is_told(capsys, flags, memory, way_out):
    """All ranks of a node write at once. Options that are not in use are no way out."""
    shape = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 64"
    sizes = f"--world-size 8 --gpus-per-node 4 --host-memory {memory}"
    data = "--mock-data --global-batch-size 8 --train-iters 1"
    config, options, *_ = parse(f"{shape} {sizes} {data} {flags}".split(), "megatron-sft fit")
    stage = SimpleNamespace(
        host_bytes=GIB,
        save_host_bytes=SaveBytes(checkpoint=GIB, in_background=4 * GIB, huggingface=9 * GIB),
    )
    assert host_fits([stage], config, options) == (not way_out)
    assert capsys.readouterr().out.rstrip().endswith(way_out)
