"""pure. Writes README.md into a folder with a trained model: its base model, data and training, and
how to load it. Checkpoints have one, too, for a later export.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from megatron.packing.folder_gate import write_output
from megatron.packing.versions import package_version
from megatron.sft.model.checkpoints.folder import huggingface_source
from megatron.sft.options.chat_template import to_json
from megatron.sft.options.config import SFTConfig
from megatron.sft.report.metrics_file import read_metrics
from megatron.sft.report.report import table

CARD = "README.md"


def write_card(
    folder: Path, config: SFTConfig, run_dir: Path | None, last: int | None = None
) -> None:
    """Writes the card into `folder`; `run_dir` has the metrics of the run, whose last step is
    `last`.
    """
    write_output(folder / CARD, "\n".join(_lines(config, run_dir, last)) + "\n")


def _lines(config: SFTConfig, run_dir: Path | None, last: int | None) -> Iterator[str]:
    output, training = config.output, config.training
    base = huggingface_source(output.pretrained_checkpoint)
    is_adapter = config.lora.writes_adapter
    yield "---"
    if base is not None:
        yield f"base_model: {json.dumps(Path(base).name)}"
    yield f"library_name: {'peft' if is_adapter else 'transformers'}"
    yield "pipeline_tag: text-generation"
    yield "tags: [megatron-sft]"
    yield "---"
    yield ""
    yield f"# {Path(output.save_hf or output.save or 'model').name}"
    yield ""
    what = "An adapter (LoRA) for" if is_adapter else "A fine-tune of"
    yield f"{what} `{Path(base).name}`." if base else "A model trained from random weights."
    yield "Written by megatron-sft; check this text before you publish it."
    yield ""
    yield "## Training"
    yield ""
    yield "| | |"
    yield "|---|---|"
    for name, value in _facts(config):
        yield f"| {name} | {value} |"
    if run_dir is not None:
        yield ""
        yield "```"
        rows = table(read_metrics(run_dir), run_dir, last)
        width = max(len(name) for name, _ in rows)
        yield from (f"{name:<{width}}  {value}".rstrip() for name, value in rows)
        yield "```"
    yield ""
    yield "## Use"
    yield ""
    yield "```python"
    loader = "AutoPeftModelForCausalLM" if is_adapter else "AutoModelForCausalLM"
    yield f"from {'peft' if is_adapter else 'transformers'} import {loader}"
    yield "from transformers import AutoTokenizer"
    yield ""
    yield f'model = {loader}.from_pretrained("FOLDER")'
    yield 'tokenizer = AutoTokenizer.from_pretrained("FOLDER")'
    yield "```"
    yield ""
    yield f"Seed {training.seed}; the same options give the same weights on the same machine."


def _facts(config: SFTConfig) -> Iterator[tuple[str, str]]:
    training, lora = config.training, config.lora
    data = ", ".join(f"`{Path(path).name}`" for path in config.data.paths)
    yield "data", data or "synthetic tokens"
    yield "steps", f"{training.train_iters:,} of {training.global_batch_size:,} sequences"
    yield "longest sequence", f"{config.model.seq_length:,} tokens"
    yield (
        "learning rate",
        f"{training.lr:g} at its peak, {training.lr_decay_style}, {training.min_lr:g} at the least",
    )
    yield "weight decay", f"{training.weight_decay:g}"
    if config.data.template_choice.variables:
        yield "chat_template_kwargs", f"`{to_json(config.data.template_choice.variables)}`"
    yield "precision", "bfloat16 with float32 main weights" if training.bf16 else "float32"
    if lora.lora:
        targets = " ".join(lora.lora_target_modules) or "all-linear"
        yield "LoRA", f"rank {lora.lora_rank}, alpha {lora.lora_alpha:g}, on {targets}"
    names = ("megatron-sft", "megatron-core", "torch")
    yield "versions", ", ".join(f"{name} {package_version(name)}" for name in names)
