"""The allocator keeps what a step frees, unless the user has said how it shall work."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron_muon.cpu import keep_freed_memory

FAULTS = """
import resource, sys
import torch
from megatron_muon.cpu import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(2**22)  # 16 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
before = faults()
kept = keep_freed_memory()
torch.ones(2**22)
print(kept, before, faults())
"""


def test_large_tensors_come_from_memory_that_was_kept():
    run = subprocess.run([sys.executable, "-c", FAULTS], check=True, capture_output=True, text=True)
    kept, before, after = run.stdout.split()
    assert kept == "True"
    assert int(before) > 10 * int(after)


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_users_own_setting_stands(name, monkeypatch):
    monkeypatch.setenv(name, "glibc.malloc.tcache_count=7" if name == "GLIBC_TUNABLES" else "131072")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *_: pytest.fail("it was changed")))
    assert not keep_freed_memory()
