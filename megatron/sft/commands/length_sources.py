"""pure. Reads the lengths of sequences for the planner, from any of these sources:

lengths.csv                   a length per line
chats.jsonl|.json|.parquet    records of training data, which a tokenizer measures
{"mode": ...} or its file     mock data, as in --sft-mock-dataset-config-json
RUN_DIR, its .jsonl files     the packs of a run with --sequence-packing, from its packs.jsonl
schedule_12.json              one step of a run, as --dump-schedule wrote it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.blending.formats.record import RecordError, read_records
from megatron.blending.formats.sources import SOURCES, open_source
from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.nodes import SampleSizes
from megatron.packing.batch.reading import SampleReader
from megatron.packing.batch.tree import MergedPaths
from megatron.packing.quoting import shortened, shown
from megatron.packing.rules import check_rules
from megatron.packing.user_files import parse_json, read_json, read_text
from megatron.planner.lengths import OPTIONS_FILE, LengthOptions, Lengths, RunSource
from megatron.planner.sequences import Sequences, sequences_of
from megatron.planner.step_record import StepRecord
from megatron.sft.data.chat_encoder import ChatEncoder, EncodedSample, Tokenizer
from megatron.sft.data.image_chats import ImageChats
from megatron.sft.data.mock.dataset import MockSFTDataset, read_lengths
from megatron.sft.data.mock.lengths import FLAG
from megatron.sft.data.preference.encode import PairEncoder
from megatron.sft.data.preference.partners import with_partners_in_order
from megatron.sft.data.tokenizer import build_tokenizer
from megatron.sft.images.sizes import tower_cost
from megatron.sft.images.urls import url_cache
from megatron.sft.images.vision import read_vision
from megatron.sft.options.chat_template import TemplateChoice, read_date, read_variables
from megatron.sft.options.data import TOKENIZER_RULES, tokenizer_type_of
from megatron.sft.options.data_columns import parse_columns
from megatron.sft.options.hub_names import check_hub_name
from megatron.sft.options.preference import PreferenceConfig
from megatron.sft.report.metrics_file import METRICS_FILE, PACKS_FILE, read_jsonl

IntArray = npt.NDArray[np.int64]

LONGEST = 2**24
"""Largest length in tokens. A longer one is refused as a mistake."""


def lengths_from(options: LengthOptions, vocab_size: int | None, needed: int) -> Lengths:
    """Returns the lengths in `options.source`, which is one of the sources above. Mock data has
    `needed` of them.

    Raises ValueError, naming file and line, if they cannot be read.
    """
    source = options.source
    assert source is not None, "checked by LengthOptions"
    if source.lstrip().startswith("{"):
        return _mock(source, options, needed)
    check_hub_name(source, is_data=True)
    path = Path(source)
    if path.is_dir() or path.name in (METRICS_FILE, PACKS_FILE):
        return _run(path if path.is_dir() else path.parent)
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file; give lengths, chats, a mock config, the folder of a run or a "
            "schedule"
        )
    if path.suffix == ".json" and (found := _json_object(path)) is not None:
        if "mode" in found:
            return _mock(source, options, needed)
        if found.get("kind") == "schedule":
            return _schedule(path, found)
        raise ValueError(
            f'{path}: must be a list of chats, a mock config with "mode" or a schedule of '
            "--dump-schedule, "
            f"but has the keys {', '.join(map(shown, list(found)[:5])) or '(none)'}"
        )
    if path.suffix in SOURCES and not _is_column_of_numbers(path):
        return _chats(path, options, vocab_size)
    lengths = _in_own_words(lambda: read_lengths(path, LONGEST))
    return Lengths(sequences=Sequences(lengths), described=str(path))


def _is_column_of_numbers(path: Path) -> bool:
    """Returns whether a CSV file holds lengths rather than records: its first line is a number, or
    the name of its only column and the second line is a number or empty.
    """
    if path.suffix not in (".csv", ".tsv"):
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        first, second = (file.readline(1000).strip() for _ in range(2))
    is_header = not any(separator in first for separator in ",\t;")
    return first.isdecimal() or (is_header and (not second or second.isdecimal()))


def _mock(config: str, options: LengthOptions, needed: int) -> Lengths:
    seq_length, seed = options.seq_length, options.seed
    found = _json_object(Path(config)) if not config.lstrip().startswith("{") else _parsed(config)
    if (
        seq_length is None
        and found is not None
        and "type" not in found
        and found.get("mode") != "file"
    ):
        raise ValueError('a mock config without "type" follows --seq-length; pass it')
    lengths = _in_own_words(
        lambda: MockSFTDataset(
            config, seq_length or LONGEST, 1024, seed, num_samples=2**40
        ).lengths(np.arange(needed))
    )
    return Lengths(sequences=Sequences(lengths), described=f"mock data {config}")


def _run(folder: Path) -> Lengths:
    path = folder / PACKS_FILE
    lines = _packs_of(path) if path.is_file() else []
    parts = [_sequences_of(line, path) for line in lines]
    parts = [part for part in parts if part.size]
    if not parts:
        raise ValueError(
            f"{path}: must hold the packs of a run, but there are none; give the folder of a run "
            "with --sequence-packing, or a file of lengths"
        )
    steps = "1 step" if len(lines) == 1 else f"{len(lines):,} steps"
    run = RunSource(
        folder=folder,
        num_ranks=len(lines[-1]["packs"]),
        capacity=lines[-1].get("capacity"),
        num_forward_passes=_count_forward_passes_of_run(folder / OPTIONS_FILE),
    )
    return Lengths(sequences=Sequences.joined(parts), described=f"{steps} in {path}", run=run)


def count_forward_passes(options: Mapping[str, Any]) -> int:
    """Returns the forward passes of a step beside those of training, by options of a run.

    {"loss": "dpo"}    ->    1, of the reference
    """
    values: dict[str, Any] = {
        name: options[name]
        for name in ("loss", "loss_type", "reference_file")
        if options.get(name) is not None
    }
    types = values.get("loss_type", ())
    values["loss_type"] = (types,) if isinstance(types, str) else tuple(types)
    return PreferenceConfig(**values).num_forward_passes


def _count_forward_passes_of_run(path: Path) -> int:
    try:
        return count_forward_passes(read_json(path)["preference"])
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return 0  # of an older version; the planner says what else is wrong with the file


def _sequences_of(line: dict[str, Any], path: Path) -> Sequences:
    lengths = [length for rank in line["packs"] for pack in rank for length in pack]
    try:
        return sequences_of(np.array(lengths, np.int64), line.get("sizes"))
    except ValueError as error:
        raise ValueError(f"{path}: not the packs of a run: {error}") from None


def _packs_of(path: Path) -> list[dict[str, Any]]:
    try:
        lines = read_jsonl(path)
        well_formed = all(
            type(length) is int and length > 0
            for line in lines
            for rank in line["packs"]
            for pack in rank
            for length in pack
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not the packs of a run: {type(error).__name__}: {error}"
        ) from error
    if not well_formed:
        raise ValueError(f"{path}: not the packs of a run: lengths must be whole numbers above 0")
    return lines


def _json_object(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object in a file; None for a list, which is one of records, and for a file
    that is not JSON.
    """
    try:
        return _parsed(read_text(path))
    except ValueError:
        return None


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        found = parse_json(text)
    except ValueError:
        return None  # read once more as records, whose reader reports the fault with its line
    return found if isinstance(found, dict) else None


