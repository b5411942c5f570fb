"""The doctor names faults that are put back, and finds none where there is none.

`make doctor-faults` does all cases in all precisions; here is a part that covers each experiment.
"""

from __future__ import annotations

import json
import re
import runpy
from types import SimpleNamespace

import pytest
import torch

from megatron.packing.doctor.command import run_doctor
from megatron.packing.doctor.decisions.decision_table import ROWS
from megatron.packing.doctor.examine import examine
from megatron.packing.doctor.module_kinds import kind_of
from megatron.packing.doctor.subjects.trainer_rows import rows_of_trainer
from megatron.packing.doctor.subjects.transformers_subject import small_subject
from megatron.packing.flags import FlagError
from megatron.sft.arguments.parse import parse_config
from megatron.sft.doctor.shrink import small_run
from tests.functional_tests.doctor_cases import CASES
from tests.functional_tests.doctor_faults import wrong
from tests.functional_tests.doctor_kills import SELECTIONS
from tests.functional_tests.doctor_loops import LOOP_CASES, wrong_of_script
from tests.functional_tests.doctor_mutants import MUTANTS
from tests.functional_tests.doctor_runs import COMMON, LAYOUTS, SOUND, answer

BY_NAME = {case.name: case for case in CASES}
COVERING = {
    "windows": "float32",
    "experts": "float64",
    "dropout": "float32",
    "experts with a capacity": "bfloat16",
    "balancing loss": "float32",
    "borders one too late": "float32",
    "borders two too early": "float64",
    "convolution in front of attention": "bfloat16",
    "windows without borders": "float32",
    "mask added as booleans": "float32",
    "window one too narrow": "bfloat16",
    "learned positions run on": "float32",
    "halves swapped": "float64",
    "state between calls": "float32",
    "backward pass crosses": "bfloat16",
    "labels across borders": "float32",
    "mean per pack": "bfloat16",
    "times context-parallel ranks": "float32",
    "norm over copies": "float32",
    "sample weights lost": "float64",
    "mean per rank": "bfloat16",
    "gradients times ranks": "float32",
    "sequence lost": "float32",
    "fused loss trains prompts": "float32",
}


@pytest.mark.parametrize("name", COVERING)
def test_faults_are_named(name):
    """A fault that is not named is trained on; a sound trainer that is blamed costs days."""
    assert wrong(BY_NAME[name], COVERING[name]) == ""


BY_MUTANT = {mutant.name: mutant for mutant in MUTANTS}


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("attention of the second stage joins sequences", "attention forgets borders"),
        ("sample weights are lost", "sample weights are lost"),
    ],
)
def test_mutants_of_packing_code(name, fault):
    """A doctor that only knows its own toy says nothing about this trainer."""
    faults, _, text = answer(BY_MUTANT[name].case, BY_MUTANT[name])
    assert faults == [fault], text


@pytest.mark.parametrize("case", [("gemma", "", "float32", "")])
def test_sound_runs(case):
    """A run that is blamed without a fault is not trained for days."""
    faults, told, text = answer(case)
    assert (faults, told) == ([], []), text


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("TRL-like: first label of each sequence kept", "float32"),
        ("verl-like: mean per rank", "float64"),
    ],
)
def test_scripts_with_a_fault(case, dtype):
    """A hook that is passed without an examination, or a name that only a toy gets."""
    (patched,) = [one for one in LOOP_CASES if f"{one.script}: {one.name}" == case]
    assert wrong_of_script(patched, dtype) == ""


