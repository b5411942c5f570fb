"""What pyproject.toml, which says all else, has no words for: the compiled cores are optional and
stripped, and README's links are absolute where the address of the repository is known.
"""

import os
import re
import sys
from pathlib import Path

from setuptools import Extension, setup

REPOSITORY = os.environ.get("REPOSITORY", "").rstrip("/")
"""Address of the public repository, https://HOST/OWNER/NAME; set it to build what is published."""


def readme() -> str:
    """Returns README.md; links to files of the repository would lead nowhere on a package index."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    if not REPOSITORY:
        return text
    text = re.sub(r"!\[([^\]]*)\]\((?!\w+:)([^)\s]+)\)", rf"![\1]({REPOSITORY}/raw/HEAD/\2)", text)
    return re.sub(
        r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)", rf"[\1]({REPOSITORY}/blob/HEAD/\2)", text
    )


def project_urls() -> dict[str, str]:
    """Returns what a package index shows beside the description."""
    if not REPOSITORY:
        return {}
    return {
        "Source": REPOSITORY,
        "Documentation": f"{REPOSITORY}/blob/HEAD/docs/index.md",
        "Changes": f"{REPOSITORY}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    }


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls=project_urls(),
    # Without a C++ compiler scheduling takes plainer ways, slower and a little worse; the order of
    # blends is the same, and slower to compute.
    ext_modules=[
        Extension(
            f"{folder.replace('/', '.')}._core",
            sources=[f"{folder}/core.cpp"],
            extra_compile_args=["-O3", "-std=c++17", "-g0"],
            extra_link_args=["-Wl,-s"] if sys.platform == "linux" else [],
            optional=True,
        )
        for folder in ("megatron/packing/scheduling", "megatron/blending/order")
    ],
)
