"""What is published: a source distribution, and a wheel built from it where there is no
compiler."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools import Extension

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("blending", "packing", "planner", "sft")
BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"


def build(kind: str, source: Path, target: Path) -> Path:
    """What pip calls, in an environment whose C++ compiler fails."""
    target.mkdir()
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(target)]
    environment = os.environ | {"CC": "false", "CXX": "false"}
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[set[str], set[str]]:
    """Names of the files in the source distribution, and in the wheel that is built from it
    alone."""
    folder = tmp_path_factory.mktemp("build")
    (folder / "checkout").mkdir()
    for path in (*ROOT.glob("*.*"), ROOT / "LICENSE", ROOT / "Makefile"):
        if path.is_file():
            shutil.copy(path, folder / "checkout")
    for name in ("megatron", "docs", "examples", "tests"):
        shutil.copytree(
            ROOT / name, folder / "checkout" / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    sdist = build("sdist", folder / "checkout", folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 has it
        archive.extractall(folder)
    (unpacked,) = folder.glob("megatron_sft-*")
    wheel = build("wheel", unpacked, folder / "wheel")
    in_sdist = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    return in_sdist, set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_the_source_distribution_builds_and_is_tested(built):
    """It would build from a checkout only, or could not be checked by those who package it."""
    in_sdist, _ = built
    wanted = {
        "LICENSE",
        "CHANGELOG.md",
        "Makefile",
        "pretrain_sft.py",
        "megatron/packing/scheduling/core.cpp",
        "megatron/blending/order/core.cpp",
    }
    assert (
        wanted | {"tests/unit_tests/test_package.py", "examples/tiny_chat/config.yaml"} <= in_sdist
    )
    assert not [name for name in in_sdist if name.endswith((".so", ".pyc"))]


def test_the_wheel_has_all_code_and_nothing_else(built):
    """A folder without an __init__.py, or a file that is no Python, would be missing only for those
    who install.
    """
    _, in_wheel = built
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron").rglob("*.py")}
    typed = {f"megatron/{package}/py.typed" for package in PACKAGES}
    assert {name for name in in_wheel if not name.startswith("megatron_sft-")} == code | typed


def test_each_core_in_c_plus_plus_is_built(monkeypatch):
    """Without its core scheduling and blending are only slower, which no other test notices."""
    built: list[Extension] = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("setuptools.setup", lambda ext_modules, **_: built.extend(ext_modules))
    runpy.run_path("setup.py")
    sources = {source for extension in built for source in extension.sources}
    assert sources == {str(path.relative_to(ROOT)) for path in ROOT.glob("megatron/**/*.cpp")}


def test_the_version_has_its_entry(built):
    """A version that no change log tells of, or a change log that nobody kept."""
    (found,) = re.findall(
        r'^version = "(.*?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert version("megatron-sft") == found
    assert re.search(
        rf"^## {re.escape(found)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert any(
        name.startswith(f"megatron_sft-{found}.dist-info/licenses/LICENSE") for name in built[1]
    )


def test_pip_and_make_install_a_torch_that_is_tested():
    """Whoever installs would get next year's torch, with which nothing has been run."""
    (asked,) = re.findall(r'"(torch[<>=].*?)"', (ROOT / "pyproject.toml").read_text())
    makefile = (ROOT / "Makefile").read_text().replace("$(comma)", ",")
    (made,) = re.findall(r"^TORCH_ASKED = torch\$\(if .*,([^,]*,[^,]*)\)$", makefile, re.MULTILINE)
    assert Requirement(f"torch{made}").specifier == Requirement(asked).specifier
    page = (ROOT / "docs" / "reference" / "megatron-core.md").read_text()
    (row,) = re.findall(r"^Tested releases of torch: (.*)\.$", page, re.MULTILINE)
    run = row.split(", ")
    versions = ("2.10.0", "2.12.1", *run, "2.16.0", "3.0.0")
    assert [version for version in versions if version in Requirement(asked).specifier] == run
    assert len({version.rsplit(".", 1)[0] for version in run}) == len(run) == 3


def test_what_is_published_links_to_the_repository(tmp_path):
    """Relative links lead nowhere on a package index, and the picture is a broken one."""
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    quiet = "import setuptools; setuptools.setup = lambda **given: None"
    code = f"{quiet}\nimport setup; print(setup.readme())"
    shutil.copy(ROOT / "setup.py", tmp_path)
    address = "https://example.com/owner/name"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"REPOSITORY": address},
        capture_output=True,
        text=True,
        check=True,
    )
    targets = re.findall(r"\]\(([^)\s]+)\)", done.stdout)
    assert f"{address}/raw/HEAD/examples/tiny_chat/report.png" in targets
    assert f"{address}/blob/HEAD/docs/tutorial.md" in targets
    assert [target for target in targets if not target.startswith("https://")] == []


def test_the_citation_is_of_this_version():
    """Whoever cites it would name another one."""
    cited = re.findall(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == [version("megatron-sft")]
