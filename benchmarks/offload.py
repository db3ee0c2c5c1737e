"""What `bench step --offload` adds: the owner scheme with momentum elsewhere, and the rate of the disk beside it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.bench.launch import StepSpec
from megatron_muon.core.layout import Layout
from megatron_muon.offload.files import Header, MomentumFile
from megatron_muon.offload.ring import transfer_memory
from megatron_muon.offload.run import OffloadRun
from megatron_muon.offload.store import RecordStore

_BLOCK = 8 * 2**20
_BLOCKS = 8


def method_of(offload: str) -> str:
    """The name of the owner scheme with this offload among the methods."""
    return f"owner+{offload}"


def offload_of(method: str) -> str | None:
    """The offload of a method; None for one that has momentum as the optimizer's state."""
    return method.removeprefix("owner+") if method.startswith("owner+") else None


def open_run(offload: str, spec: StepSpec) -> OffloadRun:
    """The files and formats of one offloaded method. Collective.

    Args:
        offload: "none", "cpu" or "nvme".
        spec: the measurement.

    Raises:
        UserError: the directory cannot be used.
    """
    directory = spec.offload_dir if offload == "nvme" else None
    return OffloadRun(offload, spec.momentum_dtype, directory=directory, buffer_mb=spec.offload_buffer_mb)


def make_store(run: OffloadRun, layout: Layout, *, rank: int, device: torch.device) -> RecordStore:
    """The store of a layout's momentum on this rank. Collective."""
    return run.make_store(layout, rank, [0] * len(layout.matrices), kind="bench", device=device)


class DiskProbe:
    """Measures the directory's disk with the sizes, alignment and calls of momentum files, all ranks at once.

    Args:
        directory: of the momentum files.
        group: all ranks.
    """

    def __init__(self, directory: Path, group: dist.ProcessGroup) -> None:
        run, rank = f"probe{os.getpid()}", group.rank()
        self._file = MomentumFile(directory, Header(run, 0, rank, "probe0", "fp32", size=_BLOCKS * _BLOCK))
        try:
            self._file.take_space()
        except OSError:
            self._file.close()
            raise
        self._buffer = transfer_memory(_BLOCK)
        self._group = group
        self.write_rates: list[float] = []
        self.read_rates: list[float] = []
        self.direct = self._file.direct

    def probe(self) -> None:
        """Write and read the file once. Collective."""
        for work, rates in ((self._file.write, self.write_rates), (self._file.read, self.read_rates)):
            dist.barrier(self._group)
            start = time.perf_counter()
            for block in range(_BLOCKS):
                work(self._file.header.front + block * _BLOCK, self._buffer)
            dist.barrier(self._group)
            rates.append(self._group.size() * _BLOCKS * _BLOCK / (time.perf_counter() - start))

    def result(self) -> dict[str, Any]:
        """Median rates of all ranks together, and whether the page cache was passed by."""
        return {
            "write_gb_per_s": statistics.median(self.write_rates) / 1e9,
            "read_gb_per_s": statistics.median(self.read_rates) / 1e9,
            "direct_io": self.direct,
        }

    def close(self) -> None:
        """Delete the file."""
        self._file.close()


def transfer_ms(disk_bytes: int, disk: dict[str, Any]) -> float:
    """Milliseconds to read and to write all ranks' momentum once at the disk's own rates, one after the other."""
    seconds: float = sum(disk_bytes / (disk[f"{what}_gb_per_s"] * 1e9) for what in ("read", "write"))
    return 1e3 * seconds


def momentum_figures(store: RecordStore, group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Bytes of momentum by place, of the fullest rank, and of the staging in them. Collective."""
    names: Sequence[str] = (*store.bytes, "staging")
    mine = torch.tensor([*store.bytes.values(), store.staging_bytes], dtype=torch.int64, device=device)
    most, total = mine.clone(), mine.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(total, group=group)
    return {
        "momentum_bytes": dict(zip(names, most.tolist(), strict=True)),
        "momentum_bytes_all_ranks": dict(zip(names, total.tolist(), strict=True)),
    }
