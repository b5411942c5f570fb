"""What still dies of what cases killed that left CI: one line of the product is changed in a copy
of the checkout, and the tests that remain must fail.

python -m tests.functional_tests.mutants --write examples/benchmarks/results/mutants.md
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("megatron", "tests", "examples", "docs", "pyproject.toml", "pretrain_sft.py", "README.md")
LIMIT_SECONDS = 400.0
FUNCTIONAL = "tests/functional_tests/test_"
NUM_TESTS_RUN = 1  # pytest's exit status where tests failed, and nothing else went wrong


class Mutant(NamedTuple):
    """A fault in the product, and who finds it."""

    fault: str
    """What is wrong then."""
    left: str
    """The case that killed it and left CI."""
    file: str
    old: str
    new: str
    test: str
    """A test of every run that must fail."""
    chosen: str = ""
    """An expression for pytest's -k."""


_MODEL = "megatron/packing/model"
MUTANTS = (
    Mutant(
        "further predictions run over borders",
        "layouts: TP2 with SP x further",
        f"{_MODEL}/loss/packed_roll.py",
        "rolled.index_fill_(-1, lasts, 0)",
        "pass",
        f"{FUNCTIONAL}layouts.py",
        "layout_trains and further-",
    ),
    Mutant(
        "words of the last tensor-parallel rank are none",
        "layouts: TP2 x CP3",
        f"{_MODEL}/loss/cross_entropy.py",
        "is_here = (labels >= first) & (labels < first + num_here)",
        "is_here = (labels >= first) & (labels < first + num_here - 8)",
        f"{FUNCTIONAL}layouts.py",
        "layout_trains and tp2sp",
    ),
    Mutant(
        "pieces of context-parallel ranks attend as one another",
        "layouts: CP3 x DP2, CP3 x TP2; six ranks of the data path",
        f"{_MODEL}/attention/zigzag.py",
        "np.column_stack(((rank + 1) * pieces, segments - rank * pieces))",
        "np.column_stack((segments - rank * pieces, (rank + 1) * pieces))",
        f"{FUNCTIONAL}layouts.py",
        "layout_trains and cp3",
    ),
    Mutant(
        "norms of sequence-parallel ranks are not summed",
        "layouts: a dozen of six ranks and of pairs with a scheduler",
        f"{_MODEL}/layers/norms.py",
        "weight.sequence_parallel = config.sequence_parallel",
        "weight.sequence_parallel = False",
        f"{FUNCTIONAL}layouts.py",
        "layout_trains and tp2sp",
    ),
    Mutant(
        "norms over all heads see those of one tensor-parallel rank",
        "mechanisms: olmo in PP2 x TP2",
        f"{_MODEL}/layers/norms.py",
        "if size > 1:  # the sum",
        "if False:  # the sum",
        f"{FUNCTIONAL}families.py",
        "transformers_computes and olmo3",
    ),
    Mutant(
        "each rank has the first ranks' sinks",
        "mechanisms: gpt-oss in PP2 x TP2",
        f"{_MODEL}/attention/core_attention.py",
        "set_tensor_model_parallel_attributes(sinks, True, 0, 1)",
        "set_tensor_model_parallel_attributes(sinks, False, 0, 1)",
        f"{FUNCTIONAL}layouts.py",
        "mechanisms and gpt-oss",
    ),
    Mutant(
        "padding is counted for the experts' biases",
        "mechanisms: minimax in PP2 x TP2",
        f"{_MODEL}/layers/routers.py",
        "routing_map = routing_map & ~padding_mask.unsqueeze(-1)",
        "pass",
        f"{FUNCTIONAL}routers.py",
    ),
    Mutant(
        "context-parallel ranks of a delta net mix up their sequences",
        "mechanisms: qwen3.5 in TP2 x CP2",
        f"{_MODEL}/parts/delta_net_module.py",
        "slice(rank, rank + 1)).flatten(1)",
        "slice(0, 1)).flatten(1)",
        f"{FUNCTIONAL}lora.py",
        "qwen3.5",
    ),
    Mutant(
        "a step without a trained token divides by zero",
        "hostile batches: the last rank's and the packed ones in five layouts",
        "megatron/sft/model/optimizer.py",
        "chunk.scale_gradients(1.0 / num_tokens.clamp(min=1))",
        "chunk.scale_gradients(1.0 / num_tokens)",
        f"{FUNCTIONAL}hostile_batches.py",
    ),
    Mutant(
        "samples packed by their owner lose their borders",
        "hostile batches: packed samples in one of two layouts",
        "megatron/packing/batch/columns.py",
        "*(longest[:length] for length in lengths.tolist())",
        "np.arange(int(lengths.sum()), dtype=np.int32)",
        f"{FUNCTIONAL}hostile_batches.py",
    ),
    Mutant(
        "gradients are divided by a rounded number of tokens",
        "precision: eight of twelve layouts",
        "megatron/sft/model/optimizer.py",
        "chunk.scale_gradients(1.0 / num_tokens.clamp(min=1))",
        "chunk.scale_gradients((1.0 / num_tokens.clamp(min=1)).bfloat16().double())",
        f"{FUNCTIONAL}precision.py",
    ),
    Mutant(
        "bfloat16 turns queries and keys by cosines of three bits",
        "AdamW beside transformers: gemma in bfloat16",
        f"{_MODEL}/attention/rotary.py",
        "out = x * cos",
        "out = x * (cos.mul(8).round().div(8) if x.dtype == torch.bfloat16 else cos)",
        f"{FUNCTIONAL}hf_training.py",
        "bfloat16",
    ),
    Mutant(
        "norms and biases are decayed",
        "AdamW beside transformers: the fifth step",
        "megatron/sft/model/optimizer.py",
        "config_overrides=get_standard_config_overrides(optimizer_config)",
        "config_overrides={}",
        f"{FUNCTIONAL}hf_training.py",
        "llama3",
    ),
    Mutant(
        "ranks of sequence parallel mask one another's padding",
        "balancing losses: TP2 x PP2, and interleaved",
        f"{_MODEL}/layers/routers.py",
        "mask = mask.narrow(1, layer.tp_group.rank() * length, length)",
        "mask = mask.narrow(1, 0, length)",
        f"{FUNCTIONAL}load_balancing.py",
    ),
    Mutant(
        "an empty pack divides its balancing loss by zero",
        "balancing losses: CP3 x PP2",
        f"{_MODEL}/loss/auxiliary_losses.py",
        "num_all.clamp(min=1)",
        "num_all",
        f"{FUNCTIONAL}load_balancing.py",
    ),
    Mutant(
        "a product in half precision takes the place of earlier ones",
        "gradients added within products: experts alone, grouped, EP2",
        "megatron/sft/model/weight_gradients.py",
        "total.add_(gradient.t() @ x)",
        "total.copy_(gradient.t() @ x)",
        f"{FUNCTIONAL}weight_gradients.py",
    ),
    Mutant(
        "what waits for a later step is forgotten",
        "outliers that wait: two stages, two replicas",
        "megatron/packing/step/global_batch.py",
        "queue.finish(delayed)",
        "pass",
        f"{FUNCTIONAL}delay.py",
        "each_sequence_once",
    ),
    Mutant(
        "what the other ranks hold back is lost where other ranks continue",
        "loaders restored within a pass: two ranks, three more places",
        "megatron/blending/energon/_loading/state.py",
        '"held": _held_again([state["held"] for state in states], rank, num_ranks),',
        '"held": states[0]["held"],',
        "tests/unit_tests/blending/energon/test_loader.py",
        "on_other_ranks_within_a_pass",
    ),
    Mutant(
        "each step waits for the device once more",
        "the stand-in for CUDA: llama3 without further options",
        "megatron/sft/model/optimizer.py",
        "chunk.scale_gradients(1.0 / num_tokens.clamp(min=1))",
        "chunk.scale_gradients(1.0 / max(num_tokens.item(), 1))",
        f"{FUNCTIONAL}cuda_stand_in.py",
        "gemma",
    ),
    Mutant(
        "layers beyond those that are traced take nothing",
        "bytes of all layers: 16, six of them on the last stage",
        "megatron/sft/fit/estimate.py",
        "        depth, num_in_flight\n    )\n    try:",
        "        4, num_in_flight\n    )\n    try:",
        f"{FUNCTIONAL}fit.py",
        "extrapolated",
    ),
    Mutant(
        "the example of the plug-in does nothing",
        "the example under torchrun itself",
        "examples/plugin/train.py",
        'if __name__ == "__main__":\n    main()',
        'if __name__ == "__main__":\n    pass',
        f"{FUNCTIONAL}plugin.py",
        "example",
    ),
    Mutant(
        "a rank that is killed is waited for",
        "faults in DP2 x TP2",
        "megatron/sft/heartbeat/member.py",
        "self._leave(cause.status)",
        "pass",
        f"{FUNCTIONAL}fault_matrix.py",
    ),
)


