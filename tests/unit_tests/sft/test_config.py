"""The options of a run: all of Megatron's names that we promise, and every contradiction refused with a way out."""

import json
import math
from functools import lru_cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.sft import flags
from megatron.sft.config import DataConfig, SFTConfig, parse_config
from megatron.sft.flags import FlagError


@pytest.fixture(autouse=True, scope="module")
def docstrings_read_once():
    """The help of each flag is parsed from source at every start; once is enough for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flags, "_field_docstrings", lru_cache(flags._field_docstrings))
        yield


MODEL = "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 128"
STEPS = "--train-iters 10 --global-batch-size 16 --lr 1e-3"
BASE = f"{MODEL} {STEPS}"


def parse(arguments: str = "", world_size: int = 1, base: str = f"{BASE} --mock-data") -> SFTConfig:
    return parse_config([*base.split(), *arguments.split()], world_size)


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
]


@pytest.mark.parametrize("arguments", PROMISED)
def test_promised_flag_is_accepted_and_arrives(arguments):
    """A script written for Megatron's trainers would stop at the first name that is missing here."""
    config = parse(arguments, world_size=2)
    flag, *values = arguments.split(" --")[0].split()
    name = flag.removeprefix("--").replace("-", "_")
    (group,) = [part for part in config.to_dict().values() if name in part]
    expected = values[0] if values else True
    assert group[name] == (type(group[name])(expected))


def test_mock_data_and_data_path_are_accepted():
    """The two kinds of data; several files are one data set."""
    assert parse("", base=f"{BASE} --mock-data").data.mock_data
    data = parse("--data-path a.jsonl b.parquet --valid-data-path c.json", base=BASE).data
    assert (list(data.data_path), list(data.valid_data_path)) == (["a.jsonl", "b.parquet"], ["c.json"])


