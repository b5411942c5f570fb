"""Whole runs of the models of `layouts.MECHANISMS`: they continue to the bit, and in another layout
with the same losses.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.functional_tests.forked_runs import train_forked
from tests.functional_tests.layouts import MECHANISMS
from tests.functional_tests.test_run import EXACT, steps_of

COMMON = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --mock-data "
    "--seq-length 96 --over-length-policy truncate --sequence-packing --global-batch-size 6 "
    "--max-seqlen-per-dp-cp-rank 192 "
    "--eval-iters 0 --train-iters 3 --save-interval 2 --lr 1e-2 --adam-eps 1e-3 "
    "--init-method-std 0.1"
)
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
ALL = os.environ.get("LAYOUTS") == "all"


@pytest.mark.parametrize("model", MECHANISMS if ALL else ["qwen3.5"])
def test_it_continues_to_the_bit_and_in_another_layout(model: str, tmp_path: Path) -> None:
    """Projections whose sections are cut apart, sinks and biases must be found again by a run whose
    ranks hold other parts of them.
    """
    flags = f"{COMMON} {MECHANISMS[model]} --use-distributed-optimizer"
    if "--num-experts" in flags:
        flags += " --expert-model-parallel-size 2"
    flags += f" --run-dir {tmp_path} --save {tmp_path}/saved --load {tmp_path}/saved"
    status, output = train_forked(2, f"{flags} {TENSOR}".split())
    assert status == 0, output
    whole = steps_of(tmp_path)
    for layout in (TENSOR, ""):
        (tmp_path / "saved/latest_checkpointed_iteration.txt").write_text("2")
        status, output = train_forked(2, f"{flags} {layout}".split())
        assert status == 0, output
        found = steps_of(tmp_path)[3]
        if layout == TENSOR:
            assert {name: found[name] for name in EXACT} == {name: whole[3][name] for name in EXACT}
        assert found["loss"] == pytest.approx(whole[3]["loss"], rel=1e-5)
