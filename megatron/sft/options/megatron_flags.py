"""pure. Options of Megatron-LM that its recipes have and that are none here, so that a recipe runs or says why not.

Three kinds: what they ask for is always so here; they have no effect here, since they tune or log what is done in
another way; they are refused, with what to do instead. All others that are unknown are refused as such.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.packing.flags import FlagError


class Accepted(NamedTuple):
    """An option that may be given."""

    always_so: bool
    """Or it has no effect here."""
    values: tuple[str, ...] | None
    """Those that it may have, () for an option without a value, None for any."""


_SWITCH, _ANY = Accepted(True, ()), Accepted(False, None)

ACCEPTED = {
    **dict.fromkeys(
        (
            "--auto-detect-ckpt-format",
            "--calculate-per-token-loss",
            "--check-for-nan-in-loss-and-grad",
            "--log-throughput",
            "--no-bias-dropout-fusion",
            "--no-bias-gelu-fusion",
            "--no-bias-swiglu-fusion",
            "--no-create-attention-mask-in-dataloader",
            "--no-gradient-accumulation-fusion",
            "--no-masked-softmax-fusion",
            "--sft",
            "--use-dist-ckpt",
            "--use-flash-attn",
            "--use-mcore-models",
            "--use-varlen-dataset",
        ),
        _SWITCH,
    ),
    "--attention-backend": Accepted(True, ("auto",)),
    "--ckpt-format": Accepted(True, ("torch_dist",)),
    "--dataloader-type": Accepted(True, ("single", "external")),
    "--dist-ckpt-format": Accepted(True, ("torch_dist",)),
    "--distributed-backend": Accepted(False, ("nccl", "gloo")),
    "--expert-tensor-parallel-size": Accepted(True, ("1",)),
    "--moe-router-load-balancing-type": Accepted(True, ("aux_loss",)),
    "--moe-token-dispatcher-type": Accepted(True, ("alltoall",)),
    "--optimizer": Accepted(True, ("adam",)),
    "--rerun-mode": Accepted(True, ("disabled",)),
    "--transformer-impl": Accepted(False, ("local", "transformer_engine")),
    **dict.fromkeys(
        (
            "--attention-softmax-in-fp32",
            "--ckpt-assume-constant-structure",
            "--ckpt-fully-parallel-load",
            "--ckpt-fully-parallel-save",
            "--cross-entropy-loss-fusion",
            "--data-cache-path",
            "--empty-unused-memory-level",
            "--log-memory-to-tensorboard",
            "--log-num-zeros-in-grad",
            "--log-params-norm",
            "--log-progress",
            "--log-timers-to-tensorboard",
            "--log-validation-ppl-to-tensorboard",
            "--logging-level",
            "--manual-gc",
            "--manual-gc-interval",
            "--moe-grouped-gemm",
            "--moe-permute-fusion",
            "--no-ckpt-fully-parallel-save",
            "--no-mmap-bin-files",
            "--no-rope-fusion",
            "--timing-log-level",
            "--use-persistent-ckpt-worker",
        ),
        _ANY,
    ),
}

REFUSED = {
    "--cp-comm-type": "context parallel gathers keys and values; drop it",
    "--data-args-path": "put what the file says after --data-path, weights before the paths",
    "--decoupled-lr": "there is one learning rate; drop it",
    "--exit-interval": "pass --train-iters, or --exit-duration-in-mins",
    "--finetune": "start from a HuggingFace folder with --pretrained-checkpoint; megatron.sft.export makes one of a "
    "checkpoint",
    "--fp16": "pass --bf16",
    "--fp8-format": "pass --bf16",
    "--hybrid-context-parallel": "pass --context-parallel-size; packs are balanced without it",
    "--lr-decay-samples": "pass --lr-decay-iters, samples divided by --global-batch-size",
    "--lr-warmup-samples": "pass --lr-warmup-iters, samples divided by --global-batch-size, or --lr-warmup-fraction",
    "--merge-file": "pass --tokenizer-model with a HuggingFace folder",
    "--multi-latent-attention": "multi-latent attention takes no packs with context parallel; use another model",
    "--no-check-for-nan-in-loss-and-grad": "pass --skip-nan-steps N to leave some steps out",
    "--no-load-optim": "start from a HuggingFace folder with --pretrained-checkpoint",
    "--no-load-rng": "a run continues to the bit; drop it",
    "--per-split-data-args-path": "pass --data-path and --valid-data-path",
    "--step-batch-size-schedule": "a run has one --global-batch-size; drop it",
    "--train-samples": "pass --train-iters, samples divided by --global-batch-size, or --train-epochs",
    "--vocab-file": "pass --tokenizer-model with a HuggingFace folder",
}


def without_megatron_flags(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without those options of Megatron-LM that are accepted.

    Raises FlagError for those that are refused, and for values that are not as things are here.
    """
    kept: list[str] = []
    for flag, values in _by_flag(arguments):
        name, *equals = flag.split("=", 1)
        if name in REFUSED:
            raise FlagError(f"{name} is an option of Megatron-LM that is none here: {REFUSED[name]}")
        accepted = ACCEPTED.get(name)
        if accepted is None:
            kept += [flag, *values]
            continue
        given = [*equals, *values]
        if accepted.values is not None and not set(given) <= set(accepted.values):
            wanted = f"be {' or '.join(accepted.values)}" if accepted.values else "have no value"
            raise FlagError(f"{name} must {wanted} here, but is {' '.join(given)}; drop it")
    return kept


def megatron_flag_notes(arguments: Sequence[str]) -> list[str]:
    """Return a line for each kind of accepted options that are among the arguments."""
    names = [flag.split("=", 1)[0] for flag, _ in _by_flag(arguments)]
    texts = {True: "as it always is here", False: "without effect here"}
    lines = []
    for always_so, text in texts.items():
        found = [name for name in names if name in ACCEPTED and ACCEPTED[name].always_so == always_so]
        if found:
            lines.append(f"options of Megatron-LM, {text}: {' '.join(dict.fromkeys(found))}")
    return lines


def _by_flag(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with what follows it; what stands before the first flag is one, too."""
    flag: str | None = None
    values: list[str] = []
    for argument in arguments:
        if not argument.startswith("--") and flag is not None:
            values.append(argument)
            continue
        if flag is not None:
            yield flag, values
        flag, values = argument, []
    if flag is not None:
        yield flag, values
