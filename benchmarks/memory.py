"""The memory that a step takes beside what was there before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def peak_extra_bytes(step: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that `step` holds beyond what was there before it.

    On CUDA the caching allocator's count of allocated bytes; on CPU the sum of the allocations and
    releases that the profiler sees in this thread. Allocations of gloo and of the math libraries
    themselves are in neither.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    results = profile.profiler.kineto_results
    changes = [
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]"
    ]
    held = peak = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        held += size
        peak = max(peak, held)
    return peak
