"""Settings of all unit tests."""

from hypothesis import settings

settings.register_profile("shared machines", deadline=None)  # tests do not time what they test
settings.load_profile("shared machines")
