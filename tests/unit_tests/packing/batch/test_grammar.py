"""Each known field is used as the table says, in each form, and samples of one content are the same
in all forms.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest
import torch

from megatron.packing.batch import grammar
from megatron.packing.batch.grammar import FORMS, KNOWN, Form
from megatron.packing.batch.reading import SampleReader, read_samples

PAGE = FilePath(__file__).parents[4] / "docs/howto/plugin.md"

TOKENS = {"tokens": np.array([5, 6, 7, 8, 9]), "labels": np.array([6, 7, 1, 9, 2])}
IDS = {"input_ids": np.array([5, 6, 7, 8, 9]), "labels": np.array([5, 6, 7, 8, 9])}
TREE = {**TOKENS, "cu_seqlens": np.array([0, 1, 3, 5]), "parents": np.array([-1, 0, 0])}
SAMPLES: dict[Form, dict[str, Any]] = {
    "tokens": TOKENS,
    "input_ids": IDS,
    "packed": {**TOKENS, "cu_seqlens": np.array([0, 3, 5])},
    "tree": TREE,
    "paths": {
        **TREE,
        "path_ids": [7, 8],
        "first_path": [0, 0, 0, 1, 1],
        "num_paths": [2, 1, 1, 1, 1],
    },
}
"""A sample of five tokens in each form."""

PIXELS = {"payloads": {"pixels": np.ones((2, 2))}}
VALUES: dict[str, Any] = {
    "tokens": np.array([4, 6, 7, 8, 9]),
    "input_ids": np.array([4, 6, 7, 8, 9]),
    "labels": np.array([5, 6, -100, 8, 9]),
    "shift_labels": np.array([5, 6, 7, -100, 9]),
    "loss_mask": [0, 1, 2, 1, 1.0],
    "position_ids": [0, 1, 0, 0, 1],
    "attention_mask": [1, 1, 1, 1, 0],
    "padding_mask": [False, False, False, False, True],
    "original_seq_len": 4,
    grammar.UNPADDED: [0, 2, 4],
    "seq_idx": [0, 0, 0, 0, 1],
    "source": 3,
    "parents": [-1, 0, 1],
    "num_paths": [3, 1, 1, 1, 1],
    "first_path": [0, 0, 0, 0, 1],
    **PIXELS,
    "payload_key": "image.jpg",
    "costs": {"vision": [256]},
    "seq_lens_padded": [3, 2],
    "inputs_embeds": np.ones((5, 2)),
    "path_tokens": [1],
}
for names, value in (
    (grammar.CUMULATIVE, [0, 2, 5]),
    (grammar.CUMULATIVE_PADDED, [0, 3, 5]),
    (grammar.LENGTHS, [2, 3]),
    (grammar.LOSS_MASKS, [0, 0, 1, 1, 1]),
    (grammar.NUMBERS_OF_SEQUENCES, [1, 1, 2, 2, 3]),
    (grammar.SIZES, 3),
    (grammar.TOKEN_TYPES, [0, 0, 1, 1, 1]),
    (("pixel_values", "pixel_values_videos", "image_grid_thw"), np.ones((5, 2))),
    (("video_grid_thw", "input_features"), np.ones((5, 2))),
):
    VALUES |= dict.fromkeys(names, value)
"""A value of each field that says something of a sample of five tokens; 5 of any other."""

COMPANY: dict[str, dict[str, Any]] = {
    **{name: {"cu_seqlens": [0, 2, 4]} for name in grammar.CUMULATIVE_PADDED},
    grammar.UNPADDED: {"cu_seqlens": [0, 3, 5]},
    "seq_lens_padded": {"seq_lens": [2, 2]},
    "costs": PIXELS,
}
"""Fields without which another says nothing."""


class Outcome:
    """What a sample becomes: its content, or an error, and the fields that warnings name."""

    def __init__(self, sample: Mapping[str, Any]) -> None:
        self.error, self.content, self.own = "", "", set[str]()
        reader = SampleReader(lambda costs: float(len(costs)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                reader.add(sample, 0)
                samples = reader.samples()
            except ValueError as error:
                self.error = str(error)
                return
            finally:
                self.warned = [str(each.message) for each in caught]
        columns = samples.columns.items()
        self.content = str(
            [samples.lengths.tolist()]
            + [(column.name, values.tolist()) for column, values in columns if not column.extra]
        )
        self.own = {column.name for column in samples.extra()}


def outcome(form: Form, name: str) -> tuple[Outcome, Outcome]:
    """The sample of a form without and with a field."""
    sample = dict(SAMPLES[form])
    company = COMPANY.get(name, {})
    # Nodes are bounded already, and only one sequence may have payloads.
    if form not in ("tree", "paths") and not (company is PIXELS and form == "packed"):
        sample |= company
        if "seq_lens" in company:
            sample.pop("cu_seqlens", None)
        if name in (*grammar.CUMULATIVE, *grammar.LENGTHS) and form == "packed":
            sample["cu_seqlens"] = [0, 5]
    return Outcome(sample), Outcome({**sample, name: VALUES.get(name, 5)})


def is_used_so(use: str, name: str, plain: Outcome, changed: Outcome) -> bool:
    """Whether a field changed a sample as its use in the table says."""
    if use == "refused":
        return "payloads" in changed.error or f"'{name}'" in changed.error
    if use == "checked":
        return bool(changed.error)
    if use == "warned":
        named = [text for text in changed.warned if f"'{name}'" in text]
        return len(named) == 1 and name in changed.own and changed.content == plain.content
    if use == "ignored":
        return (changed.content, changed.warned, changed.own) == (plain.content, [], plain.own)
    return bool(changed.error) or changed.content != plain.content


@pytest.mark.parametrize("form", FORMS)
def test_each_field_is_used_as_the_table_says(form: Form) -> None:
    """A field that is swallowed trains across borders, over padding or on the prompt, and its
    script looks right.
    """
    wrong = {}
    for name, row in KNOWN.items():
        plain, changed = outcome(form, name)
        assert not plain.error, plain.error
        if not is_used_so(row.use(form), name, plain, changed):
            wrong[name] = (row.use(form), changed.error, changed.warned)
    assert not wrong


def test_a_run_is_warned_once_of_each_field() -> None:
    """A warning per sample hides all others, and none per run is not seen."""
    warned: set[str] = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            reader = SampleReader(warned=warned)
            reader.add([{**TOKENS, "completion_mask": [0, 0, 1, 1, 1]}] * 2, 0)
            reader.add({**TOKENS, "position_ids": [0, 1, 2, 0, 1]}, 1)
            with pytest.raises(ValueError, match="'completion_mask' must be in all samples"):
                reader.samples()
        reader = SampleReader(warned=warned)
        reader.add({**IDS, "labels": [6, 7, 8, 9, -100]}, 0)
        reader = SampleReader()
        reader.add({**IDS, "position_ids": [0, 1, 5, 0, 1]}, 0)
        assert reader.samples().lengths.tolist() == [3, 2]
    names = [str(each.message).split(" of a sample ")[0] for each in caught]
    assert names == ["'completion_mask'", "'position_ids'", "'labels'", "'position_ids'"]


def test_the_documents_have_the_table() -> None:
    """A user would look up another one than the reader goes by."""
    table = "\n".join(grammar.use_table())
    assert table in PAGE.read_text(encoding="utf-8")


class Content:
    """Sequences as Megatron-LM's form has them, with weights and a user's field of their labels."""

    def __init__(self, random: np.random.Generator) -> None:
        self.lengths = random.integers(1, 7, random.integers(1, 5))
        size, self.ends = int(self.lengths.sum()), np.cumsum(self.lengths)
        self.tokens = random.integers(1, 90, size)
        self.weights = random.choice([0.0, 0.5, 1.0], size)
        self.gains = random.integers(1, 9, size) / 8
        # What follows a last token is not known, neither to collators that move labels.
        self.weights[self.ends - 1] = self.gains[self.ends - 1] = 0
        self.labels = np.where(self.weights != 0, np.roll(self.tokens, -1), -100)
        self.ids = random.integers(0, 2**40, self.lengths.size)
        self.positions = np.concatenate([np.arange(length) for length in self.lengths])
        self.numbers = np.repeat(np.arange(self.lengths.size), self.lengths)

    def fields(self, above_own: bool) -> dict[str, Any]:
        """Fields of one row of tokens, per token but for `ids`."""
        names = {"labels": -100, "loss_mask": 0, "gains": 7}
        values = dict(zip(names, (self.labels, self.weights, self.gains)))
        if above_own:  # what stands above a first token belongs to nobody
            starts = self.ends - self.lengths
            values = {name: np.roll(each, 1) for name, each in values.items()}
            for name, fill in names.items():
                values[name][starts] = fill
        return {"input_ids" if above_own else "tokens": self.tokens, **values, "ids": self.ids}

    def bounds(self, above_own: bool) -> list[dict[str, Any]]:
        """All ways to say where the sequences are, beside the row of tokens."""
        cumulative = np.append(0, self.ends)
        sees = np.tril(self.numbers[:, None] == self.numbers)
        ways: list[dict[str, Any]] = [
            {"cu_seqlens": cumulative},
            {"cu_seqlens": [*cumulative, -1], "cu_seqlens_argmin": len(cumulative)},
            {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative, "max_length_q": 6},
            {"seq_lens": self.lengths},
            {"seq_idx": self.numbers.astype(np.int32)},
            {"attention_mask": self.numbers + 1, "position_ids": self.positions},
            {"attention_mask": sees[None, None], "position_ids": self.positions},
            {"attention_mask": ~sees[None], "cu_seqlens": cumulative},
            {"attention_mask": np.where(sees, 0, -3e38)[None, None], "seq_idx": self.numbers},
        ]
        return ways + ([{"position_ids": self.positions}] if above_own else [])

    def padded(self, fields: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        """The fields with padding behind each sequence, of which `attention_mask` says so."""
        rooms = self.lengths + random.integers(0, 3, self.lengths.size)
        places = np.concatenate(
            [end - room + np.arange(n) for end, room, n in zip(rooms.cumsum(), rooms, self.lengths)]
        )

        def spread(values: Any, fill: int) -> Any:
            row = np.full(rooms.sum(), fill, np.asarray(values).dtype)
            row[places] = values
            return row

        rows = {name: spread(each, 7) for name, each in fields.items() if name != "ids"}
        said: dict[str, Any] = {"attention_mask": spread(self.numbers + 1, 0)}
        if random.random() < 0.5:
            starts = [0, *rooms.cumsum()]
            said = {"cu_seqlens": [0, *self.ends], "cu_seqlens_padded": starts}
        return {**rows, **said, "ids": self.ids}


def test_samples_of_one_content_are_the_same_in_every_form() -> None:
    """The same data set would be another one by way of another collator."""
    random, makers = np.random.default_rng(5), (np.array, torch.tensor, np.ndarray.tolist)
    for _ in range(20):
        content = Content(random)
        rows = [
            {
                name: each[part]
                for name, each in content.fields(above_own=False).items()
                if name != "ids"
            }
            | {"ids": number}
            for part, number in zip(
                map(slice, content.ends - content.lengths, content.ends), content.ids.tolist()
            )
        ]
        expected = described(rows)
        for above_own in (False, True):
            fields = content.fields(above_own=above_own)
            given = [{**fields, **way} for way in content.bounds(above_own)]
            given.append(content.padded(fields, random))
            if not above_own:
                parents = np.full(content.lengths.size, -1)
                given.append({**fields, "cu_seqlens": [0, *content.ends], "parents": parents})
            for sample in given:
                make = makers[random.integers(3)]
                converted = {name: make(np.asarray(each)) for name, each in sample.items()}
                assert described(converted) == expected, sample
        for row in (rows[0],):  # padded at either side
            for before, behind in ((0, 2), (3, 0)):
                padded = {
                    name: np.pad(each, (before, behind))
                    for name, each in row.items()
                    if name != "ids"
                }
                mask = np.pad(np.ones(len(row["tokens"]), np.int64), (before, behind))
                assert described(
                    {**padded, "attention_mask": mask, "ids": row["ids"]}
                ) == described(row)


def described(given: Any) -> list[Any]:
    """All that is trained, and the user's fields with their scopes."""
    samples = read_samples(given)
    extra = {column: values.tolist() for column, values in samples.extra().items()}
    fields = [samples.lengths.tolist(), *(values.tolist() for values in samples.fields())]
    return [*fields, extra if samples.lengths.max() > 1 else None]
