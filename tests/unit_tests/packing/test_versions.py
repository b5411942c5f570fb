"""Versions in logs and cards, also where the project is a checkout that is not installed."""

import ast
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron.packing import versions

ROOT = Path(__file__).parents[3]


def test_a_checkout_has_the_version_of_its_pyproject(monkeypatch, tmp_path):
    """A run from a checkout ended at its first collective, after its data were read."""

    def not_installed(name):
        raise PackageNotFoundError(name)

    assert versions.package_version("numpy") == version("numpy")
    monkeypatch.setattr(versions, "version", not_installed)
    assert f'version = "{versions.package_version("megatron-sft")}"' in (
        ROOT / "pyproject.toml"
    ).read_text(encoding="utf-8")
    assert versions.package_version("numpy") == "unknown"
    monkeypatch.setattr(versions, "_PROJECT", tmp_path / "pyproject.toml")
    assert versions.package_version("megatron-sft") == "unknown"


def test_nothing_else_asks_for_metadata():
    """Another look-up of a version would end a run from a checkout again, in a place that no test
    runs without the package.
    """
    users = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "megatron").rglob("*.py")
        if "importlib.metadata" in (text := path.read_text(encoding="utf-8"))
        and any(
            isinstance(node, ast.ImportFrom) and node.module == "importlib.metadata"
            for node in ast.walk(ast.parse(text))
        )
    }
    assert users == {"megatron/packing/versions.py"}
