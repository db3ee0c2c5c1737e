"""Where momentum, or other state, lives between steps, and how it gets to the arithmetic and back.

A `RecordStore` keeps each shard's momentum as a record in a storage format (`codecs`): on the
device, in host memory, or in a file. Records that lie elsewhere than the arithmetic pass through
three slots of memory: one is read, one is worked on, one is written back. A slot holds a batch, the
records of one `borrow` that fit. A step asks for the same batches as the step before it, so as soon
as a slot is left, the batch that will be asked for next is read into it.

A record that a disk does not take or give ends no step, because other ranks wait in it: see
`disk.DiskRecords`. The caller asks `verify` before a step and `failure` after it, on all ranks
together (`worst_failure`).
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, override

import torch

from megatron_muon.core.exchange import RowPhases
from megatron_muon.core.layout import Shard
from megatron_muon.core.ranks import of_all_ranks_if_any
from megatron_muon.core.storage import Borrowed, MomentumStore
from megatron_muon.core.wave import Chunk
from megatron_muon.offload.codecs import Codec, Place, matrix_key
from megatron_muon.offload.disk import (
    PAGE,
    DiskRecords,
    MomentumFile,
    in_pages,
    scratch,
    transfer_memory,
    unlock,
)

PLACES = DEVICE, HOST, DISK = "device", "host", "disk"
# for reading, and as many for writing: a write waits for the rows' arithmetic, and no read behind
# it
_THREADS = 2
SLOTS = 3
"""Slots of staging memory: one is read, one is worked on, one is written back."""


@dataclass(eq=False)
class _Slot:
    """Some staging memory, and the batch that is in it."""

    host: torch.Tensor
    device: torch.Tensor
    records: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """By shard, whole pages in host memory, and the bytes that the arithmetic sees: these, or a device's copy."""
    task: Future[Any] | None = None
    """What reads the batch, with a CUDA event or None as its result, or writes it back."""

    def wait(self) -> Any:
        return self.task.result() if self.task is not None else None


class PrepareStream:
    """Prepares a step's rows beside a GPU's products, on a stream of its own, where momentum is staged to that GPU.

    Which stream does what, and what it waits for:

        in, out     copies of momentum to the device and back: "out" waits for `prepare`, and for no products
        prepare     momentum, look-ahead of a wave's rows: waits for "in", and for the readers of the buffer it fills
        products    the caller's: packs rows, starts collectives, orthogonalises, applies updates: waits for its rows

    The exchange asks for rows of the next waves when the products of a wave are enqueued. The host
    then waits for disk and copies while the GPU has these products to do; as no copy lies behind
    them, the staging memory does not fill. Rows have two buffers, in turn: when a third wave is
    asked for, `prepare` waits for the products before the last.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def step(self, rows: RowPhases) -> Iterator[RowPhases]:
        """Around the exchange of a step, which is given what this yields in the place of `rows`."""
        self._rows, self.apply = rows, rows.apply
        self._products = torch.cuda.current_stream(self._device)
        # by buffer: the event behind which its rows have been packed
        self._read: dict[int, Any] = {}
        self._stream.wait_stream(self._products)  # gradients, and the weights of the step before
        yield self
        self._products.wait_stream(self._stream)  # whoever reads momentum and weights next

    def prepare(self, chunk: Chunk) -> None:
        """As the optimizer's, on this stream."""
        if (event := self._read.get(chunk.prepared.data_ptr())) is not None:
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            self._rows.prepare(chunk)
        self._products.wait_stream(self._stream)

    def packed(self, chunk: Chunk) -> None:
        """Note that the buffer may be filled again behind what has been enqueued so far."""
        self._read[chunk.prepared.data_ptr()] = self._products.record_event()


