"""Settings of all unit tests."""

import pytest
from hypothesis import settings

settings.register_profile("shared machines", deadline=None)  # tests do not time what they test
settings.load_profile("shared machines")


@pytest.fixture(scope="session")
def parser():
    """The parser of pretrain_gpt.py."""
    from megatron_muon.megatron.flags.arguments import build_parser

    return build_parser()
