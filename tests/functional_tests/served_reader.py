"""Reads folders that this project wrote, in an environment that has it not, and prints a line of
JSON for each.

    python served_reader.py transformers|vllm|tokenizers FOLDER ...

`expected.json` of a folder has what is read: sequences, texts and chats.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any


def read_model(folder: Path, expected: dict[str, Any], by_vllm: bool) -> dict[str, Any]:
    """Returns type, ends of generation and mean loss of a model."""
    import torch
    import transformers

    options: dict[str, Any] = {}
    read: dict[str, Any] = {}
    if by_vllm:
        # Of ModelConfig the two functions that read files: the rest imports each model's module.
        from vllm.transformers_utils.config import get_config, try_get_generation_config

        options["config"] = get_config(str(folder), False)
        generation: Any = try_get_generation_config(str(folder), False)
        read["ends"] = generation and generation.eos_token_id
        declared = options["config"].dtype or "none"
        read["dtype"] = str(declared).removeprefix("torch.")
    else:
        generation = transformers.GenerationConfig.from_pretrained(folder)
        read["ends"] = generation.eos_token_id
        declared = transformers.AutoConfig.from_pretrained(folder).dtype
        read["dtype"] = str(declared).removeprefix("torch.")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    )
    if "adapter" in expected:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, expected["adapter"])
    loss = 0.0
    with torch.no_grad():
        for tokens, labels, mask in expected["sequences"]:
            logits = model(input_ids=torch.tensor(tokens)[None], use_cache=False).logits[0].float()
            losses = torch.nn.functional.cross_entropy(
                logits, torch.tensor(labels), reduction="none"
            )
            loss += float((losses * torch.tensor(mask)).sum()) / expected["num_trained"]
    return read | {"loss": loss}


def read_adapter(folder: Path) -> dict[str, Any]:
    """Returns what vLLM takes of an adapter: its ranks; the error where it takes none."""
    from vllm.config import LoRAConfig
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_local_dir(str(folder), None)
    helper.validate_legal(LoRAConfig(max_lora_rank=64))
    return {"r": helper.r, "scale": helper.vllm_lora_scaling_factor}


def read_tokens(folder: Path, expected: dict[str, Any], reader: str) -> dict[str, Any]:
    """Returns tokens of texts, and of chats as a template writes them."""
    if reader == "tokenizers":
        from tokenizers import Tokenizer

        alone = Tokenizer.from_file(str(folder / "tokenizer.json"))
        encoded = [alone.encode(text, add_special_tokens=False).ids for text in expected["texts"]]
        return {"ids": encoded}
    tokenizer: Any
    if reader == "vllm":
        from vllm.tokenizers import get_tokenizer

        tokenizer = get_tokenizer(str(folder))
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = []
    for chat in expected["chats"]:
        try:
            text = tokenizer.apply_chat_template(
                chat["messages"], tools=chat.get("tools"), tokenize=False
            )
        except Exception as error:  # templates raise what they like
            text = type(error).__name__
        chats.append(text)
    return {
        "ids": [tokenizer.encode(text, add_special_tokens=False) for text in expected["texts"]],
        "chats": chats,
        "class": type(tokenizer).__name__,
    }


def main() -> None:
    reader, *folders = sys.argv[1:]
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    for folder in map(Path, folders):
        expected = json.loads((folder / "expected.json").read_text())
        found: dict[str, Any] = {"folder": str(folder)}
        try:
            if "texts" in expected:
                found |= read_tokens(folder, expected, reader)
            if reader != "tokenizers" and "sequences" in expected:
                base = Path(expected.get("base", folder))
                found |= read_model(base, expected, reader == "vllm")
            if reader == "vllm" and "adapter" in expected:
                found |= read_adapter(Path(expected["adapter"]))
        except Exception as error:  # what a library raises is what the page shows
            found["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
