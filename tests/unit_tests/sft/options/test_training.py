"""The options of training: rates and steps that contradict."""

import pytest

from megatron.packing.flags import FlagError
from tests.unit_tests.sft.command_line import MODEL, assert_refused, parse

CONTRADICTIONS = [
    ("--min-lr 1e-2", 1, ["--min-lr 0.01", "--lr 0.001"]),
    ("--min-lr=-1e-2", 1, ["--min-lr -0.01"]),
    ("--lr-warmup-iters 10", 1, ["--lr-warmup-iters 10", "--lr-decay-iters"]),
    ("--lr-warmup-iters 4 --lr-decay-iters 4", 1, ["--lr-warmup-iters 4", "--lr-decay-iters"]),
    ("--lr-warmup-iters -1", 1, ["--lr-warmup-iters -1"]),
    ("--train-samples 80", 1, ["pass either --train-iters or --train-samples"]),
    (
        "--lr-warmup-samples 160",
        1,
        ["--lr-warmup-samples 160 must be less than the steps of decay, 10"],
    ),
    (
        "--lr-warmup-samples 8 --lr-warmup-iters 1",
        1,
        ["either --lr-warmup-iters or --lr-warmup-samples"],
    ),
    (
        "--lr-decay-samples 80 --lr-decay-iters 5",
        1,
        ["either --lr-decay-iters or --lr-decay-samples"],
    ),
    ("--exit-interval 0", 1, ["--exit-interval must be at least 1"]),
]


@pytest.mark.parametrize(("arguments", "world_size", "words"), CONTRADICTIONS)
def test_contradiction_is_refused_with_a_way_out(arguments, world_size, words):
    """The learning rate would be another one than either option says."""
    assert_refused(arguments, world_size, words)


def test_adam_that_never_forgets_is_refused():
    """torch refuses it without the option's name, after the process groups are built."""
    with pytest.raises(FlagError, match="--adam-beta2"):
        parse("--adam-beta2 1.0")


SAMPLES = f"{MODEL} --mock-data --lr 1e-3"


def test_a_run_counted_in_samples() -> None:
    """Megatron-LM's recipes count so; the learning rate must rise and fall where it does for
    steps."""
    given = (
        "--global-batch-size 16 --train-samples 170 --lr-warmup-samples 24 --lr-decay-samples 120"
    )
    training = parse(given, base=SAMPLES).training
    assert (training.train_iters, training.warmup_samples, training.decay_samples) == (10, 24, 120)
    training = parse("--lr-warmup-iters 2 --lr-decay-iters 8").training
    assert (training.warmup_samples, training.decay_samples) == (32, 128)
    training = parse("--lr-warmup-fraction 0.25").training
    assert (training.warmup_samples, training.decay_samples) == (40, 160)
    with pytest.raises(FlagError, match="--train-samples must be at least 16, but is 15"):
        parse("--global-batch-size 16 --train-samples 15", base=SAMPLES)


EPOCHS = f"{MODEL} --data-path chats.jsonl --global-batch-size 16 --lr 1e-3"


@pytest.mark.parametrize(
    ("epochs", "records", "steps"),
    [("1", 160, 10), ("1", 161, 11), ("2.5", 160, 25), ("0.1", 1, 1)],
)
def test_epochs_are_steps_once_the_records_are_counted(epochs, records, steps):
    """The learning rate would fall to its end before or after the run's."""
    config = parse(f"--train-epochs {epochs}", base=EPOCHS).for_records(records)
    assert (config.training.train_iters, config.training.train_epochs) == (steps, None)
    assert parse().for_records(records) == parse()


@pytest.mark.parametrize(
    ("arguments", "base", "words"),
    [
        ("", EPOCHS, "--train-iters must be at least 1 without --train-epochs, but is 0"),
        ("--train-epochs 2 --train-iters 3", EPOCHS, "--train-epochs, not both"),
        ("--train-epochs 0", EPOCHS, "--train-epochs must be at least"),
        (
            "--train-epochs 1 --train-samples 9 --global-batch-size 0",
            EPOCHS,
            "--global-batch-size must be at least 1, but is 0",
        ),
        (
            "--train-epochs 1",
            EPOCHS.replace("data-path chats.jsonl", "mock-data"),
            "--train-epochs needs --data-path",
        ),
    ],
)
def test_wrong_epochs_are_refused(arguments, base, words):
    """A run would end at once, or never."""
    with pytest.raises(FlagError, match=words):
        parse(arguments, base=base)


def test_what_contradicts_the_steps_of_epochs_is_refused():
    """It is only known once the records are counted, and would be found at the last step."""
    for arguments in ("--lr-warmup-iters 10", "--sequence-packing --dump-schedule 11"):
        config = parse(f"--train-epochs 1 {arguments}", base=EPOCHS)
        assert config.for_records(200).training.train_iters == 13
        with pytest.raises(
            ValueError,
            match=r"--lr-warmup-iters 10 must be less|--dump-schedule 11 must be at most",
        ):
            config.for_records(160)
