"""The planner as a user runs it: no GPU, no torch, and one line for each mistake."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from megatron.packing.scheduling import compiled
from megatron.packing.scheduling.cost import PackCost, gpt_pack_cost
from megatron.packing.scheduling.registry import SCHEDULERS
from megatron.planner.plan import drawn, plan
from megatron.planner.plan_options import LayoutOptions, ModelOptions
from megatron.planner.sequences import Sequences
from megatron.sft.commands.length_sources import lengths_from
from megatron.sft.commands.plan import main

ROOT = Path(__file__).resolve().parents[3]
RUN = """
import sys
from megatron.sft.__main__ import main
sys.argv = ["megatron-sft", "plan", *sys.argv[1:]]
try:
    main()
finally:
    assert not {"torch", "megatron.core"} & set(sys.modules), "torch was imported"
"""


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("".join(f"{1 + i * 37 % 400}\n" for i in range(300)))
    return str(path)


SHAPE = "--num-layers 8 --hidden-size 64 --num-attention-heads 8".split()
COST = {
    "linear": 1,
    "quadratic": 0,
    "fixed": 0,
    "model": {"num_layers": 6, "num_attention_heads": 4, "num_experts": None},
}
EMPTY = "megatron.packing.scheduling.registry:empty"


QUIET = ["-W", "ignore:scheduling is slower"]
"""Where no C++ compiler was found, it is said once, and not what is tested here."""


def run(*arguments):
    return subprocess.run(
        [sys.executable, *QUIET, "-c", RUN, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_whole_command_without_torch(lengths, tmp_path):
    """Seconds on a laptop: torch alone takes as many to import, and isn't there on many."""
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    png = ["--png", picture] if find_spec("matplotlib") else []
    done = run(
        lengths,
        "--dp",
        4,
        "--pp",
        2,
        "--cp",
        2,
        "--tp",
        2,
        "--sequence-parallel",
        "--html",
        page,
        *png,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in SCHEDULERS)
    assert "dp 4, tp 2, pp 2, cp 2 = 32 devices" in done.stdout
    assert "8B (32 layers" in done.stdout
    assert "- default trains" in done.stdout
    text = page.read_text()
    assert text.count("<svg") == len(SCHEDULERS)
    assert text.count("<h2>default: batch 1 of 8, 64 sequences</h2>") == 1
    for where in (done.stdout, text):
        assert "table     means of the 8 global batches; pictures show the first" in where
    assert not png or picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.skipif(
    compiled.CORE is None, reason="the document shows what the compiled loops schedule"
)
def test_the_document_shows_what_is_printed(capsys):
    """Whoever plans with the same lengths gets other figures, and looks for what is wrong. Time to
    schedule varies.
    """
    text = (ROOT / "docs" / "howto" / "planning.md").read_text()
    command, shown = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[:2]
    (lengths,) = re.findall(r"For the lengths of `(.*?)`", text)
    _, _, _, *options = command.split()
    plan([lengths, *options[: options.index("--html")]], lengths_from)
    printed = {re.sub(r" +\S+ ms$", "", line) for line in capsys.readouterr().out.splitlines()}
    assert [
        line for line in shown.splitlines() if re.sub(r" +\S+ ms$", "", line) not in printed
    ] == []


def test_schedulers_may_be_repeated_and_be_the_users(lengths, capsys):
    plan([lengths, "--scheduler", "default", "--scheduler", EMPTY, "--dp", "2"], lengths_from)
    printed = capsys.readouterr().out
    assert EMPTY in printed
    assert "dp_balanced" not in printed


def test_failing_scheduler_costs_a_line(lengths, capsys):
    plan([lengths, "--scheduler", "default", "--scheduler", "math:sqrt"], lengths_from)
    assert "math:sqrt gave no valid schedule: TypeError" in capsys.readouterr().out
    plan(
        [lengths, "--scheduler", "math:sqrt"], lengths_from
    )  # nothing valid at all, still no traceback
    assert "padding, to the longest" in capsys.readouterr().out


