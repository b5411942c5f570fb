"""Preference losses and their gradients beside TRL's own trainers, in float64: DPOTrainer,
KTOTrainer, RewardTrainer, and of trl.experimental ORPOTrainer and CPOTrainer.

PYTHONPATH=.venv-trl python -m examples.benchmarks.preference_trl --write PAGE

Both read the same texts, by tokenizers that give the same ids, and the same two HuggingFace
folders, policy and reference. TRL's head adds up in float32 whatever the model's type: it is
replaced here by plain torch. ORPOTrainer casts log-probabilities to float32: its casts are removed.
Else nothing of TRL is changed. Gradients are compared by HuggingFace's names,
each relative to its largest element.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron.packing.device import CPU
from megatron.packing.step.groups import is_data_rank
from megatron.sft.model.build import build_model, build_transformer_config
from megatron.sft.model.cpu_support import rewrite
from megatron.sft.model.huggingface.pretrained import open_pretrained
from megatron.sft.model.huggingface.read import Pretrained, read_weights
from megatron.sft.options.preference import PreferenceConfig
from tests.functional_tests import hf_models, oracle
from tests.functional_tests.preference import END, Case, PreferencePasses, Record, batches_of
from tests.functional_tests.ranks import run_ranks

BETA = 0.3
LAYOUTS = {
    "one process": (1, ""),
    "DP 2": (2, ""),
    "CP 2": (2, "--context-parallel-size 2"),
    "TP 2, SP, PP 2": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
    ),
}
TYPES = (
    *("sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "exo_pair", "nca_pair", "bco_pair"),
    *("sppo_hard", "apo_zero", "apo_down", "discopop"),
)
CASES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": (name,)} for name in TYPES},
    "kto": {"loss": "kto", "loss_type": ("kto",), "desirable_weight": 1.5},
    "apo_zero_unpaired": {"loss": "kto", "loss_type": ("apo_zero_unpaired",)},
    "orpo": {"loss": "orpo"},
    "cpo sigmoid": {"loss": "cpo", "loss_type": ("sigmoid",), "label_smoothing": 0.1},
    "cpo hinge": {"loss": "cpo", "loss_type": ("hinge",), "cpo_alpha": 0.5},
    "cpo ipo": {"loss": "cpo", "loss_type": ("ipo",)},
    "simpo": {"loss": "simpo", "simpo_gamma": 0.5},
    "cpo simpo": {"loss": "cpo", "loss_type": ("simpo",), "simpo_gamma": 0.5, "cpo_alpha": 1.0},
    "reward": {"loss": "reward"},
    "reward, centred": {"loss": "reward", "center_rewards_coefficient": 0.1},
    "robust, e 0.1": {"loss_type": ("robust",), "label_smoothing": 0.1},
    "sigmoid, forward_kl": {"loss_type": ("sigmoid",), "f_divergence_type": "forward_kl"},
    "ipo, js_divergence": {"loss_type": ("ipo",), "f_divergence_type": "js_divergence"},
    "sigmoid, ld_alpha 0.5": {"loss_type": ("sigmoid",), "ld_alpha": 0.5},
    "sigmoid, bco_pair, sft": {
        "loss_type": ("sigmoid", "bco_pair", "sft"),
        "loss_weights": (0.8, 0.2, 1.0),
    },
}
EVERYWHERE = ("sigmoid", "ipo", "sigmoid, bco_pair, sft", "reward, centred")
"""Cases of the parallel layouts."""


class Found(NamedTuple):
    """What a trainer computes for a batch of pairs."""

    loss: float
    gradients: dict[str, Tensor]


class PlainHead:
    """Takes the place of TRL's fused head."""

    @staticmethod
    def apply(hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, *_: Any) -> Any:
        logits = (hidden @ weight.T).log_softmax(-1)
        found = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        zeros = torch.zeros_like(found).detach()
        return found, zeros, zeros, zeros, zeros.bool()


def tokenizer_of_numbers() -> Any:
    """Returns a tokenizer of transformers that reads "7 8" as the ids 7 and 8."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(END)} | {"<end>": END}
    inner = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")


class Trainer(NamedTuple):
    """A trainer of TRL."""

    module: str
    name: str
    """The trainer's class without "Trainer", and the class of its options without "Config"."""
    method: str
    """Computes the loss of a batch."""


