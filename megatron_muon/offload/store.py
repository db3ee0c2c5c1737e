"""Where momentum, or other state, lives between steps, and how it gets to the arithmetic and back.

A `RecordStore` keeps each shard's momentum as a record in a storage format (`codecs`): on the device, in host memory,
or in a file. Records that lie elsewhere than the arithmetic are staged through a ring of fixed size. A step asks for
them in the same order as the step before it, so that while one part of a wave is worked on, the next is read and the
one before is written back. It does no arithmetic on momentum, and no collectives.

A record that a disk does not take or give ends no step, because other ranks wait in it: see `files.DiskRecords`. The
caller asks `verify` before a step and `failure` after it, on all ranks together (`worst_failure`).
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, override

import torch

from megatron_muon.core.exchange import RowPhases
from megatron_muon.core.layout import Shard
from megatron_muon.core.ranks import of_all_ranks_if_any
from megatron_muon.core.storage import Borrowed, MomentumStore
from megatron_muon.offload.codecs import Codec, Place, matrix_key
from megatron_muon.offload.files import DiskRecords, Failure, MomentumFile, in_pages, scratch
from megatron_muon.offload.prepare_stream import PrepareStream
from megatron_muon.offload.ring import Piece, Ring, aligned, lock, transfer_memory, unlock

DEVICE, HOST, DISK = "device", "host", "disk"
_THREADS = 2  # for reading, and as many for writing: a write waits for the rows' arithmetic, and no read behind it
PARTS = 3
"""Parts of a ring: one is read, one is worked on, one is written back."""


@dataclass(eq=False)
class _Staged:
    """A shard's record on its way or in use."""

    index: int
    host: torch.Tensor
    """Whole pages in host memory, that are read from a file or copied from."""
    record: torch.Tensor
    """The bytes that the arithmetic sees: these, or a copy on the device."""
    pieces: list[Piece]
    ready: Future[Any]
    """When it has been read; its result is a CUDA event, or None."""

    def give_back(self) -> None:
        for piece in self.pieces:
            piece.give_back()


