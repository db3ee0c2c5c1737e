"""Tells glibc's allocator to keep what a training step frees.

By default it gives memory of a few MiB back to the system and asks for it again in the next operation, and every page
is then cleared anew. With four ranks on two cores that was a tenth of a Muon step. GPUs have torch's caching allocator
for this.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MAPPED_FROM = 128 * 2**20
_KEPT = 256 * 2**20


def keep_freed_memory() -> bool:
    """Serve blocks below 128 MiB from the heap, and keep up to 256 MiB of it when it falls free.

    False where that was left alone: no glibc, or the user has set it in the environment.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or os.environ.keys() & {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM) and mallopt(_M_TRIM_THRESHOLD, _KEPT))
