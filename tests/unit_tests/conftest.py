"""What all unit tests share."""

from hypothesis import settings

# A busy processor takes longer than Hypothesis' 200 ms for a first example; time is no part of what
# is tested.
settings.register_profile("any processor", deadline=None)
settings.load_profile("any processor")
