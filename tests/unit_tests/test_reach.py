"""The part of the repository that whoever maintains the trainer must know: all that importing it
can reach.
"""

import ast

from tests.unit_tests.test_imports import FILES, imported, module_name, syntax

BASELINE = 37_700
"""Statements that the trainer reaches. A change of more than SLACK changes this number in the same
commit.
"""
SLACK = 0.02
BY_NAME = {module_name(path).removesuffix(".__init__"): path for path in FILES}


def reached_from(name: str) -> set[str]:
    """The modules of this project that importing `name` can import, at once or later; itself among
    them.

    Imports inside functions count, and so do names of modules in strings, which `importlib`
    imports.
    """
    found, pending = set[str](), [name]
    while pending:
        module = pending.pop()
        parts = module.split(".")
        for count in range(2, len(parts) + 1):  # a package's __init__ is run before what is in it
            known = ".".join(parts[:count])
            if known in BY_NAME and known not in found:
                found.add(known)
                path = BY_NAME[known]
                pending += imported(path)
                pending += [
                    node.value
                    for node in ast.walk(syntax(path))
                    if isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and node.value in BY_NAME
                ]
    return found


def num_statements(name: str) -> int:
    """Of a module; a docstring is one."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(syntax(BY_NAME[name])))


def test_the_trainer_reaches_no_more_than_is_said():
    """Each module in reach is one more that a reader of the trainer must know; nobody would see it
    come.
    """
    reached = reached_from("megatron.sft.__main__")
    assert {
        "megatron.sft.training.train",
        "megatron.packing.step.global_batch",
        "megatron.blending.order.proportions",
    } <= reached
    # For energon's users; imported when one of its names is asked for.
    assert not any(name.startswith("megatron.blending.energon") for name in reached)
    statements = sum(map(num_statements, reached))
    print(f"megatron.sft.__main__ reaches {statements:,} statements in {len(reached)} modules")
    assert abs(statements - BASELINE) <= SLACK * BASELINE, (
        f"the trainer reaches {statements:,} statements, {BASELINE:,} are said: change BASELINE in "
        "this commit, or import less"
    )