def _schedule(path: Path, found: dict[str, Any]) -> Lengths:
    try:
        record = StepRecord.from_dict(found)
    except ValueError as error:
        raise ValueError(f"{path}: {shortened(str(error))}") from error
    return Lengths(sequences=record.sequences, described=str(path), record=record)


def _chats(path: Path, options: LengthOptions, vocab_size: int | None) -> Lengths:
    check_rules(TOKENIZER_RULES, options=options)
    tokenizer_type = tokenizer_type_of(options.tokenizer_type, options.tokenizer_model)
    source = open_source(path)
    tokenizer = build_tokenizer(
        tokenizer_type,
        options.tokenizer_model,
        vocab_size,
        TemplateChoice(
            options.chat_template,
            read_date(options.template_date),
            read_variables(options.chat_template_kwargs),
        ),
    )
    turns = options.train_turns or ("served" if tokenizer.contexts == "differ" else "all")
    columns = parse_columns(options.data_columns)
    pairs = None
    if options.loss != "sft":
        is_marked, has_prompt = options.loss == "kto", options.loss == "orpo"
        pairs = PairEncoder(
            is_marked=is_marked,
            trains_prompt=has_prompt,
            scores_last=options.loss == "reward",
            takes_plain=options.loss != "reward",
        )
    images = _image_chats(options, path, tokenizer)
    encoder = ChatEncoder(
        tokenizer, LONGEST, "truncate", columns, turns, images is None, None, pairs, images
    )
    reader, dropped = SampleReader(), 0
    image_costs: list[float] = []
    marked: list[EncodedSample] = []
    for index in range(len(source)):
        (record,) = read_records(source, [index])
        try:
            if isinstance(record, RecordError):
                raise record
            sample = encoder.encode(record)
        except Exception as error:  # any failure marks a bad record, as in training
            if not options.skip_bad_samples:
                where = "" if isinstance(error, RecordError) else f"{source.describe(index)}: "
                where += "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                raise ValueError(f"{where}{error}; or pass --skip-bad-samples") from error
            dropped += 1
            continue
        if not isinstance(sample, EncodedSample):
            dropped += 1
        elif options.loss == "kto":
            marked.append(sample)
        else:
            for part in sample.parts:
                reader.add(_fields_of(part), index)
                image_costs.append(_image_cost(options, images, part))
    # As in training, where the answer of the record before is a second branch.
    for index, sample in enumerate(with_partners_in_order(marked, LONGEST)):
        reader.add(_fields_of(sample), index)
    samples = reader.samples()
    if not samples.lengths.size:
        raise ValueError(f"{path}: holds no sample with a token to train on; give another file")
    described = f"{path}, {tokenizer_type}"
    trees = SampleSizes.of_trees(samples, Alignment())
    costs = np.array(image_costs) if any(image_costs) else None
    if images is not None:
        described += f", {np.count_nonzero(image_costs):,} sequences with images"
    sequences = Sequences(samples.lengths, trees, samples.num_loss_tokens, costs)
    return Lengths(sequences=sequences, described=described, dropped=dropped)


