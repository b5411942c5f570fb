"""Subjects that do not do what they say end in one line, and never in a verdict."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megatron.packing.doctor.command import diagnose_subject, run_doctor
from megatron.packing.doctor.subject import Step, Subject, draw_weights

VOCABULARY = 32


class Mean(nn.Module):
    """Each token sees the mean of those before it, of its own sequence."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def hidden(self, sequences):
        stream = self.embedding(torch.cat(list(sequences)))
        parts = stream.split([len(tokens) for tokens in sequences])
        return [h + h.cumsum(0) / torch.arange(1, len(h) + 1)[:, None].to(h) for h in parts]

    def logits(self, sequences, fill=0):
        return [self.head(h) for h in self.hidden(sequences)]


def subject(change=None, **fields):
    """A sound subject, whose logits go through `change`."""
    model = Mean().train()
    draw_weights(model)

    def logits(sequences, fill):
        found = model.logits(sequences)
        return found if change is None else change(found, sequences)

    made = Subject(name="mine", model=model, vocab_size=VOCABULARY, logits=logits)
    return replace(made, **{name: value(model) for name, value in fields.items()})


def fail(error):
    def change(found, sequences):
        raise error

    return change


def with_nan(found, sequences):
    return [torch.cat([found[0][:1] * torch.nan, found[0][1:]]), *found[1:]]


def nan_in_packs(found, sequences):
    return found if len(found) == 1 else with_nan(found, sequences)


def without_last_word(found, sequences):
    return [F.pad(values[:, :-1], (0, 1), value=-torch.inf) for values in found]


def cut(found, sequences):
    return [F.pad(values[:-2], (0, 0, 0, 2)) for values in found]


USELESS = {
    "raises": (subject(fail(RuntimeError("no borders.\nmore"))), "RuntimeError: no borders ("),
    "says nothing": (subject(fail(NotImplementedError())), "pack: NotImplementedError ("),
    "ends the process": (subject(fail(SystemExit(0))), "sys.exit(0) ("),
    "needs CUDA": (
        subject(fail(AssertionError("Torch not compiled with CUDA enabled"))),
        "there is no GPU here",
    ),
    "nothing": (subject(lambda found, _: None), "returned a NoneType"),
    "one tensor": (subject(lambda found, _: torch.cat(found)), "a Tensor of shape [41, 32]"),
    "too short": (subject(lambda found, _: [x[:3] for x in found]), "of lengths [3, 3, 3]"),
    "other shapes": (subject(lambda found, _: [x[:, None] for x in found]), "[11, 1, 32]"),
    "words": (subject(lambda found, _: [x.argmax(1, True) for x in found]), "int64 [11, 1]"),
    "lists": (subject(lambda found, _: [x.tolist() for x in found]), "returned list, list"),
    "NaN": (subject(with_nan), "sequence 0 are not finite, alone and in the pack"),
    "constant": (subject(lambda found, _: [0 * x for x in found]), "stay the same to the bit"),
    "random": (
        subject(lambda found, _: [x + random.random() for x in found]),
        "switch off what draws from elsewhere",
    ),
    "vocabulary": (subject(vocab_size=lambda _: 0), "Subject.vocab_size is 0"),
    "model": (subject(model=lambda _: 3), "Subject.model is a int"),
    "places": (
        subject(places=lambda _: lambda sequences: [torch.arange(len(x)) for x in sequences]),
        "rows of sequences must differ",
    ),
    "windows": (subject(windows=lambda _: {"layers.7": 4}), "Subject.windows names layers.7"),
    "loss is a number": (subject(loss=lambda _: lambda packs: 3.0), "loss returned a float"),
    "loss is NaN": (
        subject(loss=lambda model: lambda packs: model.head.weight.sum() * torch.nan),
        "Subject.loss returned nan",
    ),
    "loss of anything": (
        subject(loss=lambda model: lambda packs: model.head.weight.sum()),
        "steps on different sequences are the same",
    ),
    "step": (subject(step=lambda _: lambda packs: None), "Subject.step returned a NoneType"),
    "step is NaN": (
        subject(
            step=lambda model: lambda packs: Step(change={"head": model.head.weight * torch.nan})
        ),
        "gradients of a step are not finite",
    ),
    "no subject": (3, "the function returned int"),
}


@pytest.mark.parametrize("name", USELESS)
def test_a_subject_that_cannot_be_examined_ends_in_one_line(name):
    """Logits that do not depend on the tokens never cross: a verdict would be sound in silence."""
    made, message = USELESS[name]
    with pytest.raises(ValueError, match=re.escape(message)) as failure:
        diagnose_subject(made)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("made", "faults", "note"),
    [
        (subject(), [], ""),
        (subject(without_last_word), [], ""),
        (subject(nan_in_packs), ["logits are not finite in packs"], "nothing is seen behind NaN"),
        (subject(cut), [], "their logits do not depend on them"),
        (subject(model=lambda model: model.eval()), [], "the model is in eval()"),
    ],
)
def test_what_is_not_seen_is_told(made, faults, note):
    """What stands in the way of an experiment changes the verdict, or the first line says it."""
    diagnosis, _ = diagnose_subject(made)
    assert [finding.name for finding in diagnosis.faults] == faults
    assert note in " ".join(diagnosis.evidence.notes)
    assert bool(note) == bool(diagnosis.evidence.notes)
    assert faults or ("what was not seen" in diagnosis.verdict()) == bool(note)


def test_scripts_that_end_before_their_hook(tmp_path, monkeypatch):
    """A status of 0 without an examination would pass for a sound verdict."""
    script = tmp_path / "train.py"
    for text, message in [
        ("import sys\nsys.exit(0)\n", "ended before examine_here: sys.exit(0) ("),
        ("import absent_library\n", "No module named 'absent_library' ("),
        (
            "from megatron.packing.doctor.hook import examine_here\nexamine_here(3)\n",
            "examine_here was given a int",
        ),
    ]:
        script.write_text(text)
        with pytest.raises(ValueError, match=re.escape(message)):
            run_doctor(["--script", str(script)], "doctor")
    with pytest.raises(ValueError, match="name a function of it, too"):
        run_doctor(["--subject", str(script)], "doctor")


def test_a_script_in_another_folder_writes_its_report_here(tmp_path, monkeypatch):
    """A relative --json was written where the script had gone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import os\nfrom tests.unit_tests.packing.doctor.test_unusable import subject as make\n"
        "def subject():\n    os.chdir('/')\n    return make()\n"
    )
    assert run_doctor(["--subject", "mine.py:subject", "--json", "a.json"], "doctor") == 0
    assert (tmp_path / "a.json").is_file()
