"""The examples in the packages' docstrings, which readers run first."""

from types import ModuleType

import megatron.packing
import megatron.planner
from megatron.packing.scheduling.registry import SCHEDULERS


def example_of(module: ModuleType) -> str:
    """The indented lines of a package's docstring, without what stands behind an arrow."""
    text = module.__doc__ or ""
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ") or not line]
    code = "\n".join(line.split("    ->")[0].rstrip() for line in lines)
    assert "import" in code
    return "import numpy as np\n" + code


def test_the_example_of_packing():
    """A renamed function would end a reader's first try in an ImportError."""
    found: dict[str, object] = {}
    exec(example_of(megatron.packing), found)
    microbatch = found["microbatch"]
    assert isinstance(microbatch, dict)
    assert microbatch["tokens"].tolist() == [5, 6, 7, 0, 8, 9, 0, 0]


def test_the_example_of_the_planner(capsys):
    """As above; and the scheduler that it shows must be the best of them."""
    exec(example_of(megatron.planner), {})
    balance = {
        line[:30].strip(): float(line.rsplit("balance", 1)[1])
        for line in capsys.readouterr().out.splitlines()
    }
    assert balance.keys() >= {"padding, to the longest", *SCHEDULERS}
    assert min(balance, key=lambda name: balance[name]) == "default"
