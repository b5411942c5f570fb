"""Data of which nothing would be trained, refused before the first step."""

import json

import pytest

from megatron.blending.formats.jsonl import JsonlSource
from megatron.sft.arguments.parse import parse_config
from megatron.sft.data import trained_tokens
from megatron.sft.data.chat_encoder import ChatEncoder
from megatron.sft.data.datasets import build_datasets
from megatron.sft.data.templates.chat_template import SlowTemplateError
from megatron.sft.data.trained_tokens import check_trained

BASE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 1 --seq-length 64 --train-iters 3 --lr "
    "1e-3 --global-batch-size 2"
).split()


def turn(role, **more):
    return {"role": role, "content": "a", **more}


GOOD = {"messages": [turn("user"), turn("assistant")]}
ROLELESS = {"messages": [turn("user"), turn("user")]}
WEIGHTLESS = {"messages": [turn("user"), turn("assistant", weight=0)]}
TYPO = {"messages": [turn("user"), turn("asistant")]}
LONG = {"text": "x" * 100}


@pytest.fixture
def fault_of(write_lines):
    """Return a function that writes a file of records for each name; what `check_trained` says of
    all of them.
    """

    def find(options="--split 1", is_evaluated=True, **files):
        paths = [
            write_lines(f"{name}.jsonl", *map(json.dumps, records))
            for name, records in files.items()
        ]
        folder = paths[0].rpartition("/")[0]
        config = parse_config(
            [*BASE, *options.format(folder=folder).split(), "--data-path", *paths], world_size=1
        )
        try:
            check_trained(build_datasets(config), is_evaluated)
        except ValueError as failure:
            return str(failure).replace(folder, "DIR")
        return ""

    return find


@pytest.mark.parametrize(
    ("records", "options", "fault"),
    [
        (
            [ROLELESS] * 12,
            "",
            "x: none of 12 records has a token to train on (12 no loss token; the first is "
            "DIR/x.jsonl:1); no turn has the role assistant; roles seen: user (24); correct it, or "
            "leave it out",
        ),
        (
            [WEIGHTLESS, {**GOOD, "weight": 0}],
            "",
            "each turn of the assistant, or its record, has weight 0; roles seen: assistant (2), "
            "user (2)",
        ),
        (
            [{"tokens": [3]}],
            "",
            "x: none of 1 records has a token to train on (1 no loss token; the first is",
        ),
        ([TYPO] * 3, "", "x: DIR/x.jsonl:1: messages[1].role must be one of"),
        ([TYPO] * 3, "--skip-bad-samples", "but is 'asistant'; none of 3 records makes a sample"),
        (
            [{**GOOD, "label": False}],
            "--skip-bad-samples",
            "x: DIR/x.jsonl:1: record has label false beside",
        ),
        (
            [LONG, ROLELESS],
            "--over-length-policy drop",
            "(1 over length, 1 no loss token; the first is DIR/x.jsonl:1)",
        ),
        ([LONG, LONG], "", "x: DIR/x.jsonl:1: sample is 100 tokens long, but --seq-length is 64"),
        ([ROLELESS, TYPO, GOOD], "", ""),
        ([LONG, {"text": "x"}], "", ""),
    ],
)
def test_data_without_a_token_to_train_on_say_why(fault_of, records, options, fault):
    """The run would end with loss 0.0, exit status 0 and a model that was never trained."""
    found = fault_of(f"--split 1 {options}", x=records)
    assert fault in found if fault else found == ""


@pytest.mark.parametrize("weights", ["", "1 {folder}/good.jsonl 1 {folder}/bad.jsonl"])
def test_each_source_must_have_one(fault_of, weights):
    """A source of a blend that trains nothing takes its share of the samples from the others."""
    options = f"--split 1 --data-path {weights}" if weights else "--split 1"
    assert fault_of(options, good=[GOOD], bad=[ROLELESS]).startswith(
        "bad: none of 1 records has a token to train on"
    )
    assert fault_of("--split 1", good=[GOOD], text=[{"text": "all of it"}]) == ""


def test_held_out_data_must_have_one_in_all(fault_of):
    """Its loss would be 0.0, the lowest that --keep-best can find. One source of several may hold
    few records.
    """
    assert fault_of("--split 9,1", x=[GOOD] * 9 + [ROLELESS, GOOD] + [GOOD] * 9) == ""
    without = [GOOD] * 18 + [ROLELESS] * 2
    told = (
        "the data to {} with: none of 2 records has a token to train on (2 no loss token; the "
        "first is DIR/x.jsonl:19"
    )
    assert fault_of("--split 9,1", x=without).startswith(told.format("validate"))
    assert fault_of("--split 9,0,1", x=without).startswith(told.format("test"))
    assert fault_of("--split 9,1", is_evaluated=False, x=without) == ""
    assert (
        fault_of("--valid-data-path {folder}/x.jsonl {folder}/y.jsonl", x=without[::-1], y=[GOOD])
        == ""
    )


def test_sound_data_cost_one_record_and_others_at_most_so_many(fault_of, monkeypatch):
    """A check that reads all data takes hours where they are many; one that looks at the beginning
    only refuses data that are sorted.
    """
    read, get = [], JsonlSource.__getitem__
    monkeypatch.setattr(trained_tokens, "MAX_PROBED", 10)

    def counted(self, index):
        read.append(index)
        return get(self, index)

    monkeypatch.setattr(JsonlSource, "__getitem__", counted)
    assert fault_of(x=[GOOD] * 30) == ""
    assert read == [0, 0]  # before: for keys that are not read
    assert fault_of(x=[ROLELESS] * 15 + [GOOD] * 10) == ""
    found = fault_of(x=[ROLELESS] * 25)
    assert found.startswith(
        "x: none of 10 records, spread over 25, has a token to train on (10 no loss token;"
    )
    assert list(dict.fromkeys(read[-20:])) == [0, 2, 5, 7, 10, 12, 15, 17, 20, 22]


def test_mock_data_always_have_tokens():
    """There is nothing to look at."""
    check_trained(
        build_datasets(parse_config([*BASE, "--mock-data"], world_size=1)), is_evaluated=True
    )


def test_a_template_that_takes_too_long_is_tried_once(fault_of, monkeypatch):
    """A thousand records at ten seconds each: the run would stand for hours before it says so."""
    tried = []

    def encode(*_):
        tried.append(1)
        raise SlowTemplateError("the chat template takes too long")

    monkeypatch.setattr(ChatEncoder, "encode", encode)
    fault = fault_of("--split 1 --skip-bad-samples", x=[GOOD] * 20)
    assert fault == "DIR/x.jsonl:1: the chat template takes too long"
    assert len(tried) == 1
