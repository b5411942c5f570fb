"""The parallel layout: how many replicas it leaves, and what it cannot be."""

import pytest

from tests.unit_tests.sft.command_line import assert_refused, parse

CONTRADICTIONS = [
    (
        "--num-layers-per-virtual-pipeline-stage 2",
        1,
        ["--num-layers-per-virtual-pipeline-stage", "--pipeline-model-parallel-size"],
    ),
    ("--decoder-first-pipeline-num-layers 3", 1, ["--pipeline-model-parallel-size of at least 2"]),
    (
        "--pipeline-model-parallel-size 3",
        3,
        ["--num-layers 8 must be a multiple of", "pass --decoder-first-pipeline-num-layers or"],
    ),
    (
        "--pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 1",
        4,
        ["--decoder-last-pipeline-num-layers 1 with", "leaves 7 layers for 3 other stages"],
    ),
    (
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 "
        "--num-virtual-stages-per-pipeline-rank 2",
        2,
        ["leaves stages of 3, 5 layers", "multiples of their 2 virtual stages"],
    ),
    (
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2 "
        "--num-layers-per-virtual-pipeline-stage 1",
        2,
        ["pass --num-virtual-stages-per-pipeline-rank"],
    ),
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--num-layers-per-virtual-pipeline-stage 2",
        2,
        ["say the same; drop one"],
    ),
    (
        "--pipeline-model-parallel-size 4 --account-for-loss-in-pipeline-split",
        4,
        ["--num-layers 8 and --account-for-loss-in-pipeline-split, 9 together, must be"],
    ),
    (
        "--pipeline-model-parallel-size 4 --account-for-loss-in-pipeline-split "
        "--decoder-first-pipeline-num-layers 1",
        4,
        ["exclude one another; drop one"],
    ),
    (
        "--num-layers 7 --pipeline-model-parallel-size 8 --account-for-loss-in-pipeline-split "
        "--lora",
        8,
        ["--lora needs a layer on every pipeline stage"],
    ),
    (
        "--num-layers 7 --pipeline-model-parallel-size 8 --account-for-loss-in-pipeline-split "
        "--mtp-num-layers 1 --position-embedding-type rope",
        8,
        ["--mtp-num-layers needs a layer on the last pipeline stage"],
    ),
    ("--cp-comm-type ring", 1, ["--cp-comm-type must be p2p,", "but is ring"]),
    ("--cp-comm-type p2p a2a", 1, ["one for each of --num-layers 8"]),
    (
        "--overlap-param-gather",
        1,
        ["--overlap-param-gather", "--use-distributed-optimizer", "--overlap-grad-reduce"],
    ),
    (
        "--overlap-param-gather --use-distributed-optimizer",
        1,
        ["--overlap-param-gather", "--use-distributed-optimizer", "--overlap-grad-reduce"],
    ),
    (
        "--overlap-param-gather --overlap-grad-reduce",
        1,
        ["--overlap-param-gather", "--use-distributed-optimizer"],
    ),
    (
        "--tensor-model-parallel-size 2",
        1,
        ["number of processes, 1", "2 x 1 x 1 = 2", "--nproc-per-node 2"],
    ),
    (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2",
        12,
        ["number of processes, 12", "2 x 2 x 2 = 8", "--nproc-per-node 8"],
    ),
    (
        "--disable-bias-linear --num-experts 4 --expert-model-parallel-size 4",
        2,
        ["number of processes, 2", "--expert-model-parallel-size", "4;"],
    ),
    (
        "--disable-bias-linear --num-experts 4 --expert-model-parallel-size 4 "
        "--pipeline-model-parallel-size 2",
        4,
        ["number of processes, 4", "--pipeline-model-parallel-size, 8;"],
    ),
]


@pytest.mark.parametrize(("arguments", "world_size", "words"), CONTRADICTIONS)
def test_contradiction_is_refused_with_a_way_out(arguments, world_size, words):
    """It would show as a hang or as process groups that do not add up."""
    assert_refused(arguments, world_size, words)


def test_experts_may_share_the_ranks_of_tensor_and_data_parallel():
    """Expert parallel is no factor of its own in the number of processes."""
    experts = "--disable-bias-linear --num-experts 4 --expert-model-parallel-size 4"
    tensor = "--tensor-model-parallel-size 2 --sequence-parallel"
    assert parse(f"{experts} {tensor}", world_size=4).parallel.data_parallel_size(4) == 2


@pytest.mark.parametrize(
    ("arguments", "world_size", "expected"),
    [("", 4, 4), ("--tensor-model-parallel-size 2", 4, 2), ("--context-parallel-size 2", 2, 1)],
)
def test_data_parallel_size(arguments, world_size, expected):
    """Counted wrongly, every step trains on more or fewer samples than --global-batch-size."""
    assert parse(arguments, world_size).parallel.data_parallel_size(world_size) == expected
