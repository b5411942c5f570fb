"""pure. `megatron-sft fit`: the memory that a run takes on each GPU, before one is rented.

Takes the options of training and the number of processes. The trainer's own code runs on tensors
without memory (see `megatron/sft/fit/README.md`): no GPU, no network, no weights. Of a HuggingFace
folder only config.json is read.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from megatron.packing.flag_help import Command
from megatron.packing.flags import FlagError
from megatron.packing.memory_size import parse_memory
from megatron.packing.model.parts import parts_in
from megatron.packing.rules import Rule, at_least, check_rules, in_range
from megatron.sft.arguments.defaults import chosen_options, positions_notes, preference_options
from megatron.sft.arguments.other_trainers import answers_to
from megatron.sft.arguments.parse import COMMON, parse_run_options
from megatron.sft.arguments.pretrained import implied_options
from megatron.sft.environment import (
    exit_with_message,
    outlive_output,
    quick_imports,
    silence_warnings,
)
from megatron.sft.fit.report import (
    ESTIMATED,
    Column,
    as_json,
    gib,
    table,
    verdict,
    with_margin,
)
from megatron.sft.fit.tree_bytes import tree_bytes
from megatron.sft.fit.vocabulary import vocab_size_of, with_vocabulary
from megatron.sft.memory_estimate import OF_RUN, WayOut
from megatron.sft.options.config import GROUPS, SFTConfig

_SHOWN = ("Start from", "Data", "Layout")
_BYTES_PER_PACKED_TOKEN = 5 + 8 + 8 + 4 + 8 + 1
"""A batch as it travels, and tokens, labels, mask, positions and padding of the microbatches."""


_PAIRS = "pairs.jsonl"
"""Stands for the data of a run of preference tuning, which are not read."""


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Memory estimate."""

    world_size: int = 1
    """GPUs of the run."""
    memory: str | None = None
    """Memory of a GPU, such as 80GiB: says whether the run fits, and ends with status 1 if not."""
    loss_share: float = 1.0
    """Part of the tokens that counts for the loss; the others need no output layer."""
    image_share: float = field(
        default=1.0, metadata={"idle_without": "images", "default_holds": True}
    )
    """Part of each sequence's tokens that images have, the largest that --image-max-pixels allows.
    """
    expert_routing: Literal["balanced", "worst"] = field(
        default="balanced", metadata={"idle_without": "num_experts", "default_holds": True}
    )
    """Distribution of tokens over experts: evenly, or as many as can be to those of one rank."""
    verify: bool = False
    """Run two steps on a GPU of this machine as well, and say by how much its peaks differ. Needs
    --world-size 1.
    """
    host_memory: str | None = None
    """Memory of a node's host, such as 1900GB: says whether what options keep there fits, and ends
    with status 1 if not.
    """
    gpus_per_node: int = 8
    """GPUs of a node, which share its host."""
    fit_json: str | None = None
    """File for the estimate in bytes."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *at_least(1, "world_size", "gpus_per_node"),
        *in_range(0, 1, "loss_share", "image_share"),
    )

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)
        # No rules: the one needs text that is parsed, the other a folder.
        if self.memory is not None:
            parse_memory(self.memory)
        if self.host_memory is not None:
            parse_memory(self.host_memory, "--host-memory")
        if self.fit_json is not None and not Path(self.fit_json).resolve().parent.is_dir():
            raise ValueError(f"--fit-json {self.fit_json}: no such folder; make it first")


def main(arguments: Sequence[str], program: str) -> None:
    """Prints the estimate; status 2 and one line for a user's mistake, 1 for what does not fit."""
    outlive_output()
    if list(arguments) == [OF_RUN]:
        from megatron.sft.fit.ways_out import main as answer_run

        return answer_run()
    environment = dict(os.environ)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch: the estimate runs on the CPU
    try:
        config, options = parse(arguments, program)
        fits = run(config, options, environment)
    except (FlagError, ValueError, OSError) as failure:
        exit_with_message(program, failure)
    if not fits:
        raise SystemExit(1)


