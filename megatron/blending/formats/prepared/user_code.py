"""pure. Loads functions from Python files that a dataset.yaml names, if the user allows it."""

import importlib.util
from collections.abc import Callable
from typing import Any

from megatron.blending.arguments import shown
from megatron.blending.formats.files import is_file, join_location, local_path


def load_function(
    reference: str, default_name: str, folder: str, *, allow_code: bool, where: str
) -> Callable[..., Any]:
    """Runs a Python file of `folder`, and returns one of its functions. Raises ValueError, starting
    with `where`, without `allow_code`, or if there is no such function.

    Args:
        reference: "file.py:name" or "file.py".
        default_name: name of the function if `reference` has none.
    """
    path, _, name = reference.partition(":")
    name = name or default_name
    if not allow_code:
        raise ValueError(
            f"{where}: names Python code, {reference}, which is not run; read it, then pass "
            "allow_code=True"
        )
    location = local_path(join_location(folder, path))
    if location is None or not path.endswith(".py") or not is_file(location):
        raise ValueError(
            f"{where}: {reference}: must be file.py:function, a local file in {folder}"
        )
    spec = importlib.util.spec_from_file_location(
        f"megatron_blending_user_code_{abs(hash(location))}", location
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{where}: {reference}: {location} has no function {shown(name)}")
    return function