TRAINERS = {
    "dpo": Trainer("trl", "DPO", "_compute_loss"),
    "kto": Trainer("trl", "KTO", "_compute_loss"),
    "reward": Trainer("trl", "Reward", "compute_loss"),
    "orpo": Trainer("trl.experimental.orpo", "ORPO", "compute_loss"),
    "cpo": Trainer("trl.experimental.cpo", "CPO", "compute_loss"),
    "simpo": Trainer("trl.experimental.cpo", "CPO", "compute_loss"),
}
REFERENCED = ("dpo", "kto")


def by_trl(policy: Path, reference: Path, records: Sequence[Record], case: dict[str, Any]) -> Found:
    """Returns what TRL's trainer computes."""
    import trl.trainer.utils as utils
    from datasets import Dataset, disable_progress_bars
    from transformers.utils import logging

    logging.disable_progress_bar()
    disable_progress_bars()
    utils._ChunkedLogProbFunction = PlainHead  # type: ignore[misc]
    torch.set_default_dtype(torch.float32)  # rotary angles are float32 on both sides
    loss = case.get("loss", "dpo")
    kind = TRAINERS[loss]
    module = import_module(kind.module)
    if loss == "orpo":
        rewrite(module.ORPOTrainer.odds_ratio_loss, {}, {"float": "double"})
    load = loader(policy, loss)
    models = [load(policy), load(reference)] if loss in REFERENCED else [load(policy)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = getattr(module, f"{kind.name}Config")(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            per_device_train_batch_size=len(records),
            **options_of_trl(case),
        )
        trainer = getattr(module, f"{kind.name}Trainer")(
            *models,
            args=arguments,
            train_dataset=Dataset.from_list([row_of(record, loss) for record in records]),
            processing_class=tokenizer_of_numbers(),
        )
        batch = trainer.data_collator([trainer.train_dataset[n] for n in range(len(records))])
        found = getattr(trainer, kind.method)(trainer.model, batch, False)
        found.backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return Found(found.item(), gradients)


def loader(folder: Path, loss: str) -> Callable[[Path], Any]:
    """Returns the function that loads a folder in float64."""
    import transformers

    name = "SequenceClassification" if loss == "reward" else "CausalLM"
    load = getattr(transformers, f"AutoModelFor{name}").from_pretrained
    hf_models._keep_double(sys.modules[load(folder).__module__])
    return partial(load, dtype=torch.float64)


def options_of_trl(case: dict[str, Any]) -> dict[str, Any]:
    """Returns a case in TRL's spelling."""
    loss = case.get("loss", "dpo")
    options = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in case.items()
        if name != "loss"
    }
    if loss != "reward":
        options["beta"] = BETA
    if options.get("loss_type") == ["exo_pair"]:
        options["label_smoothing"] = 1e-3
    if loss == "simpo":
        options |= {"loss_type": ["simpo"], "cpo_alpha": 0.0}
    if loss in ("cpo", "simpo", "kto"):
        (options["loss_type"],) = options["loss_type"]
    return options


def row_of(record: Record, loss: str) -> dict[str, Any]:
    """Returns a record as TRL reads it."""
    row: dict[str, Any] = {"prompt": f"{text(record.prompt)} "}
    answers = [text(answer) for answer in record.answers]
    if loss == "kto":
        return {**row, "completion": answers[0], "label": record.is_good}
    if loss == "reward":
        row["margin"] = record.margin
    return {**row, "chosen": answers[0], "rejected": answers[1]}


def text(ids: Sequence[int]) -> str:
    """Returns ids as text of the tokenizer above."""
    return " ".join(map(str, ids))


