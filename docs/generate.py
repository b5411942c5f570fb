"""Write the pages of the reference that come from the code: python docs/generate.py

`make docs` does so, and `DOCS=strict make unit` fails where they are old.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from megatron.packing.flags import field_docstrings, flag_of
from megatron.packing.scheduling.registry import SCHEDULERS
from megatron.packing.step.stats import PackingStats
from megatron.sft.arguments.other_trainers import answers_to
from megatron.sft.commands import COMMANDS
from megatron.sft.commands.rules import sections, title_of
from megatron.sft.options.config import GROUPS
from megatron.sft.report.metrics import Evaluation, SourceMetrics, StepMetrics

DOCS = Path(__file__).parent
_NOTE = "<!-- Written by docs/generate.py; change the code instead. -->"
_FLAG = re.compile(r"(--[a-z][a-z0-9-]*)")
MODULES = (
    "megatron.packing.data_schedule",
    "megatron.packing.plugin",
    "megatron.blending",
)
"""Whose public names users import."""
TRAINERS = {
    "trl": (
        "TRL and HuggingFace's Trainer",
        "model_name_or_path dataset_name max_length packing padding_free assistant_only_loss "
        "learning_rate lr_scheduler_type warmup_ratio warmup_steps num_train_epochs max_steps "
        "per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing bf16 "
        "torch_dtype attn_implementation use_peft lora_r lora_target_modules output_dir "
        "save_steps save_total_limit load_best_model_at_end resume_from_checkpoint eval_strategy "
        "beta loss_type loss_weights label_smoothing f_divergence_type ld_alpha cpo_alpha "
        "simpo_gamma desirable_weight ref_model precompute_ref_log_probs use_weighting rpo_alpha "
        "eval_steps logging_steps report_to run_name deepspeed fsdp dataset_num_proc "
        "chat_template_path use_liger_kernel push_to_hub trust_remote_code optim",
    ),
    "llama-factory": (
        "LLaMA-Factory",
        "model_name_or_path stage finetuning_type dataset dataset_dir template cutoff_len packing "
        "neat_packing val_size per_device_train_batch_size gradient_accumulation_steps "
        "learning_rate num_train_epochs lr_scheduler_type warmup_ratio lora_target "
        "additional_target adapter_name_or_path quantization_bit mask_history train_on_prompt "
        "mix_strategy interleave_probs flash_attn deepspeed export_dir overwrite_output_dir "
        "pref_loss pref_beta pref_ftx dpo_label_smoothing simpo_gamma kto_chosen_weight "
        "kto_rejected_weight ref_model ref_model_adapters plot_loss preprocessing_num_workers "
        "freeze_vision_tower freeze_multi_modal_projector freeze_language_model image_max_pixels "
        "media_dir",
    ),
    "axolotl": (
        "Axolotl",
        "base_model datasets test_datasets val_set_size sequence_len sample_packing "
        "pad_to_sequence_len adapter lora_r lora_target_linear lora_target_modules lora_model_dir "
        "load_in_4bit gradient_accumulation_steps num_epochs learning_rate lr_scheduler "
        "optimizer train_on_inputs gradient_checkpointing flash_attention output_dir "
        "saves_per_epoch evals_per_epoch dataset_prepared_path special_tokens wandb_name "
        "rl dpo_beta rpo_alpha dpo_norm_loss dpo_use_weighting orpo_alpha cpo_alpha simpo_gamma "
        "kto_desirable_weight kto_undesirable_weight precompute_ref_log_probs "
        "deepspeed fsdp_config sequence_parallel_degree context_parallel_size",
    ),
    "ms-swift": (
        "ms-swift",
        "model dataset val_dataset split_dataset_ratio max_length truncation_strategy packing "
        "train_type tuner_type target_modules modules_to_save lora_rank learning_rate "
        "num_train_epochs per_device_train_batch_size gradient_accumulation_steps attn_impl "
        "system loss_scale adapters merge_lora output_dir dataloader_num_workers deepspeed "
        "rlhf_type beta loss_type rpo_alpha ld_alpha simpo_gamma desirable_weight ref_model "
        "ref_adapters mcore_ref_model tensor_model_parallel_size max_epochs "
        "freeze_vit freeze_aligner freeze_llm vit_lr aligner_lr max_pixels",
    ),
}
_EXAMPLES = {
    "trl": "trl sft --model_name_or_path Qwen/Qwen3-8B --dataset_name ... --use_peft",
    "llama-factory": "llamafactory-cli train qwen3_lora_sft.yaml",
    "axolotl": "axolotl train qwen3-lora.yaml",
    "ms-swift": "swift sft --model Qwen/Qwen3-8B --dataset ... --train_type lora",
}


def main() -> None:
    """Writes all pages."""
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
        print(f"wrote docs/{name}")


def pages() -> dict[str, str]:
    """Returns path below docs/ -> content."""
    made = {
        "reference/options.md": options(),
        "reference/commands.md": commands(),
        "reference/rules.md": rules(),
        "reference/metrics.md": metrics(),
        "reference/python.md": python(),
    }
    return made | {f"coming-from/{name}.md": coming_from(name) for name in TRAINERS}


def options() -> str:
    """All options of training, by group."""
    lines = [
        _NOTE,
        "",
        "# Options of training",
        "",
        "- On the command line an option is `--seq-length 4096`, in the YAML file of `--config` "
        "`seq_length: 4096`.",
        "- A switch is `--bf16`; `--no-bf16` takes it back.",
        "- Flags win over the YAML file.",
        "- `megatron-sft --help` shows the common ones, `megatron-sft --help-all` this list.",
    ]
    for group in GROUPS:
        title = title_of(group)
        docs = field_docstrings(group)
        lines += ["", f"## {title}", "", "| option | | default |", "|---|---|---|"]
        for field in fields(group):
            text = docs.get(field.name, "").replace("NAMES", ", ".join(SCHEDULERS))
            default = "required" if field.default is MISSING else _default(field.default)
            lines.append(f"| `{flag_of(field.name)}` | {_cell(text)} | {default} |")
    return "\n".join(lines) + "\n"


def _default(value: Any) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{' '.join(map(str, value)) if isinstance(value, tuple) else value}`"


def _cell(text: str) -> str:
    """A text within a table: no line ends, no bars."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def commands() -> str:
    """What --help of each subcommand says."""
    lines = [_NOTE, "", "# Commands", ""]
    lines += [f"- [`megatron-sft {name}`](#megatron-sft-{name})" for name in COMMANDS]
    for name, command in COMMANDS.items():
        lines += ["", f"## megatron-sft {name}", "", f"{command.about.capitalize()}.", ""]
        lines += ["```", help_of(name).rstrip(), "```"]
    return "\n".join(lines) + "\n"


