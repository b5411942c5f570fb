"""Layers that take packs, under a stand-in for Transformer Engine; those without are what the other
tests train.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("arguments", "found"), [([], "equal 2 0\n"), (["4"], "equal 2 4\n")])
def test_layers_of_transformer_engine_are_told_where_segments_end(arguments, found):
    """It never runs where these tests do. A layout in another form is accepted there, and attends
    to other tokens, or leaves rows as they were in memory. With experts: --moe-grouped-gemm takes
    its grouped products, of the same rows and of weights by the same names. A process of its own,
    since megatron-core is imported beside a stand-in.
    """
    name = "tests.functional_tests.transformer_engine_stand_in"
    done = subprocess.run(
        [sys.executable, "-m", name, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(found)
