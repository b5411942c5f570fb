"""Which samples a step trains on: the same for every layout, from any place on, each record once per epoch."""

import json
import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.blending.sources import open_source
from megatron.sft.chat_encoder import ChatEncoder, Dropped, EncodedSample
from megatron.sft.config import parse_config
from megatron.sft.data import ChatDataset, Counts, Part, SampleStream, Share, build_datasets
from megatron.sft.tokenizer import build_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Numbered(NamedTuple):
    """Record i is the one token i, but every `drop_every`-th makes no sample and every `cut_every`-th is cut."""

    size: int
    drop_every: int = 10**9
    cut_every: int = 10**9

    def __len__(self) -> int:
        return self.size

    def fingerprint(self):
        return str(self)

    def __getitem__(self, index):
        assert 0 <= index < self.size
        if index % self.drop_every == self.drop_every - 1:
            return Dropped("over length")
        tokens = np.full(1 + index % 3, index)
        return EncodedSample(tokens, tokens, np.ones(len(tokens), np.float32), index % self.cut_every == 0)


def names(samples):
    return [int(sample["tokens"][0]) for sample in samples]


def stream_of(size, share, seed=0, consumed_samples=0, **options):
    return SampleStream(Numbered(size, **options), share, seed=seed, consumed_samples=consumed_samples)


def global_batch(streams, share):
    """The next global batch over all ranks: names of the records in the order of the global stream."""
    return [name for stream in streams for _ in range(share.num_draws) for name in names(next(stream))]


def all_ranks(share):
    return [share._replace(rank=rank) for rank in range(share.num_ranks)]


@st.composite
def shares(draw):
    """A global batch that the ranks and their draws divide, as the options demand."""
    num_ranks, micro_batch_size = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    return Share(0, num_ranks, num_ranks * micro_batch_size * draw(st.integers(1, 4)), micro_batch_size)


def test_draws_literal():
    """The plain case, to be read: 2 ranks, 8 samples, 2 at a time."""
    assert Share(0, 2, 8, 2).draws_of(0, 8) == [range(2), range(2, 4)]
    assert Share(1, 2, 8, 2).draws_of(16, 24) == [range(20, 22), range(22, 24)]


@given(shares(), st.integers(0, 10**6), st.data())
@settings(deadline=None)
def test_draws_partition_a_batch(share, start, data):
    """A position drawn twice, or by no rank, changes the loss with the number of ranks; an odd draw hangs the rest."""
    size = data.draw(st.integers(0, share.global_batch_size))
    drawn = [one.draws_of(start, start + size) for one in all_ranks(share)]
    assert [position for draws in drawn for part in draws for position in part] == list(range(start, start + size))
    assert all(len(draws) == share.num_draws for draws in drawn)
    assert all(len(part) <= share.micro_batch_size for draws in drawn for part in draws)
    per_rank = [sum(map(len, draws)) for draws in drawn]
    assert max(per_rank) - min(per_rank) <= 1


@pytest.mark.parametrize(
    ("num_ranks", "micro_batch_size"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (3, 4), (4, 3), (6, 2), (12, 1)]
)
def test_global_batches_are_the_same_for_every_layout(num_ranks, micro_batch_size):
    """Runs on other numbers of processes would train on other data, and no loss curve could be compared."""
    one = Share(0, 1, 12, 12)
    share = Share(0, num_ranks, 12, micro_batch_size)
    streams = [stream_of(50, rank) for rank in all_ranks(share)]
    reference = stream_of(50, one)
    for _ in range(9):  # two epochs and a half; epochs end within batches
        assert global_batch(streams, share) == names(next(reference))


@given(st.integers(1, 40), st.integers(-3, 2**40), st.integers(1, 7))
@settings(max_examples=50, deadline=None)
def test_each_record_once_per_epoch(size, seed, batch):
    """Records that an epoch leaves out are never learned; sampling with replacement leaves out a third."""
    stream = stream_of(size, Share(0, 1, batch, batch), seed=seed)
    drawn = [name for _ in range(math.ceil(3 * size / batch)) for name in names(next(stream))]
    for epoch in range(3):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_epochs_and_seeds_differ():
    """The same order again and again lets the model learn the order."""
    stream = stream_of(50, Share(0, 1, 50, 50))
    first, second = names(next(stream)), names(next(stream))
    other_seed = names(next(stream_of(50, Share(0, 1, 50, 50), seed=1)))
    assert len({tuple(first), tuple(second), tuple(other_seed), tuple(range(50))}) == 4
    assert first == names(next(stream_of(50, Share(0, 1, 50, 50))))


