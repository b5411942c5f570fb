"""pure. Writes the files of a HuggingFace folder other than weights: config.json, tokenizer, chat
template, generation_config.json.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.packing.quoting import shown
from megatron.sft.data.chat_encoder import Tokenizer
from megatron.sft.data.hf_tokenizer import HuggingFaceTokenizer
from megatron.sft.data.records.content import Conversation
from megatron.sft.data.records.messages import Message
from megatron.sft.data.templates.named import TOOL_USE
from megatron.sft.data.tokenizer import BYTE_LEVEL_SPECIAL_TOKENS
from megatron.sft.images.vision import FAMILIES
from megatron.sft.model.checkpoints.folder import huggingface_source
from megatron.sft.model.huggingface.config import config_of, with_rope_scaling
from megatron.sft.model.huggingface.config_file import read_config
from megatron.sft.model.huggingface.families.registry import language_model
from megatron.sft.model.huggingface.folder import DTYPES, Folder, open_source
from megatron.sft.model.huggingface.headers import Stored
from megatron.sft.model.huggingface.names import are_stacked, with_stacked_experts
from megatron.sft.model.huggingface.older_rope import with_older_rope
from megatron.sft.model.huggingface.quantized.methods import without_quantization
from megatron.sft.model.huggingface.score_config import is_reward_model, with_score
from megatron.sft.model.huggingface.served_files import (
    copy_processor,
    copy_tokenizer,
    read_object,
    write_as_read,
    write_object,
)
from megatron.sft.model.huggingface.weights import Head, Tower, Weights
from megatron.sft.model.lora.names import AdapterWeights
from megatron.sft.model.lora.peft_folder import write_adapter_config
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.images import ImageConfig
from megatron.sft.options.model import ModelConfig

COMPANIONS = "huggingface"
"""Folder of a checkpoint with these files, for a later export of its weights."""
_GENERATION = "generation_config.json"
_BYTE_LEVEL_TEMPLATE = (
    "{% for message in messages %}{{ '<' ~ message.role ~ '>' }}{% if message.role == 'assistant' "
    "%}{% generation %}{{ message.content ~ '<end>' }}{% endgeneration %}{% else %}{{ "
    "message.content ~ '<end>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<assistant>' }}{% endif %}"
)


class Companions(NamedTuple):
    """The files of a run's model in HuggingFace form, without its weights."""

    config: SFTConfig
    tokenizer: Tokenizer | None
    """None for mock data: then there are no tokenizer files."""
    vocab_size: int
    dtype: str
    """Type of the weights for a model that was trained from scratch."""

    def model_config(self) -> dict[str, Any]:
        """Returns the content of config.json: that of the folder training started from, or a new
        one. Raises ValueError if no HuggingFace family computes this model.
        """
        source = huggingface_source(self.config.output.pretrained_checkpoint)
        if source is None:
            found = config_of(self.config.model, self.vocab_size)
            if self.tokenizer is not None:
                found |= {
                    "bos_token_id": None,
                    "eos_token_id": self.tokenizer.eod,
                    "pad_token_id": self.tokenizer.pad,
                }
        else:
            found = read_config(source)
            found.pop("_name_or_path", None)
            found.pop("transformers_weights", None)  # a file of the source, not of the export
            found = without_quantization(found)
            scaling = self.config.model.rope_scaling
            if scaling is not None:
                found = with_rope_scaling(found, scaling) or found
        # transformers 5 writes "dtype", earlier ones "torch_dtype", which all of them read.
        if found.get("dtype") is None and found.get("torch_dtype") is None:
            found["torch_dtype"] = self.dtype
        if self.config.preference.scores_answers:
            found = with_score(found, None if self.tokenizer is None else self.tokenizer.pad)
        return with_older_rope(found)

    def has_family(self) -> bool:
        """Returns whether a HuggingFace family computes this model."""
        try:
            self.model_config()
        except ValueError:
            return False
        return True

    def source(self) -> Folder | None:
        """Returns the HuggingFace folder that training started from, if it is one and has tensors
        that an export needs.
        """
        folder = huggingface_source(self.config.output.pretrained_checkpoint)
        return None if folder is None else open_source(folder)

    def weights(self) -> Weights:
        """Returns the table of the tensors that belong to this config.json."""
        source = self.source()
        tensors = {} if source is None else source.tensors
        return weights_of(
            self.config.model, self.model_config(), tensors, images=self.config.images
        )

    def are_saved(self) -> bool:
        """Returns whether checkpoints include these files. They do if `megatron-sft export` can
        write the model.
        """
        return not self.config.lora.lora and self.has_family()

    def dtype_written(self) -> str:
        """Returns the type that weights are exported in, by its name in torch."""
        return dtype_of(self.model_config())

    def write(self, folder: Path) -> str:
        """Writes all files but the weights, and returns the type of the weights in config.json."""
        model_config = self.model_config()
        source = huggingface_source(self.config.output.pretrained_checkpoint)
        write_object(folder / "config.json", model_config)
        generation = {} if source is None else read_object(Path(source) / _GENERATION)
        if source is not None:
            copy_processor(Path(source), folder)
        if self.tokenizer is not None:
            generation = _with_end_of_turn(generation, model_config, self.tokenizer)
            _write_tokenizer(folder, self.config, self.tokenizer)
        if generation:
            write_object(folder / _GENERATION, generation)
        return dtype_of(model_config)

    def write_beside_adapter(self, weights: AdapterWeights, folder: Path) -> None:
        """Writes the files of a PEFT folder other than weights: its config, and the tokenizer with
        the chat template of the training.
        """
        base = self.config.output.pretrained_checkpoint
        assert base is not None
        write_adapter_config(folder, self.config.lora, weights, base)
        if self.tokenizer is not None:
            _write_tokenizer(folder, self.config, self.tokenizer)


