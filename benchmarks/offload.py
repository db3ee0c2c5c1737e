"""`benchmarks.step --offload`: the owner scheme with momentum elsewhere, and the rate of the disk beside it."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.offload.disk import MomentumFile, transfer_memory
from megatron_muon.offload.store import RecordStore

_BLOCK = 8 * 2**20
_BLOCKS = 8


class DiskProbe:
    """Measures the directory's disk with the sizes, alignment and calls of momentum files, all ranks at once."""

    def __init__(self, directory: Path, group: dist.ProcessGroup) -> None:
        self._file = MomentumFile(directory, _BLOCKS * _BLOCK)
        self._buffer = transfer_memory(_BLOCK)
        self._group = group
        self.write_rates: list[float] = []
        self.read_rates: list[float] = []

    def probe(self) -> None:
        """Write and read the file once. Collective."""
        for work, rates in (
            (self._file.write, self.write_rates),
            (self._file.read, self.read_rates),
        ):
            dist.barrier(self._group)
            start = time.perf_counter()
            for block in range(_BLOCKS):
                work(block * _BLOCK, self._buffer)
            dist.barrier(self._group)
            rates.append(self._group.size() * _BLOCKS * _BLOCK / (time.perf_counter() - start))

    def result(self, momentum_bytes: int | None) -> dict[str, Any]:
        """Median rates of all ranks together, and whether the page cache was passed by; deletes the file.

        With `momentum_bytes` of all ranks on this disk, also the milliseconds that these take there
        and back.
        """
        self._file.close()
        read, write = statistics.median(self.read_rates), statistics.median(self.write_rates)
        rates = {
            "write_gb_per_s": write / 1e9,
            "read_gb_per_s": read / 1e9,
            "direct_io": self._file.direct,
        }
        if momentum_bytes is not None:
            rates["transfer_ms"] = 1e3 * (momentum_bytes / read + momentum_bytes / write)
        return rates


def momentum_figures(
    store: RecordStore, group: dist.ProcessGroup, device: torch.device
) -> dict[str, Any]:
    """Bytes of momentum by place, of the fullest rank, and of the staging in them. Collective."""
    names = (*store.bytes, "staging")
    mine = torch.tensor(
        [*store.bytes.values(), store.staging_bytes], dtype=torch.int64, device=device
    )
    most, total = mine.clone(), mine.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(total, group=group)
    return {
        "momentum_bytes": dict(zip(names, most.tolist(), strict=True)),
        "momentum_bytes_all_ranks": dict(zip(names, total.tolist(), strict=True)),
    }
