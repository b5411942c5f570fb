"""The loss of a HuggingFace folder by transformers and by the product, both in this process and
without a step of training.
"""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.nn.functional import cross_entropy

from megatron.packing.model.pipeline import PackedPasses
from megatron.sft.model.build import build_model, build_transformer_config
from megatron.sft.model.forward import forward_step
from megatron.sft.model.huggingface.pretrained import open_pretrained
from megatron.sft.model.huggingface.read import Pretrained
from tests.functional_tests.hf_models import options, sequences_in_order
from tests.functional_tests.oracle import CPU, _global_loss, _prepare, draws_of

BATCH = sequences_in_order(5, (9, 30))
_LORA = "--lora --lora-adapter"


def prepare(folder: Path) -> None:
    """Makes the process groups of a single process, once for all folders."""
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    _prepare(options("", folder, 1), torch.float32)


def loss_by_product(folder: Path, adapter: Path | None = None) -> float:
    """Returns the loss of the folder's model; ValueError if the product refuses the folder."""
    config = options("" if adapter is None else f"{_LORA} {adapter}", folder, 1)
    assert config.data.vocab_size is not None
    pretrained = open_pretrained(config, config.data.vocab_size)
    assert isinstance(pretrained, Pretrained)
    transformer_config = build_transformer_config(config, CPU, params_dtype=torch.float32)
    (chunk,) = build_model(config, transformer_config, config.data.vocab_size, CPU, pretrained)
    draws = draws_of(BATCH, "even", "plain", 0, 1)
    found = PackedPasses(get_forward_backward_func())(
        forward_step_func=forward_step,
        data_iterator=iter(draws),
        model=chunk,
        num_microbatches=len(draws),
        seq_length=config.model.seq_length,
        micro_batch_size=1,
        forward_only=True,
    )
    return _global_loss(found)


def loss_by_transformers(folder: Path, adapter: Path | None = None) -> tuple[float, list[str]]:
    """Returns the loss, and the weights of the language model that transformers made up because it
    did not find them.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model: Any
    model, report = getattr(transformers, architecture).from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    total = sum(int((sample.loss_mask != 0).sum()) for sample in BATCH)
    loss = 0.0
    with torch.no_grad():
        for sample in BATCH:
            logits = model(input_ids=torch.from_numpy(sample.tokens)[None]).logits[0].float()
            each = cross_entropy(logits, torch.from_numpy(sample.labels), reduction="none")
            loss += (each * torch.from_numpy(sample.loss_mask)).sum().item() / total
    towers = ("vision_tower", "visual", "multi_modal_projector")
    missing = [name for name in report["missing_keys"] if not any(t in name for t in towers)]
    return loss, sorted(missing)
