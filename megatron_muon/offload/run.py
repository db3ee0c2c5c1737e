"""A run's stores of momentum: which shards are kept where, in whose files, and what becomes of the files at the end.

Everything here happens before the first step or after the last one. What one rank cannot do, all ranks refuse together.
"""

from __future__ import annotations

import atexit
import os
import secrets
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.core.layout import Layout, Shard
from megatron_muon.core.ranks import of_all_ranks, of_first_rank
from megatron_muon.errors import UserError
from megatron_muon.offload.codecs import Codec, codec_of
from megatron_muon.offload.directory import RunDirectory
from megatron_muon.offload.files import MOMENTUM, Content, Header, MomentumFile, in_pages
from megatron_muon.offload.store import DEVICE, DISK, HOST, RecordStore

_PLACES = {"none": DEVICE, "cpu": HOST, "nvme": DISK}
_open_runs: list[OffloadRun] = []


@dataclass(eq=False)
class OffloadRun:
    """The stores of one run. Collective; a UserError on every rank where one cannot use the directory."""

    offload: str
    """"none", "cpu" or "nvme"."""
    dtype: str
    """The storage format, "fp32", "bf16" or "int8"."""
    _: KW_ONLY
    fraction: float = 1.0
    """The share of each rank's momentum that leaves the device, largest shards first."""
    directory: str | None = None
    """For "nvme"."""
    buffer_mb: float = 24.0
    """MiB of a ring for records on their way; parts of 8 MiB, a third of it, keep a disk busy."""
    keep: bool = False
    """Leave the files at the end."""
    iteration: int = 0
    """The last one before the first step."""
    save: str = ""
    """The folder that the run saves checkpoints in, by which its next start knows it; empty without one."""

    def __post_init__(self) -> None:
        self.stores: list[RecordStore] = []
        self.finished_iteration: int | None = None
        """The last one, where the training loop tells: a step that is skipped counts there, and not for the stores."""
        self._files: list[MomentumFile] = []
        self._kept: dict[str, list[str]] = {}  # kinds of parameters by what is kept of them
        self._needed = 0
        self._process = os.getpid()
        self._claimed: RunDirectory | None = None
        if self.offload == "nvme":
            assert self.directory is not None
            self.name: str = of_first_rank(partial(secrets.token_hex, 4))
            error = None
            try:
                self._claimed = RunDirectory(Path(self.directory).absolute(), self.name, save=self.save)
            except UserError as refusal:
                error = str(refusal)
            _open_runs.append(self)
            self._agree(error)
            atexit.register(self.close)
            _delete_at_signals()

    def make_store(
        self, layout: Layout, rank: int, group_of: Sequence[int], *, kind: str, device: torch.device
    ) -> RecordStore:
        """A store for the momentum that `rank` holds of a layout, as `make_records`; `kind` is "dense" or "experts"."""
        names = [matrix.name for matrix in layout.matrices]
        codec = codec_of(self.dtype)
        return self.make_records(names, layout.held(rank), group_of, kind=kind, device=device, codec=codec)

    def make_records(
        self,
        names: Sequence[str],
        shards: Sequence[Shard],
        group_of: Sequence[int],
        *,
        kind: str,
        device: torch.device,
        codec: Codec,
        content: Content = MOMENTUM,
    ) -> RecordStore:
        """A store of records, one for each shard, for arithmetic on `device`. Collective where they are on disk.

        `group_of` is the number of each one's parameter group; `kind` is for names of files. A UserError on every rank
        where the directory of one has too little room.
        """
        sizes = [codec.record_bytes(shard.rows, shard.cols) for shard in shards]
        places = places_of(sizes, _PLACES[self.offload], fraction=self.fraction)
        files: dict[int, tuple[MomentumFile, int]] = {}
        if self._claimed is not None:
            self._kept.setdefault(content.what, []).append(kind)
            of_group: dict[int, list[int]] = {}
            for index, place in enumerate(places):
                if place == DISK:
                    of_group.setdefault(group_of[index], []).append(index)
            headers = [
                (of, self._header(f"{content.part}{kind}{group}", codec, [(names[i], shards[i], sizes[i]) for i in of]))
                for group, of in sorted(of_group.items())
            ]
            self._needed += sum(header.room() + header.size for _, header in headers)
            error = None
            try:
                for indices, header in headers:
                    file = MomentumFile(self._claimed.path, header)
                    self._files.append(file)
                    file.take_space()
                    starts = (record[5] + file.header.front for record in header.records)
                    files |= {i: (file, start) for i, start in zip(indices, starts, strict=True)}
            except OSError as refusal:
                error = refusal.strerror or str(refusal)
            self._agree(error, about_room=True)
        store = RecordStore(
            names,
            shards,
            places,
            codec,
            device=device,
            staging_bytes=int(self.buffer_mb * 2**20),
            files=files,
            content=content,
        )
        store.on_disk = self._claimed is not None
        self.stores.append(store)
        return store

    def close(self) -> None:
        """Delete the files, or with `keep` name them after the iteration that they hold, and leave the directory."""
        if os.getpid() != self._process:
            return  # a forked child has the files of its parent
        at_end = self.finished_iteration
        if at_end is None:
            at_end = self.iteration + max((store.steps - store.begun_at for store in self.stores), default=0)
        whole = bool(self.stores) and not any(store.in_step or store.failure for store in self.stores)
        for store in self.stores:
            store.close()
        for file in self._files:
            file.close(keep_as=replace(file.header, iteration=at_end, kept=whole) if self.keep else None)
        self.stores, self._files = [], []
        if self._claimed is not None:
            self._claimed.close()
            self._claimed = None
        with suppress(ValueError):
            _open_runs.remove(self)
        atexit.unregister(self.close)

    def delete_files(self) -> None:
        """Delete the files, unless they are to be kept, and leave the directory; for a signal's handler.

        What it interrupted may hold locks, so it only asks the system.
        """
        if os.getpid() != self._process:
            return
        for file in self._files if not self.keep else ():
            with suppress(OSError):
                file.path.unlink()
        if self._claimed is not None:
            self._claimed.close()

    def _header(self, part: str, codec: Codec, held: Sequence[tuple[str, Shard, int]]) -> Header:
        """The header of a parameter group's file of `(name, shard, bytes)`: what is where in it."""
        records, end = [], 0
        for name, shard, size in held:
            records.append((name, shard.row_start, shard.rows, shard.col_start, shard.cols, end, size))
            end += in_pages(size)
        return Header(
            run=self.name,
            iteration=self.iteration,
            rank=dist.get_rank() if dist.is_initialized() else 0,
            part=part,
            dtype=codec.name,
            size=end,
            records=tuple(records),
            keep=self.keep,
            save=self.save,
        )

    def _agree(self, error: str | None, *, about_room: bool = False) -> None:
        """Raise on every rank what one rank found; about room, with what is needed."""
        everyone = of_all_ranks((error, socket.gethostname(), self._needed))
        failed = next((one for one in everyone if one[0] is not None), None)
        if failed is None:
            return
        path = self._claimed.path if self._claimed is not None else Path()
        self.close()
        if not about_room:
            raise UserError(failed[0] or "")
        of_all_ranks(None)  # every rank has given its room back
        free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
        all_of_host = sum(needed for _, host, needed in everyone if host == failed[1])
        kept = " and ".join(f"{what} ({' and '.join(kinds)})" for what, kinds in self._kept.items())
        takes, form = ("takes", f" as {self.dtype}") if len(self._kept) == 1 else ("take", "")
        raise UserError(
            f"--muon-offload-dir {path} is too small ({failed[0]}): {kept} of the ranks on {failed[1]} {takes} "
            f"{all_of_host:,} bytes{form}, {failed[2]:,} of them on the rank that failed; {free:,} bytes are free. "
            "Choose a larger disk, --muon-momentum-dtype bf16 or int8, or a smaller --muon-offload-fraction"
        )


def places_of(sizes: Sequence[int], place: str, *, fraction: float = 1.0) -> list[str]:
    """Where each record goes: the largest to `place` until they make up `fraction` of all bytes, the rest to DEVICE."""
    places = [DEVICE] * len(sizes)
    left = fraction * sum(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        if left <= 0 or not sizes[index]:
            break
        places[index] = place
        left -= sizes[index]
    return places


def close_runs() -> None:
    """Close what is open in this process."""
    for run in list(_open_runs):
        run.close()


def note_iteration(iteration: int) -> None:
    """The training loop has finished this iteration."""
    for run in _open_runs:
        run.finished_iteration = iteration


def _delete_at_signals() -> None:
    """Delete the files when a signal ends the process, as torchrun ends the others when one rank has failed."""
    if threading.current_thread() is not threading.main_thread():
        return

    def end(number: int, _: Any) -> None:
        for run in list(_open_runs):
            run.delete_files()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, end)
