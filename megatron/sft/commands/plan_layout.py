"""pure. `megatron-sft plan --auto-layout`: searches for the fastest parallel layouts that fit into
memory, without a GPU.

Step times come from a model (`megatron/planner/layout/times.py`). Memory comes from running the
trainer's own code on fake tensors (`megatron/sft/fit`), which is slow: seconds for each layout. So
the search visits layouts from the fastest on, and traces only those that might be among the best.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from megatron.packing.batch.layout import Alignment
from megatron.packing.flag_help import Command
from megatron.packing.memory_size import GIB, parse_memory
from megatron.packing.rules import Rule, at_least, check_rules, in_range
from megatron.packing.scheduling.registry import get_scheduler
from megatron.planner.layout.devices import DEVICES
from megatron.planner.layout.page import Bar, figure, layout_page
from megatron.planner.layout.search import (
    Candidate,
    Choice,
    Measures,
    Search,
    enumerated,
    search,
    undominated,
)
from megatron.planner.layout.times import TimeModel, reason
from megatron.planner.lengths import LengthOptions
from megatron.planner.plan import drawn
from megatron.planner.sequences import Sequences
from megatron.sft.arguments.defaults import chosen_options, preference_options
from megatron.sft.arguments.other_trainers import answers_to
from megatron.sft.arguments.parse import COMMON, parse_run_options
from megatron.sft.arguments.pretrained import implied_options
from megatron.sft.commands.layout_flags import FixedLayout
from megatron.sft.commands.length_sources import lengths_from
from megatron.sft.commands.progress_line import ProgressLine
from megatron.sft.environment import quick_imports, silence_warnings
from megatron.sft.fit.vocabulary import vocab_size_of, with_vocabulary
from megatron.sft.options.config import GROUPS, SFTConfig

if TYPE_CHECKING:
    from megatron.sft.fit.layout_search import Memory


@dataclass(frozen=True, kw_only=True)
class LayoutSearchOptions:
    """Search for a layout."""

    source: str | None = field(default=None, metadata={"positional": True})
    """File of lengths, one per line, or another source of plan, instead of --data-path."""
    auto_layout: bool = False
    """Search for the fastest parallel layouts that fit."""
    world_size: int = 8
    """GPUs."""
    gpu: Literal["a100", "h100", "h200", "b200"] = "h100"
    """Kind of GPU."""
    memory: str | None = None
    """Memory of a GPU, such as 80GiB (default: that of --gpu)."""
    layouts: int = 5
    """Layouts to print."""
    num_batches: int = 1
    """Global batches to schedule for each layout."""
    loss_share: float = 1.0
    """Part of the tokens that counts for the loss."""
    html: str | None = None
    """File for a page with memory and times of the layouts; needs nothing."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *at_least(1, "world_size", "layouts", "num_batches"),
        *in_range(0, 1, "loss_share"),
        Rule(
            when=lambda options, run: (
                options.source is None and not run.data.mock_data and len(run.data.data_path) != 1
            ),
            why="--auto-layout reads one file",
            way_out="name it, or a file of lengths, before the options: plan FILE --auto-layout",
        ),
        Rule(
            when=lambda options, run: (
                options.source is None
                and run.data.mock_data
                and run.data.sft_mock_dataset_config_json is None
            ),
            why="--mock-data needs --sft-mock-dataset-config-json here, which says what lengths "
            "sequences have",
            way_out="or name a file of lengths before the options",
        ),
        Rule(
            when=lambda options, run: run.images.images,
            why="--auto-layout does not count the time of a vision tower, which --images needs",
            way_out="drop one: plan FILE --images compares layouts that you name, and fit --images "
            "says what they need",
        ),
    )

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)
        # No rules: the one needs text that is parsed, the other a folder.
        if self.memory is not None:
            parse_memory(self.memory)
        if self.html is not None and not Path(self.html).resolve().parent.is_dir():
            raise ValueError(f"--html {self.html}: no such folder; make it first")


SEARCH_GROUPS = (*GROUPS, LayoutSearchOptions)
"""Options of the search: those of a run, and its own."""


