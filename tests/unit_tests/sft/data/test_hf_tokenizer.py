"""The files of a tokenizer, before transformers reads them."""

import json

import pytest

from megatron.sft.data.hf_tokenizer import check_tokenizer_types


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("model_max_length", "x", "float"),
        ("model_max_length", True, "float"),
        ("eos_token", 5, "str or dict"),
        ("added_tokens_decoder", [], "dict"),
        ("tokenizer_class", {"a": 1}, "str"),
        ("model_input_names", "y" * 3000, "list"),
    ],
)
def test_values_of_a_wrong_type_name_file_and_key(tmp_path, key, value, kind):
    """The faults were "'>' not supported between instances of 'int' and 'str'" in each record, and
    "'bool' object has no attribute 'removesuffix'".
    """
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(
        ValueError, match=f"tokenizer_config.json has {key} .*of type {kind}$"
    ) as end:
        check_tokenizer_types(tmp_path)
    assert len(str(end.value)) < 400  # values are cut short


@pytest.mark.parametrize("entry", ["text", {"name": "default"}, {"name": 1, "template": "x"}])
def test_a_list_of_templates_names_its_fault(tmp_path, entry):
    """The fault was "cannot be read: 'template'". A file beside it goes first in transformers."""
    listed = json.dumps({"chat_template": [entry]})
    (tmp_path / "tokenizer_config.json").write_text(listed)
    with pytest.raises(ValueError, match="list chat_template, but not of objects with a name"):
        check_tokenizer_types(tmp_path)
    (tmp_path / "chat_template.jinja").touch()
    check_tokenizer_types(tmp_path)


def test_files_as_they_are_written_pass(tmp_path):
    """transformers writes 10**30 for an endless length, and tokens in two forms."""
    check_tokenizer_types(tmp_path)
    token = {"__type": "AddedToken", "content": "</s>"}
    values = {"model_max_length": 10**30, "bos_token": "<s>", "eos_token": token, "unk_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values | {"auto_map": [None, None]}))
    check_tokenizer_types(tmp_path)
