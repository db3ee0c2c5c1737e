"""Storage of momentum, or other state, between steps, and its way to the arithmetic and back.

A `RecordStore` keeps each shard's momentum as a record in a storage format (`codecs`): on the
device, in host memory, or in a file. Records elsewhere than the arithmetic pass through three slots
of memory: one is read, one is worked on, one is written back. A slot holds a batch, the records of
one `borrow` that fit. A step requests the same batches as the step before it, so as soon as a slot
is free, the next batch is read into it.

A record that a disk fails to read or write ends no step, because other ranks wait in it: see
`disk.DiskRecords`. The caller runs `verify` before a step, and `first_failure` before and after it,
on all ranks together.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, override

import torch

from megatron_muon.core.layout import Shard
from megatron_muon.core.rows import Borrowed, InOrder, Storage
from megatron_muon.core.wave import Chunk
from megatron_muon.offload.codecs import Codec, Place, matrix_key, seeds
from megatron_muon.offload.disk import (
    PAGE,
    DiskRecords,
    MomentumFile,
    in_pages,
    scratch,
    transfer_memory,
    unlock,
)
from megatron_muon.ranks import in_the_world, of_all_ranks_if_any

PLACES = DEVICE, HOST, DISK = "device", "host", "disk"
# for reading, and as many for writing, so that no read is behind a write waiting for arithmetic
_THREADS = 2
SLOTS = 3
"""Slots of staging memory."""


_Records = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By shard: whole pages in host memory, and the bytes for the arithmetic, these or a GPU's copy."""


@dataclass(eq=False)
class _Slot:
    """Staging memory and its batch."""

    host: torch.Tensor
    device: torch.Tensor
    records: _Records = field(default_factory=dict)
    task: Future[Any] | None = None
    """Reads the batch, with a CUDA event or None as its result, or writes it back."""

    def wait(self) -> Any:
        return self.task.result() if self.task is not None else None


