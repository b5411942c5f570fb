"""Documents say what is there: links lead somewhere, options exist."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "megatron/**/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(path: Path) -> str:
    """The text without code blocks, in which `](` may be code."""
    return re.sub(r"^( *)```.*?^\1```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(path: Path) -> set[str]:
    """Names of headings as GitHub and MkDocs make them: `## Two words` -> `two-words`."""
    found: Counter[str] = Counter()
    names = set()
    for title in re.findall(r"^#+ +(.+?) *$", prose(path), flags=re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower())
        name = name.replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return names


def test_the_documents_are_found():
    """Without documents every test below passes."""
    assert {"README.md", "docs/coming-from/energon.md"} <= set(map(name_of, DOCUMENTS))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path):
    """A page that was moved leaves its readers with an error page."""
    broken = []
    for target in LINK.findall(prose(path)):
        if "://" in target or target.startswith("mailto:"):
            continue
        file, _, anchor = target.partition("#")
        place = (path.parent / file).resolve() if file else path
        if not place.exists() or (
            anchor and place.suffix == ".md" and anchor not in anchors(place)
        ):
            broken.append(target)
    assert broken == []
