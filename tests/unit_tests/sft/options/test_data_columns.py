"""Names of columns, as --data-columns gives them."""

import pytest

from megatron.sft.options.data_columns import parse_columns


@pytest.mark.parametrize(
    "wrong", ["messages", "messages=", "talk=dialogue", "text=a,messages=a", ""]
)
def test_wrong_columns(wrong):
    """A mapping that is mistyped would be passed over."""
    with pytest.raises(
        ValueError,
        match=r"^--data-columns must be pairs such as messages=conversation,content=utter",
    ):
        parse_columns(wrong)