def test_schedule_of_a_run_is_drawn_again(tmp_path, capsys):
    record = {
        "kind": "schedule", "title": "step 12", "scheduler": "empty", "capacity": 9,
        "alignment": {"sequence": 1, "pack": 1}, "cost": {"linear": 1.0, "quadratic": 0.0,
        "fixed": 0.0},
        "microbatch_multiple": 1, "model": {"num_stages": 1}, "packs": [[[9], [1]], [[1], [1]]],
    }  # fmt: skip
    path, page = tmp_path / "schedule_12.json", tmp_path / "x.html"
    path.write_text(json.dumps(record))
    plan([str(path), "--html", str(page)], lengths_from)
    printed = capsys.readouterr().out
    assert "as it ran (empty)" in printed
    assert "step 12, scheduled by empty" in printed
    assert "as it ran (empty): step 12" in page.read_text()
    with pytest.raises(
        ValueError,
        match=r"--vocab-size, --dp, --max-seqlen-per-dp-cp-rank cannot change .*leave out",
    ):
        plan(
            [
                str(path),
                "--dp=4",
                "--max-seqlen-per-dp-cp-rank",
                "5000",
                "--vocab-size",
                "8",
                "--scheduler",
                "empty",
            ],
            lengths_from,
        )
    with pytest.raises(
        ValueError, match="--dp cannot change"
    ):  # though it is what is there without it
        plan([str(path), "--dp", "1"], lengths_from)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "lengths are missing"),
        (["absent.csv"], "absent.csv: no such file"),
        (["LENGTHS", "--dp", "0"], "--dp must be at least 1, but is 0"),
        (["LENGTHS", "--dp", "x"], "--dp: invalid int value: 'x'"),
        (["LENGTHS", "--dq", "2"], "unknown option --dq; did you mean --"),
        (["LENGTHS", "--vpp", "2"], "--vpp 2 needs --pp of at least 2"),
        (["LENGTHS", "--ep", "3"], "--ep 3 must divide"),
        (["LENGTHS", *SHAPE, "--num-layers", "3", "--pp", "8"], "--pp 8"),
        (["LENGTHS", "--pp", "3"], "--num-layers 32 (the default model's)"),
        (["LENGTHS", "--pp", "4", "--vpp", "3"], "--vpp 3"),
        (["LENGTHS", "--pack-cost", "COST", "--pp", "4"], "--num-layers 6 (of --pack-cost"),
        (["LENGTHS", *SHAPE, "--num-attention-heads", "7"], "--num-attention-heads 7"),
        (["LENGTHS", "--num-experts", "4", "--moe-router-topk", "8"], "--num-experts 4"),
        (["LENGTHS", "--dp", "8", "--ep", "8"], "--num-experts"),
        (["LENGTHS", "--dp", "8", "--ep", "8", "--pack-cost", "COST"], "--num-experts"),
        (["LENGTHS", "--dp", "8", "--ep", "8", "--num-experts", "4"], "--ep 8"),
        (["LENGTHS", "--tp", "64"], "--num-attention-heads 32 (the default model's)"),
        (
            ["LENGTHS", *SHAPE, "--num-query-groups", "4", "--tp", "8", "--ffn-hidden-size", "36"],
            "--ffn-hidden-size 36",
        ),
        (
            ["LENGTHS", "--num-experts", "4", "--moe-layer-freq", "0", "1"],
            "each of --num-layers 32",
        ),
        (["LENGTHS", *SHAPE, "--tp", "3"], "--num-attention-heads 8"),
        (["LENGTHS", "--tp", "2", "--num-experts", "4"], "--sequence-parallel"),
        (["LENGTHS", "--num-layers", "2"], "also needs --hidden-size, --num-attention-heads"),
        (["LENGTHS", "--swiglu"], "also needs --num-layers, --hidden-size, --num-attention-heads"),
        (["LENGTHS", "--scheduler", "defualt"], "error: --scheduler must be one of"),
        (["LENGTHS", "--scheduler", "defualt"], "did you mean default?"),
        (
            ["LENGTHS", "--scheduler", "no.such:thing"],
            "--scheduler 'no.such:thing' can't be imported",
        ),
        (
            ["LENGTHS", "--scheduler", "EXITS:f"],
            "EXITS:f' can't be imported: its module raises SystemExit(4)",
        ),
        (
            ["HUGE"],
            "huge.csv:1: length must be 1 to 16777216, the most that is believed, but is 16777217",
        ),
        (
            ["CHATS", "--tokenizer-model", "absent"],
            "--tokenizer-model must be the directory of a Hugging Face tokenizer",
        ),
        (
            ["CHATS", "--tokenizer-model", "x", "--tokenizer-type", "NullTokenizer"],
            "x is not read by NullTokenizer",
        ),
        (["LENGTHS", "--png", "x.txt"], "--png x.txt: must end in .png, .pdf, .svg or .jpg"),
        (["LENGTHS", "--png", "x"], "--png x: must end in .png"),
        (["LENGTHS", "--html", "."], "--html .: is a folder; name a file in it"),
        (["LENGTHS", "--max-seqlen-per-dp-cp-rank", "100"], "the longest 400"),
        (
            ["LENGTHS", "--cp", "4", "--max-seqlen-per-dp-cp-rank", "1"],
            "--max-seqlen-per-dp-cp-rank",
        ),
        (
            ["LENGTHS", "--html", "no/such/folder/x.html"],
            "--html no/such/folder/x.html: no such folder",
        ),
        (
            ["LENGTHS", "--pack-cost", "absent.json"],
            "--pack-cost absent.json cannot be read: No such file",
        ),
        (["LENGTHS", "--pack-cost", "LENGTHS"], "--pack-cost"),
        (["LENGTHS", "--tflops-per-device", "nan"], "--tflops-per-device must be at least 0.001"),
        (['{"mode": "distribution"'], "is not valid JSON"),
        (['{"mode": "distribution", "type": "pareto"}'], "type must be one of"),
    ],
)
def test_mistakes_are_one_line(lengths, tmp_path, capsys, monkeypatch, arguments, said):
    """A traceback says where our code is, not what the user can do."""
    (tmp_path / "cost.json").write_text(json.dumps(COST))
    (tmp_path / "huge.csv").write_text("16777217\n")
    (tmp_path / "chats.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "EXITS.py").write_text("raise SystemExit(4)")
    monkeypatch.syspath_prepend(tmp_path)
    paths = {
        "LENGTHS": lengths,
        "COST": str(tmp_path / "cost.json"),
        "HUGE": str(tmp_path / "huge.csv"),
    }
    paths["CHATS"] = str(tmp_path / "chats.jsonl")
    with pytest.raises(SystemExit) as stop:
        main([paths.get(each, each) for each in arguments], "plan")
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("plan: error: ")
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.slow
def test_model_and_layout_of_a_released_model_and_of_a_run(lengths, tmp_path, capsys):
    """Whoever has a folder or the YAML of a run would type its numbers again, some of them
    wrong.
    """
    folder = tmp_path / "model"
    folder.mkdir()
    shape = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 8}
    written = {"intermediate_size": 128, "vocab_size": 100, "rms_norm_eps": 1e-6}
    config = {"model_type": "llama", "hidden_act": "silu", **shape, **written}
    (folder / "config.json").write_text(json.dumps(config))
    main([lengths, "--pretrained-checkpoint", str(folder), "--dp", "2"], "plan")
    assert "model     8 layers, hidden 64, 8 heads, 400" in capsys.readouterr().out
    run = tmp_path / "run.yaml"
    run.write_text(
        f"pretrained_checkpoint: {folder}\ntensor_model_parallel_size: 2\nlr: 0.1\n"
        "pipeline_model_parallel_size: 2\nnum_layers_per_virtual_pipeline_stage: 2\n"
    )
    main([lengths, "--config", str(run), "--dp", "2"], "plan")
    assert "dp 2, tp 2, pp 2, vpp 2 = 8 devices" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "--dp 8 --ep 8 --num-experts 8",
        "--pp 4 --vpp 8 --dp 4",
        f"{' '.join(SHAPE)} --num-attention-heads 7 --kv-channels 9",
        "--pack-cost COST --dp 8 --ep 8 --pp 5",
    ],
)
def test_layouts_that_can_exist_are_planned(lengths, tmp_path, capsys, arguments):
    """What a cost written by hand doesn't say of its model is the user's matter. No advice that
    would be refused.
    """
    cost = tmp_path / "cost.json"
    cost.write_text('{"linear": 1, "quadratic": 0, "fixed": 0, "model": {}}')
    given = [lengths, "--scheduler", "default", "--global-batch-size", "32"]
    plan([*given, *arguments.replace("COST", str(cost)).split()], lengths_from)
    printed = capsys.readouterr().out
    assert "- default trains" in printed
    assert "--vpp 16" not in printed


