"""Contracts of the packages: who imports whom, and what importing costs."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("pure", "tensor", "collective", "mcore")

# One after the other in one process, up to the first that is not as it should be: that one is to
# blame.
IMPORT_ALL = """
import importlib, json, sys

for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        found = [m for m in ("torch", "megatron.core") if m in sys.modules]
    except BaseException as error:
        found = [f"{type(error).__name__}: {error}"]
    print(json.dumps([name, found]), flush=True)
    if found:
        break
"""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def kind(path: Path) -> str:
    """The first word of the docstring: "pure. Lengths in, ..." -> "pure"."""
    words = (ast.get_docstring(syntax(path)) or "").split()
    return words[0].rstrip(".:,") if words else ""


@cache
def imported(path: Path, at_import_time_only: bool = False) -> list[str]:
    """Names that a file imports, "a.b.c" for `from a.b import c`; with those in functions unless
    told otherwise.
    """
    return list(_imported(path, at_import_time_only))


def _imported(path: Path, at_import_time_only: bool) -> Iterator[str]:
    pending: list[ast.AST] = [syntax(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module_name(path).split(".")[: -node.level] if node.level else []
            origin = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if not (at_import_time_only and is_function):
            pending.extend(ast.iter_child_nodes(node))


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


FILES = sorted(
    path for path in (ROOT / "megatron").rglob("*.py") if "__pycache__" not in path.parts
)
MODULES = [path for path in FILES if path.name != "__init__.py"]
PURE = [module_name(path) for path in MODULES if kind(path) == "pure"]


def test_the_files_are_found():
    """Without files every test below passes."""
    assert {path.parent.name for path in MODULES} >= {"batch", "scheduling", "planner", "sft"}
    assert len(PURE) >= 10
    packing = ROOT / "megatron" / "packing"
    assert "megatron.core.packed_seq_params.PackedSeqParams" in imported(
        packing / "model" / "get_batch.py", True
    )
    assert "megatron.packing.scheduling.problem.Schedule" in imported(packing / "step" / "stats.py")


def test_megatron_is_a_namespace():
    """With an `__init__.py` here, `import megatron.core` fails wherever this package comes first on
    the path.
    """
    assert not (ROOT / "megatron" / "__init__.py").exists()


def test_docstrings_say_the_kind():
    """The kind is the contract that the tests below hold a file to; without one a file is held to
    nothing.
    """
    assert [module_name(path) for path in MODULES if kind(path) not in KINDS] == []


@pytest.mark.slow
def test_pure_modules_import_neither_torch_nor_megatron_core():
    """Data-loader workers, reports and tests import these: each would take seconds longer, for
    nothing.
    """
    found: dict[str, list[str]] = {}
    while left := [name for name in PURE if name not in found]:
        command = [sys.executable, "-c", IMPORT_ALL, *left]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
        )
        found |= dict(json.loads(line) for line in done.stdout.splitlines())
    assert found.keys() == {*PURE}
    assert {name: loaded for name, loaded in found.items() if loaded} == {}


# Each package knows those named after it, and no other; inside a package a folder knows those
# before it.
KNOWS = {
    "blending": (),
    "packing": (),
    "planner": ("packing",),
    "sft": ("planner", "packing", "blending"),
}
FOLDERS = {
    "blending": (
        "arguments",
        "formats",
        "metadatasets",
        "order",
        "streams",
        "loading",
        "energon",
    ),
    "packing": (
        "quoting",
        "user_files",
        "folder_gate",
        "versions",
        "flag_help",
        "flag_faults",
        "flag_needs",
        "flags",
        "device",
        "stages",
        "rules",
        "layers",
        "device",
        "batch",
        "scheduling",
        "step",
        "plugin_rules",
        "model",
        "data_schedule",
        "conventions",
        "plugin_options",
        "plugin_checks",
        "plugin",
        "doctor",
    ),
    "planner": (
        "sequences",
        "step_record",
        "lengths",
        "compare",
        "layout",
        "advice",
        "plan_options",
        "plan_run",
        "step_blocks",
        "step_picture",
        "step_page",
        "step_plot",
        "plan_text",
        "plan_pictures",
        "plan",
        "calibrate",
    ),
    "sft": (
        "base_exceptions",
        "environment",
        "launch",
        "options",
        "heartbeat",
        "agreement",
        "peers",
        "memory_estimate",
        "images",
        "data",
        "model",
        "arguments",
        "distributed",
        "fit",
        "report",
        "preflight",
        "training",
        "doctor",
        "commands",
    ),
}


@pytest.mark.parametrize("package", KNOWS)
def test_packages_know_only_those_below(package):
    """Each package is usable without those above; one import, also inside a function, ends that."""
    forbidden = [
        f"megatron.{other}" for other in KNOWS if other != package and other not in KNOWS[package]
    ]
    found = [
        (module_name(path), name)
        for path in FILES
        if path.is_relative_to(ROOT / "megatron" / package)
        for name in imported(path)
        if any(is_within(name, other) for other in forbidden)
    ]
    assert found == []


@pytest.mark.parametrize("package", FOLDERS)
def test_folders_have_one_order(package):
    """Who reads a folder needs to have read those before it only."""
    order = FOLDERS[package]
    folders = [ROOT / "megatron" / package / name for name in order]
    assert all(folder.is_dir() or folder.with_suffix(".py").is_file() for folder in folders)
    found = [
        (module_name(path), name)
        for place, folder in enumerate(folders)
        for path in FILES
        if (path.is_relative_to(folder) or path == folder.with_suffix(".py"))
        for name in imported(path)
        if is_within(name, f"megatron.{package}")
        and not any(is_within(name, f"megatron.{package}.{known}") for known in order[: place + 1])
    ]
    assert found == []


@pytest.mark.parametrize("package", ["blending"])
def test_no_circle_of_files(package):
    """Files that import one another, also inside functions, can only be read, tested and moved all
    together.
    """
    paths = {
        module_name(path): path
        for path in MODULES
        if path.is_relative_to(ROOT / "megatron" / package)
    }
    left = {
        name: {
            other
            for other in paths
            for one in imported(path)
            if is_within(one, other) and other != name
        }
        for name, path in paths.items()
    }
    assert sum(map(len, left.values())) > len(left)
    while free := {name for name, known in left.items() if not known & left.keys()}:
        left = {name: known for name, known in left.items() if name not in free}
    assert left == {}


def test_text_imports_no_media():
    """Decoders of images and video take seconds to import, and need libraries that those who train
    on text lack.
    """
    code = (
        "import sys; import megatron.blending as b; b.get_train_dataset; b.get_loader; "
        "assert b.SampleDecoder()('txt', b'a') == 'a'; "
        "print([name for name in sys.modules if 'energon._media' in name])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"
    media = ROOT / "megatron" / "blending" / "energon" / "_media"
    known = [
        name
        for path in FILES
        for name in imported(path)
        if is_within(name, "megatron.blending.energon._media")
    ]
    assert media.is_dir()
    assert known == []


def test_only_mcore_files_import_megatron_core():
    """megatron-core takes seconds to import and changes by release: who depends on it must be few,
    and say so.
    """
    found = [
        (module_name(path), name)
        for path in FILES
        if kind(path) != "mcore"
        for name in imported(path, at_import_time_only=True)
        if is_within(name, "megatron.core")
    ]
    assert found == []
