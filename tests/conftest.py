"""Settings of all tests."""

import gc

# While modules are imported, and these are not looked through later: a tenth of the time of all
# unit tests, and of each process that runs functional ones.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