def test_a_script_runs_by_itself(tmp_path, monkeypatch, capsys):
    """Without the doctor a hook costs nothing and ends nothing; behind it, the script is over."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom megatron.packing.doctor.hook import examine_here\n"
        "def subject():\n"
        "    from tests.functional_tests.doctor_cases import CASES, subject_of\n"
        "    import torch\n    return subject_of(CASES[0], torch.float32)\n"
        "print(sys.argv[1:])\nexamine_here(subject)\nprint('trained')\n"
        "if 'fails' in sys.argv:\n    raise RuntimeError('no data')\n"
    )
    monkeypatch.setattr("sys.argv", ["train.py"])
    runpy.run_path(str(script), run_name="__main__")
    assert "trained" in capsys.readouterr().out
    assert run_doctor(["--script", str(script), "--", "--lr", "3"], "doctor") == 0
    out = capsys.readouterr().out
    assert out.startswith("['--lr', '3']\nattention: no contamination found")
    assert "trained" not in out
    script.write_text(script.read_text().replace("examine_here(subject)", "pass"))
    for arguments, message in [
        (["--script", str(script)], "ended without examine_here"),
        (["--script", str(script), "--", "fails"], "RuntimeError: no data"),
        (["--script", "absent.py"], "there is no such file"),
        (["--model", "opt", "--", "--lr"], "are options of --script"),
    ]:
        with pytest.raises(ValueError, match=message):
            run_doctor(arguments, "doctor")


def test_a_run_needs_packs():
    """Rows of one sequence each have nothing to find: silence would look like a sound verdict."""
    config = parse_config(f"{COMMON}".replace("--sequence-packing", "").split(), 1)
    with pytest.raises(FlagError, match="pass --sequence-packing"):
        small_run(config)


def test_the_page_covers_what_it_says():
    """A mutant without a test of the suite, or a layout that no run has, would be promised."""
    assert set(SELECTIONS) == set(BY_MUTANT)
    assert {case[1] for case in SOUND} == set(LAYOUTS)
    assert len(LAYOUTS) >= 30


def test_every_row_has_a_case():
    """A row that no case reaches may name nothing, or anything."""
    reached = {name for case in CASES for name in case.expected}
    assert {row.name for row in ROWS} - reached == {
        "form of the loss is unknown",  # as gemma2's, which caps logits behind the head
        "labels of other tokens",
        "packed path computes otherwise",  # gpt2 padded on the left, below
        "balancing loss",  # of the step, told of runs with one
        "copies of a parameter differ",  # of several ranks: mutants
        "gradient is lost between ranks",
        "step is not its sequences' sum",
        "logits are not finite in packs",  # tests/unit_tests/packing/doctor
    }


@pytest.mark.parametrize(
    ("model", "collator", "expected"),
    [
        ("llama", "flattening", []),
        ("opt", "flattening", ["attention forgets borders"]),
        ("gpt_oss", "flattening", ["windowed attention without borders"]),
        ("gemma4_text", "flattening", []),  # fields that differ by layer
        ("falcon_h1", "flattening", ["recurrent state is kept"]),
        # The last padding predicts the first token, whose label data sets leave.
        ("gpt2", "padded-left", ["packed path computes otherwise", "padding is trained"]),
    ],
)
def test_transformers(model, collator, expected):
    """Findings on real models are what users act on: the toy's modules have the doctor's names."""
    pytest.importorskip("transformers")
    assert [each.name for each in examine(small_subject(model, collator)).faults] == expected


def test_report_and_files(tmp_path, capsys):
    """A script reads the status and the JSON; people the first line."""
    pytest.importorskip("transformers")
    script = tmp_path / "mine.py"
    script.write_text(
        "from megatron.packing.doctor.subjects.transformers_subject import small_subject\n"
        "def subject():\n    return small_subject('opt', 'flattening')\n"
    )
    arguments = ["--subject", f"{script}:subject", "--json", str(tmp_path / "a.json")]
    assert run_doctor([*arguments, "--html", str(tmp_path / "a.html")], "doctor") == 1
    text = capsys.readouterr().out
    assert text.startswith("opt, flattening, sdpa: attention forgets borders.\n")
    assert "17 of 17 tokens of sequence 1 see 11 of 11 of sequence 0" in " ".join(text.split())
    found = json.loads((tmp_path / "a.json").read_text())
    assert list(found) == ["format", "verdict", "is_sound", "findings", "evidence"]
    assert (found["format"], found["is_sound"]) == (1, False)
    assert {*found["findings"][0]} == {
        *("name", "property", "text", "mend", "threads", "is_fault"),
    }
    assert found["findings"][0]["name"] == "attention forgets borders"
    page = (tmp_path / "a.html").read_text()
    assert page.count('fill="#b00020"') == 3  # 0 into 1, 0 into 2, 1 into 2
    assert not re.search(r"https?://", page)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "pass one of --model"),
        (["--model", "opt", "--subject", "a.py:f"], "pass one of --model"),
        (["--model", "no_such_type"], "neither a folder with config.json nor a model type"),
        (["--model", "opt", "--collator", "best"], "choose one of flattening"),
        (["--model", "opt", "--dtype", "int8"], "choose one of float32"),
        (["--model", "bloom", "--attention", "sdpa"], "cannot be built"),
        (["--subject", "absent.py:f"], "there is no file absent.py"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    """A traceback of transformers tells a user nothing about the option to change."""
    pytest.importorskip("transformers")
    with pytest.raises((FlagError, ValueError), match=re.escape(message)) as failure:
        run_doctor(arguments, "doctor")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "{", "does not read its config.json: OSError"),
        ("config.json", '{"model_type": "absent"}', "does not recognize this architecture"),
        ("other.json", "{}", "neither a folder with config.json nor a model type"),
        ("config.json", '{"model_type": "t5"}', "t5 is no causal language model"),
    ],
)
def test_folders_of_no_model_are_one_line(tmp_path, name, text, message):
    """The way out differs: another folder, another transformers, or one's own subject."""
    pytest.importorskip("transformers")
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as failure:
        run_doctor(["--model", str(tmp_path)], "doctor")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("rows", "packing", "expected"),
    [
        (  # axolotl's: the collator packs
            [{"input_ids": [5, 6], "labels": [5, 6], "position_ids": [0, 1]}],
            False,
            [
                {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "position_ids": [0, 1, 2]},
                {"input_ids": [4, 5], "labels": [4, 5], "position_ids": [0, 1]},
            ],
        ),
        (  # LLaMA-Factory's: rows of one width, sequences numbered in the mask
            [
                {"input_ids": [5, 6, 7, 5, 9, 9], "labels": [5, 6, 7, 5, -100, -100]}
                | {"attention_mask": [1, 1, 2, 2, 0, 0]}
            ]
            * 2,
            False,
            [
                {"input_ids": [1, 2, 3, 4, 5, 9], "labels": [1, 2, 3, 4, 5, -100]}
                | {"attention_mask": [1, 1, 1, 2, 2, 0]}
            ],
        ),
        # TRL's, wrapped: nothing says where sequences end
        ([{"input_ids": [5, 6]}], True, [{"input_ids": [1, 2, 3, 4, 5]}]),
    ],
)
def test_rows_are_those_of_the_data_set(rows, packing, expected):
    """A collator that is given other columns than in training packs otherwise: a sound trainer is
    blamed, or one that forgets borders is called sound.
    """
    trainer = SimpleNamespace(
        data_collator=None,
        train_dataset=rows,
        args=SimpleNamespace(packing=packing),
        get_train_dataloader=lambda: SimpleNamespace(dataset=rows, collate_fn=list),
    )
    sequences = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    assert rows_of_trainer(trainer).batch(sequences, sequences) == expected


