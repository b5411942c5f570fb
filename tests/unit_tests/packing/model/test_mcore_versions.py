"""The releases of megatron-core that pip installs are checked ones, and no other runs without a
word.
"""

from importlib.metadata import requires

import megatron.core
import pytest
from packaging.requirements import Requirement

from megatron.packing.model.mcore_versions import CHECKED_VERSIONS, check_version, naming_version


@pytest.mark.parametrize("version", ["0.16.1", "0.17.1", "0.18.0", "0.19.2", "0.19.0+abc"])
def test_checked_versions_pass(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(megatron.core, "__version__", version)
    check_version("packing", "or don't")


@pytest.mark.parametrize("version", ["0.9.0", "0.15.3", "0.16.0"])
def test_older_versions_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """They lack names that are imported later, and call schedules otherwise."""
    monkeypatch.setattr(megatron.core, "__version__", version)
    words = (
        rf"packing was checked with megatron-core 0\.16\.1, 0\.17, 0\.18 and 0\.19, "
        rf"but this is {version}; pip .*, or don't"
    )
    with pytest.raises(RuntimeError, match=words):
        check_version("packing", "or don't")


@pytest.mark.parametrize("version", ["0.16.2", "0.16.10", "0.20.0", "0.20.0rc1", "1.19.0"])
def test_unknown_later_versions_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """They may compute something else and not tell, but seldom do: a script that has one could not
    even try.
    """
    monkeypatch.setattr(megatron.core, "__version__", version)
    with pytest.warns(UserWarning, match=rf"this is {version}, which may compute .*; compare the"):
        check_version("packing", "or don't")


def test_missing_names_of_an_unknown_version_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback of ours looks like a fault of ours; in a checked release it is one."""

    def ask() -> None:
        with naming_version("packing"):
            _ = megatron.core.enable_cuda_graph  # type: ignore[attr-defined]

    monkeypatch.setattr(megatron.core, "__version__", "0.20.0")
    with pytest.raises(
        RuntimeError, match=r"packing does not work with megatron-core 0\.20\.0 \(.*"
    ):
        ask()
    monkeypatch.setattr(megatron.core, "__version__", "0.19.2")
    with pytest.raises(AttributeError):
        ask()


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_pip_installs_a_checked_version(python: str) -> None:
    """A release that pip takes and packing refuses would be found out only by users."""
    wanted = [Requirement(text) for text in requires("megatron-sft") or []]
    (cores,) = [
        [
            r
            for r in wanted
            if r.name == "megatron-core"
            and r.marker
            and r.marker.evaluate({"python_version": python})
        ]
    ]
    (core,) = cores
    accepted = [
        version
        for version in ("0.15.3", "0.16.1", "0.17.0", "0.18.0", "0.19.2", "0.20.0")
        if version in core.specifier
    ]
    assert accepted == (["0.16.1"] if python < "3.12" else ["0.19.2"])
    assert accepted[0].startswith(CHECKED_VERSIONS)


def test_the_installed_version_is_a_checked_one() -> None:
    check_version("this test", "or run another")