def test_over_length_policies(lengths, capsys):
    plan(
        [lengths, "--max-seqlen-per-dp-cp-rank", "100", "--over-length-policy", "truncate"],
        lengths_from,
    )
    assert "truncated to 100 tokens: 225 sequences" in capsys.readouterr().out
    plan(
        [lengths, "--max-seqlen-per-dp-cp-rank", "100", "--over-length-policy", "drop"],
        lengths_from,
    )
    assert "dropped, as they are longer than 100 tokens: 225 sequences" in capsys.readouterr().out
    Path(lengths).write_text("5\n6\n")
    with pytest.raises(ValueError, match="all sequences are longer than 4 tokens"):
        plan([lengths, "--seq-length", "4", "--over-length-policy", "drop"], lengths_from)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cost", [None, {"linear": 4e-5, "quadratic": 2e-9, "fixed": 0.1, "model": {}}]
)
def test_what_is_advised_is_what_the_advised_layout_is_shown_to_take(
    lengths, tmp_path, capsys, cost
):
    """The advice and the table would each have their own idea of what a microbatch costs a
    context-parallel rank.
    """
    measured = tmp_path / "cost.json"
    measured.write_text(json.dumps(cost))
    given = [lengths, "--scheduler", "default", "--pp", "2", "--global-batch-size", "64"]
    given += ["--pack-cost", str(measured)] * (cost is not None)

    def planned(layout):
        plan([*given, *layout.split()], lengths_from)
        printed = capsys.readouterr().out
        row = next(line.split() for line in printed.splitlines() if line.startswith("default"))
        return float(row[6].replace(",", "")), printed

    before, printed = planned("--dp 8 --cp 2")
    advised = next(line for line in printed.splitlines() if "on as many devices" in line)
    flags, _, change = advised.partition("--cp ")[2].partition(", on as many devices, would ")
    after, _ = planned("--cp " + flags.replace(" with ", " ").replace(" and ", " "))
    share, sign = float(change.split()[1].rstrip("%")), 1 if change.startswith("save") else -1
    assert after / before == pytest.approx(1 - sign * share / 100, abs=0.001)


