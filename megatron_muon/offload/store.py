"""Where momentum, or other state, lives between steps, and how it gets to the arithmetic and back.

A `RecordStore` keeps each shard's momentum as a record in a storage format (`codecs`): on the device, in host memory,
or in a file. Records that lie elsewhere than the arithmetic pass through three slots of memory: one is read, one is
worked on, one is written back. A step asks for records in the same order as the step before it, so the next ones are
read ahead. It does no arithmetic on momentum.

A record that a disk does not take or give ends no step, because other ranks wait in it: see `files.DiskRecords`. The
caller asks `verify` before a step and `failure` after it, on all ranks together (`worst_failure`).
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, override

import torch

from megatron_muon.core.exchange import RowPhases
from megatron_muon.core.layout import Shard
from megatron_muon.core.ranks import of_all_ranks_if_any
from megatron_muon.core.storage import Borrowed, MomentumStore
from megatron_muon.offload.codecs import Codec, Place, matrix_key
from megatron_muon.offload.files import DiskRecords, MomentumFile, scratch
from megatron_muon.offload.memory import PAGE, aligned, in_pages, lock, transfer_memory, unlock
from megatron_muon.offload.prepare_stream import PrepareStream

DEVICE, HOST, DISK = "device", "host", "disk"
_THREADS = 2  # for reading, and as many for writing: a write waits for the rows' arithmetic, and no read behind it
SLOTS = 3
"""Slots of staging memory: one is read, one is worked on, one is written back."""


@dataclass(eq=False)
class _Slot:
    """Some staging memory, and the records that are in it."""

    host: torch.Tensor
    device: torch.Tensor
    records: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """By shard, whole pages in host memory, and the bytes that the arithmetic sees: these, or a copy on the device."""
    tasks: dict[int, Future[Any]] = field(default_factory=dict)
    """By shard, what reads or writes its record; a read's result is a CUDA event, or None."""
    left: deque[int] = field(default_factory=deque)
    """Shards that are still to be borrowed, in order."""

    def wait(self) -> None:
        for task in self.tasks.values():
            task.result()


