"""pure. `megatron-sft plan`: options -> lengths -> global batches -> schedulers compared -> advice
-> pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.flag_help import Command
from megatron.packing.flags import given_flags, parse_flags
from megatron.packing.scheduling.cost import PackCost, launch_seconds
from megatron.packing.scheduling.options import SchedulerOptions
from megatron.planner.advice import Adviser, RunFacts
from megatron.planner.compare import Comparison, compare, outcome_of
from megatron.planner.lengths import LengthOptions, LengthReader, Lengths
from megatron.planner.plan_options import LayoutOptions, ModelOptions, PlanOptions, scheduler_of
from megatron.planner.plan_pictures import draw
from megatron.planner.plan_run import as_in_run
from megatron.planner.plan_text import forward_passes_line, lead_of, table_of, text_of
from megatron.planner.sequences import Sequences
from megatron.planner.step_record import StepLayout, StepRecord

IntArray = npt.NDArray[np.int64]

AS_RUN = "as it ran"
_SEQUENCES = 200_000
"""Sequences that are scheduled by default. A global batch with more is scheduled all the same."""
_ALLOWED_FOR_A_STEP = ("--scheduler", "--png", "--html")
"""Options that are allowed for a step that ran (schedule_12.json)."""


class Plan(NamedTuple):
    """Global batches and parallel layout for which schedulers are compared."""

    lengths: Lengths
    batches: list[Sequences]
    layout: StepLayout
    facts: RunFacts
    """Facts about the run that advice needs."""
    lead: list[str]
    """Lines printed above the table, with the assumptions."""


COMMON = {
    "Lengths": ("source", "tokenizer_model", "seq_length", "over_length_policy"),
    "Model": ("config", "pretrained_checkpoint", "pack_cost", "tflops_per_device"),
    "Layout": (
        *("dp", "tp", "pp", "vpp", "cp", "ep", "sequence_parallel"),
        *("global_batch_size", "max_seqlen_per_dp_cp_rank"),
    ),
    "Output": ("scheduler", "num_batches", "png", "html"),
}
"""Options that --help shows."""
Imply = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def plan(
    arguments: Sequence[str],
    lengths_from: LengthReader,
    program: str = "megatron-sft plan",
    imply: Imply | None = None,
) -> None:
    """Runs `megatron-sft plan`. Raises ValueError for wrong arguments and for files that cannot be
    read.

    Args:
        lengths_from: reads the lengths of a source.
        imply: function from the given options, with those of a run's YAML file, to values for
            options that are not given.
    """
    command = Command(
        program=program,
        about="Compare packing schedulers on your lengths and layout, without a GPU.",
        usage="FILE [--dp 8 --tp 2 ...] [--pretrained-checkpoint FOLDER | --config run.yaml]",
        common=COMMON,
        footer="The fastest layouts that fit: megatron-sft plan --auto-layout --help",
    )
    groups = (LengthOptions, ModelOptions, LayoutOptions, PlanOptions)
    lengths, model, layout, options = parse_flags(
        groups, arguments, command, passes_over_unknown=imply is not None, imply=imply
    )
    given = [
        flag
        for group in (lengths, model, layout, options)
        for flag in given_flags(group, arguments)
    ]
    found = _plan(lengths, model, layout, options, given, lengths_from)
    schedulers = {name: scheduler_of(name) for name in options.names}
    comparison = compare(
        found.batches,
        found.layout,
        schedulers,
        max(int(each.lengths.max()) for each in found.batches),
    )
    if found.lengths.record is not None:
        comparison = _with_record(comparison, found.lengths.record)
    advice = Adviser(found.batches, found.layout, found.facts).advice(comparison)
    table = table_of(comparison, found.layout.seconds_per_unit)
    print("\n".join(found.lead), end="\n\n")
    print("\n".join(text_of(table)), end="\n\n")
    for name, reason in comparison.failed:
        print(f"{name} gave no valid schedule: {' '.join(reason.split())}")
    print("\n".join(f"- {sentence}" for sentence in advice))
    draw(options, comparison, table, advice, found.lead)


def _plan(
    lengths: LengthOptions,
    model: ModelOptions,
    layout: LayoutOptions,
    options: PlanOptions,
    given: Sequence[str],
    lengths_from: LengthReader,
) -> Plan:
    """Reads the lengths, and returns the global batches and the layout to compare schedulers for.

    given: flags that the user gave, which take precedence over those of a run that is planned
    again.
    """
    needed = layout.batch_size * _num_batches(options, layout)
    found = lengths_from(lengths, model.vocab_size, needed)
    if found.record is not None:
        return _plan_of_step(found, found.record, lengths.source, given)
    remarks, scheduling = list[str](), SchedulerOptions()
    if found.run is not None:
        model, layout, remarks, scheduling = as_in_run(found.run, model, layout, given)
    layout.check(model)
    if lengths.images:
        if model.pack_cost is not None:
            raise ValueError("--pack-cost has times of packs without images; drop it, or --images")
        # As `num_ranks_of_image` of a run.
        found = found.costing((1 if layout.sequence_parallel else layout.tp) * layout.pp)
    found, notes = _fitted(found, lengths, layout)
    passes = 0 if found.run is None else found.run.num_forward_passes
    passes = passes if lengths.forward_passes is None else lengths.forward_passes
    cost, seconds = _cost_of_pack(found, model, layout, options, passes)
    capacity = layout.capacity(int(found.lengths.max()))
    count = _num_batches(options, layout)
    batches = list(drawn(found.sequences, layout.batch_size, count, lengths.seed))
    facts = RunFacts(
        layout.cp,
        num_layers=model.shape().num_layers,
        has_equal_stages=layout.stage_layers.are_equal,
        sync_below=-(-layout.ep // layout.tp),
    )
    lead = lead_of(found, model, layout, options, capacity, count)
    lead += [*([forward_passes_line(passes)] if passes else []), *remarks, *notes]
    step_layout = replace(layout.step_layout(model, capacity, cost, seconds), options=scheduling)
    return Plan(found, batches, step_layout, facts, lead)


def _plan_of_step(
    found: Lengths, record: StepRecord, source: str | None, given: Sequence[str]
) -> Plan:
    """Returns the plan of a step that ran, in the run's layout and with the run's cost. Raises
    ValueError for options that would have no effect.
    """
    if idle := [flag for flag in given if flag not in _ALLOWED_FOR_A_STEP]:
        raise ValueError(
            f"{', '.join(idle)} cannot change {source}, a step as it ran, with the run's layout "
            "and model; leave out, or plan the run's folder instead"
        )
    lead = [
        f"{record.title}, scheduled by {record.scheduler}; layout and cost of the model are the "
        "run's"
    ]
    # A record lacks the context-parallel size, but sequences are aligned to twice that size.
    facts = RunFacts(max(record.layout.alignment.sequence // 2, 1))
    return Plan(found, [record.sequences], record.layout, facts, lead)


def _cost_of_pack(
    found: Lengths,
    model: ModelOptions,
    layout: LayoutOptions,
    options: PlanOptions,
    num_forward_passes: int,
) -> tuple[PackCost, float]:
    """Returns the cost of a pack, summed over the ranks that share it, and the seconds per unit of
    cost.

    num_forward_passes: those beside the passes of training.
    """
    cost = model.cost()
    rows = found.sequences.loss_tokens
    # Logits are computed for trained tokens only. The padded baseline gets the same saving.
    if rows is not None:
        cost = cost.at_loss_share(int(rows.sum()) / found.sequences.num_tokens)
    # A measured cost is in seconds, the cost of a shape in FLOPs.
    per_second = 1.0 if model.pack_cost is not None else options.tflops_per_device * 1e12
    seconds = 1 / (per_second * layout.tp * layout.cp)
    cost = replace(
        cost,
        # Context-parallel ranks share the tokens, but each reads all weights: the fixed part is
        # multiplied here, and divided again by `seconds`.
        fixed=cost.fixed * layout.cp,
        least=_launches(model, layout) / seconds,
    )
    return cost.with_forward_passes(num_forward_passes), seconds


def _launches(model: ModelOptions, layout: LayoutOptions) -> float:
    """Returns the seconds to launch the kernels of one pack, the least that a pack takes. It is 0
    for a measured cost, whose fixed part includes them.
    """
    shape = model.shape()
    if model.pack_cost is not None or shape.num_layers is None:
        return 0.0
    num_layers = shape.num_layers + (shape.mtp_num_layers or 0)
    return launch_seconds(num_layers, layout.pp * layout.vpp)


def _num_batches(options: PlanOptions, layout: LayoutOptions) -> int:
    return options.num_batches or max(1, min(8, _SEQUENCES // layout.batch_size))


def _fitted(
    found: Lengths, options: LengthOptions, layout: LayoutOptions
) -> tuple[Lengths, list[str]]:
    """Returns the sequences cut to what a pack can hold, by --over-length-policy, and a note about
    those that were truncated or dropped.
    """
    limit = options.seq_length or int(found.lengths.max())
    if layout.max_seqlen_per_dp_cp_rank is not None:
        unit = layout.alignment.sequence
        limit = min(limit, layout.capacity(limit) // unit * unit)
    over = int((found.lengths > limit).sum())
    if not over:
        return found, []
    longest, policy = int(found.lengths.max()), options.over_length_policy
    if policy == "error":
        raise ValueError(
            f"{over:,} of {found.lengths.size:,} sequences are longer than {limit:,} tokens, the "
            f"longest {longest:,}; raise --max-seqlen-per-dp-cp-rank or --seq-length, or pass "
            "--over-length-policy truncate|drop"
        )
    if policy != "drop":
        return replace(found, sequences=found.sequences.truncated(limit)), [
            f"truncated to {limit:,} tokens: {over:,} sequences"
        ]
    kept = np.flatnonzero(found.lengths <= limit)
    if not kept.size:
        raise ValueError(
            f"all sequences are longer than {limit:,} tokens; raise --max-seqlen-per-dp-cp-rank"
        )
    return replace(found, sequences=found.sequences.take(kept)), [
        f"dropped, as they are longer than {limit:,} tokens: {over:,} sequences"
    ]


def drawn(sequences: Sequences, size: int, count: int, seed: int) -> list[Sequences]:
    """Returns `count` global batches of `size` samples; every epoch is shuffled differently."""
    epochs = -(-size * count // sequences.size)  # 3 batches of 4 samples from 5: 12 of 15 -> 3
    order = [
        np.random.default_rng((seed, epoch)).permutation(sequences.size) for epoch in range(epochs)
    ]
    stream = np.concatenate(order)
    return [sequences.take(stream[start : start + size]) for start in range(0, size * count, size)]


def _with_record(comparison: Comparison, record: StepRecord) -> Comparison:
    """Returns the comparison with a further row: the step as it ran."""
    name = f"{AS_RUN} ({record.scheduler})"
    named = replace(record, scheduler=name)
    others = [each for each in comparison.records if each.scheduler != record.scheduler]
    return Comparison(
        [*comparison.outcomes, outcome_of(name, [record])], comparison.failed, [named, *others]
    )
