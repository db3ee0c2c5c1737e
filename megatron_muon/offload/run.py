"""A run's stores of momentum: which shards are kept where, and in which files.

Everything here happens before the first step or after the last one. What one rank cannot do, all ranks refuse together.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import torch

from megatron_muon.core.layout import Layout, Shard
from megatron_muon.core.ranks import of_all_ranks
from megatron_muon.errors import UserError
from megatron_muon.offload.codecs import codec_of
from megatron_muon.offload.files import MomentumFile, require_writable
from megatron_muon.offload.memory import in_pages
from megatron_muon.offload.store import DEVICE, DISK, HOST, RecordStore

_PLACES = {"none": DEVICE, "cpu": HOST, "nvme": DISK}


@dataclass(eq=False)
class OffloadRun:
    """The stores of one run. Collective; a UserError on every rank where one cannot use the directory."""

    offload: str
    """"none", "cpu" or "nvme"."""
    dtype: str
    """The storage format of momentum, "fp32", "bf16" or "int8"."""
    _: KW_ONLY
    fraction: float = 1.0
    """The share of each rank's state that leaves the device, largest shards first."""
    directory: str | None = None
    """For "nvme"."""
    buffer_mb: float = 24.0
    """MiB for records on their way; slots of 8 MiB, a third of it, keep a disk busy."""

    def __post_init__(self) -> None:
        self.stores: list[RecordStore] = []
        self._disk_bytes: dict[str, int] = {}  # by what is kept
        if self.offload == "nvme":
            self._directory = Path(self.directory or "").absolute()
            refusal: UserError | None = None
            try:
                require_writable(self._directory)
            except UserError as error:
                refusal = error
            if failed := next(filter(None, of_all_ranks(refusal)), None):
                raise failed

    def make_store(self, layout: Layout, rank: int, device: torch.device) -> RecordStore:
        """A store for the momentum that `rank` holds of a layout, as `make_records`."""
        return self.make_records([matrix.name for matrix in layout.matrices], layout.held(rank), device)

    def make_records(
        self, names: Sequence[str], shards: Sequence[Shard], device: torch.device, *, what: str = "momentum"
    ) -> RecordStore:
        """A store of records, one for each shard, for arithmetic on `device`; what is not momentum is stored in fp32.

        Collective where they are on disk: a UserError on every rank where the directory of one has too little room.
        """
        codec = codec_of(self.dtype if what == "momentum" else "fp32")
        sizes = [codec.record_bytes(shard.rows, shard.cols) for shard in shards]
        places = _places_of(sizes, _PLACES[self.offload], fraction=self.fraction)
        file = None
        if self.offload == "nvme":
            size = sum(in_pages(size) for size, place in zip(sizes, places, strict=True) if place == DISK)
            file = self._take_room(size, what)
        store = RecordStore(
            names, shards, places, codec, device=device, staging_bytes=int(self.buffer_mb * 2**20), file=file, what=what
        )
        store.on_disk = self.offload == "nvme"
        self.stores.append(store)
        return store

    def close(self) -> None:
        """Delete the files."""
        while self.stores:
            self.stores.pop().close()

    def _take_room(self, size: int, what: str) -> MomentumFile | None:
        """A file of `size` bytes, none for none; refused on every rank where one cannot have it."""
        self._disk_bytes[what] = self._disk_bytes.get(what, 0) + size
        needed = sum(self._disk_bytes.values())
        file: MomentumFile | None = None
        error: str | None = None
        try:
            file = MomentumFile(self._directory, size) if size else None
        except OSError as refusal:
            error = refusal.strerror or str(refusal)
        everyone = of_all_ranks((error, socket.gethostname(), needed))
        failed = next((one for one in everyone if one[0] is not None), None)
        if failed is None:
            return file
        self.close()
        if file is not None:
            file.close()
        of_host = sum(needed for _, host, needed in everyone if host == failed[1])
        raise UserError(
            f"--muon-offload-dir {self._directory} is too small ({failed[0]}): {' and '.join(self._disk_bytes)} of the "
            f"ranks on {failed[1]} need {of_host:,} bytes, {failed[2]:,} of them on the rank that failed. Choose a "
            "larger disk, --muon-momentum-dtype bf16 or int8, or a smaller --muon-offload-fraction"
        )


def _places_of(sizes: Sequence[int], place: str, *, fraction: float) -> list[str]:
    """Where each record goes: the largest to `place` until they make up `fraction` of all bytes, the rest to DEVICE."""
    places = [DEVICE] * len(sizes)
    left = fraction * sum(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        if left <= 0 or not sizes[index]:
            break
        places[index] = place
        left -= sizes[index]
    return places