class RecordStore(MomentumStore):
    """Keeps momentum of shards: this rank's of each matrix; those without elements are never asked for.

    Args:
        names: of the matrices.
        shards: of each.
        places: DEVICE, HOST or DISK for each.
        codec: the storage format.
        device: where the arithmetic is.
        staging_bytes: of host and of device memory for records on their way; three times the largest in any case.
        file: of the records on disk, closed with the store.
        what: is in the records, for messages.

    Attributes:
        on_disk: momentum is in files, on this rank or on another one.
        on_return: called with a shard's number and its values as they go back, unless they are lost.
    """

    def __init__(
        self,
        names: Sequence[str],
        shards: Sequence[Shard],
        places: Sequence[str],
        codec: Codec,
        *,
        device: torch.device,
        staging_bytes: int,
        file: MomentumFile | None = None,
        what: str = "momentum",
    ) -> None:
        self.names, self.shards, self.places, self.codec, self.what = names, shards, places, codec, what
        self.on_disk = False
        self.on_return: Callable[[int, torch.Tensor], None] | None = None
        self.steps, self.rounds = 0, codec.name != "fp32"
        self._device, self._on_gpu = device, device.type == "cuda"
        self._sizes = [codec.record_bytes(shard.rows, shard.cols) for shard in shards]
        self._keys = [matrix_key(name) for name in names]
        on_disk = {i: size for i, size in enumerate(self._sizes) if size and places[i] == DISK}
        self.disk = DiskRecords(file, on_disk, names, what)
        # To the device, and back.
        self._streams: list[Any] = [torch.cuda.Stream(device), torch.cuda.Stream(device)] if self._on_gpu else []
        self._locked: list[torch.Tensor] = []
        self._unlock = weakref.finalize(self, unlock, self._locked, self._streams, os.getpid())
        beside = [i for i, size in enumerate(self._sizes) if size and self._on_gpu and places[i] == HOST]
        moving = {i: in_pages(self._sizes[i]) for i in (*beside, *on_disk)}
        sizes = [moving[i] for i in beside]
        in_host = dict(zip(beside, self._transfer_memory(sum(sizes)).split(sizes), strict=True))
        self._moving = moving.keys()  # records that lie elsewhere than the arithmetic
        self._home = {
            i: in_host[i][:size] if i in in_host else aligned(size, device=device)
            for i, size in enumerate(self._sizes)
            if places[i] != DISK
        }
        largest = max(moving.values(), default=0)
        share = min(staging_bytes // SLOTS, sum(moving.values()) // SLOTS + largest)  # that all fits, if it may
        self._slot_bytes = max(share // PAGE * PAGE, largest)
        host = self._transfer_memory(SLOTS * self._slot_bytes if file else 0)
        on_device = aligned(SLOTS * self._slot_bytes if self._on_gpu else 0, device=device)
        self.staging_bytes = host.numel() + on_device.numel()
        self._free = [_Slot(*parts) for parts in zip(host.chunk(SLOTS), on_device.chunk(SLOTS), strict=True)]
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(device))  # which fills the slots with zeros
        self._ahead: deque[_Slot] = deque()  # that are borrowed from, or will be
        self._leaving: deque[_Slot] = deque()
        self._order: list[int] = []  # in which the step before asked for records that move
        self._asked: list[int] = []  # by this step
        self._next = 0  # place in `_order` of what is to be read next
        # Threads start with the first record that moves.
        self._readers, self._writers = (
            ThreadPoolExecutor(_THREADS, f"momentum {way}", initializer=self._start_thread) for way in ("in", "out")
        )
        self.prepare_stream = PrepareStream(device) if moving and self._on_gpu else None
        """Runs the steps where rows are prepared beside the products of a GPU."""

    def verify(self) -> None:
        """Wait for what was read ahead of a step, so that `disk.failure` has what could not be."""
        for slot in self._ahead:
            slot.wait()

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of momentum by place, staging included."""
        found = {DEVICE: SLOTS * self._slot_bytes if self._on_gpu else 0}
        found |= {HOST: self.staging_bytes - found[DEVICE], DISK: 0}
        for place, size in zip(self.places, self._sizes, strict=True):
            found[place] += in_pages(size) if place == DISK else size
        return found

    @override
    def step(self, rows: RowPhases) -> AbstractContextManager[RowPhases]:
        return nullcontext(rows) if self.prepare_stream is None else self.prepare_stream.step(rows)

    @override
    def borrow(self, indices: Sequence[int]) -> Borrowed:
        """In parts that lie in one slot."""
        first = 0
        while first < len(indices):
            part, slot = self._next_part(indices[first:])
            values = [self._decode(index, self._record(index, slot)) for index in part]
            self._read_ahead()
            yield range(first, first + len(part)), values
            self._take_back(slot, part, values)
            first += len(part)

    @override
    def end_step(self) -> None:
        """Wait until everything is written, and begin to read what the next step asks for first."""
        self.steps += 1
        self._finish_writes()
        self._order, self._asked, self._next = self._asked, [], 0
        self._read_ahead()

    @override
    def read(self, index: int) -> torch.Tensor:
        """It is NaN where it cannot be read, and `disk.failure` tells so."""
        if (record := self._resident(index)) is not None:
            return self._decode(index, record).clone()
        record = transfer_memory(in_pages(self._sizes[index]))
        self.disk.read(index, record)
        return self._decode(index, record)

    @override
    def write(self, index: int, values: torch.Tensor) -> None:
        """It stays in memory where it cannot be written, and `disk.failure` tells so."""
        if (record := self._resident(index)) is not None:
            self._encode(index, values.to(record.device, torch.float32), record)
            return
        record = transfer_memory(in_pages(self._sizes[index]))
        self._encode(index, values.to("cpu", torch.float32), record)
        self.disk.write(index, record)

    @override
    def scratch(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """It is on the disk that momentum is on, else in memory."""
        if self.disk.file is None:
            return [torch.empty(size, dtype=torch.float32) for size in sizes]
        return scratch(self.disk.file.directory, sizes)

    def close(self) -> None:
        """Read and write nothing any more, and delete the file. The store is of no use afterwards."""
        for threads in (self._readers, self._writers):
            threads.shutdown(wait=True, cancel_futures=True)
        self._unlock()
        if self.disk.file is not None:
            self.disk.file.close()

    def _transfer_memory(self, size: int) -> torch.Tensor:
        """Host memory for direct I/O, and locked for transfers where there is a GPU."""
        memory = transfer_memory(size)
        if self._on_gpu and size:
            self._locked.append(lock(memory))
        return memory

    def _start_thread(self) -> None:
        if self._on_gpu:
            torch.cuda.set_device(self._device)

    def _decode(self, index: int, record: torch.Tensor) -> torch.Tensor:
        return self.codec.decode(record, self.shards[index].rows, self.shards[index].cols)

    def _encode(self, index: int, values: torch.Tensor, record: torch.Tensor) -> None:
        shard = self.shards[index]
        place = Place(self._keys[index], shard.row_start, shard.col_start)
        self.codec.encode(values, record, place, step=self.steps)

    def _next_part(self, indices: Sequence[int]) -> tuple[list[int], _Slot | None]:
        """The first of these shards that need one slot at most, once the arithmetic may see them; and that slot."""
        part: list[int] = []
        slot = None
        for place, index in enumerate(indices):
            if index in self._moving:
                slot = slot or self._slot_for([other for other in indices[place:] if other in self._moving])
                if not slot.left or slot.left[0] != index:
                    break
                self._asked.append(slot.left.popleft())
                if (event := slot.tasks[index].result()) is not None:
                    torch.cuda.current_stream(self._device).wait_event(event)
            part.append(index)
        return part, slot

    def _record(self, index: int, slot: _Slot | None) -> torch.Tensor:
        return self._home[index] if slot is None or index not in self._moving else slot.records[index][1]

    def _slot_for(self, indices: Sequence[int]) -> _Slot:
        """The slot with the first of these records, and as many of the others as it holds."""
        if not self._ahead:
            self._reclaim(wait=not self._free)
            self._read_ahead()
        if not self._ahead or self._ahead[0].left[0] != indices[0]:
            self._drop_ahead()
            self._next = len(self._order)  # the order has changed; learn the new one
            self._reclaim(wait=not self._free)
            self._bring_in(indices)
        return self._ahead[0]

    def _read_ahead(self) -> None:
        """Begin to read what will be asked for next, as far as there are slots."""
        self._reclaim(wait=False)
        while self._free and self._next < len(self._order):
            self._next += self._bring_in(self._order[self._next :])

    def _bring_in(self, indices: Sequence[int]) -> int:
        """Begin to read as many of these records as a free slot holds; their number."""
        slot, start = self._free.pop(), 0
        slot.records = {}
        for index in indices:
            end = start + in_pages(self._sizes[index])
            if end > self._slot_bytes:
                break
            host = slot.host[start:end] if index in self.disk else self._home[index]
            record = (slot.device[start:end] if self._on_gpu else host)[: self._sizes[index]]
            slot.records[index], start = (host, record), end
        slot.left = deque(slot.records)
        slot.tasks = {i: self._readers.submit(self._bring, i, *both) for i, both in slot.records.items()}
        self._ahead.append(slot)
        return len(slot.records)

    def _take_back(self, slot: _Slot | None, indices: Sequence[int], borrowed: Sequence[torch.Tensor]) -> None:
        """Store what has been borrowed, and begin to read what comes next."""
        for index, values in zip(indices, borrowed, strict=True):
            if self.on_return is not None and index not in self.disk.lost:
                self.on_return(index, values)
            record = self._record(index, slot)
            self._encode(index, values, record)
            if slot is not None and index in self._moving:
                computed = torch.cuda.current_stream(self._device).record_event() if self._on_gpu else None
                host = slot.records[index][0]
                slot.tasks[index] = self._writers.submit(self._return, index, host, record, computed)
        if slot is not None and not slot.left:
            self._leaving.append(self._ahead.popleft())
        self._read_ahead()

    def _reclaim(self, *, wait: bool) -> None:
        """Free the slots that have been written: all that are done, and with `wait` at least the oldest."""
        while self._leaving and (wait or all(task.done() for task in self._leaving[0].tasks.values())):
            self._leaving[0].wait()
            self._free.append(self._leaving.popleft())
            wait = False

    def _finish_writes(self) -> None:
        while self._leaving:
            self._reclaim(wait=True)

    def _drop_ahead(self) -> None:
        while self._ahead:
            self._ahead[0].wait()
            self._free.append(self._ahead.popleft())

    def _resident(self, index: int) -> torch.Tensor | None:
        """Between steps, a record that lies in memory; None where it is on disk. What was read ahead is dropped."""
        self._finish_writes()
        self._drop_ahead()
        self._next = 0
        return self._home.get(index)

    def _bring(self, index: int, host: torch.Tensor, record: torch.Tensor) -> Any:
        """In a thread: read a record, and copy it to the device."""
        if index in self.disk:
            self.disk.read(index, host)
        if not self._on_gpu:
            return None
        with torch.cuda.stream(self._streams[0]):
            record.copy_(host[: self._sizes[index]], non_blocking=True)
            return self._streams[0].record_event()

    def _return(self, index: int, host: torch.Tensor, record: torch.Tensor, computed: Any) -> None:
        """In a thread: copy a record from the device, and write it."""
        if self._on_gpu:
            with torch.cuda.stream(self._streams[1]):
                self._streams[1].wait_event(computed)
                host[: self._sizes[index]].copy_(record, non_blocking=True)
                self._streams[1].record_event().synchronize()
        if index in self.disk:
            self.disk.write(index, host)


def worst_failure(stores: Iterable[RecordStore], group: Any = None) -> tuple[bool, str] | None:
    """The worst failure of all ranks: whether nothing is lost, and a message that names the rank; None without one.

    Collective where state is on disk, over `group` or all ranks: one number from each, as long as nothing has failed.
    """
    on_disk = [store.disk for store in stores if store.on_disk]
    if not on_disk:
        return None
    found = [(not disk.lost, disk.failure) for disk in on_disk if disk.failure is not None]
    everyone = of_all_ranks_if_any(min(found, default=None), group)
    failures = [(*failure, rank) for rank, failure in enumerate(everyone) if failure is not None]
    if not failures:
        return None
    nothing_is_lost, text, rank = min(failures)
    return nothing_is_lost, f"rank {rank} {text}"
