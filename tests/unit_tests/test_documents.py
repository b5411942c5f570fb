"""Documents say what is there: links lead somewhere, commands and options exist."""

import importlib
import io
import os
import re
import shlex
import sys
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from megatron.packing.flags import flag_of
from megatron.sft.arguments.megatron_flag_table import ACCEPTED
from megatron.sft.arguments.megatron_flags import READ_AS
from megatron.sft.commands import COMMANDS
from megatron.sft.launch import FLAGS as LAUNCHER
from megatron.sft.options.config import GROUPS

OF_OTHERS = set("--local-dir --max-restarts --import-mode".split())
"""Options of other programs that pages speak of."""
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


def commands_in(text: str) -> list[list[str]]:
    """Words of each command of ours in the blocks of a page; `...` stands for what is left out."""
    found = []
    for block in re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if "megatron" not in line:
                continue
            words: list[str] = []
            with suppress(ValueError):  # a quotation that ends on another line: not of a shell
                words = [word for word in shlex.split(line, comments=True) if word != "..."]
            if words[:1] == ["megatron-sft"]:
                found.append(words[1:])
            elif "megatron.sft" in words or "pretrain_sft.py" in words:
                start = words.index(
                    "megatron.sft" if "megatron.sft" in words else "pretrain_sft.py"
                )
                found.append(words[start + 1 :])
    return found


OWN = [path for path in DOCUMENTS if path.parent.name not in ("coming-from", "results")]
COMMANDS_IN = [
    pytest.param(words, id=f"{name_of(path)}: {' '.join(words)[:60]}")
    for path in OWN
    for words in commands_in(path.read_text())
]


@cache
def flags_of(name: str) -> set[str]:
    """The options of a subcommand, with --no-x of each switch."""
    if name in ("train", "score"):  # which takes the options of training
        classes: tuple[type, ...] = GROUPS
        own = {*LAUNCHER, "--config", "--help", "--help-all", "--version"}
        negated = {flag_of(f.name).replace("--", "--no-", 1) for c in classes for f in fields(c)}
        return own | negated | {flag_of(f.name) for c in classes for f in fields(c)}
    out = io.StringIO()
    module = importlib.import_module(COMMANDS[name].module)
    more = [["--auto-layout", "--help-all"]] if name == "plan" else []
    for flags in (["--help-all"], ["--help"], *more):
        with redirect_stdout(out), redirect_stderr(io.StringIO()), suppress(SystemExit):
            module.main(flags, f"megatron-sft {name}")
    return set(re.findall(r"--[a-z][a-z0-9-]*", out.getvalue()))


def test_commands_are_found():
    """Without commands the test below passes."""
    assert len(COMMANDS_IN) > 25
    assert flags_of("train") > flags_of("show") & flags_of("train") >= {"--data-path"}


@pytest.mark.parametrize("words", COMMANDS_IN)
def test_commands_have_options_that_exist(words):
    """A page whose command is refused loses its reader at the first step."""
    name = words[0] if words[:1] and words[0] in COMMANDS else "train"
    words = words[: words.index("--")] if "--" in words else words  # others are a script's
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert given <= flags_of(name)


@pytest.mark.parametrize("path", OWN, ids=name_of)
def test_options_in_the_text_exist(path):
    """An option that was renamed stays in the prose for years."""
    if path.name in ("CHANGELOG.md", "LOG.md", "checked.md"):
        return  # they speak of the past, and of other programs
    known = set().union(*map(flags_of, COMMANDS)) | OF_OTHERS | {*ACCEPTED, *READ_AS}
    named = set(re.findall(r"`(--[a-z][a-z0-9-]*[a-z0-9])", path.read_text()))
    assert named - known == set()


@pytest.mark.skipif(
    os.environ.get("DOCS") != "strict", reason="DOCS=strict; `make docs` writes them"
)
def test_pages_from_the_code_are_as_it_is():
    """Whoever reads the reference reads the options of last month."""
    sys.path.insert(0, str(ROOT / "docs"))
    made = importlib.import_module("generate").pages()
    assert [name for name, text in made.items() if (ROOT / "docs" / name).read_text() != text] == []


def test_every_page_is_in_the_navigation():
    """MkDocs refuses to build the site, which `make test` does not try."""
    listed = set(re.findall(r"\S+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")} == listed