def plan_layout(arguments: Sequence[str], program: str) -> None:
    """Searches, and prints the layouts. Raises ValueError for a user's mistake."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch: memory is traced on the CPU
    base, options, notes = _parse(arguments, program)
    fixed = FixedLayout.read(base, arguments)
    for line in [*notes, *fixed.notes()]:
        print(line)
    silence_warnings(0)
    with quick_imports():
        from megatron.sft.fit.layout_search import Memory, is_valid
    vocab_size = vocab_size_of(base)
    device = DEVICES[options.gpu]
    limit = device.memory_bytes if options.memory is None else parse_memory(options.memory)
    size = base.training.global_batch_size
    lengths = _lengths(base, options.source, vocab_size, size * options.num_batches)
    times = TimeModel(
        shape=base.model,
        vocab_size=vocab_size,
        device=device,
        batches=drawn(lengths, size, options.num_batches, base.training.seed),
        scheduler=get_scheduler(base.packing.sequence_packing_scheduler or "default"),
        has_adapters=base.lora.lora,
        measured=None if base.packing.fitted_cost is None else base.packing.fitted_cost.cost,
        num_forward_passes=base.preference.num_forward_passes,
        scheduling=base.scheduling,
    )
    candidates = enumerated(
        options.world_size,
        num_layers=base.model.num_layers,
        num_experts=base.model.num_experts,
        capacities=partial(_capacities, base.model.seq_length, fixed.capacity),
        gpus_per_node=device.gpus_per_node,
    )
    candidates = fixed.matching(candidates, base.model.num_layers)
    share = options.loss_share
    if base.preference.scores_answers:  # one token of each answer
        share = 1 / base.model.seq_length
    memory = Memory(base=base, vocab_size=vocab_size, limit=limit, loss_share=share)
    measures = _measures(times, memory, partial(is_valid, base))
    found, is_whole = _searched(candidates, measures, limit, options.layouts)
    if is_whole and found.num_refused == found.num_layouts:
        raise ValueError(
            f"no layout of {options.world_size} GPUs divides the model and --global-batch-size "
            f"{size}; change --world-size, or make the batch a multiple of it"
        )
    tokens = sum(batch.num_tokens for batch in times.batches) / len(times.batches)
    if not is_whole and not found.best:
        raise KeyboardInterrupt
    num_found = len(found.best)
    found = found._replace(best=undominated(found.best))
    _print(found, times, tokens, base, options, limit)
    if num_found > len(found.best):
        print(f"{num_found - len(found.best)} more fit, slower than one above that needs as little")
    if not is_whole:
        print(f"interrupted: only {num_found} found; others would be slower", flush=True)
        raise SystemExit(130)
    if not found.best:
        print(
            "no layout fits; take more GPUs, GPUs with more memory, --lora or a lower --seq-length"
        )
    if options.html is not None and found.best:
        bars = [_bar(choice, times, memory.stages(choice.candidate)) for choice in found.best]
        Path(options.html).write_text(layout_page(bars, limit, tokens), encoding="utf-8")
        print(f"\npage: {options.html}")


def _measures(times: TimeModel, memory: Memory, is_valid: Callable[[Candidate], bool]) -> Measures:
    def least_bytes(one: Candidate) -> int:
        least = times.least_bytes(one)
        if least > memory.limit:  # known without a trace
            return least
        return max(least, memory.least_bytes(one, times.least_states(one)))

    return Measures(
        times.least_seconds,
        times.bound_seconds,
        times.seconds,
        least_bytes,
        memory.num_bytes,
        is_valid,
    )


def _searched(
    candidates: Iterable[Candidate], measures: Measures, limit: int, count: int
) -> tuple[Search, bool]:
    """Returns the search, and whether it is complete. After Ctrl-C it has the layouts found so far.
    They are still the fastest ones, since layouts are found in order of time.
    """
    so_far = Search([], 0, 0, 0, 0)

    def listed() -> Iterator[Candidate]:
        for number, one in enumerate(candidates):
            line.show(f"listing layouts: {number:,}")
            yield one

    def show(found: Search) -> None:
        nonlocal so_far
        so_far = found
        line.show(
            f"searching {found.num_layouts:,} layouts: {found.num_timed:,} scheduled, "
            f"{found.num_measured:,} traced, {found.num_too_large:,} too large, "
            f"{found.num_refused:,} refused by the trainer's checks, "
            f"{len(found.best)} of {count} found"
        )

    with ProgressLine() as line:
        try:
            return search(listed(), measures, limit, count, show), True
        except KeyboardInterrupt:
            return so_far, False


def _parse(
    arguments: Sequence[str], program: str
) -> tuple[SFTConfig, LayoutSearchOptions, list[str]]:
    """Returns the options of the run and of the search, and notes about them."""
    command = Command(
        program=f"{program} --auto-layout",
        about="Find the fastest parallel layouts that fit, without a GPU.",
        answers=answers_to,
        usage="FILE --pretrained-checkpoint FOLDER --world-size 64 --gpu h200",
        common={
            "Search": tuple(one.name for one in fields(LayoutSearchOptions)),
            "Start from": COMMON["Start from"],
            "Data": COMMON["Data"],
            "Training": ("global_batch_size", "bf16"),
        },
    )

    assumes_data = False

    def imply(given: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal assumes_data
        size = given.get("world_size", LayoutSearchOptions.world_size)
        ours = {"global_batch_size": 8 * size, "lr": 1e-5, "train_iters": 1, "bf16": True}
        ours["sequence_packing"] = True  # as every layout of the search does
        if {"train_epochs", "train_samples"} & given.keys():
            del ours["train_iters"]
        if not (given.get("data_path") or given.get("mock_data")):
            if "source" not in given:
                raise ValueError(
                    "lengths are missing; name a file of lengths or chats, before the options: "
                    "plan FILE --auto-layout"
                )
            assumes_data = True  # the run's data are not here; mock data have no pairs
            is_compared = given.get("loss", "sft") != "sft"
            ours |= {"data_path": (given["source"],)} if is_compared else {"mock_data": True}
        chosen = {n: v for n, v in chosen_options(given).items() if n == "seq_length"}
        return ours | chosen | implied_options(given) | preference_options(given)

    notes: list[str] = []
    *parts, options = parse_run_options(SEARCH_GROUPS, arguments, command, imply, notes)
    config = SFTConfig.of(parts)
    check_rules(options.rules, options=options, run=config)
    return with_vocabulary(config) if assumes_data else config, options, notes


def _lengths(config: SFTConfig, source: str | None, vocab_size: int, needed: int) -> Sequences:
    """Returns the sequences of `source`, else of the run's data, truncated or dropped as in
    training.
    """
    data = config.data
    if source is None:
        source = data.sft_mock_dataset_config_json if data.mock_data else data.data_path[0]
    options = LengthOptions(
        source=source,
        tokenizer_type=data.tokenizer_type,
        tokenizer_model=data.tokenizer_model,
        chat_template=data.chat_template,
        template_date=data.template_date,
        chat_template_kwargs=data.chat_template_kwargs,
        train_turns=data.train_turns,
        loss=config.preference.loss,
        seq_length=config.model.seq_length,
        over_length_policy=config.packing.over_length_policy,
    )
    found = lengths_from(options, vocab_size, needed).sequences
    # A tree of a pair has up to two paths of that length.
    limit = config.model.seq_length * (2 if config.preference.is_on else 1)
    over = int((found.lengths > limit).sum())
    if over and config.packing.over_length_policy == "error":
        raise ValueError(
            f"{over:,} sequences are longer than --seq-length {config.model.seq_length}; raise it, "
            "or pass --over-length-policy truncate|drop"
        )
    if config.packing.over_length_policy == "drop":
        return found.take(np.flatnonzero(found.lengths <= limit))
    return found.truncated(limit)


def _capacities(seq_length: int, capacity: int | None, tensor: int, context: int) -> Sequence[int]:
    """Returns the pack capacities to try, in tokens per rank: the one that was given, or room for
    the longest sequence, and twice and four times as much.
    """
    if capacity is not None:
        return [capacity]
    alignment = Alignment.for_layout(
        context_parallel_size=context, tensor_parallel_size=tensor, sequence_parallel=tensor > 1
    )
    unit = alignment.pack
    # The sequence rounded up to its alignment, then the pack to its own.
    smallest = -(-(-(-seq_length // alignment.sequence) * alignment.sequence) // unit) * unit
    return [smallest // context * times for times in (1, 2, 4)]


def _print(
    found: Search,
    times: TimeModel,
    tokens: float,
    base: SFTConfig,
    options: LayoutSearchOptions,
    limit: int,
) -> None:
    refused = f" {found.num_refused:,} others are refused by the trainer's checks."
    print(
        f"{options.world_size} {options.gpu}, {limit / GIB:,.1f} GiB each; global batch of "
        f"{base.training.global_batch_size} sequences, {tokens:,.0f} tokens. Of "
        f"{found.num_layouts:,} layouts {found.num_timed:,} were scheduled and the memory of "
        f"{found.num_measured:,} was traced; {found.num_too_large:,} faster ones do not fit."
        f"{refused * bool(found.num_refused)} Times "
        f"are modelled{_of_reference(base)}"
        f"{_UNMEASURED * (times.measured is None)}; memory is estimated, margin included.\n"
    )
    for number, choice in enumerate(found.best, start=1):
        candidate = choice.candidate
        seconds = sorted({times.most_seconds(candidate), choice.seconds}, reverse=True)
        rates = [figure(tokens / each / options.world_size) for each in seconds]
        print(
            f"{number}. {' to '.join(rates)} tokens/s per GPU, "
            f"{' to '.join(map(figure, reversed(seconds)))} s per step, "
            f"{choice.num_bytes / GIB:.1f} GiB\n   time   {reason(times.parts(candidate))}\n"
            f"   flags  {candidate.flags(base.model.num_layers)}"
        )


_UNMEASURED = " as a range, as no GPU was measured (megatron-sft calibrate, then --pack-cost)"


def _of_reference(base: SFTConfig) -> str:
    """Returns words about passes that the times count beside those of training."""
    count = base.preference.num_forward_passes
    if not count:
        return ""
    return ", with the reference's forward pass" + " and the divergence's" * (count > 1)


def _bar(choice: Choice, times: TimeModel, stages: Sequence[Any]) -> Bar:
    return Bar(
        name=choice.candidate.title,
        times=times.parts(choice.candidate),
        memory=[
            (
                stage.stage.name,
                {part.name: part.num_bytes for part in (*stage.states, *stage.passes)},
            )
            for stage in stages
        ],
    )