def parse(arguments: Sequence[str], program: str) -> tuple[SFTConfig, FitOptions]:
    """Returns the options of the run, and of the estimate; those that no memory depends on have
    defaults.
    """
    command = Command(
        program=program,
        about="Estimate the memory of a run on each GPU, without a GPU.",
        answers=answers_to,
        usage="--pretrained-checkpoint FOLDER --world-size 8 --memory 80GiB [options of training]",
        common={
            "Estimate": (
                "world_size",
                "memory",
                "host_memory",
                "gpus_per_node",
                "loss_share",
                "image_share",
                "expert_routing",
                "verify",
                "fit_json",
            ),
            **{title: COMMON[title] for title in _SHOWN},
        },
    )

    assumes_data = False

    def names_data(given: Mapping[str, Any]) -> bool:
        return any(given.get(name) for name in ("data_path", "valid_data_path", "mock_data"))

    def imply(given: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal assumes_data
        assumes_data = not names_data(given)
        size = given.get("world_size", 1) * given.get("micro_batch_size", 1)
        ours = {"global_batch_size": 8 * size, "lr": 1e-5, "train_iters": 1}
        chosen = {n: v for n, v in chosen_options(given).items() if n == "seq_length"}
        steps = {"train_epochs", "train_samples"} & given.keys()
        if steps:
            del ours["train_iters"]
        if assumes_data:  # their lengths are anyway; mock data have no pairs
            is_compared = given.get("loss", "sft") != "sft"
            ours |= {"data_path": (_PAIRS,)} if is_compared else {"mock_data": True}
        return ours | chosen | implied_options(given) | preference_options(given)

    notes: list[str] = []
    *groups, options = parse_run_options((*GROUPS, FitOptions), arguments, command, imply, notes)
    config = SFTConfig.of(groups)
    if assumes_data:
        config = with_vocabulary(config)
    config.check(options.world_size)
    if config.preference.scores_answers:  # one token of each answer
        options = replace(options, loss_share=1 / config.model.seq_length)
    for line in notes:
        print(line)
    return config, options


def run(config: SFTConfig, options: FitOptions, environment: Mapping[str, str]) -> bool:
    """Prints the estimate; returns whether the run fits, True where no memory was given.

    environment: of a process that may see GPUs.
    """
    start = time.monotonic()
    silence_warnings(0)
    with quick_imports():
        from megatron.sft.fit.estimate import Request, estimates
        from megatron.sft.fit.verify import comparison, measured_elsewhere
    request = Request(
        config=config,
        vocab_size=vocab_size_of(config),
        world_size=options.world_size,
        loss_share=options.loss_share,
        image_share=options.image_share,
        routing=options.expert_routing,
    )
    peaks = measured_elsewhere(request, environment) if options.verify else None
    found = estimates(request)
    columns = [_column(estimate) for estimate in found]
    assumed = _assumptions(request, options)
    print("\n".join([*assumed, ""]))
    model = config.model
    folder = config.output.pretrained_checkpoint
    for line in positions_notes(model.seq_length, folder, model.rope_scaling):
        print(f"{line}\n")
    memory = None if options.memory is None else parse_memory(options.memory)
    for line in table(columns, memory):
        print(line)
    print()
    for remark in dict.fromkeys(remark for estimate in found for remark in estimate.remarks):
        print(f"note      {remark}")
    print(
        "peak      the sum of the rows, or where that is more: building the model instead of all; "
        "the optimizer step instead of the passes"
    )
    print(f"status    {ESTIMATED}")
    trees = tree_bytes(config, [estimate.stage for estimate in found])
    if trees is not None:
        print(
            f"trees     packs are of sequences; of trees one keeps {gib(trees.of_own)} GiB more, "
            f"and {gib(trees.of_continued)} GiB for each 1,000 tokens that branches continue "
            "(described)"
        )
    _print_host(found, config, options)
    print(f"time      {time.monotonic() - start:.0f} s for this estimate")
    for name, expected, size in [] if peaks is None else comparison(found[0], peaks):
        print(
            f"verified  {name}: {gib(size)} GiB at most on this GPU, {size / expected - 1:+.1%} of "
            f"the estimate, {gib(expected)}"
        )
    if options.fit_json is not None:
        about = {"world_size": options.world_size, "assumes": assumed}
        Path(options.fit_json).write_text(json.dumps(as_json(columns, about), indent=1))
    if options.host_memory is not None and not host_fits(found, config, options):
        return False
    if memory is None:
        return True
    fits, line = verdict(columns, memory)
    print(line, flush=True)
    if not fits:
        _print_ways_out(request, max(column.peak for column in columns), memory)
    return fits


def _print_ways_out(request: Any, peak: int, memory: int) -> None:
    from megatron.sft.fit.fewer_bytes import fitting
    from megatron.sft.fit.ways_out import ways_out

    print("\nways out, cheapest first:", flush=True)
    is_enough = False
    for way in ways_out(request, peak, memory):
        is_enough |= with_margin(peak - way.saved_bytes) <= memory
        print(way_line(way, peak, memory), flush=True)
    if is_enough:
        return
    found = fitting(request, memory)
    if found.needed <= memory:
        print(f"  together: {found.flags}  {gib(found.needed)} GiB in all, then it fits")
        return
    print(
        f"  none is enough alone, and together they leave {gib(found.needed)} GiB; megatron-sft "
        "plan --auto-layout searches all layouts"
    )


def way_line(way: WayOut, peak: int, memory: int) -> str:
    """Returns what a change of options saves, margin included, and whether the run then fits.

    peak: bytes of tensors on the fullest GPU without the change. memory: bytes of a GPU.
    """
    changed = with_margin(peak - way.saved_bytes)
    too_much = changed - memory
    end = "then it fits" if too_much <= 0 else f"still {gib(too_much)} too much"
    return f"  {way.flags}  {gib(with_margin(peak) - changed)} GiB less, {end}"


def _column(estimate: Any) -> Column:
    parts: dict[tuple[str, str], int] = {}
    for part in (*estimate.states, *estimate.passes):
        parts[part.name, part.how] = part.num_bytes
    # At other times than the passes.
    for part in (estimate.build, estimate.optimizer):
        parts[f"instead: {part.name}", part.how] = part.num_bytes
    return Column(estimate.stage.name, parts, estimate.peak)


def _assumptions(request: Any, options: FitOptions) -> list[str]:
    config = request.config
    model, parallel = config.model, config.parallel
    sizes = {
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "CP": parallel.context_parallel_size,
        "EP": parallel.expert_model_parallel_size,
        "DP": parallel.data_parallel_size(options.world_size),
    }
    layout = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "DP")
    packs = (
        f"packs of {config.capacity_per_rank:,} tokens on each rank"
        if config.packing.sequence_packing
        else f"{config.training.micro_batch_size} rows of {model.seq_length:,} tokens"
    )
    experts = "" if model.num_experts is None else f", {options.expert_routing} routing of experts"
    adam = ""
    if config.optimizer.use_precision_aware_optimizer:
        on_host = config.optimizer.optimizer_cpu_offload
        name = "the optimizer on the host" if on_host else "Transformer Engine's FusedAdam"
        adam = f"; {name}, whose memory is described"
    described = [part.described_kernels for part in parts_in(model) if config.training.bf16]
    kernels = "".join(f"; {one}, whose memory is described" for one in described if one)
    stages = ""
    if len(set(config.layers_of_parts)) > 1:
        stages = f"; stages of {' '.join(map(str, config.layers_of_parts))} layers"
    if config.images.images:
        adam += (
            f"; images of {config.images.image_max_pixels:,} pixels or a sequence's length have "
            f"{options.image_share:.0%} of the tokens"
        )
    return [
        f"model     {model.num_layers} layers, hidden {model.hidden_size}, vocabulary "
        f"{request.vocab_size:,}, {'bfloat16' if config.training.bf16 else 'float32'}",
        f"layout    {options.world_size} GPUs: {layout}"
        f"{', sequence parallel' * parallel.sequence_parallel}"
        f"{', optimizer sharded' * config.shards_optimizer}{stages}",
        f"assumes   {packs}, {options.loss_share:.0%} of them count for the loss{experts}; layers "
        f"without Transformer Engine{kernels}{adam}",
    ]