def on_rank(
    flags: str, policy: Path, reference: Path, records: Sequence[Record], case: Any, to: Path
) -> float:
    """Returns the loss that the product computes on this rank, and writes gradients to a folder."""
    numbers = {} if case.get("loss") == "reward" else {"beta": BETA}
    options = PreferenceConfig(**{"loss": "dpo", **numbers, **case})
    configs = [
        replace(
            hf_models.options(f"{flags} --max-seqlen-per-dp-cp-rank 128", folder, 1),
            preference=options,
        )
        for folder in (reference, policy)
    ]
    oracle._prepare(configs[0])
    transformer_config = build_transformer_config(configs[0], CPU, params_dtype=torch.float64)
    vocab_size = configs[0].data.vocab_size
    assert vocab_size is not None
    first, second = (open_pretrained(config, vocab_size) for config in configs)
    assert isinstance(first, Pretrained)
    assert isinstance(second, Pretrained)
    model = build_model(configs[0], transformer_config, vocab_size, CPU, first)
    optimizer = hf_models.build_optimizer(configs[0], model)
    hf_models.connect(transformer_config, model, optimizer, configs[0])
    passes = PreferencePasses(options, configs[0], model)
    passes._is_first = False  # policy and reference differ from the first step on
    gpts = [unwrap_model(chunk) for chunk in model]
    read_weights(gpts, second.weights, second.folder)
    for chunk in model:
        chunk.broadcast_params()
        chunk.zero_grad_buffer()
    groups = hf_models.ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp"])
    rank, num_ranks = (
        hf_models.parallel_state.get_data_parallel_rank(),
        hf_models.parallel_state.get_data_parallel_world_size(),
    )
    draws = oracle.draws_of(records, "even", "plain", rank, num_ranks)  # type: ignore[arg-type]
    source = iter(draws) if is_data_rank(groups) else None
    losses = passes(data_iterator=source, num_microbatches=len(draws))
    hf_models._write_gradients(to, gpts, first.weights, torch.float64)
    return oracle._global_loss(losses)


def by_product(
    layout: str, policy: Path, reference: Path, records: Sequence[Record], case: dict[str, Any]
) -> Found:
    """Returns what the product computes in a layout."""
    world_size, flags = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        run = partial(on_rank, flags, policy, reference, records, case, Path(folder))
        losses = run_ranks(run, world_size)
        return Found(losses[0], hf_models.read_folder(Path(folder)))


def apart(found: Found, expected: Found) -> tuple[float, float]:
    """Returns the relative differences of loss and gradients."""
    of_loss = abs(found.loss - expected.loss) / max(abs(expected.loss), 1e-6)
    return of_loss, hf_models.largest_apart(found.gradients, expected.gradients)


def main() -> None:
    """Prints a row per case, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="", help="part of the name of a case")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folders = {name: Path(place, name) for name in ("policy", "reference", "scored")}
        run_ranks(partial(write_folders, *folders.values()), 1)
        for name, case in CASES.items():
            if given.only not in name:
                continue
            loss = case.get("loss", "dpo")
            records = batches_of(Case(PreferenceConfig(loss=loss), _no_definition))[0]
            policy, reference = folders["policy"], folders["reference"]
            if loss == "reward":
                policy = reference = folders["scored"]
            expected = by_trl(policy, reference, records, case)
            for layout in LAYOUTS if name in EVERYWHERE else ["one process"]:
                found = by_product(layout, policy, reference, records, case)
                of_loss, of_gradients = apart(found, expected)
                cells = (
                    name,
                    layout,
                    f"{expected.loss:.6f}",
                    f"{of_loss:.1e}",
                    f"{of_gradients:.1e}",
                )
                rows.append(f"| {' | '.join(cells)} |")
                print(rows[-1], flush=True)
    if given.write is not None:
        given.write.write_text(page(rows), encoding="utf-8")


def _no_definition(rows: Any) -> Tensor:
    raise NotImplementedError


def write_folders(policy: Path, reference: Path, scored: Path) -> None:
    """Writes two tiny Qwen3 models that differ a little, and a reward model."""
    hf_models.write_model("qwen3", reference, torch.float64, oracle.VOCAB_SIZE)
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(3)
    rewards = AutoModelForSequenceClassification.from_pretrained(
        reference, dtype=torch.float64, num_labels=1, pad_token_id=END
    )
    torch.nn.init.normal_(rewards.score.weight, 0.0, 0.2)
    rewards.save_pretrained(scored, max_shard_size="100kB")
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float64)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    model.save_pretrained(policy, max_shard_size="100kB")


def page(rows: Sequence[str]) -> str:
    """Returns the page in Markdown."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("trl", "transformers", "torch"))
    return "\n".join(
        [
            "# Preference losses beside TRL's trainers",
            "",
            f"`make preference-trl` on {time.strftime('%Y-%m-%d')}: {versions}, megatron-core "
            f"{version('megatron-core')}, float64 on CPU. 7 pairs of texts, a tiny Qwen3, another "
            "one as the reference. DPOTrainer, KTOTrainer, RewardTrainer, and ORPOTrainer and "
            "CPOTrainer of trl.experimental. TRL's head is replaced by plain torch, as it adds up "
            "in float32, and ORPO's casts to float32 are removed; in `exo_pair` it rounds its "
            "label smoothing to float32.",
            "",
            "| loss | layout | TRL's loss | loss differs by | gradients differ by |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
