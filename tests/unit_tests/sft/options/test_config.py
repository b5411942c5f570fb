"""The options of a run: all of Megatron's names that we promise, and contradictions across groups
refused.
"""

import json
import math
from itertools import product

import pytest

from tests.unit_tests.sft.command_line import assert_refused, parse

PROMISED = [
    "--num-layers 4",
    "--hidden-size 128",
    "--num-attention-heads 4",
    "--group-query-attention --num-query-groups 2",
    "--num-query-groups 2 --group-query-attention",
    "--swiglu",
    "--normalization LayerNorm",
    "--normalization RMSNorm",
    "--position-embedding-type learned_absolute",
    "--position-embedding-type rope",
    "--seq-length 256",
    "--tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size 2",
    "--num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 2",
    "--context-parallel-size 2",
    "--sequence-parallel",
    "--use-distributed-optimizer",
    "--micro-batch-size 2",
    "--global-batch-size 32",
    "--train-iters 5",
    "--lr 3e-4",
    "--min-lr 1e-5",
    "--lr-decay-style constant",
    "--lr-decay-style linear",
    "--lr-decay-style cosine",
    "--lr-decay-style inverse-square-root",
    "--lr-warmup-iters 2",
    "--weight-decay 0.1",
    "--clip-grad 0.5",
    "--bf16",
    "--eval-interval 5",
    "--eval-iters 2",
    "--save checkpoints",
    "--load checkpoints",
    "--save-interval 5 --save checkpoints",
    "--log-interval 2",
    "--tensorboard-dir tensorboard",
    "--seed 7",
    "--split 90,10,0",
    "--tokenizer-type NullTokenizer",
    "--tokenizer-model folder",
    "--sequence-packing",
    "--sequence-packing-scheduler default --sequence-packing",
    "--sequence-packing-scheduler empty --sequence-packing",
    "--sequence-packing-scheduler dp_balanced --sequence-packing",
    "--max-seqlen-per-dp-cp-rank 256 --sequence-packing",
    "--outlier-delay-steps 4 --sequence-packing",
    "--sft-mock-dataset-config-json lengths.json",
    "--recompute-granularity full",
    "--recompute-method block --recompute-granularity full",
    "--recompute-num-layers 2 --recompute-granularity full",
    "--attention-backend fused",
    "--exit-interval 100",
    "--ckpt-step 4 --load checkpoints",
]


@pytest.mark.parametrize("arguments", PROMISED)
def test_promised_flag_is_accepted_and_arrives(arguments):
    """A script written for Megatron's trainers would stop at the first name that is missing
    here."""
    config = parse(arguments, world_size=2)
    flag, *values = arguments.split(" --")[0].split()
    name = flag.removeprefix("--").replace("-", "_")
    (group,) = [part for part in config.to_dict().values() if name in part]
    expected = values[0] if values else True
    assert group[name] == (type(group[name])(expected))


def test_defaults():
    """A default that moves changes every run whose script does not name it."""
    config = parse()
    assert config.to_dict()["parallel"] == {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "context_parallel_size": 1,
        "cp_comm_type": ["p2p"],
        "query_groups_per_gather": None,
        "expert_model_parallel_size": 1,
        "sequence_parallel": False,
        "use_tp_pp_dp_mapping": False,
        "use_distributed_optimizer": False,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "distributed_timeout_minutes": 10.0,
    }
    packing, data, training, output = config.packing, config.data, config.training, config.output
    assert (packing.sequence_packing, packing.over_length_policy) == (False, "error")
    assert (data.split, data.resolved_tokenizer_type, data.skip_bad_samples) == (
        "969,30,1",
        "ByteLevelTokenizer",
        False,
    )
    assert (training.micro_batch_size, training.min_lr, training.lr_decay_style) == (
        1,
        0.0,
        "linear",
    )
    assert (training.weight_decay, training.clip_grad, training.seed, training.bf16) == (
        0.01,
        1.0,
        1234,
        False,
    )
    assert (output.save, output.load, output.save_interval, output.log_interval) == (
        None,
        None,
        None,
        1,
    )
    assert (config.model.normalization, config.model.position_embedding_type) == (
        "LayerNorm",
        "learned_absolute",
    )