class PrepareStream(InOrder):
    """Prepares a step's rows on a stream of its own, beside a GPU's products, for staged momentum.

    The streams, and what they wait for:

        in, out   copy momentum to the device and back; "out" waits for `prepare`, not for products
        prepare   momentum, look-ahead; waits for "in" and for readers of the buffer that it fills
        products  the caller's: packs, starts collectives, orthogonalises, applies; waits for rows

    The exchange requests rows of the next waves when the products of a wave are enqueued. The host
    then waits for disk and copies while the GPU computes these products; as no copy is behind them,
    the staging memory does not fill. Rows have two buffers, in turn: when a third wave is
    requested, `prepare` waits for the products before the last.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @override
    def begin(self) -> None:
        self._products = torch.cuda.current_stream(self._device)
        self._read: dict[int, Any] = {}  # by buffer: the event after its rows were packed
        self._stream.wait_stream(self._products)  # gradients, and the weights of the step before

    @override
    def end(self) -> None:
        self._products.wait_stream(self._stream)  # whoever reads momentum and weights next

    @override
    @contextmanager
    def prepare(self, chunk: Chunk) -> Iterator[None]:
        event = self._read.get(chunk.prepared.data_ptr())
        if event is not None:
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield
        self._products.wait_stream(self._stream)

    @override
    def packed(self, chunk: Chunk) -> None:
        """Note that the buffer may be filled again after the work enqueued so far."""
        self._read[chunk.prepared.data_ptr()] = self._products.record_event()


class RecordStore(Storage):
    """Keeps momentum of this rank's shards; those without elements are never requested.

    Args:
        names: of the matrices.
        shards: of each.
        places: DEVICE, HOST or DISK for each.
        codec: the storage format.
        device: where the arithmetic is.
        staging_bytes: of host and of device memory for records on their way; three times the
            largest in any case.
        file: of the records on disk, closed with the store; either every rank has one, or none.
        what: is in the records, for messages.

    Attributes:
        on_return: called with a shard's number and its values as they go back, unless they are
            lost.
        is_apart: rows are prepared on a stream of their own, beside the products of a GPU.
        bytes: of momentum by place, staging included.
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
        self.names, self.shards, self.codec, self.what = names, shards, codec, what
        self.on_return: Callable[[int, torch.Tensor], None] | None = None
        self.steps = 0
        self.format = codec.format
        self.rounds = codec.name != "fp32"
        self._device, self._on_gpu = device, device.type == "cuda"
        self._places = []
        for name, shard in zip(names, shards, strict=True):
            self._places.append(Place(matrix_key(name), shard.row_start, shard.col_start))
        self._sizes = [codec.record_bytes(shard.rows, shard.cols) for shard in shards]
        stored = [index for index, size in enumerate(self._sizes) if size]
        on_disk = {index: self._sizes[index] for index in stored if places[index] == DISK}
        self.disk = DiskRecords(file, on_disk, names, what)
        # to the GPU, and back
        self._streams: list[Any] = [torch.cuda.Stream(device) for _ in range(2) if self._on_gpu]
        self._locked: list[torch.Tensor] | None = [] if self._on_gpu else None
        self._unlock = weakref.finalize(self, unlock, self._locked, self._streams, os.getpid())
        staged = [index for index in stored if self._on_gpu and places[index] == HOST]
        self._pages = {index: in_pages(self._sizes[index]) for index in (*staged, *on_disk)}
        pages = [self._pages[index] for index in staged]
        memory = transfer_memory(sum(pages), locked=self._locked).split(pages)
        self._home = dict(zip(staged, memory, strict=True))  # records in memory
        for index in stored:
            if index not in self._pages:
                size = self._sizes[index]
                self._home[index] = torch.zeros(size, dtype=torch.uint8, device=device)
        self._slots = self._make_slots(staging_bytes)
        self.staging_bytes = sum(self.bytes.values())
        for size, place in zip(self._sizes, places, strict=True):
            self.bytes[place] += in_pages(size) if place == DISK else size
        self._idle = deque(self._slots)  # the slot that was left first is the first
        self._ahead: deque[_Slot] = deque()  # slots that are read for the next batches
        self._order: list[tuple[int, ...]] = []  # batches of the step before
        self._requested: list[tuple[int, ...]] = []  # batches of this step
        self._next = 0  # position in `_order` of the next read
        # threads start with the first record that moves
        initializer = partial(torch.cuda.set_device, device) if self._on_gpu else None
        self._readers = ThreadPoolExecutor(_THREADS, "momentum in", initializer)
        self._writers = ThreadPoolExecutor(_THREADS, "momentum out", initializer)
        self.is_apart = bool(self._pages) and self._on_gpu
        self.beside = PrepareStream(device) if self.is_apart else InOrder()

    @property
    def is_resident(self) -> bool:
        """True if all records are where the arithmetic is."""
        return not self._pages

    @override
    def addresses(self, index: int) -> tuple[int, int]:
        record, shard = self._home[index].data_ptr(), self.shards[index]
        return record + self.codec.scale_bytes(shard.rows, shard.cols), record

    @override
    def seeds(self, index: int) -> tuple[int, int, int, int]:
        place = self._places[index]
        return (*seeds(place, self.steps), place.row, place.col)

    def verify(self) -> None:
        """Wait for the reads ahead of a step, so that `disk.failure` is up to date."""
        for slot in self._ahead:
            slot.wait()

    @override
    def borrow(self, indices: Sequence[int]) -> Borrowed:
        """Borrow in parts that fit in one slot."""
        for part in self._parts(indices):
            shards = [indices[position] for position in part]
            slot = self._slot_with(tuple(index for index in shards if index in self._pages))
            staged = slot.records if slot is not None else {}
            records = []
            for index in shards:
                records.append(staged[index][1] if index in staged else self._home[index])
            values = list(map(self._decode, shards, records))
            yield part, values
            for index, rows, record in zip(shards, values, records, strict=True):
                if self.on_return is not None and index not in self.disk.lost:
                    self.on_return(index, rows)
                self._encode(index, rows, record)
            if slot is not None:
                self._leave(slot)

    @override
    def end_step(self) -> None:
        """Wait until everything is written, and start reading the next step's first batches."""
        self.steps += 1
        self._settle()
        self._order, self._requested = self._requested, []
        self._read_ahead()

    def read(self, index: int) -> torch.Tensor:
        """Read momentum; NaN, and a message in `disk.failure`, if a disk fails."""
        self._settle()
        if index not in self.disk:
            return self._decode(index, self._home[index]).clone()
        record = transfer_memory(self._pages[index])
        self.disk.read(index, record)
        return self._decode(index, record)

    def write(self, index: int, values: torch.Tensor) -> None:
        """Write momentum; it is lost, with a message in `disk.failure`, if a disk fails."""
        self._settle()
        on_disk = index in self.disk
        record = transfer_memory(self._pages[index]) if on_disk else self._home[index]
        self._encode(index, values.to(record.device, torch.float32), record)
        if on_disk:
            self.disk.write(index, record)

    def scratch(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Take memory: on the disk that momentum is on, if any."""
        if self.disk.file is None:
            return [torch.empty(size, dtype=torch.float32) for size in sizes]
        return scratch(self.disk.file.directory, sizes)

    def close(self) -> None:
        """Stop reading and writing, and delete the file. The store cannot be used afterwards."""
        for threads in (self._readers, self._writers):
            threads.shutdown(wait=True, cancel_futures=True)
        self._unlock()
        if self.disk.file is not None:
            self.disk.file.close()

    def _make_slots(self, staging_bytes: int) -> list[_Slot]:
        largest, total = max(self._pages.values(), default=0), sum(self._pages.values())
        share = min(staging_bytes // SLOTS, total // SLOTS + largest)  # all fits if possible
        self._slot_bytes = max(share // PAGE * PAGE, largest)
        size = SLOTS * self._slot_bytes
        host = transfer_memory(size if self.disk.file is not None else 0, locked=self._locked)
        on_device = torch.zeros(size if self._on_gpu else 0, dtype=torch.uint8, device=self._device)
        self.bytes = {DEVICE: len(on_device), HOST: len(host), DISK: 0}
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))  # which zeroes the slots
        return list(map(_Slot, host.chunk(SLOTS), on_device.chunk(SLOTS)))

    def _decode(self, index: int, record: torch.Tensor) -> torch.Tensor:
        shard = self.shards[index]
        return self.codec.decode(record, shard.rows, shard.cols)

    def _encode(self, index: int, values: torch.Tensor, record: torch.Tensor) -> None:
        self.codec.encode(values, record, self._places[index], step=self.steps)

    def _parts(self, indices: Sequence[int]) -> Iterator[range]:
        """Cut a list of shards into parts whose records fit a slot; positions in the list."""
        first = filled = 0
        for position, index in enumerate(indices):
            filled += self._pages.get(index, 0)
            if filled > self._slot_bytes:
                yield range(first, position)
                first, filled = position, self._pages[index]
        if indices:
            yield range(first, len(indices))

    def _slot_with(self, batch: tuple[int, ...]) -> _Slot | None:
        """The slot with these records, ready for the arithmetic; None for no records."""
        if not batch:
            return None
        self._requested.append(batch)
        if not self._ahead:
            self._read_ahead()
        if not self._ahead or tuple(self._ahead[0].records) != batch:  # the order has changed
            self._idle.extend(self._ahead)
            self._ahead.clear()
            self._next = len(self._order)  # learn the new one
            self._read_into(self._idle.popleft(), batch)
        slot = self._ahead.popleft()
        event = slot.wait()
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        return slot

    def _read_ahead(self) -> None:
        """Start reading the next batches into free slots; a read waits for the slot's write."""
        while self._idle and self._next < len(self._order):
            self._read_into(self._idle.popleft(), self._order[self._next])
            self._next += 1

    def _read_into(self, slot: _Slot, batch: tuple[int, ...]) -> None:
        slot.records = {}
        start = 0
        for index in batch:
            end = start + self._pages[index]
            host = slot.host[start:end] if index in self.disk else self._home[index]
            visible = slot.device[start:end] if self._on_gpu else host
            slot.records[index] = (host, visible[: self._sizes[index]])
            start = end
        slot.task = self._readers.submit(self._bring, slot.records, slot.task)
        self._ahead.append(slot)

    def _leave(self, slot: _Slot) -> None:
        """Start writing a batch back, and reading the next."""
        computed = torch.cuda.current_stream(self._device).record_event() if self._on_gpu else None
        slot.task = self._writers.submit(self._return, slot.records, computed)
        self._idle.append(slot)
        self._read_ahead()

    def _settle(self) -> None:
        """Wait for all reads and writes; drops batches that were read ahead."""
        for slot in self._slots:
            slot.wait()
        self._idle = deque(self._slots)
        self._ahead.clear()
        self._next = 0

    def _bring(self, records: _Records, before: Future[Any] | None) -> Any:
        """In a thread: once the slot is written back, read a batch, and copy it to the device."""
        if before is not None:
            before.result()
        for index, (host, _) in records.items():
            if index in self.disk:
                self.disk.read(index, host)
        if not self._on_gpu:
            return None
        with torch.cuda.stream(self._streams[0]):
            for index, (host, record) in records.items():
                record.copy_(host[: self._sizes[index]], non_blocking=True)
            return self._streams[0].record_event()

    def _return(self, records: _Records, computed: Any) -> None:
        """In a thread: copy a batch from the device, and write it."""
        if self._on_gpu:
            with torch.cuda.stream(self._streams[1]):
                self._streams[1].wait_event(computed)
                for index, (host, record) in records.items():
                    host[: self._sizes[index]].copy_(record, non_blocking=True)
                self._streams[1].record_event().synchronize()
        for index, (host, _) in records.items():
            if index in self.disk:
                self.disk.write(index, host)


def first_failure(stores: Iterable[RecordStore], group: Any = None) -> str | None:
    """A message on state that a rank has lost, the same on every rank; None if all have theirs.

    Collective if state is on disk, over `group` or all ranks: one number from each, as long as
    nothing has failed.
    """
    failures = [store.disk.failure for store in stores if store.disk.file is not None]
    if not failures:
        return None
    everyone = of_all_ranks_if_any(next(filter(None, failures), None), group)
    if not any(everyone):
        return None
    ranks = in_the_world(group)
    return next(f"rank {ranks[at]} {failure}" for at, failure in enumerate(everyone) if failure)
