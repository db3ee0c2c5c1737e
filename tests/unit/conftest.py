"""Settings of all unit tests."""

import inspect
import re
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


@pytest.fixture
def torch_in_fp32(monkeypatch):
    """torch.optim.Muon always iterates in bf16; its own source in fp32."""
    from torch.optim import _muon as torch_muon

    source = inspect.getsource(torch_muon._zeropower_via_newtonschulz)
    # up to torch 2.14, and from 2.15 on
    in_bf16 = r"grad\.bfloat16\(\)|grad\.to\(dtype=torch\.bfloat16, copy=True\)"
    source, replaced = re.subn(in_bf16, "grad.clone()", source)
    assert replaced == 1
    names = dict(vars(torch_muon))
    exec(source, names)
    name = "_zeropower_via_newtonschulz"
    monkeypatch.setattr(torch_muon, name, names[name])
