"""A run is planned with the model and the layout that it had: another's would be advice for another
run.
"""

import json
import math
from dataclasses import replace

import pytest

from megatron.packing.scheduling.options import SchedulerOptions
from megatron.planner.lengths import RunSource
from megatron.planner.plan import plan
from megatron.planner.plan_options import STAGE_OPTIONS, LayoutOptions, ModelOptions
from megatron.planner.plan_run import as_in_run
from megatron.sft.commands.length_sources import lengths_from
from tests.unit_tests.blending.folders import write_jsonl
from tests.unit_tests.sft.command_line import parse

PIPELINE = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"
LAYOUT = f"{PIPELINE} --context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = "--num-experts 4 --moe-router-topk 4 --disable-bias-linear --expert-model-parallel-size 4"
COST = {"linear": 1, "quadratic": 0, "fixed": 0, "model": {}}
NONE_GIVEN = (ModelOptions(), LayoutOptions())


def run_of(folder, arguments="", num_ranks=2):
    options = parse(f"--sequence-packing {arguments}", world_size=16).to_dict()
    (folder / "options.json").write_text(json.dumps(options))
    return RunSource(folder=folder, num_ranks=num_ranks, capacity=256)


def test_model_and_layout_of_a_run(tmp_path):
    """`to_dict` writes the options, and nothing else would notice that one is renamed."""
    layers = "--moe-layer-freq 0 1 1 1 1 1 1 1 --moe-shared-expert-intermediate-size 32"
    others = "--vocab-size 1000 --geglu --outlier-delay-steps 3"
    run = run_of(tmp_path, f"{LAYOUT} {EXPERTS} {layers} {others}")
    model, layout, remarks, scheduling = as_in_run(run, *NONE_GIVEN, ["--scheduler"])
    assert model == ModelOptions(
        num_layers=8,
        hidden_size=64,
        num_attention_heads=8,
        geglu=True,
        vocab_size=1024,
        num_experts=4,
        moe_router_topk=4,
        moe_layer_freq=(0, 1, 1, 1, 1, 1, 1, 1),
        moe_shared_expert_intermediate_size=32,
    )
    assert layout == LayoutOptions(
        dp=2,
        tp=2,
        pp=2,
        vpp=2,
        cp=2,
        ep=4,
        sequence_parallel=True,
        global_batch_size=16,
        max_seqlen_per_dp_cp_rank=128,
    )
    assert remarks == [
        f"run       model and layout of {tmp_path / 'options.json'}; flags of either replace all "
        "of it"
    ]
    assert scheduling == SchedulerOptions(outlier_delay_steps=3)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--decoder-first-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2",
            LayoutOptions(dp=2, pp=2, vpp=2, decoder_first_pipeline_num_layers=2),
        ),
        (
            "--num-layers 7 --account-for-loss-in-pipeline-split "
            "--num-layers-per-virtual-pipeline-stage 2",
            LayoutOptions(dp=2, pp=2, vpp=2, account_for_loss_in_pipeline_split=True),
        ),
    ],
)
def test_unequal_stages_of_a_run(tmp_path, flags, expected):
    """Stages would be taken for equal, and virtual stages be counted wrongly."""
    run = run_of(tmp_path, f"--pipeline-model-parallel-size 2 {flags}")
    layout = as_in_run(run, *NONE_GIVEN, [])[1]
    assert layout == replace(expected, global_batch_size=16, max_seqlen_per_dp_cp_rank=256)
    options = json.loads((tmp_path / "options.json").read_text())
    for name in STAGE_OPTIONS:  # as runs wrote them before stages could be unequal
        del options["parallel"][name]
    (tmp_path / "options.json").write_text(json.dumps(options))
    assert as_in_run(run, *NONE_GIVEN, [])[1].decoder_first_pipeline_num_layers is None


@pytest.mark.parametrize("group", ["packing", "scheduling"])
def test_scheduling_of_an_older_run(tmp_path, group):
    """Earlier versions wrote its options among those of packing. A file may hold anything."""
    run = run_of(tmp_path)
    options = json.loads((tmp_path / "options.json").read_text())
    del options["scheduling"]
    for value in (3, math.nan, 2.5, True, -1):
        changed = options | {group: options.get(group, {}) | {"outlier_delay_steps": value}}
        (tmp_path / "options.json").write_text(json.dumps(changed))
        if value == 3:
            assert as_in_run(run, *NONE_GIVEN, [])[3] == SchedulerOptions(outlier_delay_steps=3)
        else:
            with pytest.raises(ValueError, match="at least 0, a whole number"):
                as_in_run(run, *NONE_GIVEN, [])


def test_flags_win(tmp_path):
    """A plan for twice the ranks that keeps the run's would be believed."""
    run, (model, layout) = run_of(tmp_path), NONE_GIVEN
    assert as_in_run(run, model, layout, ["--dp"])[1] == layout
    assert as_in_run(run, model, layout, ["--dp"])[0] != model
    assert as_in_run(run, model, layout, ["--num-experts"])[0] == model
    (tmp_path / "options.json").write_text("broken")
    assert as_in_run(run, model, layout, ["--num-experts", "--dp"])[:3] == (model, layout, [])


def test_measured_cost_of_a_run(tmp_path):
    """Times are those that the run was scheduled by; a file that has gone leaves the shape."""
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps(COST))
    run = run_of(tmp_path, f"--pack-cost {cost}")
    assert as_in_run(run, *NONE_GIVEN, [])[0] == ModelOptions(pack_cost=str(cost))
    cost.unlink()
    assert as_in_run(run, *NONE_GIVEN, [])[0].num_layers == 8


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"packing": {"pack_cost": null}}'])
def test_what_are_no_options_is_refused_with_a_way_out(tmp_path, text):
    (tmp_path / "options.json").write_text(text)
    with pytest.raises(
        ValueError,
        match=r"options.json: not the options of a run: .*; give model and layout by flags",
    ):
        as_in_run(RunSource(folder=tmp_path, num_ranks=1, capacity=None), *NONE_GIVEN, [])


@pytest.mark.slow
def test_planning_a_folder(tmp_path, capsys):
    """The whole command: no word of the 8B model, unless the run's options are missing."""
    write_jsonl(
        tmp_path / "packs.jsonl", [{"iteration": 1, "capacity": 256, "packs": [[[3, 4]], [[5]]]}]
    )
    run_of(tmp_path, PIPELINE)
    plan([str(tmp_path), "--scheduler", "default"], lengths_from)
    printed = capsys.readouterr().out
    assert "model     8 layers, hidden 64, 8 heads" in printed
    assert "leave the vocabulary to its data: no output layer in the cost" in printed
    assert (
        "layout    dp 2, pp 2, vpp 2 = 4 devices; 256 tokens per rank and pack; 8 global batches "
        "of 16" in printed
    )
    (tmp_path / "options.json").unlink()
    plan([str(tmp_path / "packs.jsonl"), "--scheduler", "default"], lengths_from)
    printed = capsys.readouterr().out
    assert "8B (32 layers" in printed
    assert (
        f"note      there is no {tmp_path / 'options.json'}: model and layout are those of the "
        "flags" in printed
    )
