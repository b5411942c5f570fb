"""The how-to pages: their commands, in order, run. `make howto` runs those of all pages, in
processes of their own.
"""

import io
import os
import shlex
import sys
from pathlib import Path

import pytest

from megatron.sft.__main__ import main
from megatron.sft.launch import taken_apart
from tests.functional_tests.forked_runs import train_forked
from tests.functional_tests.pages import PAGES, commands_of, run_pages, shrunken


def execute(words: list[str], place: Path) -> tuple[int, str]:
    """Runs a command in forked processes."""
    given = taken_apart(words[1:])

    def there() -> None:
        os.chdir(place)
        sys.stdin = io.StringIO("Hi\n")  # for `chat`
        main()

    return train_forked(given.world_size or 1, given.training, there)


@pytest.mark.parametrize("page", ["blend.md", "continue.md", "finetune.md", "look-at-data.md"])
def test_commands_of_a_page(page):
    """Options that exist may refuse the data, the model or what the command before wrote."""
    done = list(run_pages(execute, ("megatron-sft",), page))
    assert done
    for each in done:
        assert each.status == 0, f"{shlex.join(each.words)}\n{each.output}"


def test_pages_have_commands():
    """Without commands the test above passes; what shrinks them must leave them what they are."""
    assert sum(len(commands_of(text)) for text in PAGES.values()) >= 19
    assert "clusters.md" not in PAGES
    assert shrunken(["megatron-sft", "inspect", "data"]) == ["megatron-sft", "inspect", "data"]
    words = shrunken(["megatron-sft", "train", "--tensor-model-parallel-size", "4"])
    assert words[:4] == ["megatron-sft", "train", "--tensor-model-parallel-size", "2"]
