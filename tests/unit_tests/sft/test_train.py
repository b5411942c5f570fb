"""What the training loop computes without processes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.packing.delay_queue import DelayQueue, Waiting
from megatron.sft.config import parse_config
from megatron.sft.data import Counts, Share

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

BASE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 128 --train-iters 10 --global-batch-size 16 "
    "--lr 1e-3 --mock-data"
)


@pytest.mark.parametrize(("loss_sum", "num_tokens", "expected"), [(6.0, 4, 1.5), (0.0, 4, 0.0), (0.0, 0, 0.0)])
def test_loss_is_the_mean_per_token(loss_sum, num_tokens, expected):
    """A batch of prompts only has no token in the loss: NaN would end in every metric after it."""
    from megatron.sft.train import Reduced

    assert Reduced(loss_sum, num_tokens, False, Counts()).loss == expected


def model_options(arguments=""):
    """What a checkpoint of a run with these options must share with the run that loads it."""
    from megatron.sft.train import Trainer

    config = parse_config([*BASE.split(), *arguments.split()], world_size=8)
    return Trainer._model_options(SimpleNamespace(_config=config))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2",
        "--sequence-packing --max-seqlen-per-dp-cp-rank 256 --train-iters 20 --lr 1e-4 --seed 5 --bf16",
        "--hidden-dropout 0.1 --recompute-granularity full",
    ],
)
def test_a_checkpoint_loads_in_another_layout(arguments):
    """A run must go on with other processes, steps and rates."""
    assert model_options(arguments) == model_options()


@pytest.mark.parametrize(
    "arguments",
    [
        "--num-layers 4",
        "--swiglu",
        "--normalization RMSNorm",
        "--use-distributed-optimizer",
        "--disable-bias-linear --num-experts 4",
        "--max-position-embeddings 256",
        "--seq-length 256",
    ],
)
def test_a_checkpoint_of_another_model_is_told_apart(arguments):
    """Weights of another shape end in megatron-core's words; of the same shape, in another model."""
    assert model_options(arguments) != model_options()


def test_rope_models_may_change_their_seq_length():
    """Fine-tuning on longer sequences is what rotary embeddings are for."""
    rope = "--position-embedding-type rope"
    assert model_options(f"{rope} --seq-length 256") == model_options(rope)


def queue_of(arguments: str, waiting: list[dict[str, Any]]) -> DelayQueue | None:
    """What a run with these options, continued from a checkpoint with `waiting`, lets sequences wait in."""
    from megatron.sft.checkpoint import Progress
    from megatron.sft.train import Trainer

    config = parse_config([*BASE.split(), *arguments.split()], world_size=2)
    trainer = SimpleNamespace(
        _config=config,
        _packing=config.packing.sequence_packing,
        _progress=Progress(4, 64, False, waiting),
        _share=Share(rank=1, num_ranks=2, global_batch_size=16, micro_batch_size=1),
    )
    return Trainer._build_queue(trainer)  # type: ignore[arg-type]


def test_what_waits_in_a_checkpoint_is_taken_over():
    """Also by a run that lets nothing wait any more; one without packing would lose it."""
    states = []
    for length in (3, 5):
        saved = DelayQueue(4)
        saved.finish(Waiting([torch.arange(length, dtype=torch.int32)], [(length, 0, -1)]))
        states.append(saved.state_dict())
    assert queue_of("--sequence-packing", []) is None
    assert queue_of("", []) is None
    for arguments, max_steps in (("--sequence-packing", 0), ("--sequence-packing --outlier-delay-steps 4", 4)):
        queue = queue_of(arguments, states)
        assert queue is not None
        assert queue.max_steps == max_steps
        assert queue.begin(is_repeated=False).rows == [(5, 0, -1)]
    empty = queue_of("--sequence-packing --outlier-delay-steps 4", [])
    assert empty is not None
    assert len(empty) == 0
    with pytest.raises(ValueError, match="holds sequences that wait for a later step; pass --sequence-packing"):
        queue_of("", states)
