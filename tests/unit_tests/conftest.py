"""What all unit tests share."""

import os

from hypothesis import settings

# A busy processor takes longer than Hypothesis' 200 ms for a first example; time is no part of what
# is tested. `make fuzz` asks for many examples.
settings.register_profile(
    "any processor", deadline=None, max_examples=int(os.environ.get("EXAMPLES", "40"))
)
settings.load_profile("any processor")