def _print_host(found: Sequence[Any], config: SFTConfig, options: FitOptions) -> None:
    """Prints what the hosts of ranks hold."""
    print(f"host      {_host(config, options)}")
    per_node = _on_node([one.host_bytes for one in found], options)
    if per_node:
        num_gpus = min(options.gpus_per_node, options.world_size)
        print(
            f"          {gib(max(one.host_bytes for one in found))} GiB more for each rank of "
            f"optimizer and activations, {gib(per_node)} GiB for a node of {num_gpus} GPUs"
        )
    by_kind = zip(*(estimate.save_host_bytes for estimate in found))
    checkpoint, in_background, huggingface = (gib(max(sizes)) for sizes in by_kind)
    print(
        f"          at most {checkpoint} GiB for each rank while it writes a checkpoint, with "
        f"--async-save {in_background} GiB until it is written; {huggingface} GiB for each that "
        "writes --save-hf (described)"
    )


def host_fits(found: Sequence[Any], config: SFTConfig, options: FitOptions) -> bool:
    """Returns whether a node's host holds what its ranks keep and write there; says so if not."""
    assert options.host_memory is not None
    memory = parse_memory(options.host_memory, "--host-memory")
    needed = _on_node([one.host_bytes + _saved_on_host(one, config) for one in found], options)
    if needed <= memory:
        return True
    in_use = {
        "--optimizer-cpu-offload": config.optimizer.optimizer_cpu_offload,
        "--fine-grained-activation-offloading": (
            config.activations.fine_grained_activation_offloading
        ),
        "--async-save": config.output.async_save,
    }
    flags = " or ".join(flag for flag, is_on in in_use.items() if is_on)
    way_out = f"drop {flags}, or take more nodes" if flags else "take more nodes"
    print(
        f"does not fit: the host needs {gib(needed)} GiB while a checkpoint is written, but has "
        f"{gib(memory)}; {way_out}",
        flush=True,
    )
    return False


