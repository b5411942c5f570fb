"""How docstrings begin: with a verb, or with what the thing is."""

import ast
import re
from collections.abc import Iterator

from tests.unit_tests.test_imports import FILES, KINDS, module_name, syntax

MAX_SHARE = 0.037
"""Of docstrings that begin with a relative clause; in grain, torchtitan, OLMo-core, streaming and
energon they are 0 to 3.7 %.
"""
_CLAUSE = re.compile(r"(What|Which|Where|Whether|That|Who|Whose|How|When|Of which|By which)\b")
_KIND = re.compile(rf"({'|'.join(KINDS)})\. ")


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Of modules, classes and functions, and the strings below attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from filter(None, [ast.get_docstring(node)])
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for before, after in zip(node.body, node.body[1:]):
                if isinstance(before, (ast.Assign, ast.AnnAssign)):
                    match after:
                        case ast.Expr(value=ast.Constant(value=str(text))):
                            yield text


def test_docstrings_begin_with_a_verb_or_a_noun():
    """Readers of help and of an editor's pop-up see the first words only: `What a run ...` makes
    them read to the end to learn what the thing is.
    """
    num_docstrings, clauses = 0, []
    for path in FILES:
        for text in docstrings(syntax(path)):
            num_docstrings += 1
            if _CLAUSE.match(_KIND.sub("", text.strip())):
                clauses.append(f"{module_name(path)}: {text.strip().splitlines()[0]}")
    assert num_docstrings > 3000
    assert len(clauses) <= MAX_SHARE * num_docstrings, "\n".join(clauses)
