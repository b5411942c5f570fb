"""pure. The chat templates of a tokenizer by name, and the one that a conversation is rendered by.

A folder may have several: a list in tokenizer_config.json, or files in additional_chat_templates/
beside chat_template.jinja. As in transformers, `tool_use` renders conversations with tools, and
`default` all others. A template with another name, as `rag`, is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.packing.user_files import read_json
from megatron.sft.data.records.content import Conversation
from megatron.sft.data.records.messages import Message
from megatron.sft.data.records.turns import Contexts
from megatron.sft.data.templates.chat_template import ChatTemplate, SlowTemplateError
from megatron.sft.data.templates.probes import PROBES

DEFAULT, TOOL_USE = "default", "tool_use"
TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates")
"""File and folder of chat templates, which transformers reads instead of tokenizer_config.json."""
PROCESSOR_FILES = ("processor_config.json", "chat_template.json")
"""Files in which a processor may have a chat template of its own. A processor of transformers reads
them first, a tokenizer never."""


@dataclass(frozen=True)
class NamedTemplates:
    """Templates by name; {} if the tokenizer has none."""

    by_name: Mapping[str, ChatTemplate]

    def select(self, conversation: Conversation) -> ChatTemplate:
        """Returns the template of a conversation. Raises ValueError if there is none."""
        name = TOOL_USE if conversation.tools and TOOL_USE in self.by_name else DEFAULT
        if name in self.by_name:
            return self.by_name[name]
        if self.by_name:
            raise ValueError(
                f"the tokenizer of --tokenizer-model has the chat templates "
                f"{', '.join(self.by_name)}, but none named default, which conversations without "
                "tools need; pass --chat-template FILE"
            )
        raise ValueError(
            "the tokenizer of --tokenizer-model has no chat template, which conversations need; "
            "pass --chat-template FILE"
        )

    @property
    def contexts(self) -> Contexts:
        """Relation of contexts to one rendering, for the templates together."""
        found = {self._contexts(name) for name in (DEFAULT, TOOL_USE) if name in self.by_name}
        return next((one for one in ("differ", "unknown") if one in found), "kept")  # type: ignore[return-value]

    def _contexts(self, name: str) -> Contexts:
        try:
            return self.by_name[name].contexts
        except SlowTemplateError:
            raise
        except ValueError:
            if name == DEFAULT:
                raise
            return "kept"  # its fault is an error when a record with tools comes


def read_templates(of_tokenizer: object, folder: str) -> dict[str, str]:
    """Returns the templates of a folder by name; {} without any. Raises ValueError if one of them
    is no text.

    of_tokenizer: `chat_template` of transformers' tokenizer: a text, texts by name, or None.
    """
    if not of_tokenizer:
        of_processor = processor_template(Path(folder))
        return {} if of_processor is None else {DEFAULT: of_processor}
    by_name: Any = of_tokenizer if isinstance(of_tokenizer, dict) else {DEFAULT: of_tokenizer}
    if not all(isinstance(text, str) for text in by_name.values()):
        raise ValueError(
            "--tokenizer-model has a chat_template that is no text; pass --chat-template FILE"
        )
    return dict(by_name)


def note_on_templates(templates: NamedTemplates, of_tokenizer: object, folder: str) -> str:
    """Returns which of a folder's templates are used, in a line; "" if there is no choice."""
    by_name, of_processor = templates.by_name, processor_template(Path(folder))
    if len(by_name) > 1:
        use = "default renders all records"
        if TOOL_USE in by_name:
            use = "tool_use renders records with tools, default all others"
        return f"chat templates {', '.join(sorted(by_name))}: {use}"
    if of_processor is None or DEFAULT not in by_name:
        return ""
    if not of_tokenizer:
        return "the tokenizer has no chat template: that of its processor is used"
    if render_alike(by_name[DEFAULT], of_processor):
        return ""
    return (
        "the processor has another chat template than the tokenizer, whose is used; what is "
        "exported has it for both"
    )


def processor_template(folder: Path) -> str | None:
    """Returns the chat template in the files of a processor; None if they have none."""
    for name in PROCESSOR_FILES:
        try:
            held = read_json(folder / name) if (folder / name).is_file() else {}
        except ValueError as error:
            raise ValueError(f"{folder / name} cannot be read: {error}") from None
        template = held.get("chat_template") if isinstance(held, dict) else None
        if isinstance(template, str):
            return template
    return None


def render_alike(template: ChatTemplate, source: str) -> bool:
    """Returns whether a template and another source render short conversations of text alike."""
    other = replace(template, source=source)
    talks = [
        messages
        for messages in PROBES
        if not any("tool_calls" in message.fields for message in messages)
    ]
    return all(_texts(template, messages) == _texts(other, messages) for messages in talks)


def _texts(template: ChatTemplate, messages: Sequence[Message]) -> list[str] | None:
    """Returns the prompts behind each message; None if the template fails."""
    try:
        return [
            template.prompt(Conversation(list(messages[:number])))
            for number in range(1, len(messages) + 1)
        ]
    except SlowTemplateError:
        raise
    except ValueError:
        return None