def test_batches_are_drawn_without_replacement():
    """Drawing with replacement would show fewer of the longest sequences together than an epoch
    has.
    """
    lengths = np.arange(1, 11)
    batches = [each.lengths for each in drawn(Sequences(lengths), 4, 5, seed=3)]
    assert (
        sorted(np.concatenate(batches[:2]).tolist() + batches[2][:2].tolist()) == lengths.tolist()
    )
    assert [batch.size for batch in batches] == [4] * 5
    again = Sequences.joined(drawn(Sequences(lengths), 4, 5, 3))
    assert np.array_equal(again.lengths, np.concatenate(batches))


def test_layout_asks_what_training_asks():
    """A plan for another capacity or another kind of waiting is a plan for another run."""
    layout = LayoutOptions(dp=4, pp=2, vpp=2, cp=2, ep=4, tp=1)
    step = layout.step_layout(ModelOptions(), layout.capacity(1001), PackCost(1.0, 0.0), None)
    assert (step.capacity, step.alignment.sequence, step.microbatch_multiple) == (1004, 4, 2)
    assert (step.model.num_stages, step.model.num_virtual_stages, step.model.stage_group) == (
        2,
        2,
        2,
    )
    assert step.model.sync_every_microbatch
    assert layout.batch_size == 64


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({}, (16, 16)),
        ({"decoder_last_pipeline_num_layers": 14}, (18, 14)),
        ({"vpp": 2, "decoder_first_pipeline_num_layers": 18}, (9, 7, 9, 7)),
    ],
)
def test_stages_do_their_layers_and_the_last_one_the_output_layer(options, layers):
    """Plans would be blind to the very options that even stages out."""
    layout = LayoutOptions(pp=2, **options)
    model = ModelOptions(loss_share=0.5)
    layout.check(model)
    step = layout.step_layout(model, 1000, PackCost(1.0, 0.0), None)
    layer, head = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336, 4096 * 128256 / 2
    work = [count * layer for count in layers]
    work[-1] += head
    assert step.model.shares == pytest.approx([each / sum(work) for each in work])


