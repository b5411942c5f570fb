"""Where the processes of functional tests run."""

import os


def pytest_configure() -> None:
    """Gives each of several workers cores of its own, which the ranks that it starts share.

    Ranks of a tiny model exchange hundreds of small messages and hardly compute: on one core a
    message wakes no other core, and a rank that is woken waits until the sender waits. That takes a
    quarter of the time off tests of layouts, on two cores.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers == 1 or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.sched_setaffinity(0, cores[number % len(cores) :: workers])
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