def outcome(mutant: Mutant) -> tuple[bool, str, float]:
    """Whether its test fails, the last line of pytest's, and seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / part)
        path = folder / mutant.file
        source_text = path.read_text()
        assert source_text.count(mutant.old) == 1, (mutant.fault, source_text.count(mutant.old))
        path.write_text(source_text.replace(mutant.old, mutant.new))
        start = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        chosen = ["-k", mutant.chosen] if mutant.chosen else []
        done = subprocess.run(
            [*command, *mutant.test.split(), *chosen],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": name, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        told = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        dies = done.returncode == NUM_TESTS_RUN and bool(told)
        last = told[0].split(" - ")[0].removeprefix("FAILED ") if told else done.stdout[-300:]
        return dies, last, time.monotonic() - start


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a fault's words")
    parser.add_argument("--write", type=Path, help="page of results")
    options = parser.parse_args()
    rows, alive = [], 0
    for mutant in MUTANTS:
        if options.only not in mutant.fault:
            continue
        dies, told, seconds = outcome(mutant)
        alive += not dies
        print(f"{'dies' if dies else 'LIVES'} {seconds:5.1f} s  {mutant.fault}: {told}", flush=True)
        test = told.split("::")[-1].replace("|", " ") if dies else "nobody"
        rows.append(f"| {mutant.fault} | {mutant.left} | `{test[:90]}` |")
    if options.write is not None:
        text = [
            "# Faults that cases killed which left CI",
            "",
            f"`make mutants`, {time.strftime('%Y-%m-%d')}: each fault is put into a copy of the",
            "checkout, and the first test of every run that finds it is shown.",
            "",
            "| fault | what left CI | killed by |",
            "|---|---|---|",
            *rows,
        ]
        options.write.write_text("\n".join([*text, ""]))
    sys.exit(f"{alive} live" if alive else 0)


if __name__ == "__main__":
    main()