def test_model_costs(tmp_path):
    """The 8B default, a shape of one's own, a fitted cost."""
    own = ModelOptions(num_layers=2, hidden_size=96, num_attention_heads=4, swiglu=True)
    assert own.cost() == gpt_pack_cost(
        num_layers=2,
        hidden_size=96,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=24,
        ffn_hidden_size=256,
        vocab_size=0,
        swiglu=True,
    )
    mixed = ModelOptions(
        num_layers=2,
        hidden_size=96,
        num_attention_heads=4,
        geglu=True,
        num_experts=4,
        moe_layer_freq=(0, 1),
        moe_shared_expert_intermediate_size=32,
    )
    assert mixed.cost() == gpt_pack_cost(
        num_layers=2,
        hidden_size=96,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=24,
        ffn_hidden_size=256,
        vocab_size=0,
        swiglu=True,
        num_experts=4,
        num_dense_layers=1,
        moe_shared_expert_intermediate_size=32,
    )
    assert ModelOptions().cost().linear == pytest.approx(6 * 7.5e9, rel=0.01)
    path = tmp_path / "cost.json"
    path.write_text('{"linear": 3.0, "quadratic": 0.25, "fixed": 10, "model": {}, "device": "x"}')
    assert ModelOptions(pack_cost=str(path)).cost() == PackCost(3.0, 0.25, 10.0)
    with pytest.raises(ValueError, match="either --pack-cost or"):
        ModelOptions(num_layers=2, hidden_size=96, num_attention_heads=4, pack_cost=str(path))


def test_fitted_cost_is_shared_by_the_layout(lengths, tmp_path, capsys):
    """Seconds of one device: 100 tokens by 0.01 s on four devices, and the weights' half a second
    on two of them.
    """
    path = tmp_path / "cost.json"
    path.write_text('{"linear": 0.01, "quadratic": 0, "fixed": 0.5, "model": {}}')
    Path(lengths).write_text("100\n")
    plan(
        [lengths, "--pack-cost", str(path), "--tp", "2", "--cp", "2", "--global-batch-size", "1"],
        lengths_from,
    )
    row = next(
        line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("default")
    )
    assert row[6] == "500.0"  # ms: 1 / 4 + 0.5 / 2


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ("--loss dpo", 4 / 3),
        ("--loss kto", 5 / 3),
        ("--loss orpo", None),
        ("--loss dpo --forward-passes 0", None),
        ("--config run.yaml", None),
    ],
)
def test_times_count_the_passes_of_a_reference(tmp_path, capsys, monkeypatch, options, factor):
    """Steps of DPO would be planned a quarter too short; those with a file of log-probabilities,
    or a loss without a reference, would not.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.csv").write_text("100\n")
    cost = {"linear": 0.01, "quadratic": 0.0001, "fixed": 0.5, "model": {}}
    (tmp_path / "cost.json").write_text(json.dumps(cost))
    (tmp_path / "run.yaml").write_text("loss: dpo\nreference_file: reference.npz\n")
    main(f"lengths.csv {options} --pack-cost cost.json --global-batch-size 1".split(), "plan")
    lines = capsys.readouterr().out.splitlines()
    row = next(line.split() for line in lines if line.startswith("default"))
    assert row[6] == f"{2500 * (factor or 1):,.1f}"
    said = [line for line in lines if line.startswith("reference")]
    assert [line.split()[-4] for line in said] == ([] if factor is None else [f"{factor:.2f}"])
