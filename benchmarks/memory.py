"""The memory that a step takes on top of what was allocated before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def peak_extra_bytes(step: Callable[[], Any], device: torch.device) -> int:
    """The peak of the bytes that `step` holds on top of those allocated before it.

    On CUDA as the caching allocator counts; on CPU the allocations and releases that the profiler
    sees in this thread, which leaves out those within gloo and the math libraries.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak
