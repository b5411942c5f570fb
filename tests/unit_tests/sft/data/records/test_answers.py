"""Several answers to one prompt make a tree, whose paths are what each answer alone would train."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.blending import (
    DefaultTaskEncoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from megatron.blending.metadatasets.metadataset import load_metadataset
from megatron.blending.metadatasets.tree import source_entries
from megatron.packing.batch import tree
from megatron.packing.batch.reading import read_samples
from megatron.sft.data.chat_encoder import ChatEncoder, EncodedSample, SampleError
from megatron.sft.data.chats import ChatLoad, open_chats
from megatron.sft.data.records.formats import read_record
from megatron.sft.data.tokenizer import build_tokenizer
from megatron.sft.options.data_columns import parse_columns

TOKENIZER = build_tokenizer("ByteLevelTokenizer")
ENCODER = ChatEncoder(TOKENIZER, 1000, "error")
ASK = [{"role": "user", "content": "q"}]
BEFORE = [*ASK, {"role": "assistant", "content": "b"}, {"role": "user", "content": "p"}]


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def encoded(record: dict[str, Any], encoder: ChatEncoder = ENCODER) -> EncodedSample:
    sample = encoder.encode(record)
    assert isinstance(sample, EncodedSample)
    return sample


def paths_of(sample: EncodedSample) -> list[tuple[str, str]]:
    """Each path as text, and the labels of it that have a loss in its last node."""
    tree = sample.tree
    assert tree is not None
    ends = tree.cu_seqlens.tolist()
    parents, nodes = tree.parents.tolist(), list(itertools.pairwise(ends))
    found = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        index: list[int] = []
        node = leaf
        while node >= 0:
            index, node = [*range(*nodes[node]), *index], parents[node]
        ids = [int(tree.tokens[index[0]]), *tree.labels[index].tolist()]
        own = np.arange(*nodes[leaf])
        trained = tree.labels[own[tree.loss_mask[own] > 0]]
        found.append((TOKENIZER.show(ids), TOKENIZER.show(trained.tolist())))
    return found


def deep(levels: int) -> list[Any]:
    turns: list[Any] = [*ASK, answer("a")]
    for _ in range(levels):
        turns = [*ASK, [turns]]
    return turns


CHAT = "<user>q<end><assistant>"
PATHS = [(f"{CHAT}a1<end>", "1<end>"), (f"{CHAT}a2<end>", "2<end>")]
"""The answers share a letter, which stands in their trunk."""


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": ASK, "responses": ["a1", "a2"]},
        {"prompt": ASK, "responses": [answer("a1"), [answer("a2")]]},
        {"messages": ASK, "responses": ["a1", "a2"]},
        {"messages": [*ASK, [answer("a1"), answer("a2")]]},
        {"conversations": [{"from": "human", "value": "q"}, ["a1", [answer("a2")]]]},
        {"prompt": ASK, "responses": ["a1", "a2"], "weights": [1, 1.0], "weight": 1},
    ],
)
def test_each_way_to_give_answers(record: dict[str, Any]) -> None:
    """An answer that is read as part of another one would follow it."""
    sample = encoded(record)
    assert paths_of(sample) == PATHS
    assert sample.tree is not None
    assert sample.tree.num_paths.sum() == 6, "a1<end> and a2<end>"
    assert read_samples([_given(sample)]).lengths.tolist() == [len(sample.tokens)]


def _given(sample: EncodedSample) -> dict[str, Any]:
    assert sample.tree is not None
    return sample.tree._asdict()


def test_texts_are_trained_without_a_template() -> None:
    """As a prompt and a completion that are text: what a prompt says twice is computed once."""
    sample = encoded({"prompt": "once ", "responses": ["upon", "more"], "weights": [2, 0.5]})
    assert paths_of(sample) == [("once upon<eod>", "upon<eod>"), ("once more<eod>", "more<eod>")]
    assert sorted(set(sample.loss_mask.tolist())) == [0, 0.5, 2]


def test_weights_scale_their_answers() -> None:
    """Rewards would go to the wrong answers, or to the prompt."""
    record = {"messages": BEFORE, "responses": ["c1", "d2"], "weights": [3, 0.5], "weight": 2}
    sample = encoded(record)
    tree = sample.tree
    assert tree is not None
    trained = sample.loss_mask > 0
    by_label = dict(zip(sample.labels[trained].tolist(), sample.loss_mask[trained].tolist()))
    assert {chr(label): weight for label, weight in by_label.items() if label < 256} == {
        "b": 2.0,
        "c": 6.0,
        "1": 6.0,
        "d": 1.0,
        "2": 1.0,
    }, "a turn before the answers has the record's weight alone, and once"
    assert tree.num_paths.max() == 1


def test_an_answer_of_weight_zero_is_no_path() -> None:
    """It would be computed for nothing."""
    sample = encoded({"prompt": ASK, "responses": ["a1", "a2"], "weights": [0, 1]})
    assert sample.tree is None
    alone = encoded({"prompt": ASK, "completion": [answer("a2")]})
    assert sample.tokens.tolist() == alone.tokens.tolist()


def test_one_answer_is_a_sequence() -> None:
    """The same bytes as without a list."""
    one = encoded({"prompt": ASK, "responses": ["a"]})
    plain = encoded({"prompt": ASK, "completion": [answer("a")]})
    assert one.tree is None
    assert one.tokens.tolist() == plain.tokens.tolist()
    assert one.loss_mask.tolist() == plain.loss_mask.tolist()


def test_branches_branch_again() -> None:
    """An agent's tries: each of its turns is trained once, however many paths go through it."""
    tail = [{"role": "user", "content": "r"}, [answer("x"), answer("y")]]
    sample = encoded({"messages": [*BEFORE, [[answer("c"), *tail], answer("d")]]})
    assert [text for text, _ in paths_of(sample)] == [
        f"{CHAT}b<end><user>p<end><assistant>{end}"
        for end in (
            "c<end><user>r<end><assistant>x<end>",
            "c<end><user>r<end><assistant>y<end>",
            "d<end>",
        )
    ]
    labels = TOKENIZER.decode(sample.labels[sample.loss_mask > 0].tolist())
    assert [labels.count(letter) for letter in "bcxyd"] == [1] * 5
    assert sample.loss_mask.max() == 1


