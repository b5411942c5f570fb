"""pure. The releases of megatron-core that the tests have been run with; pyproject.toml asks for
one of them.
"""

CHECKED_VERSIONS = ("0.16.1", "0.19")
"""A release, or a series of them: 0.19 is any 0.19.x. docs/reference/megatron-core.md says
how to add one.
"""


def check_version(user: str, way_out: str) -> None:
    """Raises RuntimeError in the name of `user` where another release is installed: it may do
    otherwise, and not tell.
    """
    import megatron.core

    installed = megatron.core.__version__
    if not any(f"{installed}.".startswith(f"{checked}.") for checked in CHECKED_VERSIONS):
        raise RuntimeError(
            f"{user} was checked with megatron-core {' and '.join(CHECKED_VERSIONS)}, but this is "
            f"{installed}; pip install megatron-core=={CHECKED_VERSIONS[0]} (Python 3.10 and 3.11) "
            f"or megatron-core=={CHECKED_VERSIONS[-1]}.* (3.12 and later), {way_out}"
        )
