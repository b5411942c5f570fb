"""What all unit tests share."""

import gc

from hypothesis import settings

# A busy processor takes longer than Hypothesis' 200 ms for a first example; time is no part of what
# is tested.
settings.register_profile("any processor", deadline=None)
settings.load_profile("any processor")

# while modules are imported, and these are not looked through later: a tenth of all tests' time
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
