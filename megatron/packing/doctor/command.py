"""tensor. `megatron-sft doctor`, and `python -m megatron.packing.doctor` without the trainer."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from megatron.packing.doctor.collators import COLLATORS
from megatron.packing.doctor.examine import examine
from megatron.packing.doctor.page import write_page
from megatron.packing.doctor.report import Diagnosis
from megatron.packing.doctor.subject import Subject
from megatron.packing.doctor.transformers_subject import small_subject
from megatron.packing.flag_help import Command
from megatron.packing.flags import parse_flags
from megatron.packing.rules import Rule, check_rules

_ABOUT = (
    "Examine whether packed sequences see one another, and whether the loss is one mean over "
    "tokens. Needs no data and no weights; exit status 1 if a fault is found."
)
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
    dtype: str = field(default="float32", metadata={"names": tuple(DTYPES)})
    """Precision of --model's weights: NAMES."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            when=lambda options: (options.model is None) == (options.subject is None),
            why="pass one of {model.flag} FOLDER|TYPE and {subject.flag} FILE.py:FUNCTION",
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
    (options,) = parse_flags(
        (DoctorOptions,), arguments, Command(program=program, about=_ABOUT, usage=usage)
    )
    diagnosis, is_first = diagnose(options)
    return report(diagnosis, options) if is_first else int(not diagnosis.is_sound)


def report(diagnosis: Diagnosis, options: ReportOptions) -> int:
    """Prints the report, writes it to files, and returns the exit status."""
    print(diagnosis.text(), end="")
    if options.json is not None:
        options.json.write_text(diagnosis.json(), encoding="utf-8")
        print(f"wrote {options.json}")
    if options.html is not None:
        write_page(diagnosis, options.html)
        print(f"wrote {options.html}")
    return 0 if diagnosis.is_sound else 1


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
        subject = small_subject(
            options.model, options.collator, options.attention, DTYPES[options.dtype]
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            is_first = subject.ranks is None or subject.ranks.is_first
            return examine(subject), is_first
    except Exception as error:  # of anybody's model
        lines = str(error).strip().splitlines() or [""]
        raise ValueError(
            f"{subject.name} does not run on the doctor's pack: {type(error).__name__}: "
            f"{lines[0]}; it fails aloud, so nothing is contaminated in silence"
        ) from error


def load_subject(text: str) -> Subject:
    """Returns the subject that a function in a Python file makes.

    Raises:
        ValueError: if there is no such file or function, or it returns something else.
    """
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        raise ValueError(
            f"--subject {text}: there is no file {file or text}; pass FILE.py:FUNCTION"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--subject {text}: {file} is not a Python file; pass FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        make = getattr(module, name, None)
        subject = make() if callable(make) else None
    except (Exception, SystemExit) as error:  # of anybody's code
        raise ValueError(f"--subject {text}: {type(error).__name__}: {error}") from error
    if not callable(make):
        raise ValueError(f"--subject {text}: {file} has no function {name}")
    if not isinstance(subject, Subject):
        raise ValueError(
            f"--subject {text}: {name} returned {type(subject).__name__}, not a "
            "megatron.packing.doctor.subject.Subject"
        )
    return subject
