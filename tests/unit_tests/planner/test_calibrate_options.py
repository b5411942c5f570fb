"""The options of calibrate, from the command line and a training run's YAML, and the packs that it measures."""

import pytest

from megatron.planner.calibrate_options import packs_to_measure, padded_vocab_size, parse_arguments

NEEDED = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 256 --vocab-size 130".split()


def test_options():
    """An option that is lost on its way leaves another model measured."""
    options = parse_arguments([*NEEDED, "--swiglu", "--normalization", "RMSNorm"])
    assert (options.num_layers, options.hidden_size, options.swiglu) == (2, 16, True)
    assert (options.normalization, options.bf16, options.num_experts) == ("RMSNorm", None, None)
    assert padded_vocab_size(options) == 256


def test_yaml_of_a_training_run(tmp_path):
    """The user would copy options by hand, and one of them wrong."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "num-layers: 4\nhidden_size: 32\nnum-attention-heads: 2\nseq-length: 512\nswiglu: true\nbf16: false\n"
        "lr: 1.0e-3\ndata-path: [a.jsonl]\nkv-channels:\n"
    )
    options = parse_arguments(["--config", str(path), "--vocab-size", "256", "--num-layers", "8"])
    assert (options.num_layers, options.hidden_size, options.seq_length, options.vocab_size) == (8, 32, 512, 256)
    assert (options.swiglu, options.bf16, options.kv_channels) == (True, False, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (NEEDED[:-2], "--vocab-size is missing; pass it, or --config FILE with it"),
        ([*NEEDED, "--num-layers", "0"], "--num-layers must be at least 1, but is 0"),
        ([*NEEDED, "--repeats", "0"], "--repeats must be at least 1, but is 0"),
        ([*NEEDED, "--tensor-model-parallel-size", "2"], "unrecognized arguments: --tensor-model-parallel-size 2"),
        ([*NEEDED, "--config", "absent.yaml"], "--config absent.yaml: "),
        ([*NEEDED, "--output", "no/such/folder/x.json"], "--output no/such/folder/x.json must be a file that can be"),
        ([*NEEDED, "--output", "."], "--output . must be a file that can be written to; give another place"),
    ],
)
def test_wrong_options_are_named(arguments, words, capsys):
    """It would show as an error inside megatron-core."""
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"), [("[1]", "must map options to values"), ("num-layers: x", "--num-layers")]
)
def test_wrong_yaml_is_named(tmp_path, content, words, capsys):
    """The same from a file."""
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(SystemExit):
        parse_arguments([*NEEDED, "--config", str(tmp_path / "run.yaml")])
    assert words in capsys.readouterr().err


def test_packs_tell_the_terms_apart():
    """Packs of one shape only would leave the split between linear and quadratic to chance."""
    assert packs_to_measure(256)[:4] == [(256,), (64,) * 4, (16,) * 16, (128,)]
    for largest in (256, 1000, 131072):
        packs = packs_to_measure(largest)
        assert len(packs) == len(set(packs)) >= 6
        assert max(map(sum, packs)) == largest
        assert {len(pack) for pack in packs} == {1, 4, 16}
        assert all(len(set(pack)) == 1 for pack in packs)
    with pytest.raises(ValueError, match="raise --seq-length"):
        packs_to_measure(32)