def test_defaults():
    """A default that moves changes every run whose script does not name it."""
    config = parse()
    assert config.to_dict()["parallel"] == {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "num_layers_per_virtual_pipeline_stage": None,
        "context_parallel_size": 1,
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
    assert (data.split, data.tokenizer_type, data.skip_bad_samples) == ("969,30,1", "ByteLevelTokenizer", False)
    assert (training.micro_batch_size, training.min_lr, training.lr_decay_style) == (1, 0.0, "linear")
    assert (training.weight_decay, training.clip_grad, training.seed, training.bf16) == (0.01, 1.0, 1234, False)
    assert (output.save, output.load, output.save_interval, output.log_interval) == (None, None, None, 1)
    assert (config.model.normalization, config.model.position_embedding_type) == ("LayerNorm", "learned_absolute")


# Arguments, world size, and words that the message must hold: the flags that contradict, and what to do.
CONTRADICTIONS = [
    ("--hidden-size 65", 1, ["--hidden-size 65", "multiple of --num-attention-heads 8", "--kv-channels"]),
    ("--group-query-attention", 1, ["--group-query-attention", "--num-query-groups", "both"]),
    ("--num-query-groups 2", 1, ["--group-query-attention", "--num-query-groups", "both"]),
    ("--group-query-attention --num-query-groups 3", 1, ["--num-attention-heads 8", "--num-query-groups 3"]),
    ("--max-position-embeddings 64", 1, ["--max-position-embeddings 64", "at least", "--seq-length 128"]),
    (
        "--disable-bias-linear --num-experts 2 --moe-router-topk 3",
        1,
        ["--moe-router-topk 3", "at most --num-experts 2"],
    ),
    (
        "--num-layers-per-virtual-pipeline-stage 2",
        1,
        ["--num-layers-per-virtual-pipeline-stage", "--pipeline-model-parallel-size", "at least 2"],
    ),
    ("--overlap-param-gather", 1, ["--overlap-param-gather", "--use-distributed-optimizer", "--overlap-grad-reduce"]),
    (
        "--overlap-param-gather --use-distributed-optimizer",
        1,
        ["--overlap-param-gather", "--use-distributed-optimizer", "--overlap-grad-reduce"],
    ),
    ("--overlap-param-gather --overlap-grad-reduce", 1, ["--overlap-param-gather", "--use-distributed-optimizer"]),
    ("--tensor-model-parallel-size 2", 1, ["number of processes, 1", "2 x 1 x 1 = 2", "--nproc-per-node 2"]),
    (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2",
        12,
        ["number of processes, 12", "2 x 2 x 2 = 8", "--nproc-per-node 8"],
    ),
    ("--max-seqlen-per-dp-cp-rank 256", 1, ["--max-seqlen-per-dp-cp-rank needs --sequence-packing"]),
    ("--outlier-delay-steps 4", 1, ["--outlier-delay-steps needs --sequence-packing"]),
    ("--outlier-delay-steps -1 --sequence-packing", 1, ["--outlier-delay-steps must be at least 0", "-1"]),
    (
        "--outlier-delay-steps 4 --sequence-packing --sequence-packing-scheduler empty",
        1,
        ["--outlier-delay-steps", "--sequence-packing-scheduler default"],
    ),
    ("--mock-data --data-path a.jsonl", 1, ["--data-path", "--mock-data", "not both"]),
    ("--no-mock-data", 1, ["--data-path FILE", "--mock-data"]),
    (
        "--no-mock-data --data-path a.jsonl --sft-mock-dataset-config-json x.json",
        1,
        ["--sft-mock-dataset-config-json needs --mock-data"],
    ),
    ("--valid-data-path a.jsonl", 1, ["--valid-data-path needs --data-path", "--mock-data"]),
    ("--split 1,2,3,4", 1, ["--split", "969,30,1", "'1,2,3,4'"]),
    ("--split a,b", 1, ["--split", "969,30,1", "'a,b'"]),
    ("--split 1,-1", 1, ["--split", "'1,-1'"]),
    ("--split 0,1", 1, ["--split", "'0,1'"]),
    ("--split nan", 1, ["--split", "'nan'"]),
    ("--min-lr 1e-2", 1, ["--min-lr 0.01", "--lr 0.001"]),
    ("--min-lr=-1e-2", 1, ["--min-lr -0.01", "from 0"]),
    ("--lr-warmup-iters 10", 1, ["--lr-warmup-iters 10", "less than", "lower it or raise --lr-decay-iters"]),
    ("--lr-warmup-iters 4 --lr-decay-iters 4", 1, ["--lr-warmup-iters 4", "4; lower it"]),
    ("--lr-warmup-iters -1", 1, ["--lr-warmup-iters -1"]),
    ("--save-interval 5", 1, ["--save-interval", "needs --save"]),
    ("--no-sequence-packing --dump-schedule 3", 1, ["--dump-schedule", "needs --sequence-packing"]),
    ("--sequence-packing --dump-schedule 3 0", 1, ["--dump-schedule", "but is 0"]),
    (
        "--micro-batch-size 3",
        1,
        ["--global-batch-size 16", "multiple of --micro-batch-size 3", "data-parallel size 1"],
    ),
    ("--micro-batch-size 2", 3, ["--global-batch-size 16", "--micro-batch-size 2", "data-parallel size 3"]),
    (
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 6",
        4,
        ["interleaved", "multiple of 4 microbatches", "--global-batch-size 6 makes 6"],
    ),
    (
        "--tensor-model-parallel-size 16",
        16,
        ["--num-attention-heads 8", "multiple of --tensor-model-parallel-size 16"],
    ),
    (
        "--tensor-model-parallel-size 2 --ffn-hidden-size 33",
        2,
        ["--ffn-hidden-size 33", "multiple of --tensor-model-parallel-size 2"],
    ),
    (
        "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2",
        4,
        ["--num-query-groups 2", "multiple of --tensor-model-parallel-size 4"],
    ),
    (
        "--pipeline-model-parallel-size 3 --global-batch-size 3",
        3,
        ["--num-layers 8", "multiple of --pipeline-model-parallel-size 3"],
    ),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
        2,
        ["--num-layers 8", "--pipeline-model-parallel-size 2", "--num-layers-per-virtual-pipeline-stage 3"],
    ),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4",
        2,
        ["--num-layers-per-virtual-pipeline-stage", "one virtual stage", "lower it or drop it"],
    ),
    (
        "--expert-model-parallel-size 2",
        2,
        ["--num-experts None", "multiple of --expert-model-parallel-size 2"],
    ),
    (
        "--expert-model-parallel-size 2 --disable-bias-linear --num-experts 3",
        2,
        ["--num-experts 3", "multiple of --expert-model-parallel-size 2"],
    ),
    (
        "--disable-bias-linear --num-experts 4 --tensor-model-parallel-size 2",
        2,
        ["--num-experts", "--tensor-model-parallel-size above 1", "needs --sequence-parallel"],
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
    ("--seq-length 130 --context-parallel-size 2", 2, ["--seq-length 130", "multiple of 4", "without packing"]),
    (
        "--seq-length 130 --tensor-model-parallel-size 4 --sequence-parallel",
        4,
        ["--seq-length 130", "multiple of 4", "without packing"],
    ),
    (
        "--seq-length 132 --context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel",
        8,
        ["--seq-length 132", "multiple of 8", "without packing"],
    ),
    ("--pack-cost cost.json", 1, ["--pack-cost needs --sequence-packing"]),
    ("--sequence-packing --pack-cost absent.json", 1, ["--pack-cost absent.json cannot be read", "calibrate"]),
    ("--sequence-packing-scheduler empty", 1, ["--sequence-packing-scheduler needs --sequence-packing"]),
    (
        "--disable-bias-linear --num-experts 4 --expert-model-parallel-size 4",
        2,
        ["number of processes, 2", "multiple of --expert-model-parallel-size", "4; lower them or start more"],
    ),
    (
        "--disable-bias-linear --num-experts 4 --expert-model-parallel-size 4 --pipeline-model-parallel-size 2",
        4,
        ["number of processes, 4", "times --pipeline-model-parallel-size, 8; lower them or start more"],
    ),
    (
        "--disable-bias-linear --num-experts 4 --moe-router-topk 1",
        1,
        ["--moe-router-topk 1 needs --moe-router-pre-softmax"],
    ),
    (
        "--disable-bias-linear --num-experts 4 --mtp-num-layers 1 --position-embedding-type rope "
        "--moe-aux-loss-coeff 0.01",
        1,
        ["--moe-aux-loss-coeff must be 0 with --mtp-num-layers", "is 0.01"],
    ),
    ("--split inf,1", 1, ["--split", "969,30,1", "'inf,1'"]),
    ("--tokenizer-type Foo", 1, ["--tokenizer-type", "'Foo'", "ByteLevelTokenizer"]),
]


