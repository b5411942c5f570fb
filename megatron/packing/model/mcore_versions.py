"""pure. The releases of megatron-core that the tests have been run with.

pyproject.toml installs the first or the last of them; a script with the plug-in may have any.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from packaging.version import Version

CHECKED_VERSIONS = ("0.16.1", "0.17", "0.18", "0.19")
"""A release, or a series of them: 0.19 is any 0.19.x. docs/reference/megatron-core.md says
how to add one.
"""


def check_version(user: str, way_out: str) -> None:
    """Warns in the name of `user` of a release that was not checked, as it may do otherwise and not
    tell.

    Raises RuntimeError for one that is older than all of them: it lacks what packing needs.
    """
    installed = _installed_version()
    if _is_checked(installed):
        return
    checked = (
        f"{user} was checked with megatron-core {', '.join(CHECKED_VERSIONS[:-1])} and "
        f"{CHECKED_VERSIONS[-1]}, but this is {installed}"
    )
    if Version(installed) < Version(CHECKED_VERSIONS[0]):
        raise RuntimeError(f"{checked}; {_install_checked()}, {way_out}")
    warnings.warn(
        f"{checked}, which may compute something else; compare the losses of a few steps with and "
        f"without packing, or {_install_checked()}",
        stacklevel=3,
    )


@contextmanager
def naming_version(user: str) -> Iterator[None]:
    """Raises RuntimeError, inside the `with`, where names that `user` needs are missing in a
    release that was not checked.
    """
    try:
        yield
    except (AttributeError, ImportError, TypeError) as failure:
        installed = _installed_version()
        if _is_checked(installed):
            raise
        raise RuntimeError(
            f"{user} does not work with megatron-core {installed} ({failure}); {_install_checked()}"
        ) from failure


def _installed_version() -> str:
    import megatron.core

    return megatron.core.__version__


def _is_checked(installed: str) -> bool:
    return any(f"{installed}.".startswith(f"{checked}.") for checked in CHECKED_VERSIONS)


def _install_checked() -> str:
    return (
        f"pip install megatron-core=={CHECKED_VERSIONS[0]} (Python 3.10 and 3.11) or "
        f"megatron-core=={CHECKED_VERSIONS[-1]}.* (3.12 and later)"
    )
