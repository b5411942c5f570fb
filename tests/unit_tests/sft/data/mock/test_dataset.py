"""Mock data: lengths as asked for, a function of (seed, index), and errors that say what to write
instead.
"""

import json
import pickle

import numpy as np
import pytest

from megatron.sft.data.mock.dataset import MockSFTDataset
from megatron.sft.data.mock.lengths import PRESETS

MANY = np.arange(100_000)
LOGNORMAL = {
    "mode": "distribution",
    "type": "lognormal",
    "min_seq_len": 1024,
    "max_seq_len": 8192,
    "mean_seq_len": 4096,
    "lognormal_sigma": 1.1,
}


def dataset(config, seq_length=8192, vocab_size=100, seed=7) -> MockSFTDataset:
    text = config if config is None or isinstance(config, str) else json.dumps(config)
    return MockSFTDataset(text, seq_length, vocab_size, seed, num_samples=1000)


@pytest.mark.parametrize(
    ("shortest", "longest", "mean", "sigma"),
    [
        (1024, 8192, 4096, 1.1),
        (1024, 8192, 1500, 0.3),
        (1024, 8192, 7900, 1.1),
        (20, 400, 80, 2.0),
        (10, 8000, 300, 1.5),
    ],
)
def test_lognormal_has_the_mean_asked_for_and_no_pile_up(shortest, longest, mean, sigma):
    """Clipping instead of truncating puts most samples at the minimum: benchmarks then measure
    another workload.
    """
    keys = {
        "min_seq_len": shortest,
        "max_seq_len": longest,
        "mean_seq_len": mean,
        "lognormal_sigma": sigma,
    }
    lengths = dataset({**LOGNORMAL, **keys}).lengths(MANY)
    assert abs(lengths.mean() / mean - 1) < 0.01
    assert lengths.min() >= shortest
    assert lengths.max() <= longest
    # A smooth density: about as many samples on the end itself as on the lengths beside it.
    counts = np.bincount(lengths, minlength=longest + 2)
    for end, beside in (
        (shortest, counts[shortest + 1 : shortest + 6]),
        (longest, counts[longest - 5 : longest]),
    ):
        assert counts[end] <= 2 * beside.max() + 20


def test_default_config():
    """Without a configuration: half of the sequence length to all of it, three quarters on
    average."""
    lengths = dataset(None, seq_length=4096).lengths(MANY)
    assert lengths.min() >= 2048
    assert lengths.max() <= 4096
    assert abs(lengths.mean() / 3072 - 1) < 0.01
    assert dataset(None, seq_length=1)[0]["tokens"].shape == (1,)
    assert (dataset('{"mode": "distribution"}', seq_length=4096).lengths(MANY) == lengths).all()


def test_uniform_and_constant():
    """Both ends must be drawn, and as often as the rest."""
    lengths = dataset(
        {"mode": "distribution", "type": "uniform", "min_seq_len": 3, "max_seq_len": 7}
    ).lengths(MANY)
    values, counts = np.unique(lengths, return_counts=True)
    assert values.tolist() == [3, 4, 5, 6, 7]
    assert abs(counts / MANY.size - 0.2).max() < 0.01
    constant = dataset({"mode": "distribution", "type": "constant", "seq_len": 5})
    assert set(constant.lengths(MANY).tolist()) == {5}


def test_mixture():
    """Weights are shares of samples, whatever their sum."""
    short = {"type": "uniform", "min_seq_len": 10, "max_seq_len": 20, "weight": 3}
    long = {"type": "constant", "seq_len": 4000, "weight": 1}
    lengths = dataset(
        {"mode": "distribution", "type": "mixture", "components": [short, long]}
    ).lengths(MANY)
    assert abs((lengths == 4000).mean() - 0.25) < 0.01
    rest = lengths[lengths != 4000]
    assert (rest.min(), rest.max()) == (10, 20)
    assert abs(rest.mean() - 15) < 0.1


def test_empirical():
    """Quantiles drawn must be those written; a maximum leaves longer samples out and keeps the
    shape of the rest.
    """
    config = {
        "mode": "distribution",
        "type": "empirical",
        "quantiles": [[0, 100], [0.5, 200], [1, 1000]],
    }
    lengths = dataset(config).lengths(MANY)
    assert (lengths.min(), lengths.max()) == (100, 1000)
    assert abs(np.quantile(lengths, [0.25, 0.5, 0.75]) - [150, 200, 600]).max() < 10
    cut = dataset({**config, "max_seq_len": 600}, seq_length=600).lengths(MANY)
    assert cut.max() == 600
    assert abs((cut < 200).mean() - 2 / 3) < 0.01
    assert (cut == 600).mean() < 0.005


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset):
    """A preset that can't be read is found only by the user who needs it."""
    config = {"mode": "distribution", "type": "empirical", "preset": preset}
    lengths = dataset(config, seq_length=131072).lengths(MANY)
    for share, tokens in PRESETS[preset][1:-1]:
        assert abs((lengths < tokens).mean() - share) < 0.01
    with pytest.raises(
        ValueError, match=r"longer than --seq-length 512 .* give a lower max_seq_len"
    ):
        dataset(config, seq_length=512)
    assert dataset({**config, "max_seq_len": 512}, seq_length=512).lengths(MANY).max() <= 512


