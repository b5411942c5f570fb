"""What the training loop computes without processes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit_tests.sft.command_line import BASE, parse

RELEASED = Path(__file__).parents[3] / "fixtures" / "released"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def model_options(arguments=""):
    """What a checkpoint of a run with these options must share with the run that loads it."""
    from megatron.sft.training import saved_run

    datasets = SimpleNamespace(vocabulary=dict)
    return saved_run.model_options(parse(arguments, world_size=8), datasets)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2",
        "--sequence-packing --max-seqlen-per-dp-cp-rank 256 --train-iters 20 --lr 1e-4 --seed 5",
        "--hidden-dropout 0.1 --recompute-granularity full",
    ],
)
def test_a_checkpoint_loads_in_another_layout(arguments):
    """A run must go on with other processes, steps and rates."""
    assert model_options(arguments) == model_options()
    sharded = "--use-distributed-optimizer"
    assert model_options(f"{arguments} {sharded} --bf16") == model_options(sharded)


@pytest.mark.parametrize(
    "arguments",
    [
        "--num-layers 4",
        "--swiglu",
        "--normalization RMSNorm",
        "--use-distributed-optimizer",
        "--bf16",
        "--disable-bias-linear --num-experts 4",
        "--max-position-embeddings 256",
        "--seq-length 256",
    ],
)
def test_a_checkpoint_of_another_model_is_told_apart(arguments):
    """Weights of another shape end in megatron-core's words; of the same shape, in another
    model."""
    assert model_options(arguments) != model_options()


def test_the_reference_of_a_run_is_part_of_its_checkpoints(tmp_path):
    """A run that continues beside other weights would keep its margins, of something else."""
    from megatron.sft.training import saved_run

    (tmp_path / "pairs.jsonl").write_text("{}")
    datasets = SimpleNamespace(vocabulary=dict)
    dpo = f"{BASE} --loss dpo --data-path {tmp_path / 'pairs.jsonl'}"
    seeds = [
        saved_run.model_options(parse(f"--seed {seed}", base=dpo), datasets)  # type: ignore[arg-type]
        for seed in (1, 2)
    ]
    assert seeds[0].pop("reference") != seeds[1].pop("reference")
    sources = [seed.pop("reference_source") for seed in seeds]
    assert sources == ["random weights of --seed 1", "random weights of --seed 2"]
    assert seeds[0] == seeds[1]


def test_rope_models_may_change_their_seq_length():
    """Fine-tuning on longer sequences is what rotary embeddings are for."""
    rope = "--position-embedding-type rope"
    assert model_options(f"{rope} --seq-length 256") == model_options(rope)


def test_adapters_beside_attention_alone_are_told_apart_beside_any_experts():
    """Those of Mixtral, which has no shared experts, would end in megatron-core's words."""
    from megatron.sft.training import saved_run

    datasets: Any = SimpleNamespace(vocabulary=dict)
    experts: list[dict[str, Any]] = []
    for kind in ("all", "shared"):
        arguments = (
            f"--lora --lora-experts {kind} --pretrained-checkpoint {RELEASED / 'qwen'} "
            "--seq-length 128 --train-iters 10 --global-batch-size 16 --lr 1e-3 --mock-data"
        )
        config = parse(arguments, base="")
        model = replace(config.model, num_experts=4)
        experts.append(saved_run.model_options(replace(config, model=model), datasets))
    assert [options["lora_experts"] for options in experts] == ["all", "shared"]