# Arguments, world size, and words that the message must hold: the flags that contradict, and what
# to do.
CONTRADICTIONS = [
    ("--no-sequence-packing --dump-schedule 3", 1, ["--dump-schedule", "--sequence-packing"]),
    (
        "--sequence-packing --dump-schedule 3 11",
        1,
        ["--dump-schedule 11 must be at most --train-iters 10"],
    ),
    (
        "--micro-batch-size 3",
        1,
        ["--global-batch-size 16", "--micro-batch-size 3", "data-parallel size 1"],
    ),
    (
        "--micro-batch-size 2",
        3,
        ["--global-batch-size 16", "--micro-batch-size 2", "data-parallel size 3"],
    ),
    (
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 "
        "--global-batch-size 6",
        4,
        ["interleaved", "multiple of 4 microbatches", "--global-batch-size 6 makes 6"],
    ),
    (
        "--tensor-model-parallel-size 16",
        16,
        ["--num-attention-heads 8", "--tensor-model-parallel-size 16"],
    ),
    (
        "--tensor-model-parallel-size 2 --ffn-hidden-size 33",
        2,
        ["--ffn-hidden-size 33", "--tensor-model-parallel-size 2"],
    ),
    (
        "--tensor-model-parallel-size 2 --num-attention-heads 6 --kv-channels 8 "
        "--group-query-attention --num-query-groups 3",
        2,
        ["--num-query-groups 3", "multiple of --tensor-model-parallel-size 2"],
    ),
    (
        "--pipeline-model-parallel-size 3 --global-batch-size 3",
        3,
        ["--num-layers 8", "--pipeline-model-parallel-size 3"],
    ),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
        2,
        [
            "--num-layers 8",
            "--pipeline-model-parallel-size 2",
            "--num-layers-per-virtual-pipeline-stage 3",
        ],
    ),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4",
        2,
        ["--num-layers-per-virtual-pipeline-stage", "one virtual stage", "lower it or drop it"],
    ),
    (
        "--expert-model-parallel-size 2",
        2,
        ["--expert-model-parallel-size 2", "--num-experts"],
    ),
    (
        "--expert-model-parallel-size 2 --disable-bias-linear --num-experts 3",
        2,
        ["--num-experts 3", "--expert-model-parallel-size 2"],
    ),
    (
        "--disable-bias-linear --num-experts 4 --tensor-model-parallel-size 2",
        2,
        [
            "--num-experts with --tensor-model-parallel-size 2 needs "
            "--expert-model-parallel-size above 1 and --sequence-parallel:"
        ],
    ),
    (
        "--disable-bias-linear --num-experts 4 --tensor-model-parallel-size 2 --sequence-parallel",
        2,
        ["needs --expert-model-parallel-size above 1: megatron-core would"],
    ),
    (
        "--sequence-packing --max-seqlen-per-dp-cp-rank 100",
        1,
        ["--max-seqlen-per-dp-cp-rank 100", "--seq-length 128", "raise it to 128"],
    ),
    (
        "--sequence-packing --max-seqlen-per-dp-cp-rank 63 --context-parallel-size 2",
        2,
        ["--max-seqlen-per-dp-cp-rank 63", "--seq-length 128", "raise it to 64"],
    ),
    (
        "--seq-length 130 --context-parallel-size 2",
        2,
        ["--seq-length 130", "multiple of 4", "without packing"],
    ),
    (
        "--seq-length 130 --tensor-model-parallel-size 4 --sequence-parallel",
        4,
        ["--seq-length 130", "multiple of 4", "without packing"],
    ),
    (
        "--seq-length 132 --context-parallel-size 2 --tensor-model-parallel-size 4 "
        "--sequence-parallel",
        8,
        ["--seq-length 132", "multiple of 8", "without packing"],
    ),
]


@pytest.mark.parametrize(("arguments", "world_size", "words"), CONTRADICTIONS)
def test_contradiction_is_refused_with_a_way_out(arguments, world_size, words):
    """It would show as a hang or a shape error inside megatron-core, minutes later and on some
    ranks only.
    """
    assert_refused(arguments, world_size, words)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", None),
        ("--pipeline-model-parallel-size 2", None),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", 2),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 4),
        ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1", 2),
    ],
)
def test_num_virtual_stages(arguments, expected):
    """One stage too few drops layers from the model, which trains all the same."""
    assert parse(arguments, world_size=8).num_virtual_stages == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", 128),
        ("--context-parallel-size 2", 64),
        ("--max-seqlen-per-dp-cp-rank 300", 300),
        ("--max-seqlen-per-dp-cp-rank 300 --context-parallel-size 2", 300),
        ("--seq-length 127 --context-parallel-size 4", 32),
        (
            "--seq-length 129 --context-parallel-size 2",
            66,
        ),  # 129 -> 132, a multiple of 4, over 2 ranks
        ("--seq-length 127 --tensor-model-parallel-size 2 --sequence-parallel", 128),
        ("--seq-length 127 --tensor-model-parallel-size 2", 127),
        (
            "--seq-length 132 --context-parallel-size 2 --tensor-model-parallel-size 4 "
            "--sequence-parallel",
            68,
        ),
    ],
)
def test_capacity_per_rank(arguments, expected):
    """Rounded down, it would refuse the longest sequences that --seq-length allows."""
    assert parse(f"--sequence-packing {arguments}", world_size=8).capacity_per_rank == expected


def test_capacity_by_default_holds_the_longest_sequence_in_every_layout():
    """A sequence of --seq-length tokens would end the run at the step that draws it."""
    for seq_length, context, tensor in product((125, 127, 128), (1, 2, 4), (1, 2)):
        config = parse(
            f"--sequence-packing --sequence-parallel --seq-length {seq_length} "
            f"--context-parallel-size {context} --tensor-model-parallel-size {tensor}",
            world_size=8,
        )
        sequence = 2 * context if context > 1 else 1
        pack = math.lcm(sequence, context * tensor)
        capacity = config.capacity_per_rank * context // pack * pack
        assert capacity >= -(-seq_length // sequence) * sequence, (seq_length, context, tensor)


def test_without_packing_a_sequence_need_be_a_multiple_of_the_layout_only():
    """Demands beyond need would refuse what megatron-core runs: 132 / (2 x 2) pieces of 33
    tokens."""
    layout = "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    assert parse(f"--seq-length 132 {layout}", world_size=4).model.seq_length == 132


def test_an_interleaved_pipeline_may_pack_any_batch():
    """With packing the scheduler makes up the multiple of microbatches, so the batch size need
    not."""
    arguments = (
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 "
        "--global-batch-size 6"
    )
    assert parse(f"{arguments} --sequence-packing", world_size=4).training.global_batch_size == 6


def test_to_dict_is_plain_json():
    """Checkpoints compare these values with those of the next run: they must survive being written
    and read.
    """
    values = parse("--data-path a b --no-mock-data").to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["data"]["data_path"] == ["a", "b"]
    assert values["model"]["hidden_size"] == 64
