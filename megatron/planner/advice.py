"""pure. Advice about capacity, parallel layout and global batch size, in sentences with a figure
each.

Each figure comes from scheduling the global batches again, with the scheduler `default`, and from
the modelled time of the result. There are no rules of thumb.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron.packing.batch.layout import Alignment
from megatron.packing.scheduling.default import default
from megatron.packing.scheduling.step_time import StepModel
from megatron.planner.compare import PADDED_TO_LONGEST, Comparison, Outcome, modelled_cost
from megatron.planner.sequences import Sequences
from megatron.planner.step_record import StepLayout

MIN_SAID = 0.01
"""Smallest gain that is mentioned, as a share of the step's time."""
MAX_SEQUENCES = 30_000
"""Maximum number of sequences that are scheduled for a figure; at least one global batch is."""


class RunFacts(NamedTuple):
    """Facts of a run that advice needs and a `StepLayout` does not have."""

    context_parallel_size: int
    num_layers: int | None = None
    """None if it is not known."""
    has_equal_stages: bool = True
    """True if all pipeline stages have the same number of layers."""
    sync_below: int | None = None
    """Smallest context-parallel size at which all experts are within a data-parallel rank. Below
    it, data-parallel ranks wait for one another at each microbatch. None if it is not known.
    """


class Adviser:
    """Schedules the same global batches in other parallel layouts."""

    def __init__(self, batches: Sequence[Sequences], layout: StepLayout, facts: RunFacts) -> None:
        self._batches = batches[: max(1, min(len(batches), MAX_SEQUENCES // batches[0].size))]
        self._pairs = batches[: max(2, len(self._batches) // 2 * 2)]
        self._layout = layout
        self._facts, self._context = facts, facts.context_parallel_size
        self._now = modelled_cost(self._batches, layout, default)

    def advice(self, comparison: Comparison) -> list[str]:
        """Returns sentences about schedulers, capacity, parallel layout and batch. Changes with a
        small gain are left out.
        """
        best = next((outcome for outcome in comparison.outcomes if outcome.name == "default"), None)
        sentences = self._on_schedulers(comparison, best)
        sentences += self._on_capacity(best)
        sentences += self._on_context()
        sentences += self._on_tower()
        if best is not None and best.bubble > 0.05:
            sentences += self._on_bubble(best)
        return sentences

    def _change(self, layout: StepLayout, batches: Sequence[Sequences] | None = None) -> float:
        """Returns the share of the time per token that a layout saves; below 0 if it costs."""
        return 1 - modelled_cost(batches or self._batches, layout, default) / self._now

    def _on_schedulers(self, comparison: Comparison, best: Outcome | None) -> list[str]:
        if best is None:
            return []
        sentences = []
        padded = next(
            outcome for outcome in comparison.outcomes if outcome.name == PADDED_TO_LONGEST
        )
        others = [
            each
            for each in comparison.outcomes
            if each.schedule_seconds is not None and each is not best
        ]
        gain = (
            f"default trains {padded.step_cost / best.step_cost:.2f}x the tokens per second of "
            "padding to the longest"
        )
        if others:  # of packing
            next_best = min(others, key=lambda each: each.step_cost)
            times = next_best.step_cost / best.step_cost
            gain += f", and {times:.2f}x those of {next_best.name}" * (abs(times - 1) >= 0.005)
        sentences.append(gain + ".")
        if best.balance < 1:
            sentences.append(
                f"Its modelled time is {best.balance:.3f} of what any schedule of even packs "
                "takes: small packs first and last fill the bubbles of the pipeline."
            )
        elif best.balance < 1 + MIN_SAID:
            sentences.append(
                f"It is {best.balance - 1:.2%} above the lower bound: no schedule can gain more "
                "than that."
            )
        return sentences

    def _on_capacity(self, best: Outcome | None) -> list[str]:
        """Returns sentences about 0.5 to 2 times the capacity, where all sequences fit."""
        layout, longest = self._layout, max(int(batch.lengths.max()) for batch in self._batches)
        needed, unit = layout.alignment.padded_length(np.int64(longest)), layout.alignment.pack
        tried = [int(layout.capacity * times) // unit * unit for times in (0.5, 0.75, 1.5, 2.0)]
        saved = {
            capacity: self._change(replace(layout, capacity=capacity))
            for capacity in tried
            if capacity >= needed
        }
        more = {capacity: it for capacity, it in saved.items() if capacity > layout.capacity}
        sentences = self._on_more_capacity(more) if more else []
        fill = "" if best is None else f"packs are {best.fill:.0%} filled; "
        smallest = min(saved, default=layout.capacity)
        if smallest < layout.capacity:
            each = f"{self._per_rank(smallest)} {_percent(saved[smallest])}"
            sentences.append(
                f"Less capacity: {fill}{each}, and activations take "
                f"{smallest / layout.capacity:.0%}."
            )
        elif best is not None and best.fill < 0.8:
            sentences.append(
                f"Packs are {best.fill:.0%} filled, but the longest sequence, {longest:,} tokens, "
                "needs the capacity: a smaller one would take more context parallel, or truncating "
                "sequences."
            )
        return sentences

    def _on_tower(self) -> list[str]:
        """Returns a sentence about the layers of the first pipeline stage, where images are encoded
        while the others wait.
        """
        num_stages, num_layers = self._layout.model.num_stages, self._facts.num_layers
        images = sum(
            float(batch.payload_costs.sum())
            for batch in self._batches
            if batch.payload_costs is not None
        )
        is_plain = self._facts.has_equal_stages and self._layout.model.num_virtual_stages == 1
        if not images or num_stages == 1 or num_layers is None or not is_plain:
            return []
        tokens = sum(
            float(self._layout.cost.of_sequences(batch.lengths).sum()) for batch in self._batches
        )
        # The cost of images counts the stages that wait.
        of_tower = images / num_stages / (tokens / num_layers)
        times = {
            first: max(first + of_tower, (num_layers - first) / (num_stages - 1))
            for first in range(1, num_layers // num_stages)
            if (num_layers - first) % (num_stages - 1) == 0
        }
        best = min(times, key=times.__getitem__, default=None)
        if best is None:
            return []
        saved = 1 - times[best] / (num_layers / num_stages + of_tower)
        if saved < MIN_SAID:
            return []
        return [
            f"The vision tower takes as long as {of_tower:.1f} layers, while all other stages "
            f"wait: --decoder-first-pipeline-num-layers {best} would make the slowest stage "
            f"{saved:.1%} faster (not fewer than there are features for DeepStack)."
        ]

    def _on_more_capacity(self, more: Mapping[int, float]) -> list[str]:
        if max(more.values()) < MIN_SAID:
            largest = max(more) // self._context
            return [
                f"More capacity does not pay for its memory: up to {largest:,} tokens per rank "
                f"(--max-seqlen-per-dp-cp-rank) would save {max(0.0, *more.values()):.1%} of the "
                "time."
            ]
        each = ", ".join(
            f"{self._per_rank(capacity)} {_percent(saved)}" for capacity, saved in more.items()
        )
        return [f"More capacity (--max-seqlen-per-dp-cp-rank): {each}."]

    def _per_rank(self, capacity: int) -> str:
        return f"{capacity // self._context:,} tokens per rank would"

    def _on_context(self) -> list[str]:
        """Returns a sentence about twice the context-parallel size on as many devices."""
        layout = self._layout
        _, length, cost = layout.request(self._batches[0]).sorted
        share = float(cost[0] / (cost.sum() / layout.num_ranks))
        longest = (
            f"the longest sequence, {int(length[0]):,} tokens, costs {share:.1f}x a rank's "
            "fair share"
        )
        if layout.num_ranks % 2:
            return (
                [f"{longest[0].upper()}{longest[1:]}: more context parallel would share it."]
                if share > 1
                else []
            )
        other = _with_twice_the_context(layout, self._facts)
        saved = self._change(other)
        if share <= 1 and saved < MIN_SAID:
            return []
        dp, cp = layout.num_ranks // 2, self._context * 2
        reason = f"{longest[0].upper()}{longest[1:]}, which bounds the step: " if share > 1 else ""
        flags = f"--cp {cp} with --dp {dp} and --max-seqlen-per-dp-cp-rank {other.capacity // cp}"
        return [f"{reason}{flags}, on as many devices, would {_percent(saved)}."]

    def _on_bubble(self, best: Outcome) -> list[str]:
        """Returns a sentence about ways to shorten the bubble of a pipeline."""
        layout, model = self._layout, self._layout.model
        # Twice the batch, rounded up to a multiple of the ranks, as training needs it.
        size = -(-2 * self._batches[0].size // layout.num_ranks) * layout.num_ranks
        # Join batches two by two; a single batch is joined with itself.
        stream = Sequences.joined(self._pairs)
        count = max(1, stream.size // size)
        ids = np.resize(np.arange(stream.size), count * size)
        larger = [stream.take(each) for each in np.split(ids, count)]
        saved = 1 - _cost_per_token(larger, layout) / _cost_per_token(self._pairs, layout)
        remedies = [f"--global-batch-size {size} would {_percent(saved)} per token"]
        virtual = _more_virtual_stages(model, self._facts.num_layers)
        if virtual is not None and self._facts.has_equal_stages:
            interleaved = replace(
                model,
                num_virtual_stages=virtual,
                stage_group=model.num_stages,
                shares=_divided_shares(model, virtual),
            )
            saved = self._change(
                replace(layout, model=interleaved, microbatch_multiple=model.num_stages)
            )
            needs = model.num_stages * virtual
            unsure = (
                f", if the layers are a multiple of {needs},"
                if self._facts.num_layers is None
                else ""
            )
            remedies.append(f"--vpp {virtual}{unsure} would {_percent(saved)}")
        shorter = _shorter_last_stage(model, self._facts)
        if shorter is not None:
            num_layers, shares = shorter
            saved = self._change(replace(layout, model=replace(model, shares=shares)))
            if saved >= MIN_SAID:
                remedies.append(
                    f"--decoder-last-pipeline-num-layers {num_layers} would {_percent(saved)}"
                )
        return [f"Devices wait for {best.bubble:.0%} of the step: {'; '.join(remedies)}."]


def _cost_per_token(batches: Sequence[Sequences], layout: StepLayout) -> float:
    return modelled_cost(batches, layout, default) / sum(batch.num_tokens for batch in batches)


def _shorter_last_stage(model: StepModel, facts: RunFacts) -> tuple[int, tuple[float, ...]] | None:
    """Returns the layers of a shorter last stage, with one layer more on each other stage, and the
    shares of the stages then. Returns None if stages differ in layers, or have too few.

        4 stages of 8 layers and an output layer    ->    5, shares of 9 9 9 and 5 layers
    """
    if model.num_virtual_stages > 1 or not (model.shares and facts.has_equal_stages):
        return None
    others, last = model.shares[:-1], model.shares[-1]
    per_stage = (facts.num_layers or 0) // model.num_stages
    num_layers = per_stage - len(others)
    if num_layers < 1 or max(others) > min(others) * (1 + 1e-9) or last <= others[0]:
        return None
    layer = others[0] / per_stage
    return num_layers, (others[0] + layer,) * len(others) + (last - layer * len(others),)


def _divided_shares(model: StepModel, num_virtual_stages: int) -> tuple[float, ...]:
    """Returns the shares of chunks of layers if each stage is divided into `num_virtual_stages`
    chunks. The output layer stays in the last one.

        2 stages, shares 0.4 0.6, 2 chunks    ->    0.2 0.2 | 0.2 0.4
    """
    if not model.shares:
        return ()
    count, least = model.num_stages * num_virtual_stages, min(model.shares)
    layers = least * len(model.shares) / count
    return (layers,) * (count - 1) + (1 - layers * (count - 1),)


def _more_virtual_stages(model: StepModel, num_layers: int | None) -> int | None:
    """Returns the next larger number of virtual stages that divides the layers of a stage; None if
    there is none.

        12 layers per stage, 2 virtual stages    ->    3
    """
    if model.num_stages == 1 or model.sync_every_microbatch:
        return None
    if num_layers is None:
        return model.num_virtual_stages * 2
    per_stage = num_layers // model.num_stages
    return next(
        (
            more
            for more in range(model.num_virtual_stages + 1, per_stage + 1)
            if per_stage % more == 0
        ),
        None,
    )


def _with_twice_the_context(layout: StepLayout, facts: RunFacts) -> StepLayout:
    """Returns the parallel layout with half the ranks, each with twice the devices for a sequence.

    Each device still reads as many weights per microbatch, so that `fixed` stays the same.
    """
    alignment, num_ranks = layout.alignment, layout.num_ranks // 2
    context = 2 * facts.context_parallel_size
    sequence = 2 * context
    syncs = (
        layout.model.sync_every_microbatch
        and num_ranks > 1
        and (facts.sync_below is None or context < facts.sync_below)
    )
    alignment = Alignment(sequence=sequence, pack=int(np.lcm(sequence, 2 * alignment.pack)))
    cost = layout.cost.shared_by(2)
    return replace(
        layout,
        num_ranks=num_ranks,
        model=replace(layout.model, sync_every_microbatch=syncs),
        capacity=2 * layout.capacity // alignment.pack * alignment.pack,
        alignment=alignment,
        cost=cost,
    )


def _percent(saved: float) -> str:
    if abs(saved) < 0.0005:
        return "change nothing"
    return f"save {saved:.1%} of the time" if saved > 0 else f"cost {-saved:.1%} more time"
