"""pure. Options of the data: what is read, how it is blended and split, and its tokenizer."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from typing import Any, ClassVar, Literal

from megatron.blending.formats.paths import is_metadataset
from megatron.blending.order.proportions import BlendMode
from megatron.blending.order.weights import WeightSchedule
from megatron.packing.flags import flag_of
from megatron.packing.quoting import shown
from megatron.packing.rules import Rule, at_least, check_rules
from megatron.packing.user_files import parse_json, read_json
from megatron.planner.lengths import TokenizerType
from megatron.sft.options.chat_template import TemplateChoice, read_date, read_variables
from megatron.sft.options.data_columns import parse_columns
from megatron.sft.options.data_paths import expanded, one_of

TrainTurns = Literal["served", "all", "last"]


def tokenizer_type_of(
    tokenizer_type: TokenizerType | None, tokenizer_model: str | None
) -> TokenizerType:
    """Returns the type of the tokenizer, which follows from --tokenizer-model if not given."""
    if tokenizer_type is None:
        return "ByteLevelTokenizer" if tokenizer_model is None else "HuggingFaceTokenizer"
    return tokenizer_type


def _has_own_format(options: Any) -> dict[str, str]:
    kind = tokenizer_type_of(options.tokenizer_type, options.tokenizer_model)
    return {} if kind == "HuggingFaceTokenizer" else {"kind": kind}


TOKENIZER_RULES: tuple[Rule, ...] = (
    Rule(
        when=lambda options: options.tokenizer_model is not None and _has_own_format(options),
        why="{tokenizer_model} is not read by {kind}",
        way_out="drop {tokenizer_type.flag}",
    ),
    *(
        Rule(
            when=lambda options, name=name: (
                getattr(options, name) is not None and _has_own_format(options)
            ),
            why=f"{{{name}.flag}} needs {{tokenizer_model.flag}}, but {{kind}} has a format of its "
            "own",
        )
        for name in ("chat_template", "chat_template_kwargs")
    ),
)
"""Rules of a tokenizer and its chat template, wherever records are encoded."""


def _number(text: str) -> float | None:
    """Returns a weight of --data-path; None if the text is not a number above 0."""
    try:
        weight = float(text)
    except ValueError:
        return None
    return weight if 0 < weight < math.inf else None


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data."""

    data_path: tuple[str, ...] = ()
    """Training data: files, folders, patterns or a blend. Files of chats, instructions or text
    (.jsonl, .ndjson, .json, .parquet, .csv, .tsv), folders and patterns ('data/*.jsonl') of them,
    token files (.bin/.idx) and prepared WebDataset folders are read one after the other; with
    weights before them (5 a.jsonl 3 b.jsonl) they are blended; a metadataset (.yaml) names a whole
    blend.
    """
    blend_mode: BlendMode = "exact"
    """Order of a blend's sources. exact: each source stays within one sample of its share at
    every moment; random: sources are drawn at random by their weights.
    """
    blend_weight_schedule: str | None = None
    """Blend weights that change over steps, in place of the metadataset's: JSON or a file with
    it, such as {"kind": "linear", "points": [[0, [5, 3]], [1000, [1, 1]]]}.
    """
    blend_weights_by: Literal["samples", "tokens"] = "samples"
    """Unit of blend weights. For tokens, mean lengths are estimated from 64 samples of each
    source, and for JSONL from the bytes of all lines.
    """
    valid_data_path: tuple[str, ...] = ()
    """Validation data, instead of a part of --data-path. Of a metadataset or folder: its split
    val.
    """
    split: str = field(
        default="969,30,1", metadata={"idle_without": ("data_path", "!valid_data_path")}
    )
    """Shares of --data-path for training, validation and test. Data with splits val or test of
    their own ignore it.
    """
    mock_data: bool = False
    """Train on synthetic (mock) tokens."""
    sft_mock_dataset_config_json: str | None = field(
        default=None, metadata={"only_with": "mock_data"}
    )
    """Lengths of synthetic samples: JSON or a file with it."""
    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer (default: HuggingFaceTokenizer with --tokenizer-model, else
    ByteLevelTokenizer, which needs no files).
    """
    tokenizer_model: str | None = None
    """Folder of a HuggingFace tokenizer."""
    chat_template: str | None = None
    """File with the chat template to train with, instead of the tokenizer's."""
    template_date: str | None = field(default=None, metadata={"idle_without": "tokenizer_model"})
    """Date YYYY-MM-DD for chat templates that ask for today's (gpt-oss, Mistral Small)."""
    chat_template_kwargs: str | None = field(default=None, metadata={"is_json": True})
    """Variables of the chat template for all records, as JSON, such as {"enable_thinking":
    false}; a record's own chat_template_kwargs win (default: as the checkpoint was trained, else
    none).
    """
    train_turns: TrainTurns | None = field(default=None, metadata={"idle_without": "data_path"})
    """Turns of conversations to train. served: each of the assistant's turns behind the prompt that
    it is generated from, where the template may leave out earlier thoughts; all: all of them, in
    one rendering of the conversation; last: the assistant's last turn (default: as the checkpoint
    was trained, else served with --sequence-packing and a template that renders earlier turns
    otherwise as more follow; all in any other case).
    """
    data_columns: str | None = field(default=None, metadata={"idle_without": "data_path"})
    """Column renames, as messages=dialogue,content=utterance; none=COLUMN ignores one."""
    vocab_size: int | None = field(
        default=None,
        metadata={"idle_without": "mock_data|tokenizer_type=NullTokenizer|pretrained_checkpoint"},
    )
    """Vocabulary size of NullTokenizer and of mock data (default there: 1024)."""
    skip_bad_samples: bool = field(default=False, metadata={"idle_without": "data_path"})
    """Log, count and skip samples that cannot be read, instead of failing."""
    max_bad_samples_in_a_row: int = field(
        default=100, metadata={"idle_without": "skip_bad_samples"}
    )
    """Consecutive bad samples of a source that --skip-bad-samples skips on a rank before it
    fails (0: any).
    """
    allow_changed_data: bool = field(default=False, metadata={"idle_without": "load"})
    """Continue a checkpoint with a blend of other sources, weights or mode. The position in it
    is kept.
    """
    num_workers: int | None = None
    """Data workers per data rank (0: load in the rank itself). A data rank is the rank of a
    replica that loads data (default: the rank's cores less two, at most 4).
    """
    prefetch_global_batches: int = 2
    """Global batches that a thread loads, schedules, moves and packs ahead of their step (0:
    none).
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            when=lambda options: options.mock_data and options.data_path,
            why="pass either {data_path.flag} FILE or {mock_data.flag}, not both",
        ),
        Rule(
            when=lambda options: not options.mock_data and not options.data_path,
            why="pass either {data_path.flag} FILE or {mock_data.flag}",
        ),
        Rule(
            when=lambda options: options.mock_data and options.valid_data_path,
            why="{valid_data_path.flag} needs {data_path.flag}, but {mock_data.flag} is given",
        ),
        *TOKENIZER_RULES,
        *at_least(1, "vocab_size"),
        *at_least(0, "max_bad_samples_in_a_row", "num_workers", "prefetch_global_batches"),
    )

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)
        self._check_blend()
        # No rules, as they parse texts and look for files.
        _ = self.template_choice, self.split_shares, self.columns, self.valid_paths

    def _check_blend(self) -> None:
        """Raises ValueError for faults of a blend. No rule: files decide what is a weight."""
        blends = [path for path in self.paths if is_metadataset(path)]
        if blends and len(self.data_path) > 1:
            raise ValueError(f"--data-path {blends[0]} must be the only one; name the others in it")
        for name in ("blend_mode", "blend_weights_by", "blend_weight_schedule"):
            if not self.is_blend and getattr(self, name) != getattr(DataConfig, name):
                raise ValueError(
                    f"{flag_of(name)} needs weights or a metadataset (.yaml) in --data-path"
                )

    @property
    def today(self) -> date | None:
        """The date that chat templates are given."""
        return read_date(self.template_date)

    @property
    def template_choice(self) -> TemplateChoice:
        """The chat template and its variables."""
        variables = read_variables(self.chat_template_kwargs)
        return TemplateChoice(self.chat_template, self.today, variables)

    @property
    def resolved_tokenizer_type(self) -> TokenizerType:
        """--tokenizer-type, or the type that follows from --tokenizer-model."""
        return tokenizer_type_of(self.tokenizer_type, self.tokenizer_model)

    @cached_property
    def weighted_paths(self) -> tuple[tuple[float | None, str], ...]:
        """--data-path as pairs: `5 a 3 b -> ((5.0, "a"), (3.0, "b"))`. Without weights, the first
        of each pair is None: `a b -> ((None, "a"), (None, "b"))`.
        """
        weights = [None if os.path.exists(part) else _number(part) for part in self.data_path]
        if not any(weight is not None for weight in weights):
            paths = [one for path in self.data_path for one in expanded(path, "--data-path")]
            return tuple((None, path) for path in paths)
        are_pairs = None not in weights[::2] and set(weights[1::2]) == {None}
        if not are_pairs or len(weights) % 2:
            raise ValueError(
                "--data-path with weights must be pairs such as 5 a.jsonl 3 b.jsonl, but is "
                f"{' '.join(self.data_path)}"
            )
        paths = [one_of(path, "--data-path") for path in self.data_path[1::2]]
        return tuple(zip(weights[::2], paths))

    @property
    def paths(self) -> tuple[str, ...]:
        """--data-path without weights."""
        return tuple(path for _, path in self.weighted_paths)

    @cached_property
    def valid_paths(self) -> tuple[str, ...]:
        """--valid-data-path, with the files of its folders and patterns."""
        flag = "--valid-data-path"
        return tuple(one for path in self.valid_data_path for one in expanded(path, flag))

    @property
    def is_blend(self) -> bool:
        """Returns whether sources are blended, not read one after the other."""
        return any(
            weight is not None or is_metadataset(path) for weight, path in self.weighted_paths
        )

    @property
    def bad_samples_in_a_row(self) -> int | None:
        """Bad samples of a source in a row before they are an error, 0 for any number; None if the
        first one is.
        """
        return self.max_bad_samples_in_a_row if self.skip_bad_samples else None

    @property
    def columns(self) -> dict[str, str]:
        """Column -> the name that `records.formats` knows, by --data-columns."""
        return parse_columns(self.data_columns)

    @property
    def split_shares(self) -> tuple[float, float, float]:
        """Shares of training, validation and test; they sum to one."""
        try:
            shares = [float(part) for part in self.split.split(",")]
        except ValueError:
            shares = []
        if (
            not 1 <= len(shares) <= 3
            or not all(0 <= share < math.inf for share in shares)
            or not shares[0] > 0
        ):
            raise ValueError(
                f"--split must be up to three shares such as 969,30,1, but is {shown(self.split)}"
            )
        shares += [0.0] * (3 - len(shares))
        return shares[0] / sum(shares), shares[1] / sum(shares), shares[2] / sum(shares)

    def weight_schedule(self, samples_per_step: int) -> WeightSchedule | None:
        """Returns what --blend-weight-schedule says, as JSON or in a file; ValueError for what is
        no schedule.

            {"kind": "linear", "points": [[0, [5, 3, 2]], [1000, [1, 1, 1]]]}

        At each point stand the step and a weight for every source, in the order of the metadataset;
        `kind` is linear between points, or step. Before the first point there is none: it is at
        step 0.
        """
        if self.blend_weight_schedule is None:
            return None
        flag, text = "--blend-weight-schedule", self.blend_weight_schedule
        form = '{"kind": "step" or "linear", "points": [[step, [weight of each source]], ...]}'
        try:
            written = parse_json(text) if text.lstrip().startswith("{") else read_json(text)
        except ValueError as failure:
            raise ValueError(f"{flag} must be {form}, or a file with it, but: {failure}") from None
        try:
            points = tuple((step, tuple(weights)) for step, weights in written["points"])
            if not set(written) <= {"kind", "points"} or any(
                type(step) is not int for step, _ in points
            ):
                raise TypeError
            return WeightSchedule(points, samples_per_step, written.get("kind", "step"))
        except (KeyError, TypeError):
            raise ValueError(f"{flag} must be {form}, but is {shown(written)}") from None
        except ValueError as failure:
            raise ValueError(f"{flag}: {failure}") from None
