"""What a run says of its chat template."""

from pathlib import Path

import pytest

from megatron.packing.flags import FlagError
from megatron.sft.arguments.parse import parse_config
from megatron.sft.options.chat_template import read_date, read_variables, to_json
from megatron.sft.options.config import SFTConfig
from tests.unit_tests.sft.command_line import BASE

CHATS = "--data-path chats.jsonl --tokenizer-model tokenizer"


def parse(text: str, *more: str) -> SFTConfig:
    """`more`: arguments that may hold spaces."""
    return parse_config([*BASE.split(), *text.split(), *more], 1)


def test_variables_of_the_command_line_and_of_yaml(tmp_path: Path) -> None:
    """A mapping in YAML is what a JSON object is on the command line, in any order."""
    given = '{"reasoning_effort": "low", "enable_thinking": false}'
    (tmp_path / "run.yaml").write_text(
        "chat_template_kwargs:\n  enable_thinking: false\n  reasoning_effort: low\n"
    )
    lines = (["--chat-template-kwargs", given], ["--config", str(tmp_path / "run.yaml")])
    found = [parse(CHATS, *line).data.template_choice.variables for line in lines]
    assert found[0] == found[1] == {"enable_thinking": False, "reasoning_effort": "low"}
    assert len({to_json(one) for one in found}) == 1
    assert read_variables(None) == read_variables("{}") == {}


@pytest.mark.parametrize(
    "text", ["enable_thinking=false", "[1]", "1", '{"a": 1', '{"messages": []}', '{"tools": 1}', ""]
)
def test_what_is_no_object_of_variables_is_refused(text: str) -> None:
    """A template that is given another conversation would train that one."""
    with pytest.raises(FlagError, match="--chat-template-kwargs must be a JSON obj"):
        parse(CHATS, "--chat-template-kwargs", text)


def test_variables_need_a_template() -> None:
    """Bytes and numbers have none: nothing would read them."""
    with pytest.raises(FlagError, match="--chat-template-kwargs needs --tokenizer-m"):
        parse("--data-path chats.jsonl", "--chat-template-kwargs", '{"a": 1}')


@pytest.mark.parametrize("text", ["today", "2025-13-01", "30.6.2025"])
def test_what_is_no_date_is_refused(text: str) -> None:
    """Read as another day, samples would be others."""
    with pytest.raises(ValueError, match="--template-date must be a date such as 2025-06-30"):
        read_date(text)
