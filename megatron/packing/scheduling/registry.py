"""pure. Schedulers by name, as the command line has them; users add theirs as `module:function`.

Each keeps the invariants in the docstring of `problem`.
"""

from __future__ import annotations

import difflib
import importlib

from megatron.packing.scheduling.arrival_order import dp_balanced, empty
from megatron.packing.scheduling.default import default
from megatron.packing.scheduling.problem import Scheduler

SCHEDULERS: dict[str, Scheduler] = {"default": default, "empty": empty, "dp_balanced": dp_balanced}


def get_scheduler(name: str) -> Scheduler:
    """Returns the scheduler of that name, in any case, or the function of `module:function`.

    Raises ValueError with the choices for an unknown name, and with the cause for a module that
    can't be imported or has no such function.
    """
    if ":" in name:
        return _import(name)
    if name.lower() not in SCHEDULERS:
        close = difflib.get_close_matches(name, SCHEDULERS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(
            f"--sequence-packing-scheduler must be one of {', '.join(SCHEDULERS)} "
            f"or module:function, but is {name!r}{hint}"
        )
    return SCHEDULERS[name.lower()]


def _import(name: str) -> Scheduler:
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"--sequence-packing-scheduler {name!r} can't be imported: {error}; "
            "give module:function, with the module on the Python path"
        ) from error
    except SystemExit as end:
        raise ValueError(
            f"--sequence-packing-scheduler {name!r} can't be imported: its module raises "
            f"SystemExit({end}); guard what it does as a program by if __name__ == '__main__'"
        ) from end
    if not callable(function):
        raise ValueError(
            f"--sequence-packing-scheduler {name!r} must be a function, but is {function!r}"
        )
    scheduler: Scheduler = function
    return scheduler