def help_of(name: str) -> str:
    """Returns what `megatron-sft name --help` prints."""
    out = io.StringIO()
    module = importlib.import_module(COMMANDS[name].module)
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        module.main(["--help"], f"megatron-sft {name}")
    return out.getvalue()


def rules() -> str:
    """What is refused before anything is built."""
    lines = [
        _NOTE,
        "",
        "# What is refused, and the way out",
        "",
        "Each line is what a program says that is asked for it, before anything is built. N and "
        "words in capitals stand for what the run has. `megatron-sft rules lora` prints those that "
        "name a word. Data, model folders and checkpoints are looked at besides, and refused by "
        "file and place.",
    ]
    for title, said in sections().items():
        lines += ["", f"## {title}", ""]
        lines += ["- " + _FLAG.sub(r"`\1`", line).replace("<", "&lt;") for line in said]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Columns of metrics.jsonl."""
    lines = [
        _NOTE,
        "",
        "# Columns of metrics.jsonl",
        "",
        "One JSON object per line; `kind` is `train`, `evaluation` or `event`. NaN is null.",
    ]
    parts = {
        "A training step (kind `train`)": StepMetrics,
        "An evaluation (kind `evaluation`)": Evaluation,
        "A source, within `sources`": SourceMetrics,
    }
    for title, kind in parts.items():
        docs = field_docstrings(kind)
        lines += ["", f"## {title}", "", "| column | |", "|---|---|"]
        names = [field.name for field in fields(kind)]
        lines += [f"| `{name}` | {_cell(docs.get(name, ''))} |" for name in names]
        lines += [f"| `{name}` | {_cell(text)} |" for name, text in _properties(kind)]
    return "\n".join(lines) + "\n"


def _properties(kind: type) -> Iterator[tuple[str, str]]:
    written = {"perplexity", "fill", "padding", "balance", "moved", "prediction_error"}
    for base in (kind, PackingStats) if kind is StepMetrics else (kind,):
        for name, value in vars(base).items():
            if isinstance(value, property) and name in written:
                yield name, inspect.getdoc(value) or ""


def python() -> str:
    """Public names, with the first sentence of each."""
    lines = [_NOTE, "", "# Python names", "", "What users import. All else may change."]
    for name in MODULES:
        module = importlib.import_module(name)
        lines += ["", f"## {name}", "", "| name | |", "|---|---|"]
        found = getattr(module, "__all__", None) or [
            each
            for each, value in vars(module).items()
            if not each.startswith("_") and getattr(value, "__module__", "") == name
        ]
        for each in found:
            value = getattr(module, each)
            is_ours = getattr(value, "__module__", "").startswith("megatron.")
            if is_ours and (inspect.isfunction(value) or inspect.isclass(value)):
                lines.append(f"| `{each}` | {_cell(_sentence(value))} |")
    return "\n".join(lines) + "\n"


def _sentence(value: Any) -> str:
    said = inspect.getdoc(value) or ""
    if is_dataclass(value) and said.startswith(f"{getattr(value, '__name__', '')}("):
        # Python's own, of a dataclass without a docstring: `ImageSample(*, image: ...`
        names = [field.name for field in fields(value) if not field.name.startswith("__")]
        return f"Sample of {', '.join(f'`{name}`' for name in names)}."
    text = " ".join(said.split("\n\n")[0].split())
    return re.split(r"(?<=[a-z\)`])\. ", text)[0].rstrip(".") + "."


def coming_from(name: str) -> str:
    """A page for users of another trainer."""
    title, names = TRAINERS[name]
    ours = {flag_of(field.name) for group in GROUPS for field in fields(group)}
    lines = [
        _NOTE,
        "",
        f"# Coming from {title}",
        "",
        f"What is there `{_EXAMPLES[name]}` is here:",
        "",
        "```",
        "megatron-sft train --pretrained-checkpoint Qwen3-8B --data-path chats.jsonl \\",
        "    --sequence-packing --bf16 --lora --save-hf Qwen3-8B-chats",
        "```",
        "",
        "- The model is a folder on this machine; `hf download Qwen/Qwen3-8B --local-dir Qwen3-8B` "
        "makes one.",
        "- Data are files on this machine. Their layout is found by itself: "
        "[data](../reference/data.md).",
        "- Only what the assistant says is trained, by the chat template of the model.",
        "- `megatron-sft show` prints samples with the trained tokens marked. Compare them first.",
        "- A batch is `--global-batch-size` sequences over all GPUs, however they are packed.",
        "- Pairs of answers, marked answers and reward models: "
        "[preferences](../howto/preference.md).",
        "- Chats with images take `--images`: [vision](../howto/vision.md).",
        "- An unknown name, as a flag or a key of YAML, is answered with the one here.",
        "",
        "| there | here |",
        "|---|---|",
    ]
    for each in names.split():
        flag = flag_of(each)
        answer = f"`{flag}`" if flag in ours else answers_to([each], ours)[each]
        answer = answer.removeprefix("is ").removesuffix(" here")
        answer = answer[1:-1] if answer.startswith("(") else answer
        marked = answer if "`" in answer else _FLAG.sub(r"`\1`", answer)
        lines.append(f"| `{each}` | {marked} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
