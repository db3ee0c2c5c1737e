"""Settings of all unit tests."""

import sys

import pytest
from hypothesis import settings

settings.register_profile("shared machines", deadline=None)  # tests do not time what they test
settings.load_profile("shared machines")


@pytest.fixture(autouse=True)
def device():
    """Takes back the CPU backend that a command installed for its process: a later test found no
    CUDA meshes.
    """
    before = (cpu := sys.modules.get("megatron_muon.cpu")) is not None and cpu.installed()
    yield
    if not before and (cpu := sys.modules.get("megatron_muon.cpu")) is not None:
        cpu.uninstall()


@pytest.fixture(scope="session")
def parser():
    """The parser of pretrain_gpt.py."""
    from megatron_muon.megatron.flags.command_line import build_parser

    return build_parser()


@pytest.fixture
def patches(monkeypatch):
    """Undone before what a test put in the place of upstream's functions, or that would be put back
    for good.
    """
    from megatron_muon.patching import Patches

    with Patches() as patches:
        yield patches
