"""Planner: gains of packing, from lengths alone and without a GPU.

    from megatron.packing.scheduling.registry import SCHEDULERS
    from megatron.planner.compare import compare
    from megatron.planner.plan_options import LayoutOptions, ModelOptions
    from megatron.planner.sequences import Sequences

    batch = Sequences(np.random.default_rng(0).integers(16, 4096, 512))
    model = ModelOptions()
    layout = LayoutOptions(dp=8, pp=2).step_layout(model, 8192, model.cost(), None)
    for outcome in compare([batch], layout, SCHEDULERS, longest=4096).outcomes:
        print(f"{outcome.name:30} fill {outcome.fill:.0%}, balance {outcome.balance:.3f}")

Names to know: `plan.plan` (the command), `compare.compare` (schedulers side by side),
`advice.Adviser` (other layouts), `step_record.StepRecord` (a scheduled step, as JSON and back),
`calibrate.calibrate` (measured cost of packs). README.md has the map.
"""