@given(shares(), st.integers(0, 6), st.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_seek_equals_having_run_there(share, steps, size):
    """A run that is continued would train on records again, or skip some."""
    for rank in all_ranks(share):
        ran, jumped = stream_of(size, rank), stream_of(size, rank, consumed_samples=steps * share.global_batch_size)
        for _ in range(steps * share.num_draws):
            next(ran)
        for _ in range(2 * share.num_draws):
            assert names(next(ran)) == names(next(jumped))


def test_seek_in_the_middle_of_a_batch_starts_a_batch():
    """An evaluation that is cut short, or a step repeated, must not leave half a batch behind."""
    stream = stream_of(50, Share(0, 1, 8, 2))
    first = [names(next(stream)) for _ in range(4)]
    for draws in (1, 3):
        for _ in range(draws):
            next(stream)
        stream.seek(0)
        assert [names(next(stream)) for _ in range(4)] == first


def test_continued_on_another_number_of_ranks():
    """The samples consumed are the whole place: a run may go on with more processes."""
    two, three = Share(0, 2, 12, 2), Share(0, 3, 12, 1)
    streams = [stream_of(31, rank) for rank in all_ranks(two)]
    batches = [global_batch(streams, two) for _ in range(6)]
    streams = [stream_of(31, rank, consumed_samples=36) for rank in all_ranks(three)]
    assert [global_batch(streams, three) for _ in range(3)] == batches[3:]


@pytest.mark.parametrize(("num_ranks", "micro_batch_size"), [(1, 8), (2, 2), (4, 1), (8, 1)])
@pytest.mark.parametrize("size", [1, 3, 8, 11, 16])
def test_finite_stream_reads_all_once_and_ends_on_all_ranks_together(num_ranks, micro_batch_size, size):
    """A last batch that is dropped makes a small validation set empty; a rank that ends early hangs the others."""
    share = Share(0, num_ranks, 8, micro_batch_size)
    streams = [stream_of(size, rank, seed=None) for rank in all_ranks(share)]
    batches = [global_batch(streams, share) for _ in range(math.ceil(size / 8))]
    assert [name for batch in batches for name in batch] == list(range(size))
    for stream in streams:
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(stream)


def test_finite_stream_starts_anew_by_seek():
    """The second evaluation of a run would be of no data at all."""
    stream = stream_of(5, Share(0, 1, 4, 4), seed=None)
    first = [names(samples) for samples in stream]
    stream.seek(0)
    assert [names(samples) for samples in stream] == first == [[0, 1, 2, 3], [4]]


def test_counts():
    """Dropped and cut records that nobody counts are data that silently is not trained on."""
    stream = stream_of(30, Share(0, 1, 10, 5), drop_every=5, cut_every=4)
    drawn = [sample for _ in range(6) for sample in next(stream)]
    kept = [i for i in range(30) if i % 5 != 4]
    assert sorted(names(drawn)) == kept
    assert stream.counts == Counts(
        num_sequences=len(kept),
        num_tokens=sum(1 + i % 3 for i in kept),
        square_sum=sum((1 + i % 3) ** 2 for i in kept),
        num_dropped=6,
        num_cut=len([i for i in kept if i % 4 == 0]),
    )


def test_counts_add_and_subtract():
    """A step's counts are the difference of two totals."""
    total, before = Counts(5, 50, 500, 2, 1), Counts(3, 20, 100, 2, 0)
    assert total - before == Counts(2, 30, 400, 0, 1)
    assert before + (total - before) == total


def test_a_draw_of_dropped_records_is_empty_and_not_the_end():
    """StopIteration there would end the training on one rank."""
    stream = stream_of(4, Share(0, 1, 4, 2), drop_every=1)
    assert [next(stream) for _ in range(6)] == [[]] * 6
    assert stream.counts == Counts(num_dropped=12)


def test_samples_have_what_packing_reads():
    """A missing loss mask would be taken for all ones: training on the user's turns."""
    (sample,) = next(stream_of(9, Share(0, 1, 1, 1)))
    assert set(sample) == {"tokens", "labels", "loss_mask"}
    assert {len(values) for values in sample.values()} == {len(sample["tokens"])}


def test_part():
    """A validation part that overlaps the training part shows no overfitting."""
    whole = Numbered(10)
    parts = [Part(whole, 0, 6), Part(whole, 6, 9), Part(whole, 9, 10)]
    samples = [part[i] for part in parts for i in range(len(part))]
    seen = [int(sample.tokens[0]) for sample in samples if isinstance(sample, EncodedSample)]
    assert seen == list(range(10))
    assert [len(part) for part in parts] == [6, 3, 1]


@pytest.mark.parametrize(("start", "end", "index"), [(0, 6, 6), (6, 9, 3), (6, 9, -1), (4, 4, 0)])
def test_part_refuses_what_is_outside(start, end, index):
    """An index off by one would read a record of the next part, the last but one negative, without a word."""
    with pytest.raises(IndexError, match=rf"range\({end - start}\), but is {index}$"):
        Part(Numbered(10), start, end)[index]


# Real files.

BROKEN = '{"text": "half'
ROLELESS = '{"messages": [{"role": "robot", "content": "x"}]}'


@pytest.fixture(scope="module")
def encoder():
    return ChatEncoder(build_tokenizer("ByteLevelTokenizer"), seq_length=64, over_length_policy="error")


@pytest.fixture
def write_lines(tmp_path):
    """Return a function that writes lines to a file and returns its path."""

    def write(name, *lines):
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in lines))
        return str(path)

    return write