class RecordStore(MomentumStore):
    """Keeps momentum of shards: this rank's of each matrix; those without elements are never asked for.

    Args:
        names: of the matrices.
        shards: of each.
        places: DEVICE, HOST or DISK for each.
        codec: the storage format.
        device: where the arithmetic is.
        staging_bytes: of each ring; it takes three times the largest record in any case.
        files: for each shard on disk its file and the offset in it.
        what: is in the records, for messages.

    Attributes:
        on_disk: momentum is in files, on this rank or on another one.
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
        files: Mapping[int, tuple[MomentumFile, int]],
        what: str = "momentum",
    ) -> None:
        self.on_disk = False
        self.what = what
        self.names = names
        self.shards = shards
        self.places = places
        self.codec = codec
        self.disk = DiskRecords(files, names, what)
        self.steps = 0  # of the training; stochastic rounding depends on it
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._sizes = [codec.record_bytes(shard.rows, shard.cols) for shard in shards]
        self._keys = [matrix_key(name) for name in names]
        self._at_hand: dict[int, torch.Tensor] = {}  # records that the arithmetic sees where they lie
        self._in_host: dict[int, torch.Tensor] = {}  # records in host memory beside a GPU
        # To the device, and back.
        self._streams: list[Any] = [torch.cuda.Stream(device), torch.cuda.Stream(device)] if self._on_gpu else []
        self._locked: list[torch.Tensor] = []
        self._unlock = weakref.finalize(self, unlock, self._locked, self._streams, os.getpid())
        self._make_resident()
        moving = [in_pages(size) for i, size in enumerate(self._sizes) if size and i not in self._at_hand]
        is_staged = bool(moving)
        ring_bytes = max(min(in_pages(staging_bytes), sum(moving)), PARTS * max(moving, default=0))
        self._part_bytes = ring_bytes // PARTS
        self._host_ring = Ring(self._transfer_memory(ring_bytes if files else 0))
        self._device_ring = Ring(aligned(ring_bytes if self._on_gpu else 0, device=device))
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(device))  # which fills the ring with zeros
        # Threads start with the first record that moves.
        self._readers, self._writers = (
            ThreadPoolExecutor(_THREADS, f"momentum {what}", initializer=self._start_thread) for what in ("in", "out")
        )
        self.prepare_stream = PrepareStream(device) if is_staged and self._on_gpu else None
        """Runs the steps where rows are prepared beside the products of a GPU."""
        self._staged: dict[int, _Staged] = {}
        self._leaving: deque[tuple[_Staged, Future[None]]] = deque()
        self._order: list[int] = []  # of the step before
        self._asked: dict[int, None] = {}  # of this step, in order
        self._next = 0

    @property
    def failure(self) -> Failure | None:
        """The first read or write that failed."""
        return self.disk.failure

    @property
    def lost(self) -> Set[int]:
        """Shards whose records cannot be read: they are NaN, and are not written."""
        return self.disk.lost

    def verify(self) -> None:
        """Wait for what was read ahead of a step, so that `failure` has what could not be."""
        for staged in self._staged.values():
            staged.ready.result()

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of momentum by place, staging included."""
        at_hand = sum(record.numel() for i, record in self._at_hand.items() if self.places[i] == DEVICE)
        hosted = sum(size for size, place in zip(self._sizes, self.places, strict=True) if place == HOST)
        disk = sum(in_pages(size) for i, size in enumerate(self._sizes) if i in self.disk)
        return {DEVICE: at_hand + self._device_ring.size, HOST: hosted + self._host_ring.size, DISK: disk}

    @property
    def staging_bytes(self) -> int:
        """Bytes of the rings."""
        return self._host_ring.size + self._device_ring.size

    @property
    @override
    def rounds(self) -> bool:
        return self.codec.name != "fp32"

    @override
    def set_step_count(self, steps: int) -> None:
        self.steps = steps

    @override
    def step(self, rows: RowPhases) -> AbstractContextManager[RowPhases]:
        return nullcontext(rows) if self.prepare_stream is None else self.prepare_stream.step(rows)

    @override
    def borrow(self, indices: Sequence[int]) -> Borrowed:
        """In parts of a third of the ring."""
        first = 0
        for part in self._parts(indices):
            values = [self._decode(index, record) for index, record in self._records(part)]
            self._stage_ahead()
            yield range(first, first + len(part)), values
            self._take_back(part, values)
            first += len(part)

    @override
    def end_step(self) -> None:
        """Wait until everything is written, and begin to read what the next step asks for first."""
        self.steps += 1
        self._finish_writes()
        self._order, self._asked, self._next = list(self._asked), {}, 0
        self._stage_ahead()

    @override
    def read(self, index: int) -> torch.Tensor:
        """It is NaN where it cannot be read, and `failure` tells so."""
        record = self._settled(index)
        if record is not None:
            return self._decode(index, record).clone()
        record = transfer_memory(in_pages(self._sizes[index]))
        self.disk.read(index, record)
        return self._decode(index, record)

    @override
    def write(self, index: int, values: torch.Tensor) -> None:
        """It stays in memory where it cannot be written, and `failure` tells so."""
        record = self._settled(index)
        if record is not None:
            self._encode(index, values.to(record.device, torch.float32), record)
            return
        record = transfer_memory(in_pages(self._sizes[index]))
        self._encode(index, values.to("cpu", torch.float32), record)
        self.disk.write(index, record)

    @override
    def scratch(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """It is on the disk that momentum is on, else in memory."""
        if not self.disk.files:
            return [torch.empty(size, dtype=torch.float32) for size in sizes]
        return scratch(self.disk.files[0].directory, sizes)

    def _parts(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """`indices` in parts that fit a third of the ring, in order."""
        part: list[int] = []
        filled = 0
        for index in indices:
            size = 0 if index in self._at_hand else in_pages(self._sizes[index])
            if part and filled + size > self._part_bytes and size:
                yield part
                part, filled = [], 0
            part.append(index)
            filled += size
        if part:
            yield part

    def _take_back(self, indices: Sequence[int], borrowed: Sequence[torch.Tensor]) -> None:
        """Store what has been borrowed, and begin to bring in what comes next."""
        for index, values in zip(indices, borrowed, strict=True):
            staged = self._staged.pop(index, None)
            self._encode(index, values, self._at_hand[index] if staged is None else staged.record)
            if staged is not None:
                computed = torch.cuda.current_stream(self._device).record_event() if self._on_gpu else None
                self._leaving.append((staged, self._writers.submit(self._return, staged, computed)))
        self._stage_ahead()

    def close(self) -> None:
        """Nothing is read or written any more. The store is of no use afterwards; its files are as they were."""
        for threads in (self._readers, self._writers):
            threads.shutdown(wait=True, cancel_futures=True)
        self._unlock()

    def _make_resident(self) -> None:
        """Zeros for every record that does not come from a file."""
        in_host = [i for i, place in enumerate(self.places) if place == HOST and self._sizes[i]]
        for i, place in enumerate(self.places):
            if place == DEVICE or (place == HOST and not self._on_gpu):
                self._at_hand[i] = aligned(self._sizes[i], device=self._device)
        if self._on_gpu and in_host:
            sizes = [in_pages(self._sizes[i]) for i in in_host]
            for i, record in zip(in_host, self._transfer_memory(sum(sizes)).split(sizes), strict=True):
                self._in_host[i] = record[: self._sizes[i]]

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

    def _records(self, indices: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """The shards of a part, and their records where the arithmetic is."""
        moving = [index for index in indices if index not in self._at_hand]
        self._asked |= dict.fromkeys(moving)
        while not all(index in self._staged or self._bring_in(index) for index in moving):
            self._make_room()
        for index in moving:
            event = self._staged[index].ready.result()
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
        for index in indices:
            yield index, self._staged[index].record if index in self._staged else self._at_hand[index]

    def _stage_ahead(self) -> None:
        """Begin to read what will be asked for next, as far as there is room."""
        self._reclaim(wait=False)
        while self._next < len(self._order):
            index = self._order[self._next]
            if index not in self._asked and index not in self._staged and self._bring_in(index) is None:
                return
            self._next += 1

    def _bring_in(self, index: int) -> _Staged | None:
        """Begin to read a record; None where the rings have no room."""
        size, on_disk = self._sizes[index], index in self.disk
        rings = [self._host_ring] * on_disk + [self._device_ring] * self._on_gpu
        taken = [ring.take(size) for ring in rings]
        pieces = [piece for piece in taken if piece is not None]
        if len(pieces) < len(rings):
            for piece in pieces:
                piece.give_back()
            return None
        host = pieces[0].memory if on_disk else self._in_host[index]
        record = (pieces[-1].memory if self._on_gpu else host)[:size]
        staged = _Staged(index, host, record, pieces, self._readers.submit(self._bring, index, host, record))
        self._staged[index] = staged
        return staged

    def _make_room(self) -> None:
        """Wait for a write, or where none is under way drop all that was read, as nothing is borrowed.

        What was read too early goes, and with it what was read of this part, which may lie across the room.
        """
        if self._leaving:
            self._reclaim(wait=True)
            return
        assert self._staged, "a part does not fit the ring"
        self._drop_staged()
        self._next = len(self._order)  # the order has changed; learn the new one

    def _drop_staged(self) -> None:
        for staged in self._staged.values():
            staged.ready.result()
            staged.give_back()
        self._staged.clear()

    def _reclaim(self, *, wait: bool) -> None:
        """Free what has been written: all that is done, and with `wait` at least the oldest."""
        while self._leaving and (wait or self._leaving[0][1].done()):
            staged, done = self._leaving.popleft()
            done.result()
            staged.give_back()
            wait = False

    def _finish_writes(self) -> None:
        while self._leaving:
            self._reclaim(wait=True)

    def _settle(self) -> None:
        """Nothing on its way: what was read ahead is dropped."""
        self._finish_writes()
        self._drop_staged()
        self._next = 0

    def _settled(self, index: int) -> torch.Tensor | None:
        """Between steps, a record that lies in memory; None where it is on disk."""
        self._settle()
        return self._at_hand.get(index, self._in_host.get(index))

    def _bring(self, index: int, host: torch.Tensor, record: torch.Tensor) -> Any:
        """In a thread: read a record, and copy it to the device."""
        if index in self.disk:
            self.disk.read(index, host)
        if not self._on_gpu:
            return None
        with torch.cuda.stream(self._streams[0]):
            record.copy_(host[: self._sizes[index]], non_blocking=True)
            return self._streams[0].record_event()

    def _return(self, staged: _Staged, computed: Any) -> None:
        """In a thread: copy a record from the device, and write it."""
        if self._on_gpu:
            with torch.cuda.stream(self._streams[1]):
                self._streams[1].wait_event(computed)
                staged.host[: self._sizes[staged.index]].copy_(staged.record, non_blocking=True)
                self._streams[1].record_event().synchronize()
        if staged.index in self.disk:
            self.disk.write(staged.index, staged.host)


def worst_failure(stores: Iterable[RecordStore], group: Any = None) -> tuple[bool, str] | None:
    """The worst failure of all ranks: whether nothing is lost, and a message that names the rank; None without one.

    Collective where state is on disk, over `group` or all ranks: one number from each, as long as nothing has failed.
    """
    on_disk = [store for store in stores if store.on_disk]
    if not on_disk:
        return None
    found = [(not store.failure.lost, str(store.failure)) for store in on_disk if store.failure is not None]
    everyone = of_all_ranks_if_any(min(found, default=None), group)
    failures = [(*failure, rank) for rank, failure in enumerate(everyone) if failure is not None]
    if not failures:
        return None
    nothing_is_lost, text, rank = min(failures)
    return nothing_is_lost, f"rank {rank} {text}"
