"""pure. Parses --data-columns, which gives columns of data their meaning."""

from __future__ import annotations

from megatron.packing.quoting import shown

COLUMNS = (
    "messages",
    "conversations",
    "conversation",
    "prompt",
    "completion",
    "responses",
    "instruction",
    "query",
    "question",
    "input",
    "context",
    "output",
    "response",
    "answer",
    "system",
    "system_prompt",
    "answers",
    "tools",
    "functions",
    "chat_template_kwargs",
    "history",
    "text",
    "tokens",
    "input_ids",
    "labels",
    "attention_mask",
    "position_ids",
    "completion_mask",
    "assistant_masks",
    "weight",
    "weights",
    "role",
    "content",
    "none",
)
"""Names on the left of --data-columns: keys of records that `data.records.formats` reads, `role`
and `content` of turns, and `none` for a column that is left out.
"""


def parse_columns(text: str | None) -> dict[str, str]:
    """Returns --data-columns as a dict from the column to its name in `COLUMNS`. Raises ValueError
    if it is not valid.

    `"messages=dialogue,none=notes" -> {"dialogue": "messages", "notes": "none"}`
    """
    columns: dict[str, str] = {}
    for pair in [] if text is None else text.split(","):
        name, equals, column = (part.strip() for part in pair.partition("="))
        if name not in COLUMNS or not equals or not column or column in columns:
            raise ValueError(
                "--data-columns must be pairs such as messages=conversation,content=utterance, "
                f"each column once, with {', '.join(COLUMNS)} on the left, but has {shown(pair)}"
            )
        columns[column] = name
    return columns