def text_line(text):
    return json.dumps({"text": text})


def text_of(sample):
    return bytes(int(token) for token in sample.tokens if token < 256).decode()


def chats(encoder, *paths, skip_bad_samples=False):
    return ChatDataset([open_source(path) for path in paths], encoder, skip_bad_samples)


def test_two_files_are_one_data_set(encoder, write_lines):
    """At the border of files an index off by one reads a record twice and another never."""
    first = write_lines("a.jsonl", text_line("one"), text_line("two"))
    second = write_lines("b.jsonl", text_line("three"), text_line("four"), text_line("five"))
    for paths, expected in (
        ((first, second), ["one", "two", "three", "four", "five"]),
        ((second, first), ["three", "four", "five", "one", "two"]),
    ):
        dataset = chats(encoder, *paths)
        assert len(dataset) == 5
        assert [text_of(dataset[i]) for i in range(5)] == expected


@pytest.mark.parametrize(("line", "words"), [(BROKEN, "not JSON"), (ROLELESS, "role"), ('{"txt": 1}', "'txt'")])
def test_error_names_file_and_line(encoder, write_lines, line, words):
    """One bad line in a million must be found by its place, also in the second file and after blank lines."""
    first = write_lines("a.jsonl", text_line("one"), text_line("two"))
    second = write_lines("b.jsonl", text_line("three"), "", line)
    dataset = chats(encoder, first, second)
    assert text_of(dataset[2]) == "three"
    with pytest.raises(ValueError, match=words) as failure:
        dataset[3]
    assert str(failure.value).startswith(f"{second}:3: ")


def test_over_long_sample_names_file_and_line(encoder, write_lines):
    """--seq-length too small is the commonest of mistakes; the message must say by how much and where."""
    path = write_lines("a.jsonl", text_line("one"), text_line("x" * 100))
    with pytest.raises(ValueError, match=r"a\.jsonl:2: .*100 tokens.*--seq-length is 64"):
        chats(encoder, path)[1]


def test_bad_samples_are_skipped_and_counted_when_asked(encoder, write_lines):
    """Skipping that does not count hides that half of a file is unreadable."""
    path = write_lines("a.jsonl", text_line("one"), BROKEN, text_line("two"), ROLELESS)
    dataset = chats(encoder, path, skip_bad_samples=True)
    assert dataset[1] == dataset[3] == Dropped("bad sample")
    stream = SampleStream(dataset, Share(0, 1, 4, 4), seed=None)
    assert len(next(stream)) == 2
    assert (stream.counts.num_sequences, stream.counts.num_dropped) == (2, 2)


# build_datasets, from options.

BASE = "--num-layers 2 --hidden-size 8 --num-attention-heads 1 --seq-length 64 --train-iters 3 --lr 1e-3"


def build(*arguments, batch=4, seed=1234):
    common = [*BASE.split(), "--global-batch-size", str(batch), "--seed", str(seed)]
    return build_datasets(parse_config([*common, *arguments], world_size=1))


