"""A run's stores of momentum: which shards are kept where, and in which files.

Everything here happens before the first step or after the last one. What one rank cannot do, all ranks refuse together.
"""

from __future__ import annotations

import atexit
import itertools
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import torch

from megatron_muon.core.layout import Layout, Shard
from megatron_muon.core.ranks import of_all_ranks
from megatron_muon.errors import UserError
from megatron_muon.offload.codecs import Codec, codec_of
from megatron_muon.offload.files import MomentumFile, in_pages, require_writable
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

    def __post_init__(self) -> None:
        self.stores: list[RecordStore] = []
        self._files: list[MomentumFile] = []
        self._kept: dict[str, None] = {}  # what is in files, in order
        self._needed = 0
        self._process = os.getpid()
        self._directory: Path | None = None
        if self.offload == "nvme":
            assert self.directory is not None
            self._directory = Path(self.directory).absolute()
            error = None
            try:
                require_writable(self._directory)
            except UserError as refusal:
                error = str(refusal)
            _open_runs.append(self)
            self._agree(error)
            atexit.register(self.close)

    def make_store(self, layout: Layout, rank: int, device: torch.device) -> RecordStore:
        """A store for the momentum that `rank` holds of a layout, as `make_records`."""
        names = [matrix.name for matrix in layout.matrices]
        codec = codec_of(self.dtype)
        return self.make_records(names, layout.held(rank), device=device, codec=codec)

    def make_records(
        self,
        names: Sequence[str],
        shards: Sequence[Shard],
        *,
        device: torch.device,
        codec: Codec,
        what: str = "momentum",
    ) -> RecordStore:
        """A store of records, one for each shard, for arithmetic on `device`. Collective where they are on disk.

        A UserError on every rank where the directory of one has too little room.
        """
        sizes = [codec.record_bytes(shard.rows, shard.cols) for shard in shards]
        places = places_of(sizes, _PLACES[self.offload], fraction=self.fraction)
        files: dict[int, tuple[MomentumFile, int]] = {}
        if self._directory is not None:
            self._kept[what] = None
            on_disk = [index for index, place in enumerate(places) if place == DISK and sizes[index]]
            starts = list(itertools.accumulate((in_pages(sizes[index]) for index in on_disk), initial=0))
            self._needed += starts[-1]
            error = None
            try:
                if on_disk:
                    self._files.append(MomentumFile(self._directory, starts[-1]))
                    files = {index: (self._files[-1], start) for index, start in zip(on_disk, starts, strict=False)}
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
            what=what,
        )
        store.on_disk = self._directory is not None
        self.stores.append(store)
        return store

    def close(self) -> None:
        """Delete the files; in a forked child, which has them from its parent, do nothing."""
        if os.getpid() != self._process:
            return
        for store in self.stores:
            store.close()
        for file in self._files:
            file.close()
        self.stores, self._files = [], []
        with suppress(ValueError):
            _open_runs.remove(self)
        atexit.unregister(self.close)

    def _agree(self, error: str | None, *, about_room: bool = False) -> None:
        """Raise on every rank what one rank found; about room, with what is needed."""
        everyone = of_all_ranks((error, socket.gethostname(), self._needed))
        failed = next((one for one in everyone if one[0] is not None), None)
        if failed is None:
            return
        self.close()
        if not about_room:
            raise UserError(failed[0] or "")
        of_all_ranks(None)  # every rank has given its room back
        path = self._directory or Path()
        free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
        all_of_host = sum(needed for _, host, needed in everyone if host == failed[1])
        kept = " and ".join(self._kept)
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
