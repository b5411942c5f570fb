"""Runs whose weight gradients are added up within products, beside runs without."""

from pathlib import Path

import pytest

from tests.functional_tests.forked_runs import train_forked
from tests.functional_tests.layouts import MODELS
from tests.functional_tests.test_run import steps_of

ARGUMENTS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 96 "
    "--global-batch-size 8 --mock-data --sequence-packing --over-length-policy truncate "
    "--eval-iters 0 --lr 1e-2 --train-iters 3"
)
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
CASES = {
    "tied": (1, f"{MODELS['tied']} --logits-of-masked-tokens"),
    "further": (1, f"{MODELS['further']}"),
    "further-tied": (2, f"{MODELS['further-tied']} --pipeline-model-parallel-size 2"),
    "split": (2, f"{MODELS['grouped']} --tensor-model-parallel-size 2 --sequence-parallel"),
    "experts": (2, f"{MODELS['experts']} --bf16 {OVERLAPPED}"),
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
