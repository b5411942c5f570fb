"""What packs of trees keep beside packs of sequences."""

from __future__ import annotations

from megatron.sft.arguments.parse import parse_config
from megatron.sft.fit.stages import stages_of
from megatron.sft.fit.tree_bytes import TreeBytes, tree_bytes

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 64 --train-iters 1 --global-batch-size 8 --lr 1e-3 --bf16 "
    "--sequence-packing --max-seqlen-per-dp-cp-rank 512 --data-path chats.jsonl --vocab-size 96 "
    "--tokenizer-type NullTokenizer"
)


def found(flags: str, world_size: int) -> TreeBytes | None:
    """The bytes of a run of that many processes."""
    config = parse_config(f"{FLAGS} {flags}".split(), world_size)
    return tree_bytes(config, stages_of(config, world_size))


def test_keys_of_paths_are_counted() -> None:
    """They are no part of a trace of sequences: a run that fits would end at its first tree."""
    row = 2 * 2 * 16 * 2  # keys and values of two groups of 16 channels, in bfloat16
    assert found("", 1) == TreeBytes(4 * row * 512, 4 * row * 1000)
    # Context parallel: keys are copied in any case, those of a path for two pieces of each node.
    assert found("--context-parallel-size 2", 2) == TreeBytes(0, 4 * row * 2 * 1000)
    # Two microbatches of half of the layers; half of the groups.
    both = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"
    assert found(both, 4) == TreeBytes(2 * row * 512, 2 * row * 1000)
    assert found("--recompute-granularity full", 1) == TreeBytes(row * 512, row * 1000)
    # One group at a time, in both passes.
    by_groups = TreeBytes(row // 2 * 512, row // 2 * 1000)
    assert found("--query-groups-per-gather 1", 1) == by_groups


def test_runs_without_trees_have_none() -> None:
    """A line of trees would puzzle whoever trains one rendering of each conversation."""
    assert found("--train-turns all", 1) is None
