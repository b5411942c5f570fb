"""Layers that take packs, under a stand-in for Transformer Engine; those without are what the other
tests train.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_layers_of_transformer_engine_are_told_where_segments_end():
    """It never runs where these tests do. A layout in another form is accepted there, and attends
    to other tokens, or leaves rows as they were in memory. With experts: --moe-grouped-gemm takes
    its grouped products, of the same rows and of weights by the same names. A process of its own,
    since megatron-core is imported beside a stand-in; one for both, as that takes most of the time.
    """
    name = "tests.functional_tests.transformer_engine_stand_in"
    done = subprocess.run(
        [sys.executable, "-m", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("equal 2 0\nequal 2 4\n")
