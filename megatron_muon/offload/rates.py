"""Which device orthogonalises where momentum is offloaded: the accelerator, with momentum streamed through, or the CPU.

On the CPU only gradients come down and the update's rows go back up, and the exchange goes over gloo. The choice is
arithmetic on rates that are measured once, before the first step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

ACCELERATOR, CPU = "accelerator", "cpu"
_SIDE = 512
_REPEATS = 2
_COPY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Rates:
    """What was measured, of the slowest rank.

    Attributes:
        accelerator_flops: per second, in products of the iteration's dtype.
        cpu_flops: the same on the CPU, with every rank of the machine at work.
        copy_bytes: per second, between host and device in one direction.
    """

    accelerator_flops: float
    cpu_flops: float
    copy_bytes: float


def faster_device(rates: Rates, *, flops: float, momentum_bytes: float, gradient_bytes: float) -> str:
    """ACCELERATOR or CPU, whichever takes less time for a rank's part of a step.

    On the accelerator the stored momentum goes there and back, beside the arithmetic; on the CPU gradients come and
    updates go before and after it.

    Args:
        rates: what was measured.
        flops: of Newton-Schulz.
        momentum_bytes: that are offloaded.
        gradient_bytes: of this rank's rows, fp32; updates have as many.
    """
    on_accelerator = max(flops / rates.accelerator_flops, 2 * momentum_bytes / rates.copy_bytes)
    on_cpu = flops / rates.cpu_flops + 2 * gradient_bytes / rates.copy_bytes
    return ACCELERATOR if on_accelerator <= on_cpu else CPU


def measure(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure on every rank at once; the slowest rank's rates, the same on all. Collective.

    Args:
        device: the accelerator.
        dtype: of the iteration's products.
    """
    host = torch.device("cpu")
    pinned = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    found = torch.tensor(
        [
            _product_rate(device, dtype),
            _product_rate(host, dtype),
            _COPY_BYTES / _seconds(lambda: target.copy_(pinned, non_blocking=True), device),
        ],
        dtype=torch.float64,
        device=device,
    )
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return Rates(*found.tolist())


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    matrix = torch.ones(_SIDE, _SIDE, dtype=dtype, device=device)
    return 2 * _SIDE**3 / _seconds(lambda: matrix @ matrix, device)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds that `work` takes, the best of a few times after a first."""
    best = float("inf")
    for _ in range(_REPEATS + 1):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
