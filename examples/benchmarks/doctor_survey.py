"""Which ways of packing keep sequences apart, for every decoder type of transformers.

    python -m examples.benchmarks.doctor_survey --write examples/benchmarks/results/doctor_survey.md

A small model of each type with random weights is fed a pack; one sequence is changed, and the
logits of the others are watched. They are the same to the bit, or the pack is contaminated.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from textwrap import shorten

import torch
from torch import nn

from megatron.packing.doctor.evidence import Evidence
from megatron.packing.doctor.examine import is_rounding_of_experts
from megatron.packing.doctor.experiments import Examination
from megatron.packing.doctor.probe import Probe
from megatron.packing.doctor.subject import LENGTHS
from megatron.packing.doctor.subjects.collators import COLLATORS
from megatron.packing.doctor.subjects.small_models import small_config, small_model
from megatron.packing.doctor.subjects.transformers_subject import subject_from_transformers
from megatron.packing.doctor.unusable import Unusable

WAYS = ("flattening", "flattening-borders", "trl", "positions", "ones", "mask", "boolean-mask")
ATTENTIONS = ("eager", "sdpa")
Row = tuple[str, str, dict[str, str]]
"""Type, attention, and way -> answer; "" -> why it was not examined."""
SEPARATE, LEAKS, RAISES = "separate", "**leaks**", "raises"


def decoder_types() -> list[str]:
    """Returns the model types that AutoModelForCausalLM knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def answer(model: nn.Module, way: str) -> str:
    """Returns whether a way of packing keeps sequences apart in a model, or raises."""
    subject = subject_from_transformers(model, way, windows=False)
    examination = Examination(Probe(subject), LENGTHS)
    evidence = Evidence(subject=way, lengths=LENGTHS)
    try:
        examination.repeat(evidence)
        if evidence.keeps_state() or evidence.not_finite:
            return "not judged"
        examination.influence(evidence)
        if is_rounding_of_experts(examination, evidence):
            return SEPARATE
    except Unusable:
        return "not judged"
    except Exception:  # of hundreds of models' own code
        return RAISES
    return LEAKS if evidence.crossings else SEPARATE


def rows_of_type(name: str, ways: Sequence[str]) -> Iterator[Row]:
    """Yields type, attention and way -> answer; one row for attentions with the same answers."""
    answers: dict[str, dict[str, str]] = {}
    for attention in ATTENTIONS:
        try:
            model = small_model(small_config(name), attention)
            answers[attention] = {way: answer(model, way) for way in ways}
        except Exception as error:
            answers[attention] = {"": str(error).splitlines()[0] if str(error) else repr(error)}
    eager, sdpa = (answers[attention] for attention in ATTENTIONS)
    if "" in sdpa or eager == sdpa:
        yield name, "eager" if "" in sdpa and "" not in eager else "eager, sdpa", eager
    else:
        yield from ((name, attention, answers[attention]) for attention in ATTENTIONS)


def examine_type(name: str, ways: Sequence[str], seconds: float) -> list[Row]:
    """Returns the rows of a type, from a fork of this process that ends after `seconds`."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_rows, args=(sender, name, ways))
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            return [(name, "", {"": f"not done in {seconds:.0f} s"})]
        return list(receiver.recv())
    except EOFError:
        return [(name, "", {"": "its process ended"})]
    finally:
        process.kill()
        process.join()


def _send_rows(sender: Connection, name: str, ways: Sequence[str]) -> None:
    sender.send(list(rows_of_type(name, ways)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Examines all types; prints what changed since the page that is there, and writes it.

    What is done is kept beside the page, and a run that was stopped goes on behind it.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="+", default=None)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0, help="limit for each type")
    options = parser.parse_args(arguments)
    ways = [way for way in WAYS if way != "trl" or _has_trl()]
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kept = None if options.write is None else options.write.with_suffix(".part.json")
    done: dict[str, list[Row]] = {}
    if kept is not None and kept.exists():
        stored = json.loads(kept.read_text())
        done = stored["types"] if stored["versions"] == versions() else {}
    is_part = bool(options.types) and options.write is not None and options.write.exists()
    before = read_page(options.write.read_text(), ways) if is_part else {}
    start = os.times()
    for name in options.types or decoder_types():
        if name not in done:
            done[name] = examine_type(name, ways, options.seconds)
            print("\n".join(f"{row[0]} | {row[1]} | {row[2]}" for row in done[name]), flush=True)
            if kept is not None:
                kept.write_text(json.dumps({"versions": versions(), "types": done}))
    done = {**before, **done}
    end = os.times()
    seconds = end.children_user + end.children_system - start.children_user
    if is_part:
        seconds = float(re.findall(r"(\d+) CPU seconds", options.write.read_text())[0])
    if options.write is None:
        return
    lines, left_out = [], []
    counts: dict[str, Counter[str]] = {way: Counter() for way in ways}
    for name in sorted(done):
        for model_type, attention, answers in done[name]:
            if "" in answers:
                left_out.append(f"{model_type} ({shorten(answers[''], 90)})")
                continue
            for way in ways:
                counts[way][answers[way]] += 1
            cells = " | ".join(answers[way] for way in ways)
            lines.append(f"| {model_type} | {attention} | {cells} |")
    page = "\n".join(page_lines(ways, lines, left_out, counts, seconds))
    if options.write.exists():
        print_changes(options.write.read_text(), page)
    options.write.write_text(page + "\n")
    if kept is not None:
        kept.unlink(missing_ok=True)


def read_page(page: str, ways: Sequence[str]) -> dict[str, list[Row]]:
    """Returns the rows of a page, and the types that it leaves out.

    Raises:
        SystemExit: if it was made with other versions, or other ways of packing.
    """
    header = "| type | attention | " + " | ".join(f"`{way}`" for way in ways) + " |"
    if versions() not in page or header not in page:
        raise SystemExit(
            "the page that is there has other versions or ways of packing; run all types"
        )
    rows: dict[str, list[Row]] = {}
    for line in page[page.index(header) :].splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == len(ways) + 2:
            answers = dict(zip(ways, cells[2:]))
            rows.setdefault(cells[0], []).append((cells[0], cells[1], answers))
    left_out = page[page.index("Not built small") :].split(": ", 1)[1]
    for name, reason in re.findall(r"([\w-]+) \(((?:[^()]|\([^()]*\))*)\)(?:, |\.$)", left_out):
        rows[name] = [(name, "", {"": reason})]
    return rows


def _has_trl() -> bool:
    try:
        import trl.trainer.sft_trainer  # noqa: F401
    except ImportError:
        return False
    return True


def versions() -> str:
    """Returns names and versions of what was examined."""
    names = ["transformers", "torch", *["trl"] * _has_trl()]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def page_lines(
    ways: Sequence[str],
    lines: Sequence[str],
    left_out: Sequence[str],
    counts: dict[str, Counter[str]],
    seconds: float,
) -> Iterator[str]:
    """Yields the page."""
    yield "# Which ways of packing keep sequences apart in transformers"
    yield ""
    yield (
        f"{versions()}, CPU, float32, no extra kernels (flash attention, fla, mamba_ssm, "
        f"causal_conv1d). {seconds:.0f} CPU seconds."
    )
    yield ""
    yield "```\nmake doctor-survey\n```"
    yield ""
    yield (
        "A small model of each decoder type, in the default configuration of the type, is fed a "
        "pack of three sequences. One is changed; the logits of the others are *separate* (the "
        "same to the bit, but for how products of experts round), or the pack *leaks* without a "
        "word, or the model *raises*. "
        "*Not judged* are models whose logits are not finite here or depend on the run before."
    )
    yield ""
    for way in ways:
        yield f"- `{way}`: {COLLATORS[way].about}"
    yield ""
    header = " | ".join(f"`{way}`" for way in ways)
    yield f"| type | attention | {header} |"
    yield "|---|---|" + "---|" * len(ways)
    yield from lines
    yield ""
    yield "Rows by answer:"
    yield ""
    for way in ways:
        total = ", ".join(f"{count} {key.strip('*')}" for key, count in counts[way].most_common())
        yield f"- `{way}`: {total}"
    yield ""
    yield f"Not built small, so not examined ({len(left_out)}): {', '.join(left_out) or 'none'}."


def print_changes(before: str, after: str) -> None:
    """Prints the rows of the table that differ."""
    old, new = (
        {match[1]: match[0] for match in re.finditer(r"^(\| [\w-]+ \| [\w, ]+ \|).*$", text, re.M)}
        for text in (before, after)
    )
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    for key in changed:
        print(f"was {old.get(key, 'absent')}\nnow {new.get(key, 'absent')}")
    print(f"{len(changed)} rows changed")


if __name__ == "__main__":
    main()
