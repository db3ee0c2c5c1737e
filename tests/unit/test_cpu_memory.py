"""The allocator keeps what a step frees, unless the user has said how it shall work."""

import os
import subprocess
import sys

import pytest

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


def measure(**environ):
    """What `keep_freed_memory` returned, and the page faults of twenty large tensors before and after it."""
    output = subprocess.run(
        [sys.executable, "-c", FAULTS], env={**os.environ, **environ}, check=True, capture_output=True, text=True
    ).stdout.split()
    return output[0] == "True", int(output[1]), int(output[2])


def test_large_tensors_come_from_memory_that_was_kept():
    kept, before, after = measure()
    assert kept
    assert before > 10 * after


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_users_own_setting_stands(name):
    assert not measure(**{name: "glibc.malloc.tcache_count=7" if name == "GLIBC_TUNABLES" else "131072"})[0]
