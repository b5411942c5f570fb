"""Training scripts with the doctor's hook: each is examined as it is, and with a fault patched in.

A fault is a few words of the script, changed in a copy that `megatron-sft doctor --script` runs.
The scripts are the plug-in's example, and loops in `loops` after what TRL, verl and Megatron-LM do.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from megatron.packing.doctor.scripts import run_script
from megatron.sft.model import cpu_support, mcore_fixes
from tests.functional_tests.oracle import _keep_double
from tests.functional_tests.ranks import run_ranks

_ROOT = Path(__file__).parents[2]
_LOOPS = Path(__file__).parent / "loops"
SCRIPTS = {
    "TRL-like": (_LOOPS / "trl_like.py", 1),
    "verl-like": (_LOOPS / "verl_like.py", 1),
    "Megatron-LM-like": (_LOOPS / "megatron_lm_like.py", 2),
    "plug-in's example": (_ROOT / "examples/plugin/train.py", 2),
    "transformers' Trainer": (_LOOPS / "transformers_trainer.py", 2),
}
"""Name -> script, and the ranks that run it."""
_EXAMPLE = "plug-in's example"
_CONFIG = "        use_cpu_initialization=True,\n"
_OF_DTYPE = {
    "float32": [],
    "float64": [(_CONFIG, f"{_CONFIG}        params_dtype=torch.float64,\n")],
    "bfloat16": [
        (_CONFIG, f"{_CONFIG}        params_dtype=torch.bfloat16, bf16=True,\n"),
        ("OptimizerConfig(lr=1e-3", "OptimizerConfig(bf16=True, lr=1e-3"),
        (
            "    model = DistributedDataParallel(",
            "    from megatron.core.transformer.module import Float16Module\n"
            "    gpt = Float16Module(config, gpt)\n    model = DistributedDataParallel(",
        ),
    ],
}
"""Changes of the example, which has no option for its precision."""


class LoopCase(NamedTuple):
    """A script with a fault, or without."""

    name: str
    script: str
    expected: tuple[str, ...] = ()
    """Names of all faults."""
    old: str = ""
    new: str = ""
    options: str = ""


_TRL, _VERL, _MLM = "TRL-like", "verl-like", "Megatron-LM-like"
_TRAINER = "transformers' Trainer"
_HYBRID = "--hybrid-override-pattern *-*-"
LOOP_CASES = (
    *(LoopCase(f"{script} loop", script) for script in SCRIPTS),
    *(
        LoopCase(f"{_MLM} loop, {size}", _MLM, options=f"--{size} 2")
        for size in ("context-parallel-size", "tensor-model-parallel-size")
    ),
    LoopCase(f"{_MLM} loop, pipeline", _MLM, options="--pipeline-model-parallel-size 2"),
    LoopCase(f"{_MLM} loop, hybrid model", _MLM, options=_HYBRID),
    LoopCase(
        "borders by rising positions from 1",
        _TRL,
        ("border too late",),
        "return (position_ids == 0).cumsum(0)",
        "return (position_ids == 1).cumsum(0)",
    ),
    LoopCase(
        "positions run on",
        _TRL,
        ("attention forgets borders", "label across a border"),
        "position_ids = torch.cat([torch.arange(len(one.input_ids)) for one in examples])",
        "position_ids = torch.arange(len(input_ids))",
    ),
    LoopCase(
        "first label of each sequence kept",
        _TRL,
        ("label across a border",),
        "    labels[position_ids == 0] = IGNORED\n",
        "",
    ),
    LoopCase(
        "completion mask lost",
        _TRL,
        ("prompt is trained",),
        "labels = input_ids.masked_fill(mask == 0, IGNORED)",
        "labels = input_ids.clone()",
    ),
    LoopCase(
        "mean per accumulated batch",
        _TRL,
        ("mean per pack",),
        "return losses.sum() / num_items_in_batch",
        "return losses.sum() / (labels != IGNORED).sum() / 2",
    ),
    LoopCase(
        "last accumulated batch divided by its own tokens",
        _TRL,
        ("weights of tokens differ",),
        "return losses.sum() / num_items_in_batch",
        "return losses.sum() / (num_items_in_batch - len(labels) // 2)",
    ),
    LoopCase(
        "labels not shifted",
        _TRL,
        ("labels are not shifted",),
        'labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[1:]',
        'labels = batch["labels"]',
    ),
    LoopCase(
        "cu_seqlens one too early",
        _VERL,
        ("border too early",),
        "torch.bucketize(order, cu_seqlens[1:], right=True)",
        "torch.bucketize(order, cu_seqlens[1:] - 1, right=True)",
    ),
    LoopCase(
        "positions of padded rows",
        _VERL,
        ("packed path computes otherwise",),
        "position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)",
        "position_ids = torch.arange(width).expand(len(sequences), -1)",
    ),
    LoopCase(
        "response mask one too late",
        _VERL,
        ("label across a border", "target is lost", "labels of other tokens"),
        'loss_mask = F.pad(batch["response_mask"], (0, 1))[:, 1:]',
        'loss_mask = batch["response_mask"]',
    ),
    LoopCase(
        "mean per rank",
        _VERL,
        ("mean per rank",),
        "loss = loss_of_rank(model, batch, num_tokens) / NUM_RANKS",
        'loss = loss_of_rank(model, batch, int(batch["response_mask"].sum()))'
        " / NUM_RANKS / len(of_ranks)",
    ),
    LoopCase(
        "averaged over ranks twice",
        _VERL,
        ("gradient is scaled",),
        "        loss.backward()\n",
        "        (loss / NUM_RANKS).backward()\n",
    ),
    LoopCase(
        "last rank left out",
        _VERL,
        ("sequence is lost",),
        "    for batch in of_ranks:\n",
        "    for batch in of_ranks[:1]:\n",
    ),
    LoopCase(
        "borders lost on the way to the model",
        _MLM,
        ("attention forgets borders",),
        "    output = model(tokens",
        "    from tests.functional_tests.loops.one_sequence import joined\n"
        "    packed_seq_params = joined(packed_seq_params)\n    output = model(tokens",
    ),
    LoopCase(
        "positions from a table of the pack",
        _MLM,
        ("positions run on over the pack",),
        "return batch.tokens, batch.labels, batch.loss_mask, batch.position_ids,",
        "return batch.tokens, batch.labels, batch.loss_mask, "
        "torch.arange(batch.tokens.numel())[None],",
    ),
    LoopCase(
        "loss mask lost",
        _MLM,
        ("sequences weigh differently",),  # as prompts and padding count
        "    loss_mask = loss_mask.view(-1).to(losses.dtype)\n",
        "    loss_mask = torch.ones_like(losses)\n",
        "--context-parallel-size 2",
    ),
    LoopCase(
        "labels are the tokens themselves",
        _MLM,
        ("loss is another",),
        "return batch.tokens, batch.labels,",
        "return batch.tokens, batch.tokens,",
    ),
    LoopCase(
        "loss times context-parallel ranks",
        _MLM,
        ("loss is another",),
        "    loss = torch.sum(losses * loss_mask)\n",
        "    loss = torch.sum(losses * loss_mask) * 2\n",
        "--context-parallel-size 2",
    ),
    LoopCase(
        "tokens counted twice",
        _MLM,
        ("loss is another",),
        "    num_tokens = loss_mask.sum().to(torch.int)\n",
        "    num_tokens = 2 * loss_mask.sum().to(torch.int)\n",
        "--context-parallel-size 2",
    ),
    LoopCase(
        "borders lost on the way to the second stage",
        _MLM,
        ("attention forgets borders",),
        "    output = model(tokens",
        "    from tests.functional_tests.loops.one_sequence import joined\n"
        "    packed_seq_params = joined(packed_seq_params, only_last=True)\n"
        "    output = model(tokens",
        "--pipeline-model-parallel-size 2",
    ),
    LoopCase(
        "borders lost on the way to a hybrid model",
        _MLM,
        ("attention forgets borders",),
        "    output = model(tokens",
        "    from tests.functional_tests.loops.one_sequence import joined\n"
        "    packed_seq_params = joined(packed_seq_params)\n    output = model(tokens",
        _HYBRID,
    ),
    LoopCase(
        "positions of a hybrid model from a table of the pack",
        _MLM,
        ("positions run on over the pack",),
        "return batch.tokens, batch.labels, batch.loss_mask, batch.position_ids,",
        "return batch.tokens, batch.labels, batch.loss_mask, "
        "torch.arange(batch.tokens.numel())[None],",
        _HYBRID,
    ),
    LoopCase(
        "borders lost on the way to the model",
        _EXAMPLE,
        ("attention forgets borders",),
        "    return model(batch",
        "    from tests.functional_tests.loops.one_sequence import joined\n"
        "    inputs['packed_seq_params'] = joined(inputs['packed_seq_params'])\n"
        "    return model(batch",
    ),
    LoopCase(
        "last token of each pack not trained",
        _EXAMPLE,
        ("step is not its sequences' sum",),
        "    total, num_tokens = (losses.float() * loss_mask).sum(), loss_mask.sum()\n",
        "    loss_mask = loss_mask.clone()\n    loss_mask[0, -1] = 0\n"
        "    total, num_tokens = (losses.float() * loss_mask).sum(), loss_mask.sum()\n",
    ),
    LoopCase(
        "gradients divided by all slots",
        _EXAMPLE,
        ("sequences weigh differently",),
        "return total, num_tokens.int(), {",
        "return total, torch.tensor(losses.numel(), dtype=torch.int), {",
    ),
    LoopCase("autocast", _TRAINER, options="--autocast"),
    LoopCase(
        "positions lost",
        _TRAINER,
        ("attention forgets borders",),
        "data_collator=DataCollatorWithFlattening()",
        "data_collator=DataCollatorWithFlattening(return_position_ids=False)",
    ),
    LoopCase(
        "tokens counted on each rank",
        _TRAINER,
        ("mean per rank",),
        "average_tokens_across_devices=True",
        "average_tokens_across_devices=False",
    ),
    LoopCase(
        "tokens counted on each rank, autocast",
        _TRAINER,
        ("mean per rank",),
        "average_tokens_across_devices=True",
        "average_tokens_across_devices=False",
        "--autocast",
    ),
    LoopCase(
        "half of the tokens counted",
        _TRAINER,
        ("scale of the loss",),
        "return batches, num_items",
        "return batches, num_items // 2",
    ),
    LoopCase(
        "all slots counted",
        _TRAINER,
        ("divided by slots",),
        "return batches, num_items",
        'return batches, self.args.world_size * sum(one["labels"].numel() for one in batches)',
    ),
    LoopCase(
        "gradients summed over ranks",
        _TRAINER,
        ("gradient is scaled",),
        "        return loss\n",
        "        for parameter in model.parameters():\n"
        "            parameter.grad *= self.args.world_size\n        return loss\n",
    ),
    LoopCase(
        "gradients of each rank alone",
        _TRAINER,
        ("copies of a parameter differ",),
        "super().training_step(model, inputs",
        "super().training_step(self.model, inputs",
    ),
)


def patched(case: LoopCase, dtype: str) -> str:
    """Returns the script's text with the fault of a case."""
    text = SCRIPTS[case.script][0].read_text()
    changes = [(case.old, case.new)] if case.old else []
    changes += _OF_DTYPE[dtype] if case.script == _EXAMPLE else []
    for old, new in changes:
        assert text.count(old) == 1, f"{case.name}: {text.count(old)} places of {old!r}"
        text = text.replace(old, new)
    return text


