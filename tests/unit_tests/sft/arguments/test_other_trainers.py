"""Names of other trainers are answered with ours."""

import re
from dataclasses import fields

import pytest

from megatron.packing.flag_help import Command
from megatron.packing.flags import FlagError, flag_of
from megatron.sft.arguments.other_trainers import _OURS, _WAYS, ANSWERS, answers_to
from megatron.sft.arguments.parse import parse_config
from megatron.sft.options.config import GROUPS

FLAGS = [flag_of(field.name) for group in GROUPS for field in fields(group)]
TRAIN = Command(answers=answers_to)


def message_of(*arguments):
    with pytest.raises(FlagError) as failure:
        parse_config(arguments, 1, TRAIN)
    return str(failure.value)


def test_answers_name_flags_that_exist():
    """An option that was renamed leaves an answer that sends its reader to nothing."""
    named = {flag for answer in ANSWERS.values() for flag in re.findall(r"--[a-z][\w-]*", answer)}
    assert named - {"--nproc-per-node"} <= set(FLAGS)
    assert len(named) > 30


def test_each_name_has_one_answer():
    """A name in two rows has the answer of the later one, which may be the wrong one."""
    names = [name for names in (*_OURS.values(), *_WAYS.values()) for name in names.split()]
    assert sorted(names) == sorted(set(names))
    assert not {flag_of(name) for name in names} & set(FLAGS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--learning_rate 1e-5", "--learning_rate is --lr here"),
        ("--model_name_or_path Qwen3-8B", "--model_name_or_path is --pretrained-checkpoint FOLDER"),
        ("--weight_decay=0.1", "--weight_decay is --weight-decay"),
        ("--per-device-train-batch-size 4", "is --global-batch-size, sequences of a step over all"),
        ("--load_in_4bit", "--load_in_4bit (drop it: weights are not quantized)"),
        (
            "--pref_beta 0.1",
            "--pref_beta is --beta here",
        ),
        (
            "--deepspeed zero3",
            "--deepspeed is --use-distributed-optimizer (ZeRO-1; --tensor-model-",
        ),
        ("--gpus 8", "--gpus is --nproc-per-node here"),
        ("--vllm_gpu_memory_utilization 0.5", "--vllm_gpu_memory_utilization (drop it: answers"),
        ("--rl grpo", "(GRPO, PPO) are not offered)"),
        ("--sft_loss_weight 1", "--sft_loss_weight is --loss-type sigmoid sft --loss-weights 1 X"),
        ("--use_ema", "--use_ema (drop it: this is not offered)"),
        ("--bf16 true --learning-rate 1", "--learning-rate is --lr here"),
    ],
)
def test_flags_of_trl_and_others(arguments, said):
    """ "unknown option; see --help" leaves a user with 200 options to read."""
    assert said in message_of(*arguments.split(), "--lrr", "3")


def test_commands_without_processes_take_their_number_as_world_size():
    """`fit` answered a torchrun option with --no-rope-freq."""
    assert answers_to(["--nproc_per_node", "num_gpus"], ["--world-size", "--lr"]) == {
        "--nproc_per_node": "is --world-size here",
        "num_gpus": "is --world-size here",
    }


def test_all_names_are_answered_at_once(tmp_path):
    """A file of 20 keys would take 20 starts."""
    path = tmp_path / "axolotl.yaml"
    path.write_text("base_model: Qwen/Qwen3-8B\nsequence_len: 4096\nlrr: 1\n")
    assert message_of("--config", str(path)) == (
        f"--config {path}: options of other trainers: base_model is --pretrained-checkpoint "
        "FOLDER (a folder on this machine) here; sequence_len is --seq-length here; lrr is unknown"
    )


def test_many_names_are_a_table():
    """One line of 25 answers is cut in its middle, and nobody finds a name in it."""
    with pytest.raises(FlagError) as failure:
        parse_config(["--lrr", "1", *(f"--{name}" for name in ANSWERS)], 1, TRAIN)
    table = [line.split(maxsplit=1) for line in failure.value.details]
    assert table[0] == ["--lrr", "unknown"]
    assert ["--learning_rate", "--lr"] in table
    assert ["--optim", "drop it: the optimizer is Adam"] in table
    assert ["--fp16", "--bf16"] in table  # which alone is answered as Megatron-LM's
    assert len(table) > 200
    assert f"{len(table)} options are none of ours" in str(failure.value)


def test_a_typing_mistake_is_none_of_them():
    """`--lrr` is nobody's; the nearest of ours helps."""
    assert message_of("--lrr", "1") == "unknown option --lrr; did you mean --lr?"


def test_methods_that_generate_are_refused_with_the_reason():
    """A list of six losses does not say that the others will not come."""
    for name, answer in (
        ("ipo", "--loss ipo is --loss dpo --loss-type ipo here"),
        ("rm", "--loss rm is --loss reward here"),
        ("aot", "--loss-type aot is not offered: it sorts the pairs"),
        ("foo", "invalid choice: 'foo'"),
    ):
        with pytest.raises(FlagError, match=answer):
            parse_config(["--loss", name], 1)
    with pytest.raises(FlagError, match="--loss grpo is of a method that generates answers"):
        parse_config(["--loss", "GRPO"], 1)