def test_parquet_gives_what_json_gives(tmp_path: Path) -> None:
    """Rows have all columns, with nulls, and lists of structs for turns."""
    records = [
        {"prompt": ASK, "responses": ["a1", "a2"], "weights": [1.0, 0.5]},
        {"prompt": ASK, "responses": ["a"], "weights": None},
    ]
    arrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    made = []
    for name in ("rows.parquet", "rows.jsonl"):
        (entry,) = source_entries(load_metadataset(str(tmp_path / name), "train"))
        opened = open_chats(entry, ENCODER)
        assert isinstance(opened.load, ChatLoad)
        made.append([opened.load(opened.source[at], (name, 0, at))[1] for at in range(2)])
    for row, line in zip(*made):
        for field in ("tokens", "labels", "loss_mask"):
            assert getattr(row, field).tolist() == getattr(line, field).tolist()
        assert (row.tree is None) == (line.tree is None)
    assert made[0][0].tree is not None


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ({"prompt": "p", "responses": "a"}, "responses must be a list of texts, turns or lists"),
        ({"prompt": "p", "responses": [answer("a")]}, "responses[0] must be a string, but is {"),
        ({"prompt": ASK, "responses": ["a", 5]}, "responses[1] must be text, a turn or turns, but"),
        ({"prompt": ASK, "responses": [["a"]]}, "responses[0][0] must be {role, content}"),
        ({"prompt": ASK, "responses": [[]]}, "responses[0] must be a list of at least one message"),
        ({"messages": [*ASK, []]}, "messages[1] must hold at least one answer, but is empty"),
        ({"prompt": ASK, "responses": []}, "record has keys 'prompt' (empty: 'responses'), but"),
        ({"messages": [[answer("a")]]}, "messages[0] must be {role, content}"),
        ({"messages": deep(101)}, "turns must branch at most 100 times, but messages[1][0][1][0]["),
        (
            {"messages": [*ASK, [answer("a")], answer("b")]},
            "messages[1] is a list of alternatives, which must be the last entry, but more follow",
        ),
        (
            {"prompt": ASK, "responses": ["a", {"role": "user", "content": "b"}]},
            "each of responses must hold a turn of the assistant, but one is a turn of the user",
        ),
        (
            {"prompt": ASK, "responses": ["a", "b"], "weights": [1]},
            "weights must be a list of one number per response (2), but is [1]",
        ),
        (
            {"prompt": "p", "responses": ["a", "b"], "weights": [1, -1]},
            "weights[1] must be a number from 0 to 10,000, but is -1",
        ),
        (
            {"prompt": "p", "completion": "c", "responses": ["a"]},
            "record has completion, which would be lost",
        ),
        (
            {"text": "t", "responses": ["a"]},
            "record has responses, which would be lost",
        ),
    ],
)
def test_wrong_answers_are_explained(record: dict[str, Any], fault: str) -> None:
    """Half of the answers would be trained, or none, without a word."""
    with pytest.raises(SampleError) as caught:
        read_record(record, {})
    assert str(caught.value).startswith(fault)


