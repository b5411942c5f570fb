"""Names of the hub where a path is needed."""

import pytest

from megatron.packing.flags import FlagError
from megatron.sft.options.hub_names import check_hub_name, check_hub_names, download_advice
from tests.unit_tests.sft.command_line import parse


@pytest.mark.parametrize(
    ("path", "is_data", "line"),
    [
        ("Qwen/Qwen3-8B", False, "hf download Qwen/Qwen3-8B --local-dir Qwen3-8B"),
        ("hf://Qwen/Qwen3-8B", False, "hf download Qwen/Qwen3-8B --local-dir Qwen3-8B"),
        (
            "https://huggingface.co/Qwen/Qwen3-8B/tree/v2",
            False,
            "hf download Qwen/Qwen3-8B --revision v2 --local-dir Qwen3-8B",
        ),
        (
            "https://huggingface.co/Qwen/Qwen3-8B/tree/main",
            False,
            "hf download Qwen/Qwen3-8B --local-dir Qwen3-8B",
        ),
        (
            "tatsu-lab/alpaca",
            True,
            "hf download tatsu-lab/alpaca --repo-type dataset --local-dir alpaca",
        ),
        (
            "hf://datasets/org/chats@v1",
            True,
            "hf download org/chats --repo-type dataset --revision v1 --local-dir chats",
        ),
    ],
)
def test_the_line_to_download_is_given(path, is_data, line):
    """ "download it first" leaves a user with a page of a tool to read."""
    with pytest.raises(ValueError, match="on the hub") as failure:
        check_hub_name(path, is_data=is_data)
    assert f"`{line}`" in str(failure.value)


@pytest.mark.parametrize(
    "path",
    [
        "chats.jsonl",
        "data/chats.jsonl",
        "./org/chats",
        "/org/chats",
        "org/chats/data",
        "org/*.jsonl",
        "s3://org/chats",
        "5",
        "hf://datasets/org/chats/train.jsonl",
        "https://huggingface.co/datasets/org/chats/resolve/main/train.parquet",
        "megatron/qwen3",
        "megatron/sft",
    ],
)
def test_other_paths_are_left_to_their_readers(path, monkeypatch, request):
    """A wrong name in a folder that is there is no name of the hub, and some addresses are read."""
    monkeypatch.chdir(request.config.rootpath)
    check_hub_name(path, is_data=True)


def test_options_with_paths_are_checked():
    """Each option that takes a folder takes one of the hub elsewhere; --load may begin empty."""
    with pytest.raises(
        FlagError, match="--pretrained-checkpoint Qwen/Qwen3: no such folder; if it"
    ):
        parse("--pretrained-checkpoint Qwen/Qwen3")
    with pytest.raises(ValueError, match="--data-path org/b: no such file or folder"):
        check_hub_names({"data_path": ("5", "a.jsonl", "3", "org/b")})
    check_hub_names({"load": "org/b", "save": "org/b", "lr": 1.0, "data_path": ()})


def test_data_that_cannot_be_fetched_have_a_way_out():
    """Behind a firewall the error was a traceback of 120 lines."""
    assert download_advice("hf://datasets/org/chats/a/b.jsonl") == (
        "; download it, `hf download org/chats a/b.jsonl --repo-type dataset --local-dir chats`, "
        "and pass chats/a/b.jsonl"
    )
    assert download_advice("org/chats") == download_advice("s3://a/b.jsonl") == ""