@pytest.mark.parametrize(("arguments", "world_size", "words"), CONTRADICTIONS)
def test_contradiction_is_refused_with_a_way_out(arguments, world_size, words):
    """It would show as a hang or a shape error inside megatron-core, minutes later and on some ranks only."""
    with pytest.raises(FlagError) as failure:
        parse(arguments, world_size)
    message = str(failure.value)
    assert "\n" not in message
    for word in words:
        assert word in message


AT_LEAST_ONE = [
    "num-layers",
    "hidden-size",
    "num-attention-heads",
    "seq-length",
    "moe-router-topk",
    "ffn-hidden-size",
    "kv-channels",
    "num-experts",
    "num-query-groups",
    "moe-ffn-hidden-size",
    "make-vocab-size-divisible-by",
    "rotary-base",
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
    "num-layers-per-virtual-pipeline-stage",
    "max-seqlen-per-dp-cp-rank",
    "vocab-size",
    "train-iters",
    "global-batch-size",
    "micro-batch-size",
    "eval-interval",
    "lr-decay-iters",
    "log-interval",
    "save-interval",
]


@pytest.mark.parametrize(
    ("option", "limits"),
    [(f"{name} {value}", "at least 1") for name in AT_LEAST_ONE for value in (0, -2)]
    + [
        (option, "at least 0")
        for option in ("lr nan", "lr inf", "lr -0.1", "weight-decay -1.0", "clip-grad -1.0", "eval-iters -1", "seed -1")
    ]
    + [(f"{name} {value}", "from 0 to") for name in ("hidden-dropout", "adam-beta1") for value in (1.5, -0.5)]
    + [
        ("distributed-timeout-minutes 0.0", "at least 0.01"),
    ],
)
def test_value_out_of_range_is_refused(option, limits):
    """It would be taken for no value, divide by zero, or end in an error that does not name the option."""
    name, value = option.split()
    with pytest.raises(FlagError) as failure:
        parse(f"--sequence-packing --save folder --{name}={value}")
    assert str(failure.value).startswith(f"--{name} must be {limits}")
    assert str(failure.value).endswith(f", but is {value}")


def test_adam_that_never_forgets_is_refused():
    """torch refuses it without the option's name, after the process groups are built."""
    with pytest.raises(FlagError, match="--adam-beta2"):
        parse("--adam-beta2 1.0")


def test_experts_may_share_the_ranks_of_tensor_and_data_parallel():
    """Expert parallel is no factor of its own in the number of processes."""
    experts = "--disable-bias-linear --num-experts 4 --expert-model-parallel-size 4"
    tensor = "--tensor-model-parallel-size 2 --sequence-parallel"
    assert parse(f"{experts} {tensor}", world_size=4).parallel.data_parallel_size(4) == 2