def test_a_model_that_raises_is_told(tmp_path):
    """A loud refusal is no contamination, and must not look like a fault of the doctor."""
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch\nfrom megatron.packing.doctor.subject import Subject\n"
        "def fail(sequences, fill):\n    raise RuntimeError('no borders here')\n"
        "def short(sequences, fill):\n    return [torch.zeros(3, 9)] * len(sequences)\n"
        "def make(logits):\n    return Subject(name='mine', model=torch.nn.Linear(2, 2), "
        "vocab_size=9, logits=logits)\n"
        "def raises():\n    return make(fail)\n"
        "def cuts():\n    return make(short)\n"
        "def nothing():\n    return 3\n"
    )
    for name, message in [
        ("raises", "RuntimeError: no borders here"),
        ("cuts", "returned tensors of lengths"),
        ("nothing", "returned int"),
        ("absent", "has no function absent"),
    ]:
        with pytest.raises(ValueError, match=message):
            run_doctor(["--subject", f"{script}:{name}"], "doctor")


def test_a_model_that_raises_alone_is_told(monkeypatch):
    """A small model that raises while it is made was a traceback of transformers."""
    pytest.importorskip("transformers")

    def fail(*_):
        raise RuntimeError("size of tensor a\nsecond line")

    monkeypatch.setattr("megatron.packing.doctor.command.small_subject", fail)
    with pytest.raises(
        ValueError, match=r"small opt cannot be made: .* tensor a .*; examine"
    ) as failure:
        run_doctor(["--model", "opt"], "doctor")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("name", "class_name", "kind"),
    [
        ("model.layers.0.self_attn", "AfmoeAttention", "attention"),
        ("model.layers.0.mlp", "MixtralSparseMoeBlock", "experts"),
        ("model.layers.0.linear_attn", "Qwen3NextGatedDeltaNet", "recurrence"),
        ("model.layers.0.mlp.experts", "GptOssExperts", "experts"),
        ("model.layers.0.conv", "Lfm2ShortConv", "convolution"),
        ("decoder.final_layernorm", "LayerNorm", "norm"),
    ],
)
def test_kinds_of_modules(name, class_name, kind):
    """An attention that is taken for experts would be told as expected: contamination in silence,
    as AfmoeAttention once was.
    """
    assert kind_of(name, class_name) == kind
