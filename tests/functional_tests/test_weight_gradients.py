"""Runs whose weight gradients are added up within products, beside runs without."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron.packing.model import grouped_experts
from megatron.sft.__main__ import main
from tests.functional_tests.forked_runs import train_forked
from tests.functional_tests.layouts import MODELS
from tests.functional_tests.test_run import steps_of

ARGUMENTS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 96 "
    "--global-batch-size 8 --mock-data --sequence-packing --over-length-policy truncate "
    "--max-seqlen-per-dp-cp-rank 192 "
    "--eval-iters 0 --lr 1e-2 --train-iters 3"
)
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
EP2 = f"{MODELS['experts']} --bf16 --moe-grouped-gemm --expert-model-parallel-size 2"
CASES = {
    "tied": (1, f"{MODELS['tied']} --logits-of-masked-tokens"),
    "further-tied": (2, f"{MODELS['further-tied']} --pipeline-model-parallel-size 2"),
    "split": (2, f"{MODELS['grouped']} --tensor-model-parallel-size 2 --sequence-parallel"),
    "grouped-overlapped": (2, f"{EP2} {OVERLAPPED}"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_trains_as_without(case: str, tmp_path: Path) -> None:
    """A weight that has gradients from a layer and from elsewhere loses those from elsewhere, if
    nobody marks it; one that is added to twice trains twice as fast. No message says so.
    """
    num_processes, model = CASES[case]
    for name, flag in (("without", ""), ("within", "--gradient-accumulation-fusion")):
        text = f"{ARGUMENTS} {model} {flag} --run-dir {tmp_path}/{name}"
        status, output = train_forked(num_processes, text.split())
        assert status == 0, output
    without, within = steps_of(tmp_path / "without"), steps_of(tmp_path / "within")
    assert list(within) == [1, 2, 3]
    for iteration, step in within.items():
        for figure in ("loss", "grad_norm"):
            assert step[figure] == pytest.approx(without[iteration][figure], rel=1e-4)


def main_with_counts() -> None:
    """A run, and how often weights and gradients of a layer's experts were found side by side."""
    find: Any = grouped_experts._side_by_side
    counts: Counter[tuple[str, bool]] = Counter()

    def counted(tensors: Any) -> Any:
        found = find(tensors)
        kind = "weights" if tensors[0].requires_grad else "gradients"
        counts[kind, found is not None] += 1
        return found

    grouped_experts._side_by_side = counted
    main()
    print(f"found: {sorted(counts.items())}")


@pytest.mark.parametrize("optimizer", ["", OVERLAPPED])
def test_experts_lie_side_by_side(optimizer: str, tmp_path: Path) -> None:
    """Where they do not, each pass copies the weights of all experts, and each gradient is added by
    itself: a tenth of a step, to the same losses.
    """
    text = f"{ARGUMENTS} {MODELS['experts']} --bf16 --moe-grouped-gemm {optimizer}"
    text += f" --gradient-accumulation-fusion --run-dir {tmp_path}"
    status, output = train_forked(1, text.split(), main_with_counts)
    assert status == 0, output
    num_microbatches = sum(step["microbatches"] for step in steps_of(tmp_path).values())
    products = 2 * 2 * num_microbatches  # of two layers' two linear layers
    expected = [(("gradients", True), products), (("weights", True), 2 * products)]
    assert f"found: {expected}" in output
