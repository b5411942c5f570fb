"""Every place that asks for the device is in the table of the memory estimate."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron.sft.fit.fake.cuda_branches import BRANCHES, flash_backward_bytes

from megatron.packing.model.loss import cross_entropy
from megatron.sft.fit.counter import ByteCounter
from megatron.sft.fit.fake import cuda_branches

ROOT = Path(__file__).parents[5] / "megatron"
OWN = ("sft/fit", "planner", "blending")
"""The estimate itself, and what no training step runs."""


def asks_for_device(node: ast.AST) -> bool:
    """Whether an expression is `x.is_cuda`, `x.type == "cuda"` or `torch.cuda.is_available`."""
    if isinstance(node, ast.Attribute):
        return node.attr == "is_cuda" or ast.unparse(node) == "torch.cuda.is_available"
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(isinstance(side, ast.Attribute) and side.attr == "type" for side in sides) and (
            ".type" in ast.unparse(node)
            and ("'cuda'" in ast.unparse(node) or "'cpu'" in ast.unparse(node))
        )
    return False


def sites(tree: ast.AST, name: str) -> Iterator[str]:
    """Yields the functions of a module that ask, by qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if isinstance(node, ast.FunctionDef) and any(map(asks_for_device, ast.walk(node))):
                yield f"{name}.{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from sites(node, f"{name}.{node.name}")


def found() -> set[str]:
    """The places of the trainer."""
    names = set()
    for path in ROOT.rglob("*.py"):
        where = path.relative_to(ROOT).as_posix()
        if not where.startswith(OWN):
            module = where.removesuffix(".py").replace("/", ".")
            names |= set(sites(ast.parse(path.read_text()), module))
    return names


def test_no_device_branch_is_missing() -> None:
    """A new way of CUDA's would be estimated as a CPU's, and nobody would see it."""
    listed = {branch.where for branch in BRANCHES if not branch.where.startswith("torch.")}
    assert found() - listed == set()
    assert listed - found() == set()
    assert len({branch.where for branch in BRANCHES}) == len(BRANCHES)


@pytest.mark.parametrize(
    "text",
    ["x = q.is_cuda", "x = device.type != 'cuda'", "x = torch.cuda.is_available() and y"],
)
def test_a_new_branch_is_found(text: str) -> None:
    """The search must see each way of asking."""
    (function,) = sites(ast.parse(f"def ask(q):\n    {text}"), "module")
    assert function == "module.ask"
    assert not list(sites(ast.parse("def ask(q):\n    x = q.type"), "module"))


def test_a_sum_of_products_is_held_once() -> None:
    """On a CPU a product in bfloat16 is held beside it, half as large."""
    torch = pytest.importorskip("torch")
    left, right = (torch.empty(2, size, dtype=torch.bfloat16, device="meta") for size in (96, 32))
    peaks = []
    for add in (cuda_branches._add_product, cross_entropy._add_product):
        with ByteCounter() as counter, counter.phase("sum"):
            total = None
            for _ in range(3):
                total = add(total, left.t(), right, torch.float32)
        peaks.append(counter.phases[0].peak)
    assert peaks == [4 * 96 * 32, 6 * 96 * 32]


def test_workspace_of_flash_attention() -> None:
    """1,000 tokens in two sequences, 8 heads that share 2 groups of keys, 64 channels."""
    torch = pytest.importorskip("torch")
    query, key = torch.empty(1000, 8, 64, device="meta"), torch.empty(1000, 2, 64, device="meta")
    rows = 1000 + 2 * 128
    expected = 4 * rows * 8 * 64 + 4 * rows * 8 + 2 * 2 * 1000 * 8 * 64
    assert flash_backward_bytes(query, key, torch.empty(3, device="meta")) == expected


def test_stand_ins_return_what_fused_swiglu_does() -> None:
    """Another shape or type would be counted as other bytes, and no run would fail."""
    torch = pytest.importorskip("torch")
    fused_bias_swiglu = cuda_branches.fused_bias_swiglu
    x, gradient = (torch.ones(6, width, dtype=torch.bfloat16) for width in (8, 4))
    bias, weights = torch.ones(8, dtype=torch.bfloat16), torch.ones(6, 1)
    arguments = {
        "swiglu": (x,),
        "bias_swiglu": (x, bias),
        "weighted_swiglu": (x, weights),
        "swiglu_back": (gradient, x),
        "bias_swiglu_back": (gradient, x, bias),
        "weighted_swiglu_back": (gradient, x, weights),
    }
    assert list(cuda_branches._COMPILED) == list(arguments)
    for name, stand_in in cuda_branches._COMPILED.items():
        with torch.compiler.set_stance("force_eager"):
            expected = getattr(fused_bias_swiglu, name)(*arguments[name])
        found = stand_in(*arguments[name])
        for one, other in zip(tensors(found), tensors(expected), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype), name


def tensors(value: object) -> tuple[Any, ...]:
    """Returns the tensors of a result."""
    return value if isinstance(value, tuple) else (value,)
