"""How a run makes samples: by its own choice, as its checkpoint did, or as the template needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from megatron.sft.data.datasets import _train_turns
from megatron.sft.options.chat_template import TemplateChoice, read_variables
from megatron.sft.options.preference import PreferenceConfig
from megatron.sft.preflight import samples_of_run


@dataclass(frozen=True)
class Part:
    """Options that are read here."""

    train_turns: str | None = None
    template_date: str | None = None
    chat_template_kwargs: str | None = None
    mock_data: bool = False
    sequence_packing: bool = True
    mtp_num_layers: int | None = None
    load: str | None = "folder"
    ckpt_step: int | None = None
    finetune: bool = False
    contexts: str = "differ"

    @property
    def today(self) -> str | None:
        return self.template_date

    @property
    def template_choice(self) -> TemplateChoice:
        return TemplateChoice(variables=read_variables(self.chat_template_kwargs))


@dataclass(frozen=True)
class Options:
    """Stands for SFTConfig."""

    data: Any = field(default_factory=Part)
    output: Any = field(default_factory=Part)
    packing: Any = field(default_factory=Part)
    model: Any = field(default_factory=Part)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (Part(), "served"),
        (Part(contexts="kept"), "all"),
        (Part(contexts="unknown"), "all"),
        (Part(sequence_packing=False), "all"),
        (Part(mtp_num_layers=1), "all"),
        (Part(train_turns="all"), "all"),
        (Part(train_turns="last", sequence_packing=False), "last"),
        (Part(train_turns="served", contexts="kept", sequence_packing=False), "served"),
    ],
)
def test_the_default_is_what_a_template_needs(part: Part, expected: str) -> None:
    """Thinking models would be trained behind thoughts that nobody serves them."""
    config: Any = Options(data=part, packing=part, model=part)
    tokenizer: Any = part
    assert _train_turns(config, tokenizer) == expected


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Part(train_turns="served", sequence_packing=False), "need --sequence-packing"),
        (Part(train_turns="served", mtp_num_layers=1), "--mtp-num-layers does not take"),
    ],
)
def test_trees_that_cannot_be_trained_are_refused(part: Part, words: str) -> None:
    """Padded rows would take a tree for one sequence."""
    config: Any = Options(data=part, packing=part, model=part)
    tokenizer: Any = part
    with pytest.raises(ValueError, match=words):
        _train_turns(config, tokenizer)


@pytest.mark.parametrize(
    ("saved", "given", "output", "expected"),
    [
        ({"train_turns": "served"}, None, Part(), "served"),
        ({}, None, Part(), "all"),
        ({"train_turns": "served"}, "last", Part(), "last"),
        ({}, None, Part(finetune=True), None),
        ({}, None, Part(load=None), None),
        (None, None, Part(), None),
    ],
)
def test_a_checkpoint_keeps_its_mode(
    monkeypatch: pytest.MonkeyPatch,
    saved: dict[str, Any] | None,
    given: str | None,
    output: Part,
    expected: str | None,
) -> None:
    """A run that is continued would see other contexts than before, from one step to the next."""
    monkeypatch.setattr(
        samples_of_run, "latest_iteration", lambda folder: None if saved is None else 3
    )
    monkeypatch.setattr(samples_of_run, "read_common", lambda path: {"data": saved})
    config: Any = Options(data=Part(train_turns=given), output=output)
    assert samples_of_run.with_samples_of_checkpoint(config).data.train_turns == expected


def test_a_checkpoint_keeps_its_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continued without the flag, a run of gpt-oss would be refused, or see other prompts."""
    saved = {"template_date": "2025-06-30", "train_turns": "served"}
    monkeypatch.setattr(samples_of_run, "latest_iteration", lambda folder: 3)
    monkeypatch.setattr(samples_of_run, "read_common", lambda path: {"data": saved})
    given: Any = Options()
    resolved = samples_of_run.with_samples_of_checkpoint(given)
    assert (resolved.data.template_date, resolved.data.train_turns) == ("2025-06-30", "served")
    assert list(samples_of_run.notes_on_samples(given, resolved, "served")) == [
        "training each of the assistant's turns behind the prompt that it is generated from "
        "(--train-turns served)",
        "the chat template's date is 2025-06-30 (--template-date, as the checkpoint has it)",
    ]
    given = Options(data=Part(template_date="2026-01-01"))
    resolved = samples_of_run.with_samples_of_checkpoint(given)
    assert resolved.data.template_date == "2026-01-01"
    assert list(samples_of_run.notes_on_samples(given, resolved, "all")) == [
        "the chat template's date is 2026-01-01 (--template-date)"
    ]


def test_a_checkpoint_keeps_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continued without the flag, a model would be trained behind other prompts; an empty object
    takes them back.
    """
    saved = {"chat_template_kwargs": '{"enable_thinking": false}'}
    monkeypatch.setattr(samples_of_run, "latest_iteration", lambda folder: 3)
    monkeypatch.setattr(samples_of_run, "read_common", lambda path: {"data": saved})
    given: Any = Options(data=Part(train_turns="all", template_date="2026-01-01"))
    resolved = samples_of_run.with_samples_of_checkpoint(given)
    assert resolved.data.chat_template_kwargs == '{"enable_thinking": false}'
    assert list(samples_of_run.notes_on_samples(given, resolved, "all"))[-1] == (
        'the chat template\'s variables are {"enable_thinking": false} (--chat-template-kwargs, as '
        "the checkpoint has it); serve the model with the same"
    )
    given = Options(data=Part(chat_template_kwargs="{}"))
    resolved = samples_of_run.with_samples_of_checkpoint(given)
    assert not resolved.data.template_choice.variables