def examine_script(case: LoopCase, dtype: str) -> tuple[list[str], str]:
    """Returns the names of faults and the report; called by each rank."""
    mcore_fixes.install()
    options = case.options.split()
    if case.script == _EXAMPLE:
        options += ["--sequence-packing", "--max-seqlen-per-dp-cp-rank", "512"]
    else:
        options += ["--dtype", dtype]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        script = Path(folder) / "script.py"
        script.write_text(patched(case, dtype))
        stack.enter_context(mock.patch.object(sys, "path", [str(_ROOT), *sys.path]))
        stack.enter_context(mock.patch.object(dist, "init_process_group"))
        # accelerate wants it, though the ranks have their process group.
        stack.enter_context(mock.patch.dict(os.environ, MASTER_ADDR="localhost", MASTER_PORT="0"))
        if dtype == "float64" and SCRIPTS[case.script][1] > 1:
            torch.set_default_dtype(torch.float64)
            cpu_support.install()
            _keep_double()
            stack.enter_context(mock.patch.object(cpu_support, "install"))
        diagnosis, _ = run_script(script, options)
    return [finding.name for finding in diagnosis.faults], diagnosis.text()


def wrong_of_script(case: LoopCase, dtype: str, timeout_seconds: float = 90.0) -> str:
    """Returns what the doctor says wrongly of a script, or "" if it is right."""
    num_ranks = SCRIPTS[case.script][1]
    try:
        of_ranks = run_ranks(
            examine_script, num_ranks, case, dtype, timeout_seconds=timeout_seconds
        )
    except AssertionError as failure:
        return f"raises {str(failure).strip().splitlines()[-1]}"
    faults, text = of_ranks[0]
    if any(other != of_ranks[0] for other in of_ranks):
        return "ranks found different faults"
    return "" if tuple(faults) == case.expected else f"found {faults}, not {case.expected}\n{text}"