def test_sample_is_a_function_of_seed_and_index():
    """Workers and restarts read in another order; a sample that depends on it makes no run
    reproducible.
    """
    data = dataset(LOGNORMAL)
    again = pickle.loads(pickle.dumps(dataset(LOGNORMAL)))
    for i in (3, 0, 999, 3):
        for key, value in data[i].items():
            assert (value == again[i][key]).all()
    lengths = data.lengths(np.arange(1000))
    assert [data[i]["tokens"].size for i in range(1000)] == lengths.tolist()
    assert (dataset(LOGNORMAL, seed=8).lengths(np.arange(1000)) != lengths).mean() > 0.99
    assert lengths[:4].tolist() == [2106, 2026, 1938, 1184]
    assert data[0]["tokens"][:6].tolist() == [72, 72, 0, 33, 77, 71]


def test_sample_contents():
    """Types and shift are what the packing road expects; a wrong shift trains to copy."""
    sample = dataset(LOGNORMAL, vocab_size=11)[5]
    assert {key: value.dtype.name for key, value in sample.items()} == {
        "tokens": "int64",
        "labels": "int64",
        "loss_mask": "float32",
    }
    assert sample["tokens"].shape == sample["labels"].shape == sample["loss_mask"].shape
    assert (sample["tokens"][1:] == sample["labels"][:-1]).all()
    assert (sample["loss_mask"] == 1).all()
    assert set(np.append(sample["tokens"], sample["labels"][-1]).tolist()) == set(range(11))
    data = dataset(LOGNORMAL)
    assert len(data) == 1000
    for index in (1000, -1):
        with pytest.raises(IndexError, match=r"must be in range\(1000\)"):
            data[index]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("length\n5\n3\n8\n", [5, 3, 8, 5, 3]),
        ("5\n3\n8\n", [5, 3, 8, 5, 3]),
        ("\ufeff5\r\n 3 \r\n8\r\n\n\n", [5, 3, 8, 5, 3]),
        ('"seq_len"\n5', [5, 5, 5, 5, 5]),
    ],
)
def test_file_of_lengths(tmp_path, text, expected):
    """The first line taken for a header, or the last for blank, is one length lost in every
    epoch."""
    (tmp_path / "lengths.csv").write_text(text, encoding="utf-8", newline="")
    (tmp_path / "config.json").write_text('{"mode": "file", "path": "lengths.csv"}')
    data = dataset(str(tmp_path / "config.json"), seq_length=8)
    assert [data[i]["tokens"].size for i in range(5)] == expected
    assert data.lengths(np.arange(5)).tolist() == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5\n4O96\n", r"lengths.csv:2: must be one length, a whole number, but is '4O96'"),
        ("4O96\n5\n", r"lengths.csv:1: must be one length"),
        ("len\n5\n\n3\n", r"lengths.csv:3: must be one length, a whole number, but is ''"),
        ("5\n-3\n", r"lengths.csv:2: must be one length"),
        ("5\n0\n", r"lengths.csv:2: length must be 1 to --seq-length 8, but is 0"),
        ("5\n9\n", r"lengths.csv:2: length must be 1 to --seq-length 8, but is 9"),
        ("len\n", r"lengths.csv holds none"),
        ("", r"lengths.csv holds none"),
    ],
)
def test_bad_file_of_lengths(tmp_path, text, message):
    """A skipped bad line would shift every later sample."""
    (tmp_path / "lengths.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        dataset({"mode": "file", "path": str(tmp_path / "lengths.csv")}, seq_length=8)


def without(key):
    return {k: v for k, v in LOGNORMAL.items() if k != key}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{oops", "the JSON is not valid JSON"),
        (
            "nowhere.json",
            "must be a JSON object or the path of a file with one, but is 'nowhere.json'",
        ),
        ("{}", "key mode is missing"),
        ({"mod": "file"}, "key mode is missing; did you mean 'mod'?"),
        ({"mode": "files"}, "mode must be file, distribution or verification, but is 'files'"),
        ({"mode": "file"}, "key path is missing"),
        (
            {"mode": "file", "path": "nowhere.csv"},
            "path must be a readable text file of lengths, but is 'nowhere.csv'",
        ),
        (without("type"), "key type is missing"),
        (
            {**LOGNORMAL, "type": "lognorm"},
            "type must be one of lognormal, uniform, ",
        ),
        (
            {**without("min_seq_len"), "min_seqlen": 3},
            "unknown key min_seqlen; did you mean 'min_seq_len'?",
        ),
        (without("lognormal_sigma"), "key lognormal_sigma is missing"),
        ({**LOGNORMAL, "min_seq_len": "1024"}, "min_seq_len must be an integer, but is '1024'"),
        ({**LOGNORMAL, "min_seq_len": True}, "min_seq_len must be an integer, but is True"),
        ({**LOGNORMAL, "min_seq_len": 0}, "min_seq_len must be above 0"),
        ({**LOGNORMAL, "mean_seq_len": float("nan")}, "mean_seq_len must be above 0 and finite"),
        ({**LOGNORMAL, "lognormal_sigma": 1e-9}, "lognormal_sigma must be at least 0.001"),
        ({**LOGNORMAL, "min_seq_len": 9000}, "min_seq_len 9000 must be at most max_seq_len 8192"),
        (
            {**LOGNORMAL, "max_seq_len": 10**13},
            "samples longer than --seq-length 8192 cannot be trained",
        ),
        (
            {**LOGNORMAL, "mean_seq_len": 1024},
            "mean_seq_len must lie between min_seq_len 1024 and max_seq_len 8192",
        ),
        (
            {**LOGNORMAL, "mean_seq_len": 9000},
            "mean_seq_len must lie between min_seq_len 1024 and max_seq_len 8192",
        ),
        (
            {"mode": "distribution", "type": "mixture", "components": [{}]},
            "components must be two distributions",
        ),
        (
            {
                "mode": "distribution",
                "type": "mixture",
                "components": [{"weight": 1, "type": "constant"}, {}],
            },
            "key components[0].seq_len is missing",
        ),
        ({"mode": "distribution", "type": "empirical"}, "give either preset or quantiles"),
        (
            {"mode": "distribution", "type": "empirical", "preset": "chats"},
            "preset must be one of chat, long_documents",
        ),
        (
            {"mode": "distribution", "type": "empirical", "preset": "chat", "max_seq_len": 16},
            "max_seq_len must be above 16 and at most 16384",
        ),
        *(
            (
                {"mode": "distribution", "type": "empirical", "quantiles": quantiles},
                "quantiles must be pairs",
            )
            for quantiles in (
                [],
                [[0, 1]],
                [[0, 5], [1, 5]],
                [[0, 5], [0.9, 6]],
                [[0, 5], [1, "6"]],
                [[0, 1.5], [1, 3]],
            )
        ),
        (
            {**LOGNORMAL, "format": "sbhd"},
            'format must be "thd": samples are padded where --sequence-packing is left out',
        ),
        ({**LOGNORMAL, "fromat": "thd"}, "unknown key fromat; "),
        (
            {"mode": "verification", "data_path": "nowhere", "min_len": 2},
            "unknown key min_len; did you mean",
        ),
        (
            {"mode": "verification", "data_path": "nowhere"},
            "data_path must name a .bin/.idx pair, but nowhere.bin: no such file",
        ),
    ],
)
def test_errors_name_the_flag_and_the_way_out(config, message):
    """A configuration read wrong measures another workload than the one asked for."""
    with pytest.raises(ValueError, match=r"^--sft-mock-dataset-config-json") as error:
        dataset(config)
    assert message in str(error.value)


