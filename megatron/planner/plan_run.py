"""pure. Reads model and parallel layout of a run from its options.json, as planner options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from megatron.packing.flags import flag_of
from megatron.packing.scheduling.fitted_cost import read_fitted_cost
from megatron.packing.scheduling.options import SchedulerOptions
from megatron.packing.user_files import read_json
from megatron.planner.lengths import OPTIONS_FILE, RunSource
from megatron.planner.plan_options import LayoutOptions, ModelOptions, layout_of_run


class Planned(NamedTuple):
    """Model and parallel layout of a plan, and lines about where they come from."""

    model: ModelOptions
    layout: LayoutOptions
    remarks: list[str]
    scheduling: SchedulerOptions = SchedulerOptions()


def as_in_run(
    run: RunSource, model: ModelOptions, layout: LayoutOptions, given: Sequence[str]
) -> Planned:
    """Returns the model and the parallel layout to plan with. Each is the run's, unless the user
    gave a flag of it (`given`).

    Options of scheduling are the run's where model or layout is. Raises ValueError if the file does
    not have the options of a run.
    """
    path = run.folder / OPTIONS_FILE
    takes = {
        kind: not any(flag_of(field.name) in given for field in fields(group))
        for kind, group in (("model", ModelOptions), ("layout", LayoutOptions))
    }
    if not any(takes.values()):
        return Planned(model, layout, [])
    if not path.is_file():
        return Planned(
            model,
            layout,
            [f"note      there is no {path}: model and layout are those of the flags"],
        )
    try:
        options = read_json(path)
        model = _model_of(options) if takes["model"] else model
        layout = _layout_of(options, run) if takes["layout"] else layout
        scheduling = _scheduling_of(options)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{path}: not the options of a run: {type(error).__name__}: {error}; give model and "
            "layout by flags"
        ) from error
    taken = " and ".join(kind for kind, takes_it in takes.items() if takes_it)
    remarks = [f"run       {taken} of {path}; flags of either replace all of it"]
    if takes["model"] and model.pack_cost is None and model.vocab_size is None:
        remarks.append(
            "note      the run's options leave the vocabulary to its data: no output layer in the "
            "cost"
        )
    return Planned(model, layout, remarks, scheduling)


def _scheduling_of(options: Mapping[str, Any]) -> SchedulerOptions:
    """Returns a run's options of scheduling. Older versions have them among those of packing."""
    names = {field.name for field in fields(SchedulerOptions)}
    values = options["packing"] | options.get("scheduling", {})
    return SchedulerOptions(**{name: value for name, value in values.items() if name in names})


def _model_of(options: Mapping[str, Any]) -> ModelOptions:
    """Returns the model of a run: the cost file that it was scheduled with, or if that file is
    missing, its shape.
    """
    measured = options["packing"]["pack_cost"]
    if measured is not None and _is_readable(measured):
        return ModelOptions(pack_cost=measured)
    named = {field.name for field in fields(ModelOptions)}
    shape: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value  # JSON has lists for tuples
        for name, value in options["model"].items()
        if name in named
    }
    vocabulary = options["data"]["vocab_size"]
    unit = options["model"]["make_vocab_size_divisible_by"]
    return ModelOptions(
        **shape, vocab_size=None if vocabulary is None else -(-vocabulary // unit) * unit
    )


def _is_readable(path: str) -> bool:
    try:
        read_fitted_cost(path)
    except ValueError:
        return False
    return True


def _layout_of(options: Mapping[str, Any], run: RunSource) -> LayoutOptions:
    parallel, training = options["parallel"], options["training"]
    context = parallel["context_parallel_size"]
    return LayoutOptions(
        dp=run.num_ranks,
        **layout_of_run(parallel, options["model"]["num_layers"]),
        global_batch_size=training["global_batch_size"],
        max_seqlen_per_dp_cp_rank=None if run.capacity is None else run.capacity // context,
    )
