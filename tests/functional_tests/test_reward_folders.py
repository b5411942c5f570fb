"""A reward model's folder, read in a layout, scores held-out pairs as transformers does, and is
written back to the bit.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model

from megatron.packing.device import CPU
from megatron.packing.step.global_batch import GROUPS, schedule_global_batch
from megatron.packing.step.groups import is_data_rank
from megatron.sft.data.counts import Counts
from megatron.sft.model.build import Training, build_model, build_transformer_config
from megatron.sft.model.huggingface.companions import Companions
from megatron.sft.model.huggingface.pretrained import open_pretrained
from megatron.sft.model.huggingface.read import Pretrained
from megatron.sft.model.huggingface.write import write_folder
from megatron.sft.training.passes import Passes
from megatron.sft.training.preference.objective import ANSWER, Scores
from megatron.sft.training.preference.rewards import RewardPairs
from megatron.sft.training.step_batches import StepBatch
from tests.functional_tests import hf_models, oracle
from tests.functional_tests.preference import CASES, END, FIELDS, Record, batches_of
from tests.functional_tests.ranks import run_ranks

CASE = CASES["reward"]
RECORDS = batches_of(CASE, num_steps=1, count=4)[0]
LAYOUT = "--tensor-model-parallel-size 2 --sequence-parallel --max-seqlen-per-dp-cp-rank 96"


def by_transformers(folder: Path) -> list[list[float]]:
    """Writes a reward model, and returns its scores of each record's answers."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    kind, changes = hf_models.MODELS["qwen3"]
    sizes = {"vocab_size": oracle.VOCAB_SIZE, "num_labels": 1, "pad_token_id": END}
    config = AutoConfig.for_model(kind, **(hf_models._COMMON | changes | sizes))
    torch.manual_seed(1)
    model: Any = AutoModelForSequenceClassification.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    hf_models._keep_double(sys.modules[type(model).__module__])
    model = model.double()
    model.save_pretrained(folder)

    def score(record: Record, answer: list[int]) -> float:
        ids = torch.tensor([[*record.prompt, *answer, END]])
        with torch.no_grad():
            return float(model(input_ids=ids).logits)

    return [[score(record, answer) for answer in record.answers] for record in RECORDS]


def by_product(folder: Path, copy: Path) -> dict[tuple[int, int], float]:
    """The product's scores by record and rank of the answer; writes the folder again."""
    config = replace(hf_models.options(LAYOUT, folder, 1), preference=CASE.options)
    oracle._prepare(config)
    model_config = build_transformer_config(config, CPU, params_dtype=torch.float64)
    vocab_size = config.data.vocab_size
    assert vocab_size is not None
    pretrained = open_pretrained(config, vocab_size, END)
    assert isinstance(pretrained, Pretrained)
    model = build_model(config, model_config, vocab_size, CPU, pretrained)
    companions = Companions(config, None, vocab_size, "float64")
    gpts = [unwrap_model(chunk) for chunk in model]
    write_folder(copy, gpts, companions.weights(), companions.write, source=companions.source())
    FIELDS.options = CASE.options
    groups = ProcessGroupCollection.use_mpu_process_groups(GROUPS)
    draws = oracle.draws_of(RECORDS, "even", "plain", 0, 1)  # type: ignore[arg-type]
    source = iter(draws) if is_data_rank(groups) else None
    batch = schedule_global_batch(source, get_model_config(model[0]), len(draws), groups)
    training = Training(model, None, None, None, CPU)  # type: ignore[arg-type]
    passes = Passes(config, training, RewardPairs(CASE.options))
    with passes.without_training():
        logs = passes.run(StepBatch(batch, [], Counts.none(1)), Scores(), forward_only=True)
    found: dict[tuple[int, int], float] = {}
    for microbatch, log in zip(batch.microbatches, logs, strict=True):
        fields = microbatch["extra_per_path"]
        keys = zip(fields["path_position"].tolist(), fields["path_rank"].tolist())
        found |= dict(zip(keys, log["paths"][ANSWER].tolist()))
    return found


def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    """A row of the head that ranks share wrongly, another token's score, or a folder without its
    score would leave a model that judges by nothing, though its training loss had fallen.
    """
    pytest.importorskip("transformers")
    folder, copy = tmp_path / "model", tmp_path / "copy"
    (expected,) = run_ranks(partial(by_transformers, folder), 1)
    found = run_ranks(partial(by_product, folder, copy), 2)[0]
    for number, scores in enumerate(expected):
        for rank, score in enumerate(scores):
            assert found[number, rank] == pytest.approx(score, rel=1e-12, abs=1e-12)
    tensors, written = hf_models.read_folder(folder), hf_models.read_folder(copy)
    assert tensors.keys() == written.keys()
    assert "score.weight" in written
    assert all(torch.equal(tensors[name], written[name]) for name in tensors)