RECORDS = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a" * i}]} for i in range(20)
]


@pytest.fixture
def data_path(tmp_path):
    """Return a function that writes RECORDS in the format of a suffix."""

    def write(suffix):
        path = tmp_path / f"train{suffix}"
        if suffix == ".jsonl":
            path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
        elif suffix == ".json":
            path.write_text(json.dumps(RECORDS, indent=1))
        else:
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(RECORDS), path, row_group_size=7)
        return str(path)

    return write


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_every_format_gives_the_same_samples(data_path, suffix):
    """A record that loses a turn on its way through a format trains on other text."""
    datasets = build("--data-path", data_path(suffix), "--split", "1")
    assert len(datasets.train) == len(RECORDS)
    for i, record in enumerate(RECORDS):
        sample = datasets.train[i]
        assert isinstance(sample, EncodedSample)
        assert text_of(sample) == record["messages"][0]["content"] + record["messages"][1]["content"]
        assert sample.loss_mask.sum() == i + 1  # the answer and its end
        assert sample.tokens.max() < datasets.vocab_size


@pytest.mark.parametrize(
    ("split", "sizes"),
    [("1", (20, 0, 0)), ("8,1,1", (16, 2, 2)), ("1,1", (10, 10, 0)), ("9,0,1", (18, 0, 2)), ("96,2,2", (19, 1, 0))],
)
def test_split_shares_records_out_without_overlap(data_path, split, sizes):
    """A record in two parts makes the held-out loss a training loss; one in none is lost."""
    datasets = build("--data-path", data_path(".jsonl"), "--split", split)
    parts = datasets.train, datasets.valid, datasets.test
    assert tuple(map(len, parts)) == sizes
    assert sum(sizes) == len(RECORDS)
    answers = [int(part[i].loss_mask.sum()) - 1 for part in parts for i in range(len(part))]
    assert answers == list(range(20))


def test_split_without_training_records_is_refused(data_path):
    """The first step would fail on an empty data set."""
    with pytest.raises(ValueError, match=r"--split 1,99 .* of 20 .*raise its first share"):
        build("--data-path", data_path(".jsonl"), "--split", "1,99")


def test_validation_files_take_the_place_of_the_split(data_path, write_lines):
    """With files of its own for validation, all of --data-path is for training."""
    datasets = build("--data-path", data_path(".json"), "--valid-data-path", write_lines("v.jsonl", text_line("held")))
    assert (len(datasets.train), len(datasets.valid), len(datasets.test)) == (20, 1, 0)
    assert text_of(datasets.valid[0]) == "held"


@pytest.mark.parametrize(("name", "words"), [("none.jsonl", "no such file"), ("a.txt", "suffix")])
def test_file_that_cannot_be_used_is_named(write_lines, name, words):
    """Training would start, and end at the first draw."""
    path = write_lines("a.txt", "x").replace("a.txt", name)
    with pytest.raises(ValueError, match=words) as failure:
        build("--data-path", path)
    assert path in str(failure.value)


def mock_tokens(dataset, number):
    return [tuple(dataset[i].tokens.tolist()) for i in range(number)]


def test_mock_validation_differs_from_training():
    """Evaluated on what it was trained on, a model looks better the more it overfits."""
    datasets = build("--mock-data", "--eval-iters", "2")
    train, valid = mock_tokens(datasets.train, 24), mock_tokens(datasets.valid, len(datasets.valid))
    assert not set(train) & set(valid)
    assert len(set(train)) == len(train)
    assert len(valid) == 2 * 4
    assert len(datasets.test) == 0


def test_mock_data_is_a_function_of_the_seed():
    """Benchmarks that claim the same data for two layouts must have it."""
    first, again, other = (mock_tokens(build("--mock-data", seed=seed).train, 12) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_mock_data_stays_in_the_vocabulary():
    """A token outside the embedding is an illegal memory access on CUDA."""
    for arguments, vocab_size in ((("--vocab-size", "17"), 17), ((), 1024)):
        datasets = build("--mock-data", *arguments)
        assert datasets.vocab_size == vocab_size
        assert max(map(max, mock_tokens(datasets.train, 12))) < vocab_size


def test_mock_data_without_evaluation():
    """--eval-iters 0 must mean no evaluation, and not an error about empty data."""
    assert len(build("--mock-data", "--eval-iters", "0").valid) == 0