def _saved_on_host(stage: Any, config: SFTConfig) -> int:
    """Returns the most bytes on the host of a rank while it writes what `config` asks for."""
    sizes, output = stage.save_host_bytes, config.output
    checkpoint = sizes.in_background if output.async_save else sizes.checkpoint
    return max(checkpoint, 0 if output.save_hf is None else sizes.huggingface)


def _on_node(of_ranks: Sequence[int], options: FitOptions) -> int:
    """Returns the bytes on the host of the fullest node, from those of a rank of each stage. Ranks
    of a stage are neighbours.

    16 GPUs in 2 stages of 3 and 2 GiB, 8 GPUs a node    ->    24 GiB
    """
    per_stage = options.world_size // len(of_ranks)
    ranks = [size for size in of_ranks for _ in range(per_stage)]
    starts = range(0, len(ranks), options.gpus_per_node)
    return max(sum(ranks[start : start + options.gpus_per_node]) for start in starts)


def _host(config: SFTConfig, options: FitOptions) -> str:
    """Returns the memory of the host for batches, at most: every sequence as long as it may be."""
    replicas = config.parallel.data_parallel_size(options.world_size)
    num_tokens = config.training.global_batch_size // replicas * config.model.seq_length
    batches = 1 + config.data.prefetch_global_batches
    size = num_tokens * _BYTES_PER_PACKED_TOKEN * batches / 2**20
    return (
        f"at most {size:,.1f} MiB of batches for each rank ({batches} global batches, described); "
        "without Python and data workers"
    )