class Rollouts(DefaultTaskEncoder[Any, Any, Any, Any]):
    """A task encoder of a user's."""

    def encode_sample(self, sample: Any) -> tree.MergedPaths:
        paths, record = [], sample["json"]
        for answer in record["responses"]:
            ids = np.array([*record["prompt"].encode(), *answer.encode()])
            paths.append(tree.Path(ids[:-1], ids[1:], np.ones(len(ids) - 1, np.float32)))
        return tree.merge(paths)


def test_a_task_encoder_may_return_a_tree(tmp_path: Path) -> None:
    """What a loader makes of a tuple of arrays must still be one sample."""
    lines = [json.dumps({"prompt": "ask", "responses": ["yes", "no"][:count]}) for count in (2, 1)]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines) + "\n")
    worker = WorkerConfig(rank=0, world_size=1, num_workers=0)
    data = get_train_dataset(
        str(tmp_path / "rollouts.jsonl"),
        batch_size=None,
        task_encoder=Rollouts(),
        worker_config=worker,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
    )
    given = list(itertools.islice(get_savable_loader(data), 2))
    samples = read_samples(given)
    assert sorted(samples.lengths.tolist()) == [5, 2 + 3 + 2]
    assert sorted(samples.sizes.rows("node").tolist()) == [1, 3]


def test_names_of_columns() -> None:
    """Rollouts come under many names."""
    columns = parse_columns("responses=rollouts,weights=rewards")
    reading = read_record({"prompt": "p", "rollouts": ["a", "b"], "rewards": [1, 0]}, columns)
    assert reading.content == ([("p", "a"), ("p", "b")], [1, 0])
    assert not reading.unread


def test_over_long_answers_are_dropped_alone() -> None:
    """One long answer would take the others with it."""
    record = {"prompt": ASK, "responses": ["a" * 50, "b"]}
    with pytest.raises(SampleError, match="are 54 tokens long, but --seq-length is 20"):
        encoded(record, replace(ENCODER, seq_length=20))
    dropped = encoded(record, replace(ENCODER, seq_length=20, over_length_policy="drop"))
    assert dropped.tree is None
    assert dropped.is_cut
    cut = encoded(record, replace(ENCODER, seq_length=20, over_length_policy="truncate"))
    assert [len(text) for text, _ in paths_of(cut)] == [len(CHAT) + 17, len(CHAT) + 6]


def test_a_run_without_trees_refuses_answers() -> None:
    """Padded rows know no nodes: a branch would follow its sibling."""
    record = {"prompt": ASK, "responses": ["a1", "a2"]}
    encoder = replace(ENCODER, takes_trees=False)
    with pytest.raises(SampleError, match=r"several answers.* takes --sequence-packing"):
        encoder.encode(record)
    assert encoded({**record, "weights": [0, 1]}, encoder).tree is None
