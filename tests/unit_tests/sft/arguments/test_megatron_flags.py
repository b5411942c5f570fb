"""A recipe of Megatron-LM: each of its options works, is said to be so anyway, or is refused with a
way out.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from megatron.packing.flags import FlagError, flag_of
from megatron.sft.arguments.megatron_flag_table import ACCEPTED, REFUSED, TOKENIZERS
from megatron.sft.arguments.megatron_flags import (
    READ_AS,
    _found,
    megatron_flag_notes,
    without_megatron_flags,
)
from megatron.sft.arguments.parse import parse_config
from megatron.sft.options.config import GROUPS
from tests.unit_tests.sft.command_line import parse

DOCUMENT = Path(__file__).parents[4] / "docs" / "coming-from" / "megatron-lm.md"


def table() -> str:
    """The options in docs/coming-from/megatron-lm.md, which is written by this."""
    lines = ["| option | here |", "|---|---|"]
    lines += [f"| `{flag}` | read as {read.others} |" for flag, read in READ_AS.items()]
    for name, ours in TOKENIZERS.items():
        what = (
            f"read as {ours}"
            if ours
            else "refused: pass --tokenizer-model with a HuggingFace folder"
        )
        lines.append(f"| `--tokenizer-type {name}` | {what} |")
    groups: dict[str, list[str]] = {}
    for flag, accepted in ACCEPTED.items():
        what = "always so" if accepted.is_default else "without effect"
        values = f", as {' or '.join(accepted.values)}" if accepted.values else ""
        groups.setdefault(what + values, []).append(flag)
    for flag, way in REFUSED.items():
        groups.setdefault(f"refused: {way}", []).append(flag)
    return "\n".join(
        [
            *lines,
            *(
                f"| {' '.join(f'`{flag}`' for flag in flags)} | {what} |"
                for what, flags in groups.items()
            ),
        ]
    )


def test_document_lists_all() -> None:
    """A table that is kept by hand lies after the next change."""
    assert table() in DOCUMENT.read_text()


def test_no_option_of_ours_is_hidden() -> None:
    """It would be dropped, or refused, before it is read; a misspelled one would be, too."""
    ours = [flag_of(field.name) for group in GROUPS for field in fields(group)]
    flags = [*ours, *(flag.replace("--", "--no-", 1) for flag in ours)]
    assert len(ours) > 100
    assert [flag for flag in flags if flag in READ_AS or _found(flag) is not None] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--rl-profile --bf16 --openai-gelu",
            "--rl-profile (the model learns from given answers only, as --loss dpo "
            "does; use Megatron-LM), ",
        ),
        ("--qk-clip 1", "--qk-clip (models of this kind are not computed; use another)"),
        ("--fp8-recipe=delayed", "--fp8-recipe (pass --bf16)"),
        ("--no-save-optim", "--no-save-optim (checkpoints are whole; drop it)"),
    ],
)
def test_kinds_are_refused_by_their_pattern(arguments: str, message: str) -> None:
    """Megatron-LM has 900 options: most are told by what they belong to."""
    with pytest.raises(FlagError, match=r"^options of Megatron-LM, refused: ") as failure:
        without_megatron_flags(arguments.split())
    assert message in str(failure.value)


def test_tuning_is_accepted_by_its_pattern() -> None:
    """Scripts for clusters have dozens of these."""
    tuning = (
        "--tp-comm-overlap-cfg f.yaml --no-overlap-p2p-communication --otel-enabled --no-one-logger"
    )
    assert without_megatron_flags(tuning.split()) == []
    assert megatron_flag_notes(tuning.split()) == [
        "options of Megatron-LM, without effect here: --tp-comm-overlap-cfg "
        "--no-overlap-p2p-communication --otel-enabled --no-one-logger"
    ]


def test_recipe_trains_as_if_they_were_not_there() -> None:
    """Values of accepted options must go with them, and those of ours must stay."""
    recipe = (
        "--sft --transformer-impl local --lr-decay-style cosine --timing-log-level 0 "
        "--ckpt-format=torch_dist"
    )
    assert without_megatron_flags(recipe.split()) == ["--lr-decay-style", "cosine"]
    assert parse(recipe) == parse("--lr-decay-style cosine")
    assert megatron_flag_notes(recipe.split()) == [
        "options of Megatron-LM, as is the default: --sft --ckpt-format",
        "options of Megatron-LM, without effect here: --transformer-impl --timing-log-level",
    ]
    assert megatron_flag_notes(["--train-data-path", "a"]) == [
        "options of Megatron-LM, read as ours: --train-data-path as --data-path"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--ckpt-format zarr",
            "options of Megatron-LM, refused: --ckpt-format (must be torch_dist, but is zarr; drop "
            "it)",
        ),
        (
            "--sft yes",
            "options of Megatron-LM, refused: --sft (must have no value, but is yes; drop it)",
        ),
        ("--fp16", "options of Megatron-LM, refused: --fp16 (pass --bf16)"),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-warmup-iters 2",
            "--lr-wsd-decay-iters 9 must fit behind the warmup into the steps of decay, 2 of 10; "
            "lower it or raise --lr-decay-iters",
        ),
        (
            "--lr-wsd-decay-iters 3",
            "--lr-decay-style WSD and --lr-wsd-decay-iters belong together; pass both or none",
        ),
        ("--lr-warmup-fraction 1", "--lr-warmup-fraction must be from 0 to below 1, but is 1.0"),
        (
            "--lr-warmup-fraction .1 --lr-warmup-iters 1",
            "pass either --lr-warmup-iters or --lr-warmup-fraction, not both",
        ),
    ],
)
def test_what_is_not_so_here_is_refused(arguments: str, message: str) -> None:
    """Dropped in silence, a recipe would train something else."""
    with pytest.raises(FlagError) as failure:
        parse(arguments)
    assert str(failure.value) == message


def test_data_in_files_of_arguments(tmp_path: Path) -> None:
    """Weights and paths of long blends stand in files; read in another order, another blend is
    trained.
    """
    (tmp_path / "blend.txt").write_text("5 a.jsonl\n3 b.jsonl\n")
    (tmp_path / "splits.json").write_text(
        '{"train": ["5", "a.jsonl", 3, "b.jsonl"], "valid": ["c.jsonl"], "test": null}'
    )
    for path in ("test", "list"):
        (tmp_path / f"{path}.json").write_text(
            '{"train": ["a"], "test": ["t"]}' if path == "test" else "[1]"
        )

    def read(text: str) -> list[str]:
        return without_megatron_flags(text.replace("DIR", str(tmp_path)).split())

    blend = ["--data-path", "5", "a.jsonl", "3", "b.jsonl"]
    assert read("--data-args-path DIR/blend.txt --bf16") == [*blend, "--bf16"]
    assert read("--per-split-data-args-path=DIR/splits.json") == [
        *blend,
        "--valid-data-path",
        "c.jsonl",
    ]
    assert read("--train-data-path a b --recompute-activations") == [
        *("--data-path", "a", "b"),
        *("--recompute-granularity", "selective"),
    ]
    for text, message in (
        (
            "--data-path a --data-args-path DIR/blend.txt",
            "either --data-args-path or --data-path, not both",
        ),
        ("--data-args-path", "--data-args-path must be one file, but is missing"),
        ("--data-args-path DIR/none.txt", "none.txt: "),
        ("--per-split-data-args-path DIR/list.json", 'must be a file with JSON such as {"train"'),
        ("--per-split-data-args-path DIR/test.json", "has data for test; take it out"),
    ):
        with pytest.raises(FlagError) as failure:
            read(text)
        assert message in str(failure.value)


def test_tokenizers_of_megatron_lm() -> None:
    """A name that argparse alone refuses comes with a list of ours, and no way to the same
    tokens."""
    given = ["--tokenizer-type", "SFTTokenizer", "--tokenizer-model", "folder"]
    assert without_megatron_flags(given) == [
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        "folder",
    ]
    assert without_megatron_flags(["--tokenizer-type=NullTokenizer"]) == [
        "--tokenizer-type",
        "NullTokenizer",
    ]
    with pytest.raises(
        FlagError,
        match="TikTokenizer is not supported: pass --tokenizer-model with a HuggingFace folder",
    ):
        without_megatron_flags(["--tokenizer-type", "TikTokenizer"])


BENCHMARK = """
--use-mcore-models --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
--seq-length 256
--max-position-embeddings 256 --attention-dropout 0.0 --hidden-dropout 0.0
--transformer-impl transformer_engine
--attention-backend flash --moe-token-dispatcher-type alltoall --micro-batch-size 1
--global-batch-size 8
--train-iters 20 --lr-decay-iters 20 --lr 1.5e-4 --min-lr 1.0e-5 --lr-decay-style cosine
--lr-warmup-iters 0
--weight-decay 1.0e-2 --clip-grad 1.0 --bf16 --calculate-per-token-loss
--no-gradient-accumulation-fusion
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 2
--use-varlen-dataset
--mock-data --tokenizer-type NullTokenizer --vocab-size 128 --null-tokenizer-pad-id 0
--split 99,1,0 --num-workers 2
--data-cache-path cache --dataloader-type single --log-interval 1 --log-throughput
--timing-log-level 0
--eval-interval 1000000 --eval-iters 1 --distributed-backend nccl --tensorboard-log-interval 1
"""
MOCK = (
    '{"mode":"distribution","type":"lognormal","format":"thd","min_seq_len":16,"max_seq_len":256,"mean_seq_len":64,'
    '"lognormal_sigma":1.1}'
)


def test_upstreams_packing_benchmark() -> None:
    """Who compares the two must not have to write a command line of their own."""
    mock = ["--varlen-mock-dataset-config-json", MOCK]
    scheduler = [
        "--sequence-packing-scheduler",
        "dp_balanced",
        "--max-seqlen-per-dp-cp-rank",
        "128",
    ]
    config = parse_config([*BENCHMARK.split(), *mock, *scheduler], 2)
    assert config.packing.sequence_packing
    assert config.packing.sequence_packing_scheduler == "dp_balanced"
    assert config.data.sft_mock_dataset_config_json == MOCK
    assert parse_config(
        [*BENCHMARK.split(), *mock], 2
    ).packing.sequence_packing  # its data set is packed in any case


def test_a_scheduler_alone_switches_packing_on() -> None:
    """As in Megatron-LM, whose recipes have no --sequence-packing."""
    assert parse("--sequence-packing-scheduler dp_balanced").packing.sequence_packing
    with pytest.raises(FlagError, match="needs --sequence-packing"):
        parse("--sequence-packing-scheduler dp_balanced --no-sequence-packing")