def copy_companions(source: Path, target: Path) -> str:
    """Copies the files that `Companions.write` has written, and returns the type of the weights in
    config.json.
    """
    shutil.copytree(source, target, dirs_exist_ok=True)
    return dtype_of(read_config(source))


def weights_of(
    model: ModelConfig,
    model_config: Mapping[str, Any],
    tensors: Mapping[str, Stored] = MappingProxyType({}),
    head: Head | None = None,
    images: ImageConfig | None = None,
) -> Weights:
    """Returns the table of tensors of a model whose config.json is `model_config`.

    tensors: those of the folder that training started from. Experts may be one tensor each, or one
    stack per layer, and an export keeps the form of that folder. head: None for what config.json
    says. images: options of a run with images, whose table has the vision tower, too.
    """
    family, text, prefix = language_model(model_config)
    if head is None:
        head = "score" if is_reward_model(model_config) else "words"
    if are_stacked(tensors):
        family = with_stacked_experts(family, tensors, model.hidden_size)
    tower = None
    if images is not None and images.images:
        vision = FAMILIES[model_config["model_type"]]
        shapes = {
            name: stored.shape for name, stored in tensors.items() if name.startswith(vision.prefix)
        }
        is_trained = partial(vision.is_trained, images=images)
        tower = Tower(vision.prefix, shapes, is_trained, images.freeze_language_model)
    return Weights(model, text.number("vocab_size"), family, prefix, head, tower)


def dtype_of(model_config: Mapping[str, Any]) -> str:
    """Returns the type of the weights in a config.json, by its name in torch. Raises ValueError if
    weights cannot be written in it.
    """
    dtype = model_config.get("dtype") or model_config["torch_dtype"]
    if dtype not in DTYPES.values():
        raise ValueError(
            f"config.json has dtype {shown(dtype)}, but must have {' or '.join(DTYPES.values())}; "
            "correct it"
        )
    return dtype


def _with_end_of_turn(
    generation: dict[str, Any], model_config: Mapping[str, Any], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Returns the generation config with all tokens that the model was trained to end a turn with
    added to `eos_token_id`. Without them generation would run on after an answer.
    """
    known = generation.get("eos_token_id", model_config.get("eos_token_id"))
    ends = [known] if isinstance(known, int) else list(known or [])
    new = [end for end in ends_of_turns(tokenizer) if end not in ends]
    return {**generation, "eos_token_id": [*ends, *new]} if new else generation


def ends_of_turns(tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that the model is trained to end a turn with. There are two if a tool call
    ends in another token than an answer (gpt-oss, GLM). Returns [] without a chat template, or if
    the template trains no end.
    """
    calls = [
        {"type": "function", "function": {"name": name, "arguments": {}}, "id": f"{name}23456789"}
        for name in "fg"
    ]
    answers = [Message("assistant", text) for text in ("yes", "no")]
    of_answers = _common_end(tokenizer, answers)
    if of_answers is None:
        return []
    has_tool_use = isinstance(tokenizer, HuggingFaceTokenizer) and (
        TOOL_USE in tokenizer.templates.by_name
    )
    of_calls = _common_end(
        tokenizer,
        [Message("assistant", "", fields={"tool_calls": [call]}) for call in calls],
        # Calls are then written by the template of conversations with tools.
        [{"type": "function", "function": call["function"]} for call in calls]
        if has_tool_use
        else None,
    )
    return [of_answers] if of_calls in (None, of_answers) else [of_answers, of_calls]  # type: ignore[list-item]


def _common_end(
    tokenizer: Tokenizer, answers: Iterable[Message], tools: list[Any] | None = None
) -> int | None:
    """Returns the token that ends each of these answers; None if it is not the same one, or if the
    end consists of several tokens. A tokenizer that does not know `<|im_end|>` ends it with the
    token `>`, and generation would then stop at any other `>`.
    """
    tails = set()
    for answer in answers:
        try:
            tokens = tokenizer.encode_chat(Conversation([Message("user", "?"), answer], tools))
        except ValueError:
            return None
        trained = tokens.ids[tokens.weights > 0]
        tails.add(tuple(map(int, trained[-2:])))
    lasts = {tail[-1:] for tail in tails}
    if len(lasts) != 1 or not (last := lasts.pop()):
        return None
    # The end is one whole token if the tokens before it differ, being those of the answers, or if
    # it is a special token, which decodes to nothing.
    is_whole = len(tails) > 1 or not tokenizer.decode(list(last))
    return last[0] if is_whole else None


def _write_tokenizer(folder: Path, config: SFTConfig, tokenizer: Tokenizer) -> None:
    if config.data.resolved_tokenizer_type == "ByteLevelTokenizer":
        _write_byte_level(folder)
    elif config.data.resolved_tokenizer_type == "HuggingFaceTokenizer":
        assert config.data.tokenizer_model is not None
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        source = Path(config.data.tokenizer_model)
        copy_tokenizer(source, folder, tokenizer.templates.by_name)
        write_as_read(source, folder, tokenizer.files)


def _write_byte_level(folder: Path) -> None:
    """Writes ByteLevelTokenizer as a tokenizer of transformers. One difference remains: there the
    text "<end>" in a message becomes the special token.
    """
    # GPT-2's byte-level vocabulary: a printable byte stands for itself, any other byte for one of
    # the characters from 256 on.
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    special = [
        {"id": 256 + number, "content": token, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for number, token in enumerate(BYTE_LEVEL_SPECIAL_TOKENS)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    write_object(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        },
    )
    write_object(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<eod>",
            "pad_token": "<pad>",
            "clean_up_tokenization_spaces": False,
            "chat_template": _BYTE_LEVEL_TEMPLATE,
        },
    )