def test_empty_list_of_files_is_refused(tmp_path):
    """`data_path: []` is a list that some script failed to fill."""
    path = tmp_path / "run.yaml"
    path.write_text("data_path: []")
    with pytest.raises(FlagError, match="'data_path' must be a list of at least one text, but is \\[\\]"):
        parse(f"--config {path}", base=BASE)


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
        ("--seq-length 129 --context-parallel-size 2", 66),  # 129 -> 132, a multiple of 4, over 2 ranks
        ("--seq-length 127 --tensor-model-parallel-size 2 --sequence-parallel", 128),
        ("--seq-length 127 --tensor-model-parallel-size 2", 127),
        ("--seq-length 132 --context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel", 68),
    ],
)
def test_capacity_per_rank(arguments, expected):
    """Rounded down, it would refuse the longest sequences that --seq-length allows."""
    assert parse(f"--sequence-packing {arguments}", world_size=8).capacity_per_rank == expected


def test_capacity_by_default_holds_the_longest_sequence_in_every_layout():
    """A sequence of --seq-length tokens would end the run at the step that draws it."""
    for seq_length, context, tensor in product((125, 127, 128), (1, 2, 4), (1, 2)):
        config = parse(
            f"--sequence-packing --sequence-parallel --seq-length {seq_length} --context-parallel-size {context} "
            f"--tensor-model-parallel-size {tensor}",
            world_size=8,
        )
        sequence = 2 * context if context > 1 else 1
        pack = math.lcm(sequence, context * tensor)
        capacity = config.capacity_per_rank * context // pack * pack
        assert capacity >= -(-seq_length // sequence) * sequence, (seq_length, context, tensor)


def test_without_packing_a_sequence_need_be_a_multiple_of_the_layout_only():
    """Demands beyond need would refuse what megatron-core runs: 132 / (2 x 2) pieces of 33 tokens."""
    layout = "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    assert parse(f"--seq-length 132 {layout}", world_size=4).model.seq_length == 132


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("969,30,1", (0.969, 0.03, 0.001)),
        ("1", (1.0, 0.0, 0.0)),
        ("9,1", (0.9, 0.1, 0.0)),
        ("0.5,0.25,0.25", (0.5, 0.25, 0.25)),
        ("2,0,2", (0.5, 0.0, 0.5)),
    ],
)
def test_split_shares(split, expected):
    """Shares that do not sum to one leave records unread, or read them twice."""
    assert parse(f"--split {split}").data.split_shares == pytest.approx(expected)


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=3))
@settings(deadline=None)
def test_split_shares_sum_to_one(shares):
    """Validation on records of the training set shows no overfitting."""
    result = DataConfig(mock_data=True, split=",".join(map(str, shares))).split_shares
    assert sum(result) == pytest.approx(1)
    assert min(result) >= 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", 256),
        ("--swiglu", 128),  # 8/3 of 64 is 170, down to a multiple of 64
        ("--swiglu --hidden-size 4096", 10880),
        ("--swiglu --hidden-size 16", 64),
        ("--ffn-hidden-size 100", 100),
        ("--ffn-hidden-size 100 --swiglu", 100),
    ],
)
def test_resolved_ffn_hidden_size(arguments, expected):
    """A width other than Megatron's makes a model of another size under the same options."""
    assert parse(arguments).model.resolved_ffn_hidden_size == expected


def test_resolved_kv_channels():
    """Heads of another width than hidden size / heads are what --kv-channels is for."""
    assert parse().model.resolved_kv_channels == 8
    assert parse("--hidden-size 100 --kv-channels 32").model.resolved_kv_channels == 32


@pytest.mark.parametrize(
    ("arguments", "world_size", "expected"),
    [("", 4, 4), ("--tensor-model-parallel-size 2", 4, 2), ("--context-parallel-size 2", 2, 1)],
)
def test_data_parallel_size(arguments, world_size, expected):
    """Counted wrongly, every step trains on more or fewer samples than --global-batch-size."""
    assert parse(arguments, world_size).parallel.data_parallel_size(world_size) == expected


def test_an_interleaved_pipeline_may_pack_any_batch():
    """With packing the scheduler makes up the multiple of microbatches, so the batch size need not."""
    arguments = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 6"
    assert parse(f"{arguments} --sequence-packing", world_size=4).training.global_batch_size == 6


def test_to_dict_is_plain_json():
    """Checkpoints compare these values with those of the next run: they must survive being written and read."""
    values = parse("--data-path a b --no-mock-data").to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["data"]["data_path"] == ["a", "b"]
    assert values["model"]["hidden_size"] == 64