def test_verification_reads_real_tokens(tmp_path, monkeypatch):
    """Documents must follow one another, round and round, without a token lost or made up
    between."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    documents = [[10, 11, 12], [20], [30, 31, 32, 33]]
    builder = IndexedDatasetBuilder(str(tmp_path / "real.bin"), dtype=np.uint16)
    for document in documents:
        builder.add_document(np.array(document, np.uint16), [len(document)])
    builder.finalize(str(tmp_path / "real.idx"))
    config = {"mode": "verification", "data_path": "real", "type": "constant", "seq_len": 20}
    (tmp_path / "config.json").write_text(json.dumps(config))

    data = dataset(str(tmp_path / "config.json"), seq_length=20, vocab_size=34)
    road = [token for document in documents for token in document]
    starts = set()
    for i in range(30):
        sample = data[i]
        stream = [*sample["tokens"].tolist(), int(sample["labels"][-1])]
        at = road.index(stream[0])
        assert stream == (road[at:] + 3 * road)[:21]
        starts.add(stream[0])
    assert starts == {10, 20, 30}
    assert sample["tokens"].dtype == np.int64

    monkeypatch.chdir(tmp_path)
    drawn = dataset({"mode": "verification", "data_path": "real"}, seq_length=20, vocab_size=34)
    assert drawn.lengths(MANY).max() == 20
    upstream = {
        "type": "lognormal",
        "min_seq_len": 100,
        "max_seq_len": 4096,
        "mean_seq_len": 2048,
        "lognormal_sigma": 1.1,
    }
    for given in ({}, {"min_seq_len": 1000}, {"mean_seq_len": 512, "lognormal_sigma": 0.5}):
        drawn = dataset({"mode": "verification", "data_path": "real", "format": "thd", **given})
        same = dataset({"mode": "distribution", **upstream, **given})
        assert (drawn.lengths(MANY) == same.lengths(MANY)).all()
    small = dataset({"mode": "verification", "data_path": "real"}, seq_length=20, vocab_size=33)
    with pytest.raises(
        ValueError, match=r"document 2 of real holds token 33, but the vocabulary is 33 tokens"
    ):
        [small[i] for i in range(30)]