class RecordStore(MomentumStore):
    """Keeps momentum of shards: this rank's of each matrix; those without elements are never asked for.

    Args:
        names: of the matrices.
        shards: of each.
        places: DEVICE, HOST or DISK for each.
        codec: the storage format.
        device: where the arithmetic is.
        staging_bytes: of host and of device memory for records on their way; three times the
            largest in any case.
        file: of the records on disk, closed with the store; where there is one, every rank has one.
        what: is in the records, for messages.

    Attributes:
        on_return: called with a shard's number and its values as they go back, unless they are
            lost.
        prepare_stream: runs the steps where rows are prepared beside the products of a GPU.
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
        self.steps, self.rounds = 0, codec.name != "fp32"
        self._device, self._on_gpu = device, device.type == "cuda"
        self._sizes = [codec.record_bytes(shard.rows, shard.cols) for shard in shards]
        self._keys = [matrix_key(name) for name in names]
        of_place = {
            place: [i for i, p in enumerate(places) if p == place and self._sizes[i]]
            for place in PLACES
        }
        self.disk = DiskRecords(file, {i: self._sizes[i] for i in of_place[DISK]}, names, what)
        # to it, and back
        self._streams: list[Any] = [torch.cuda.Stream(device) for _ in range(2) if self._on_gpu]
        self._locked: list[torch.Tensor] | None = [] if self._on_gpu else None
        self._unlock = weakref.finalize(self, unlock, self._locked, self._streams, os.getpid())
        beside = of_place[HOST] if self._on_gpu else []
        # Of records that lie elsewhere than the arithmetic.
        self._pages = {i: in_pages(self._sizes[i]) for i in (*beside, *of_place[DISK])}
        pages = [self._pages[i] for i in beside]
        self._home = dict(
            zip(beside, transfer_memory(sum(pages), locked=self._locked).split(pages), strict=True)
        )
        for i in {*of_place[DEVICE], *of_place[HOST]} - self._pages.keys():
            self._home[i] = torch.zeros(self._sizes[i], dtype=torch.uint8, device=device)
        self._slots = self._make_slots(staging_bytes)
        self.bytes = {
            place: sum(self._sizes[i] for i in of_place[place]) for place in (DEVICE, HOST)
        }
        self.bytes[DEVICE] += sum(slot.device.numel() for slot in self._slots)
        self.bytes[HOST] += sum(slot.host.numel() for slot in self._slots)
        self.bytes[DISK] = sum(self._pages[i] for i in of_place[DISK])
        self.staging_bytes = sum(slot.host.numel() + slot.device.numel() for slot in self._slots)
        self._idle = deque(self._slots)  # the one that was left first, first
        self._ahead: deque[_Slot] = deque()  # that are read for what comes next
        self._order: list[tuple[int, ...]] = []  # of the step before
        self._asked: list[tuple[int, ...]] = []  # by this step
        self._next = 0  # place in `_order` of what is to be read next
        # Threads start with the first record that moves.
        initializer = partial(torch.cuda.set_device, device) if self._on_gpu else None
        self._readers = ThreadPoolExecutor(_THREADS, "momentum in", initializer)
        self._writers = ThreadPoolExecutor(_THREADS, "momentum out", initializer)
        self.prepare_stream = PrepareStream(device) if self._pages and self._on_gpu else None

    def verify(self) -> None:
        """Wait for what was read ahead of a step, so that `disk.failure` has what could not be."""
        for slot in self._ahead:
            slot.wait()

    @override
    def step(self, rows: RowPhases) -> AbstractContextManager[RowPhases]:
        return nullcontext(rows) if self.prepare_stream is None else self.prepare_stream.step(rows)

    @override
    def borrow(self, indices: Sequence[int]) -> Borrowed:
        """In parts that lie in one slot."""
        for part in self._parts(indices):
            shards = [indices[place] for place in part]
            slot = self._slot_with(tuple(i for i in shards if i in self._pages))
            records = [
                slot.records[i][1] if slot and i in self._pages else self._home[i] for i in shards
            ]
            values = [self._decode(i, record) for i, record in zip(shards, records, strict=True)]
            yield part, values
            for index, record, value in zip(shards, records, values, strict=True):
                if self.on_return is not None and index not in self.disk.lost:
                    self.on_return(index, value)
                self._encode(index, value, record)
            if slot is not None:
                self._leave(slot)

    @override
    def end_step(self) -> None:
        """Wait until everything is written, and begin to read what the next step asks for first."""
        self.steps += 1
        self._settle()
        self._order, self._asked = self._asked, []
        self._read_ahead()

    @override
    def read(self, index: int) -> torch.Tensor:
        """It is NaN where it cannot be read, and `disk.failure` says so."""
        self._settle()
        if index not in self.disk:
            return self._decode(index, self._home[index]).clone()
        record = transfer_memory(self._pages[index])
        self.disk.read(index, record)
        return self._decode(index, record)

    @override
    def write(self, index: int, values: torch.Tensor) -> None:
        """It stays in memory where it cannot be written, and `disk.failure` says so."""
        self._settle()
        record = transfer_memory(self._pages[index]) if index in self.disk else self._home[index]
        self._encode(index, values.to(record.device, torch.float32), record)
        if index in self.disk:
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

    def _make_slots(self, staging_bytes: int) -> list[_Slot]:
        largest, every = max(self._pages.values(), default=0), sum(self._pages.values())
        share = min(staging_bytes // SLOTS, every // SLOTS + largest)  # that all fits, if it may
        size = max(share // PAGE * PAGE, largest)
        host = transfer_memory(
            SLOTS * size if self.disk.file is not None else 0, locked=self._locked
        )
        on_device = torch.zeros(
            SLOTS * size if self._on_gpu else 0, dtype=torch.uint8, device=self._device
        )
        for stream in self._streams:
            # which fills the slots with zeros
            stream.wait_stream(torch.cuda.current_stream(self._device))
        self._slot_bytes = size
        return [
            _Slot(*parts) for parts in zip(host.chunk(SLOTS), on_device.chunk(SLOTS), strict=True)
        ]

    def _decode(self, index: int, record: torch.Tensor) -> torch.Tensor:
        return self.codec.decode(record, self.shards[index].rows, self.shards[index].cols)

    def _encode(self, index: int, values: torch.Tensor, record: torch.Tensor) -> None:
        shard = self.shards[index]
        place = Place(self._keys[index], shard.row_start, shard.col_start)
        self.codec.encode(values, record, place, step=self.steps)

    def _parts(self, indices: Sequence[int]) -> Iterator[range]:
        """Cut a list of shards into parts whose records fit a slot."""
        first, filled = 0, 0
        for place, index in enumerate(indices):
            filled += self._pages.get(index, 0)
            if filled > self._slot_bytes:
                yield range(first, place)
                first, filled = place, self._pages[index]
        if indices:
            yield range(first, len(indices))

    def _slot_with(self, batch: tuple[int, ...]) -> _Slot | None:
        """The slot with these records, once the arithmetic may see them; None for no records."""
        if not batch:
            return None
        self._asked.append(batch)
        if not self._ahead:
            self._read_ahead()
        if not self._ahead or tuple(self._ahead[0].records) != batch:  # the order has changed
            self._idle.extend(self._ahead)
            self._ahead.clear()
            self._next = len(self._order)  # learn the new one
            self._read_into(self._idle.popleft(), batch)
        slot = self._ahead.popleft()
        if (event := slot.wait()) is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        return slot

    def _read_ahead(self) -> None:
        """Begin to read what will be asked for next, as far as there are slots; a read waits for the slot's write."""
        while self._idle and self._next < len(self._order):
            self._read_into(self._idle.popleft(), self._order[self._next])
            self._next += 1

    def _read_into(self, slot: _Slot, batch: tuple[int, ...]) -> None:
        slot.records, start = {}, 0
        for index in batch:
            end = start + self._pages[index]
            host = slot.host[start:end] if index in self.disk else self._home[index]
            record = (slot.device[start:end] if self._on_gpu else host)[: self._sizes[index]]
            slot.records[index], start = (host, record), end
        slot.task = self._readers.submit(self._bring, slot.records, slot.task)
        self._ahead.append(slot)

    def _leave(self, slot: _Slot) -> None:
        """Begin to write what has been borrowed, and to read what comes next."""
        computed = torch.cuda.current_stream(self._device).record_event() if self._on_gpu else None
        slot.task = self._writers.submit(self._return, slot.records, computed)
        self._idle.append(slot)
        self._read_ahead()

    def _settle(self) -> None:
        """Wait for all reads and writes; what was read ahead is dropped."""
        for slot in self._slots:
            slot.wait()
        self._idle = deque(self._slots)
        self._ahead.clear()
        self._next = 0

    def _bring(
        self, records: dict[int, tuple[torch.Tensor, torch.Tensor]], before: Future[Any] | None
    ) -> Any:
        """In a thread: read a batch, and copy it to the device, once the slot's batch `before` is written."""
        if before is not None:
            before.result()
        for index in filter(self.disk.__contains__, records):
            self.disk.read(index, records[index][0])
        if not self._on_gpu:
            return None
        with torch.cuda.stream(self._streams[0]):
            for index, (host, record) in records.items():
                record.copy_(host[: self._sizes[index]], non_blocking=True)
            return self._streams[0].record_event()

    def _return(self, records: dict[int, tuple[torch.Tensor, torch.Tensor]], computed: Any) -> None:
        """In a thread: copy a batch from the device, and write it."""
        if self._on_gpu:
            with torch.cuda.stream(self._streams[1]):
                self._streams[1].wait_event(computed)
                for index, (host, record) in records.items():
                    host[: self._sizes[index]].copy_(record, non_blocking=True)
                self._streams[1].record_event().synchronize()
        for index in filter(self.disk.__contains__, records):
            self.disk.write(index, records[index][0])


def worst_failure(stores: Iterable[RecordStore], group: Any = None) -> tuple[bool, str] | None:
    """The worst failure of all ranks: whether nothing is lost, and a message that names the rank; None without one.

    Collective where state is on disk, over `group` or all ranks: one number from each, as long as
    nothing has failed.
    """
    on_disk = [store.disk for store in stores if store.disk.file is not None]
    if not on_disk:
        return None
    found = [(not disk.lost, disk.failure) for disk in on_disk if disk.failure is not None]
    everyone = of_all_ranks_if_any(min(found, default=None), group)
    failures = [(*failure, rank) for rank, failure in enumerate(everyone) if failure is not None]
    if not failures:
        return None
    nothing_is_lost, text, rank = min(failures)
    return nothing_is_lost, f"rank {rank} {text}"