def _image_chats(options: LengthOptions, path: Path, tokenizer: Tokenizer) -> ImageChats | None:
    if not options.images:
        return None
    vision = read_vision(str(options.tokenizer_model), options.image_max_pixels)
    literals = tuple(tokenizer.show([token]) for token in vision.reserved_tokens)
    cache = url_cache(options.image_url_cache, options.image_url_hosts)
    return ImageChats(vision, literals, options.image_root or str(path.parent), cache)


def _image_cost(options: LengthOptions, images: ImageChats | None, sample: EncodedSample) -> float:
    """Returns the FLOPs of the tower on the images of a sequence, on the rank that encodes them."""
    if images is None or sample.images is None:
        return 0.0
    cost = tower_cost(
        images.vision,
        trains_tower=options.tower_lr is not None,
        trains_projector=options.projector_lr is not None,
    )
    return float(cost(sample.images.num_patches).sum())


def _fields_of(sample: EncodedSample) -> MergedPaths | dict[str, Any]:
    fields = {name: getattr(sample, name) for name in ("tokens", "labels", "loss_mask")}
    return fields if sample.tree is None else sample.tree


def _in_own_words(read: Callable[[], IntArray]) -> IntArray:
    """Calls `read`, and rewrites its errors for the planner. Those of mock data name a flag of the
    trainer, and a --seq-length that the planner's user may not have passed.
    """
    try:
        return read()
    except ValueError as error:
        said = str(error).removeprefix(f"{FLAG}: ")
        raise ValueError(
            said.replace(f"--seq-length {LONGEST}", f"{LONGEST}, the most that is believed")
        ) from error
