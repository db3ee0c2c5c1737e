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


@pytest.fixture
def patches(monkeypatch):
    """Undone before what a test put in the place of upstream's functions, or that would be put back for good."""
    from megatron_muon.patching import Patches

    with Patches() as patches:
        yield patches
