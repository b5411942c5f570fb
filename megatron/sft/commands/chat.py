"""pure. `megatron-sft chat FOLDER`: talk to a model in the terminal, through transformers.

The folder may be a HuggingFace model, a PEFT adapter, or checkpoints of a run. Checkpoints are
exported to a temporary HuggingFace folder first.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from megatron.packing.flag_help import Command
from megatron.packing.flags import FlagError, parse_flags
from megatron.packing.quoting import shortened, shown
from megatron.packing.rules import Rule, at_least, check_rules, in_range
from megatron.sft.base_exceptions import describe_failure, is_failure
from megatron.sft.data.hf_tokenizer import HuggingFaceTokenizer, build_hugging_face
from megatron.sft.data.image_chats import ImageChats
from megatron.sft.data.records.content import Conversation
from megatron.sft.data.records.images import MessageImage
from megatron.sft.data.records.messages import Message
from megatron.sft.data.templates.named import NamedTemplates
from megatron.sft.environment import exit_with_message, outlive_output, silence_warnings
from megatron.sft.images.source import pixels_of, source_of_text
from megatron.sft.images.vision import FAMILIES, read_vision
from megatron.sft.model.checkpoints.folder import distributed_checkpoint
from megatron.sft.model.huggingface.config_file import read_config
from megatron.sft.model.huggingface.files import ADAPTER_CONFIG, some
from megatron.sft.model.huggingface.names import wrapper_message
from megatron.sft.model.huggingface.refusals import check_served
from megatron.sft.model.huggingface.score_config import is_reward_model
from megatron.sft.model.lora.peft_folder import read_adapter_config
from megatron.sft.options.chat_template import TemplateChoice, read_variables
from megatron.sft.options.hub_names import check_hub_name

_ENDS = ("/exit", "/quit")
_CLEAR, _IMAGE = "/clear", "/image"
_BYTES_PER_FILE = 5_000_000_000


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Conversation."""

    folder: str | None = field(default=None, metadata={"positional": True})
    """HuggingFace model, PEFT adapter, or folder of a run's checkpoints."""
    max_new_tokens: int = 512
    """Tokens of an answer."""
    temperature: float = 0.0
    """Randomness of answers (0: always the likeliest token)."""
    top_p: float = 1.0
    """Share of probability that random answers are drawn from."""
    system: str | None = None
    """System message that each conversation begins with."""
    chat_template_kwargs: str | None = field(default=None, metadata={"is_json": True})
    """Variables of the chat template, as JSON, such as {"enable_thinking": false}."""
    seed: int = 1234
    """Random seed."""
    image: tuple[str, ...] = ()
    """Image files that the first message begins with; in the terminal, /image FILE does it for the
    next message.
    """
    image_max_pixels: int = 1024 * 1024
    """Resize larger images to at most so many pixels."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            when=lambda options: options.folder is None,
            why="the folder of a model is needed: megatron-sft chat FOLDER",
        ),
        *at_least(1, "max_new_tokens", "image_max_pixels"),
        *at_least(0, "temperature", "seed"),
        *in_range(1e-6, 1, "top_p"),
    )

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)
        read_variables(self.chat_template_kwargs)


class Speaker(Protocol):
    """A model that answers messages."""

    def answer(self, messages: Sequence[dict[str, Any]], options: ChatOptions) -> str:
        """Returns the next message of a conversation, and prints it."""

    def check_image(self, path: str) -> None:
        """Raises ValueError for an image that cannot be read, or that the model does not see."""


class TransformersSpeaker(NamedTuple):
    """A model of transformers or peft, with its tokenizer."""

    model: Any
    tokenizer: Any
    templates: NamedTemplates
    images: ImageChats | None = None
    """Puts images into a conversation; None for a model that sees none."""

    def check_image(self, path: str) -> None:
        """Raises ValueError for an image that cannot be read, or that the model does not see."""
        if self.images is None:
            raise ValueError(
                f"{path}: the model sees no images; only folders of {', '.join(FAMILIES)} with "
                "their image processor do, and Pillow is needed"
            )
        self.images.sized([_message({"role": "user", "content": "", "images": [path]})])

    def answer(self, messages: Sequence[dict[str, Any]], options: ChatOptions) -> str:
        """Returns the next message of a conversation. Prints it token by token."""
        from transformers import TextStreamer

        # Not by transformers, which renders a template without bounds on time and memory.
        conversation = Conversation([_message(message) for message in messages])
        prompt = self.templates.select(conversation).prompt(conversation)
        inputs = self.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        # Some tokenizers return them, and most models refuse them.
        inputs.pop("token_type_ids", None)
        if self.images is not None:
            inputs = self._with_images(self.images, inputs["input_ids"][0], conversation)
        inputs = {name: tensor.to(self.model.device) for name, tensor in inputs.items()}
        _check_rows(inputs["input_ids"], self.model, self.tokenizer)
        samples = options.temperature > 0
        drawn = {"temperature": options.temperature, "top_p": options.top_p} if samples else {}
        made = self.model.generate(
            **inputs,
            max_new_tokens=options.max_new_tokens,
            do_sample=samples,
            streamer=TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
            **drawn,
        )
        return self.tokenizer.decode(
            made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )

    def _with_images(
        self, chats: ImageChats, ids: Any, conversation: Conversation
    ) -> dict[str, Any]:
        """Returns the inputs of a prompt [n] with its images, as in training."""
        import torch

        from megatron.sft.images.tower import ImageProcessor

        chats.check_texts(conversation)
        images = chats.sized(conversation.messages)
        words = ids.numpy().astype(np.int32)
        grids = [chats.grid(image) for image in images]
        expanded = chats.expand(words, np.zeros(len(words), np.float32), grids)
        row = torch.from_numpy(expanded.ids.astype(np.int64))[None]
        inputs = {"input_ids": row, "attention_mask": torch.ones_like(row)}
        # transformers 5 tells words from images by them.
        if "mm_token_type_ids" in signature(self.model.forward).parameters:
            inputs["mm_token_type_ids"] = (row == chats.vision.image_token).long()
        if images:
            pixels = [torch.from_numpy(pixels_of(one.source, one.size)) for one in images]
            patches, grids_of_tower = ImageProcessor(chats.vision)(pixels)
            inputs |= {"pixel_values": patches, "image_grid_thw": torch.tensor(grids_of_tower)}
        return inputs


def _message(message: Mapping[str, Any]) -> Message:
    images = [MessageImage(0, source_of_text(path, "image")) for path in message.get("images", ())]
    return Message(message["role"], message["content"], images=images)


def _check_rows(ids: Any, model: Any, tokenizer: Any) -> None:
    num_rows, largest = model.get_input_embeddings().weight.shape[0], int(ids.max())
    if largest >= num_rows:
        raise ValueError(
            f"the conversation holds the token {tokenizer.decode([largest])} with id {largest}, "
            f"but the model has only {num_rows} rows of embeddings; leave it out"
        )


def main(arguments: Sequence[str], program: str) -> None:
    """Reads questions from the terminal or a pipe until it ends, and answers them."""
    outlive_output()
    silence_warnings(0)  # of transformers and peft, about one another
    about = "Talk to a model in the terminal, through transformers."
    try:
        (options,) = parse_flags(
            (ChatOptions,),
            arguments,
            Command(program=program, about=about, usage="FOLDER [options]"),
        )
        with ExitStack() as end:
            folder = end.enter_context(huggingface_folder(options.folder))
            converse(open_speaker(folder, options), options)
    except KeyboardInterrupt:
        print()
    except (FlagError, ValueError, OSError, ImportError) as failure:
        exit_with_message(program, failure)


@contextmanager
def huggingface_folder(given: str) -> Iterator[Path]:
    """Yields a folder that transformers or peft can load. For checkpoints it is a temporary export,
    which is removed at the end.
    """
    check_hub_name(given, is_data=False)
    if not Path(given).is_dir():
        raise ValueError(f"{given}: no such folder; give that of a model or of checkpoints")
    if distributed_checkpoint(given) is None:
        yield Path(given)
        return
    from megatron.sft.commands.export import export

    with TemporaryDirectory(prefix="megatron-sft-chat-") as place:
        folder = Path(place) / "model"
        print(f"writing {given} as a HuggingFace folder ...", flush=True)
        export(given, folder, _BYTES_PER_FILE)
        yield folder


def open_speaker(folder: Path, options: ChatOptions) -> Speaker:
    """Loads a model and its tokenizer, onto the GPU if there is one. Raises ValueError if the
    folder has no model, or no chat template.
    """
    has_adapter = (folder / ADAPTER_CONFIG).is_file()
    for name in ("transformers", "peft")[: 1 + has_adapter]:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"chat needs the package {name}; do pip install {name}")
    is_model = (folder / "config.json").is_file()
    _check_files(folder, is_model, has_adapter)
    import torch
    import transformers

    from megatron.packing.device import Device

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(options.seed)
    # Without it transformers asks on a terminal whether to run the folder's code.
    no_code = {"trust_remote_code": False}
    variables = read_variables(options.chat_template_kwargs)
    choice = TemplateChoice(today=date.today(), variables=variables)
    read = build_hugging_face(str(folder), choice, flag="")
    if not read.templates.by_name:
        raise ValueError(
            f"{folder} has no chat template; put a chat_template.jinja into it, or fine-tune with "
            "--chat-template"
        )
    if read.files.rebuilt_as is not None:
        print(shortened(read.note), flush=True)
    base = folder if is_model else Path(str(read_adapter_config(folder)["base_model_name_or_path"]))
    try:
        model = _load_model(folder, base, {"dtype": "auto", **no_code}).eval()
    except BaseException as error:  # of many kinds: no memory, a family of a later version
        if not is_failure(error) or isinstance(error, (ValueError, torch.OutOfMemoryError)):
            raise
        raise ValueError(f"{folder} cannot be loaded: {describe_failure(error)}") from None
    if Device.here().is_gpu:
        model = model.cuda()
    return TransformersSpeaker(
        model, read.tokenizer, read.templates, _image_chats(base, read, options.image_max_pixels)
    )


def _sees_images(folder: Path) -> bool:
    """Returns whether a model has a vision tower whose images are read here."""
    if not (folder / "config.json").is_file():
        return False
    config = read_config(folder)
    return config.get("model_type") in FAMILIES and "vision_config" in config


def _image_chats(
    folder: Path, tokenizer: HuggingFaceTokenizer, max_pixels: int
) -> ImageChats | None:
    if not _sees_images(folder) or importlib.util.find_spec("PIL") is None:
        return None
    vision = read_vision(folder, max_pixels)
    literals = tuple(tokenizer.show([token]) for token in vision.reserved_tokens)
    return ImageChats(vision, literals)


def _check_files(folder: Path, is_model: bool, has_adapter: bool) -> None:
    """Raises ValueError if a folder is no model or adapter, or a run would refuse its files."""
    _refuse_scores(folder, is_model, has_adapter)
    if is_model or not has_adapter:
        check_served(folder, folder if has_adapter else None)
        return
    base = str(read_adapter_config(folder).get("base_model_name_or_path"))
    if os.path.isdir(base):
        check_served(Path(base), folder)
    elif os.path.isabs(base):
        raise ValueError(
            f"{folder / ADAPTER_CONFIG} has base_model_name_or_path {shown(base)}, but no such "
            "folder is there; write the base model's folder into it"
        )


def _refuse_scores(folder: Path, is_model: bool, has_adapter: bool) -> None:
    """Raises ValueError for a reward model, or the adapter of one: it has no words to say."""
    adapter = read_adapter_config(folder) if has_adapter else {}
    is_scored = is_model and is_reward_model(read_config(folder))
    if is_scored or adapter.get("task_type") == "SEQ_CLS":
        raise ValueError(
            f"{folder} is a reward model, which scores answers and writes none; megatron-sft score "
            "--write-scores FILE writes its scores"
        )


def _load_model(folder: Path, base: Path, options: dict[str, Any]) -> Any:
    """Loads a model, with its adapter if there is one. Raises ValueError if transformers would
    leave a weight random.

    base: `folder`, or that of the model that an adapter stands beside.
    """
    import transformers

    library: Any = transformers
    sees_images = _sees_images(base)
    automatic = library.AutoModelForImageTextToText if sees_images else library.AutoModelForCausalLM
    if base != folder:
        import peft

        if not sees_images:
            return peft.AutoPeftModelForCausalLM.from_pretrained(str(folder), **options)
        model = automatic.from_pretrained(str(base), **options)
        return peft.PeftModel.from_pretrained(model, str(folder))
    model, report = automatic.from_pretrained(str(folder), output_loading_info=True, **options)
    missing = sorted(report["missing_keys"])
    if missing and not (folder / ADAPTER_CONFIG).is_file():  # then it is the adapter's report
        wrapper = wrapper_message(report["unexpected_keys"], missing)
        raise ValueError(
            f"{folder} {wrapper or f'lacks {some(missing)}, which its config.json asks for'}"
        )
    return model


def converse(speaker: Speaker, options: ChatOptions) -> None:
    """Answers lines of standard input, until it ends or one says /exit."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(
            f"{_CLEAR} forgets the conversation, {_IMAGE} FILE shows an image, {_ENDS[0]} ends",
            flush=True,
        )
    opening = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages: list[dict[str, Any]] = list(opening)
    images = list(options.image)
    for path in images:
        speaker.check_image(path)
    while True:
        try:
            said = input("> " if is_terminal else "").strip()
        except EOFError:
            return
        if said in _ENDS:
            return
        if said == _CLEAR:
            messages, images = list(opening), []
        elif said.split(maxsplit=1)[:1] == [_IMAGE]:
            path = said.removeprefix(_IMAGE).strip()
            try:
                speaker.check_image(path)
            except ValueError as fault:
                print(fault, flush=True)
            else:
                images.append(path)
        elif said:
            shown_images = {"images": images} if images else {}
            messages.append({"role": "user", "content": said, **shown_images})
            images = []
            answer = speaker.answer(messages, options)
            messages.append({"role": "assistant", "content": answer})
