"""A model's shape: widths by Megatron's rules, and what megatron-core could not build."""

import pytest

from tests.unit_tests.sft.command_line import assert_refused, parse

CONTRADICTIONS = [
    ("--hidden-size 65", 1, ["--hidden-size 65", "--num-attention-heads 8", "--kv-channels"]),
    ("--group-query-attention", 1, ["--group-query-attention", "--num-query-groups", "both"]),
    ("--num-query-groups 2", 1, ["--group-query-attention", "--num-query-groups", "both"]),
    (
        "--group-query-attention --num-query-groups 3",
        1,
        ["--num-attention-heads 8", "--num-query-groups 3"],
    ),
    ("--recompute-num-layers 2", 1, ["--recompute-num-layers needs --recompute-granularity full"]),
    (
        "--recompute-granularity full --recompute-num-layers 3",
        1,
        [
            "--recompute-num-layers 3 must divide the layers of a stage, 8",
            "--recompute-method block",
        ],
    ),
    ("--recompute-modules mlp --disable-bias-linear", 1, ["needs --recompute-granularity select"]),
    ("--recompute-modules mlps", 1, ["knows core_attn, layernorm, mlp, moe", "but not mlps"]),
    ("--recompute-modules moe", 1, ["--recompute-modules moe is of no layer of this model"]),
    (
        "--recompute-granularity selective --recompute-modules mlp",
        1,
        ["--recompute-modules mlp needs --disable-bias-linear"],
    ),
    (
        "--max-position-embeddings 64",
        1,
        ["--max-position-embeddings 64", "at least", "--seq-length 128"],
    ),
    (
        "--disable-bias-linear --num-experts 2 --moe-router-topk 3",
        1,
        ["--moe-router-topk 3", "--num-experts 2"],
    ),
    (
        "--disable-bias-linear --num-experts 4 --moe-router-topk 1",
        1,
        ["--moe-router-topk 1", "--moe-router-pre-softmax"],
    ),
    (
        "--disable-bias-linear --mtp-num-layers 1 --position-embedding-type rope "
        "--recompute-granularity full --recompute-num-layers 2",
        1,
        ["--recompute-num-layers 2 must be 1 with --mtp-num-layers", "--recompute-method block"],
    ),
    ("--swiglu --geglu", 1, ["--swiglu", "--geglu", "drop one"]),
    ("--moe-layer-freq 1 0", 1, ["--moe-layer-freq", "need --num-experts"]),
    (
        "--moe-shared-expert-intermediate-size 8",
        1,
        ["--moe-shared-expert-intermediate-size", "need --num-experts"],
    ),
    (
        "--moe-shared-expert-gate",
        1,
        ["--moe-shared-expert-gate", "--moe-shared-expert-intermediate-size"],
    ),
    *(
        (
            f"--disable-bias-linear --num-experts 4 --moe-layer-freq {layers}",
            1,
            ["--moe-layer-freq", "0 or 1 for each of --num-layers 8"],
        )
        for layers in ("1 0", "1 0 1 0 1 0 1 2", "0 0 0 0 0 0 0 0")
    ),
    *(
        (
            "--disable-bias-linear --num-experts 4 --tensor-model-parallel-size 2 "
            f"--expert-model-parallel-size 2 --sequence-parallel {widths}",
            2,
            [f"{widths.split()[0]} 33 must be a multiple of --tensor-model-parallel-size 2"],
        )
        for widths in (
            "--moe-shared-expert-intermediate-size 33",
            "--ffn-hidden-size 33 --moe-layer-freq 0 1 1 1 1 1 1 1",
        )
    ),
]


@pytest.mark.parametrize(("arguments", "world_size", "words"), CONTRADICTIONS)
def test_contradiction_is_refused_with_a_way_out(arguments, world_size, words):
    """It would show as a shape error inside megatron-core, seconds later and on every rank, or as
    another model.
    """
    assert_refused(arguments, world_size, words)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", 256),
        ("--swiglu", 128),
        ("--geglu", 128),
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
