"""pure. Versions of packages, for logs and reports; this project's own also from a checkout that is
not installed.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

UNKNOWN = "unknown"
_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def package_version(name: str) -> str:
    """Returns the version of an installed package, of megatron-sft else that of the checkout, or
    `UNKNOWN`.

    The modules of a package can be there without its metadata: on PYTHONPATH, in a folder that was
    copied. A run must not end for a version that only its log shows.
    """
    try:
        return version(name)
    except PackageNotFoundError:
        return (_checkout_version() if name == "megatron-sft" else None) or UNKNOWN


def _checkout_version() -> str | None:
    """Returns the version in pyproject.toml beside the package; None if there is none of ours."""
    try:
        text = _PROJECT.read_text(encoding="utf-8")
    except OSError:
        return None
    written = re.search(r'^name = "megatron-sft"\nversion = "([^"\n]+)"', text, re.MULTILINE)
    return written[1] if written else None
