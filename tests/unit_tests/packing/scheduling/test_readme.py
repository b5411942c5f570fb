"""The example of the README: what it prints is what it says."""

import re
from pathlib import Path

import megatron.packing.scheduling
from tests.unit_tests.packing.stubs import needs_compiled


@needs_compiled
def test_the_example_prints_what_the_readme_says(capsys):
    """A reader learns the three modes from it; a wrong one teaches what no longer holds."""
    text = (Path(megatron.packing.scheduling.__file__).parent / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == printed
