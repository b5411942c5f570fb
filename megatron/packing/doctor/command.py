"""tensor. `megatron-sft doctor`, and `python -m megatron.packing.doctor` without the trainer."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist

from megatron.packing.doctor.examine import examine
from megatron.packing.doctor.page import write_page
from megatron.packing.doctor.report import Diagnosis
from megatron.packing.doctor.scripts import load_subject, run_script
from megatron.packing.doctor.subject import Subject
from megatron.packing.doctor.subjects.collators import COLLATORS
from megatron.packing.doctor.subjects.transformers_subject import small_subject
from megatron.packing.doctor.unusable import Unusable, check_subject, reason_of
from megatron.packing.flag_help import Command
from megatron.packing.flags import parse_flags
from megatron.packing.rules import Rule, check_rules

_ABOUT = (
    "Examine whether packed sequences see one another, and whether the loss is one mean over "
    "tokens. Needs no data and no weights; exit status 1 if a fault is found, 2 if there is "
    "nothing to judge."
)
_PATIENCE_SECONDS = 2.0
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Report."""

    json: Path | None = None
    """Write findings and evidence to this JSON file."""
    html: Path | None = None
    """Write the report as a page, with a picture of who influences whom."""

    def __post_init__(self) -> None:
        for flag, path in (("--json", self.json), ("--html", self.html)):  # needs the folder
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise ValueError(f"{flag} {path} must be a file in a folder that exists; make it")
            if path is not None:  # scripts may go to another folder
                object.__setattr__(self, flag[2:], path.absolute())


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(ReportOptions):
    """Examination."""

    model: str | None = None
    """Folder with a transformers config.json, or a model type such as qwen3_moe. A small model of
    its kind with random weights is examined.
    """
    collator: str = field(default="flattening", metadata={"names": tuple(COLLATORS)})
    """How sequences are packed for --model: NAMES."""
    attention: str = ""
    """attn_implementation of --model: eager, sdpa, ... The default is the model's own."""
    subject: str | None = None
    """Your own trainer instead of --model: FILE.py:FUNCTION, a function without arguments that
    returns a megatron.packing.doctor.subject.Subject.
    """
    script: Path | None = None
    """Your own training script instead of --model, with examine_here of
    megatron.packing.doctor.hook in front of its loop. Its own options follow behind `--`.
    """
    dtype: str = field(default="float32", metadata={"names": tuple(DTYPES)})
    """Precision of --model's weights: NAMES."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            when=lambda options: (
                sum(each is not None for each in (options.model, options.subject, options.script))
                != 1
            ),
            why="pass one of {model.flag} FOLDER|TYPE, {subject.flag} FILE.py:FUNCTION and "
            "{script.flag} FILE.py",
        ),
        *(
            Rule(
                when=lambda options, name=name, known=known: getattr(options, name) not in known,
                why=f"{{{name}}} is unknown",
                way_out=f"choose one of {', '.join(known)}",
            )
            for name, known in (("collator", COLLATORS), ("dtype", DTYPES))
        ),
    )

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)
        super().__post_init__()


def run_doctor(arguments: Sequence[str], program: str) -> int:
    """Examines what the options name, and prints the report.

    Returns:
        the exit status: 1 if a fault was found, else 0.

    Raises:
        ValueError: for a mistake in the options, or a subject that cannot be run.
    """
    usage = "--model FOLDER|TYPE [--collator NAME] [--attention NAME]"
    own, of_script = _split(arguments)
    (options,) = parse_flags(
        (DoctorOptions,), own, Command(program=program, about=_ABOUT, usage=usage)
    )
    if of_script and options.script is None:
        raise ValueError(f"{' '.join(of_script)} behind -- are options of --script; pass it, too")
    if options.script is not None:
        diagnosis, is_first = run_script(options.script, of_script)
    else:
        diagnosis, is_first = diagnose(options)
    return report_once(diagnosis, options, is_first)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the options in front of `--` and those behind it."""
    if "--" not in arguments:
        return list(arguments), []
    at = list(arguments).index("--")
    return list(arguments[:at]), list(arguments[at + 1 :])


def report_once(diagnosis: Diagnosis, options: ReportOptions, is_first: bool) -> int:
    """Reports on the first of several processes, for which the others wait, and returns the exit
    status: a launcher ends all processes as soon as one has a status that is not 0.
    """
    if is_first:
        report(diagnosis, options)
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
    elif not is_first and not diagnosis.is_sound:  # a script that took its process group back
        time.sleep(_PATIENCE_SECONDS)
    return 0 if diagnosis.is_sound else 1


def report(diagnosis: Diagnosis, options: ReportOptions) -> None:
    """Prints the report, and writes it to files."""
    print(diagnosis.text(), end="", flush=True)
    if options.json is not None:
        options.json.write_text(diagnosis.json(), encoding="utf-8")
        print(f"wrote {options.json}")
    if options.html is not None:
        write_page(diagnosis, options.html)
        print(f"wrote {options.html}", flush=True)


def diagnose(options: DoctorOptions) -> tuple[Diagnosis, bool]:
    """Examines what the options name. Returns whether this process reports, too.

    Raises:
        ValueError: if it cannot be built, or raises; with its own reason.
    """
    if options.subject is not None:
        subject = load_subject(options.subject)
    else:
        try:
            import transformers
        except ImportError as error:
            raise ValueError("--model needs transformers; run pip install transformers") from error
        transformers.logging.set_verbosity_error()  # of kernels that a small model lacks
        assert options.model is not None
        try:
            subject = small_subject(
                options.model, options.collator, options.attention, DTYPES[options.dtype]
            )
        except Unusable:
            raise
        except Exception as error:  # of hundreds of models' own code
            raise ValueError(
                f"a small {options.model} cannot be made: {reason_of(error)}; examine your own "
                "model by --subject or --script"
            ) from error
    return diagnose_subject(subject)


def diagnose_subject(subject: Subject) -> tuple[Diagnosis, bool]:
    """Examines a subject. Returns whether this process reports, too.

    Raises:
        ValueError: if it raises; with its own reason.
    """
    check_subject(subject)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            diagnosis = examine(subject)
    except Unusable:
        raise
    except (Exception, SystemExit) as error:  # of anybody's model
        raise ValueError(
            f"{subject.name} does not run on the doctor's pack: {reason_of(error)}; it fails "
            "aloud, so nothing is contaminated in silence"
        ) from error
    if subject.ranks is not None:
        return diagnosis, subject.ranks.is_first
    # Of processes that examine by themselves the first reports, and each that finds a fault.
    return diagnosis, os.environ.get("RANK", "0") == "0" or not diagnosis.is_sound
