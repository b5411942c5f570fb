"""pure. Options of Megatron-LM that its recipes have and that are none here, so that a recipe runs or says why not.

Four kinds: they are read as options of ours; what they ask for is always so here; they have no effect here, since they
tune or log what is done in another way; they are refused, with what to do instead. All others that are unknown are
refused as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from megatron.packing.flags import FlagError
from megatron.packing.user_files import read_json, read_text


class ReadAs(NamedTuple):
    """An option that stands for others."""

    others: str
    arguments: Callable[[list[str]], list[str]]
    """What its values are on our command line; ValueError where they are wrong."""


def _data_args(values: list[str]) -> list[str]:
    return ["--data-path", *read_text(_one_file(values)).split()]


def _per_split_data_args(values: list[str]) -> list[str]:
    paths: Any = read_json(_one_file(values))
    if not isinstance(paths, dict) or not all(isinstance(parts or [], list) for parts in paths.values()):
        raise ValueError('must be a file with JSON such as {"train": ["a.jsonl"], "valid": ["b.jsonl"]}')
    flags = {"train": "--data-path", "valid": "--valid-data-path"}
    beyond = [split for split, parts in paths.items() if parts and split not in flags]
    if beyond:
        raise ValueError(f"has data for {', '.join(beyond)}; take it out, only train and valid are read")
    return [word for split, flag in flags.items() if paths.get(split) for word in (flag, *map(str, paths[split]))]


def _one_file(values: list[str]) -> str:
    if len(values) != 1:
        raise ValueError(f"must be one file, but is {' '.join(values) or 'missing'}")
    return values[0]


READ_AS = {
    "--data-args-path": ReadAs("--data-path, with what stands in the file", _data_args),
    "--per-split-data-args-path": ReadAs("--data-path and --valid-data-path, by the JSON file", _per_split_data_args),
    "--recompute-activations": ReadAs(
        "--recompute-granularity selective", lambda values: ["--recompute-granularity", "selective", *values]
    ),
    "--train-data-path": ReadAs("--data-path", lambda values: ["--data-path", *values]),
    "--varlen-mock-dataset-config-json": ReadAs(
        "--sft-mock-dataset-config-json", lambda values: ["--sft-mock-dataset-config-json", *values]
    ),
}


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
            "--override-opt-param-scheduler",
            "--override-opt_param-scheduler",
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
    "--cuda-graph-impl": Accepted(True, ("none",)),
    "--dataloader-type": Accepted(True, ("single", "external")),
    "--dist-ckpt-format": Accepted(True, ("torch_dist",)),
    "--distributed-backend": Accepted(False, ("nccl", "gloo")),
    "--expert-tensor-parallel-size": Accepted(True, ("1",)),
    "--moe-router-score-function": Accepted(True, ("softmax",)),
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
            "--cross-entropy-fusion-impl",
            "--cross-entropy-loss-fusion",
            "--data-cache-path",
            "--ddp-bucket-size",
            "--ddp-num-buckets",
            "--disable-gloo-process-groups",
            "--dist-ckpt-strictness",
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
            "--moe-router-fusion",
            "--no-ckpt-fully-parallel-save",
            "--no-mmap-bin-files",
            "--no-rope-fusion",
            "--null-tokenizer-eod-id",
            "--null-tokenizer-pad-id",
            "--te-rng-tracker",
            "--timing-log-level",
            "--use-persistent-ckpt-worker",
        ),
        _ANY,
    ),
}

REFUSED = {
    "--cp-comm-type": "context parallel gathers keys and values; drop it",
    "--cuda-graph-scope": "packs differ in length from step to step; drop it",
    "--decoupled-lr": "there is one learning rate; drop it",
    "--dynamic-context-parallel": "pass --context-parallel-size; packs are balanced without it",
    "--finetune": "start from a HuggingFace folder with --pretrained-checkpoint; megatron.sft.export makes one of a "
    "checkpoint",
    "--fp16": "pass --bf16",
    "--fp8-format": "pass --bf16",
    "--hybrid-context-parallel": "pass --context-parallel-size; packs are balanced without it",
    "--merge-file": "pass --tokenizer-model with a HuggingFace folder",
    "--min-dynamic-context-parallel-size": "pass --context-parallel-size; packs are balanced without it",
    "--moe-router-force-load-balancing": "experts are chosen by the router; drop it",
    "--multi-latent-attention": "multi-latent attention takes no packs with context parallel; use another model",
    "--no-check-for-nan-in-loss-and-grad": "pass --skip-nan-steps N to leave some steps out",
    "--no-load-optim": "start from a HuggingFace folder with --pretrained-checkpoint",
    "--no-load-rng": "a run continues to the bit; drop it",
    "--pad-packed-seq-alignment": "packs are padded as the layout needs it; drop it",
    "--profile": "run nsys or py-spy around it, and drop it",
    "--rampup-batch-size": "a run has one --global-batch-size; drop it",
    "--sft-tokenizer-prompt-format": "pass --chat-template FILE, unless the tokenizer's own template is meant",
    "--step-batch-size-schedule": "a run has one --global-batch-size; drop it",
    "--test-data-path": "pass --split, or leave the test out",
    "--thd-max-packed-sequences": "a pack has as many sequences as fit; drop it",
    "--thd-tail-padding-policy": "the tail of a pack is a segment of its own; drop it",
    "--use-megatron-fsdp": "pass --use-distributed-optimizer",
    "--varlen-sbhd-validation": "leave out --sequence-packing and its scheduler: then rows are padded",
    "--vocab-file": "pass --tokenizer-model with a HuggingFace folder",
}


def without_megatron_flags(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without those options of Megatron-LM that are accepted, and with ours for those that are
    read as ours.

    Raises FlagError for those that are refused, and for values that are not as things are here.
    """
    kept: list[str] = []
    names = {flag.split("=", 1)[0] for flag, _ in _by_flag(arguments)}
    for flag, values in _by_flag(arguments):
        name, *equals = flag.split("=", 1)
        if name in READ_AS:
            kept += _read_as(name, [*equals, *values], names)
            continue
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


def _read_as(name: str, values: list[str], names: set[str]) -> list[str]:
    try:
        arguments = READ_AS[name].arguments(values)
    except ValueError as failure:
        raise FlagError(f"{name} {failure}" if len(values) != 1 else f"{name} {values[0]}: {failure}") from None
    twice = names & set(arguments)
    if twice:
        raise FlagError(f"pass either {name} or {' '.join(sorted(twice))}, not both")
    return arguments


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
