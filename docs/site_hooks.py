"""For MkDocs: what pages link to outside of docs/ comes with the site, pictures as they are, other
files by name.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_pictures: dict[str, Path] = {}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Returns the page with links that leave docs/ replaced."""
    place = Path(page.file.abs_src_path).parent
    docs = Path(config["docs_dir"])
    depth = len(Path(page.file.dest_uri).parts) - 1

    def replaced(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        path = (place / target.partition("#")[0]).resolve()
        if path.is_relative_to(docs) or not path.exists():
            return match[0]
        if mark:
            _pictures[path.name] = path
            return f'<img alt="{text}" src="{"../" * depth}pictures/{path.name}">'
        return f"{text} (`{path.relative_to(ROOT)}`)"

    return LINK.sub(replaced, markdown)


def on_post_build(config: Any) -> None:
    """Copies the pictures."""
    for name, path in _pictures.items():
        target = Path(config["site_dir"], "pictures", name)
        os.makedirs(target.parent, exist_ok=True)
        shutil.copy(path, target)
