"""What a run would train, shown: the same samples and masks as in training."""

import json
import subprocess
import sys

import pytest

from megatron.sft.commands import show
from tests.unit_tests.sft.command_line import BASE

CHAT = {
    "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "weight": 0.5},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "b", "weight": 0},
    ]
}
RECORDS = [CHAT, {"text": "x" * 300}, {"messages": CHAT["messages"][:1]}]


@pytest.fixture
def options(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return [
        *BASE.split(),
        "--data-path",
        str(path),
        "--split",
        "1",
        "--over-length-policy",
        "truncate",
    ]


def test_shows_samples_and_shares(options, capsys):
    """A mask that is shown otherwise than it is trained hides what the command is for."""
    show.main([*options, "--samples", "5"], "show")
    blocks = capsys.readouterr().out.split("\n\n")
    *samples, summary = blocks
    assert sorted(samples) == [
        "--- chats: 11 tokens, 2 trained\n<user>q<end><assistant>⟦0.5 x "
        "a<end>⟧<user>q<end><assistant>b<end>",
        f"--- chats: 128 tokens, 128 trained\nx⟦{'x' * 128}⟧",
    ]
    rows = [line.split() for line in summary.splitlines()]
    assert rows[1] == ["chats", "2", "93.5%", "70", "70", "116", "128", "1", "1"]
    assert summary.splitlines()[2:] == [
        "chats  dropped for no loss token: 1",
        "--train-turns all: all of the assistant's turns, in one rendering",
        "note: tokens are bytes (ByteLevelTokenizer), and roles have no template; pass "
        "--pretrained-checkpoint or --tokenizer-model for those of a model",
    ]


def test_says_what_train_does_otherwise(options, capsys):
    """Samples that show cuts end a run, and bytes are not the tokens of a model."""
    given = [word for word in options if word not in ("--over-length-policy", "truncate")]
    data = options[options.index("--data-path") + 1]
    show.main([*given, "--samples", "0", "--valid-data-path", data], "show")
    notes = capsys.readouterr().out.split("note: ")[1:]
    assert notes[0].startswith("--split has no effect with --valid-data-path")
    assert notes[1].startswith("train refuses samples longer than --seq-length 128, as 1 are, unl")
    assert notes[2].startswith("tokens are bytes (ByteLevelTokenizer)")
    assert notes[3].startswith(f"{data} is trained, too")


def test_leaves_out_bad_records_where_asked(tmp_path, capsys):
    """One bad record would hide what a run makes of all others."""
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a"}\n{"text": 5}\n{"text": "b"}\n')
    show.main(["--data-path", str(path), "--split", "1", "--skip-bad-samples"], "show")
    assert "dropped for" in capsys.readouterr().out


def test_shows_what_shared_prefixes_save(tmp_path, capsys):
    """Whether trees are worth it depends on the data alone."""
    path = tmp_path / "answers.jsonl"
    asked = [{"role": "user", "content": "q"}]
    records = [{"prompt": asked, "responses": ["a", "b"]}, {"prompt": asked, "responses": ["a"]}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    show.main(["--data-path", str(path), "--split", "1", "--samples", "2"], "show")
    told = capsys.readouterr().out
    assert "--- answers: 7 tokens, 4 trained; 10 as sequences, 1.4 times as many\n" in told
    assert (
        "answers  shared prefixes are computed once: 12 tokens; as sequences 15, "
        "1.25 times as many\n" in told
    )


def test_counts_no_more_than_asked(options, capsys):
    """A million records would be tokenized to show three."""
    show.main([*options, "--samples", "0", "--count", "1"], "show")
    counted = capsys.readouterr().out.splitlines()[1].split()
    assert int(counted[1]) + int(counted[-1]) == 1


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        (["--no-such-flag"], "unknown option --no-such-flag"),
        (["--mock-data"], "pass either --data-path FILE or"),
    ],
)
def test_wrong_options_are_one_line(options, more, fault, capsys):
    """A traceback hides which option is wrong."""
    with pytest.raises(SystemExit) as ended:
        show.main([*options, *more], "megatron-sft show")
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"megatron-sft show: error: {fault}")
    assert error.count("\n") == 1


def test_asks_for_data_alone(options, capsys):
    """Whoever wants to see data has no layout, batch size or learning rate yet."""
    show.main([*options[len(BASE.split()) :], "--samples", "0"], "megatron-sft show")
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["chats", "2"]


def test_needs_no_torch(options):
    """It is for machines without GPUs, and for an answer at once."""
    command = (
        "import sys; from megatron.sft.commands.show import main; main(sys.argv[1:], 'show'); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", command, *options], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
