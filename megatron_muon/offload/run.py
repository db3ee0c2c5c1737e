"""A run's stores of momentum: the place and file of each shard. If one rank fails, all refuse."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_muon.core.layout import Shard
from megatron_muon.errors import SettingError
from megatron_muon.offload.codecs import CODECS
from megatron_muon.offload.disk import MomentumFile, in_pages
from megatron_muon.offload.store import DEVICE, DISK, HOST, RecordStore
from megatron_muon.ranks import of_all_ranks
from megatron_muon.settings import MuonSettings

_PLACES = {"none": DEVICE, "cpu": HOST, "nvme": DISK}


@dataclass(eq=False)
class OffloadRun:
    """The stores of one run."""

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
    group: dist.ProcessGroup | None = None
    """The ranks that make stores together; None is all of them."""
    stores: list[RecordStore] = field(default_factory=list, init=False)

    def make_records(
        self,
        names: Sequence[str],
        shards: Sequence[Shard],
        device: torch.device,
        *,
        what: str = "momentum",
    ) -> RecordStore:
        """A store of records, one for each shard, for arithmetic on `device`.

        The storage format is for momentum; other state is stored in fp32. Collective if records are
        on disk: a UserError on every rank if the directory of one has too little room.
        """
        codec = CODECS[self.dtype if what == "momentum" else "fp32"]
        sizes = [codec.record_bytes(shard.rows, shard.cols) for shard in shards]
        places = [DEVICE] * len(sizes)
        left = self.fraction * sum(sizes)
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            if left > 0 and sizes[index]:
                places[index] = _PLACES[self.offload]
                left -= sizes[index]
        file = None
        if self.offload == "nvme":
            on_disk = [in_pages(sizes[i]) for i, place in enumerate(places) if place == DISK]
            file = self._take_room(sum(on_disk), what)
        store = RecordStore(
            names,
            shards,
            places,
            codec,
            device=device,
            staging_bytes=int(self.buffer_mb * 2**20),
            file=file,
            what=what,
        )
        self.stores.append(store)
        return store

    def close(self) -> None:
        """Delete the files."""
        while self.stores:
            self.stores.pop().close()

    def _take_room(self, size: int, what: str) -> MomentumFile:
        """A file of `size` bytes; refused on every rank if one cannot have it."""
        file = refusal = None
        try:
            file = MomentumFile(Path(self.directory or "").absolute(), size)
        except OSError as error:
            reason = f"{size:,} bytes ({error.strerror or error})"
            refusal = f"cannot take {what} of a rank on {socket.gethostname()}, {reason}"
        failed = next(filter(None, of_all_ranks(refusal, self.group)), None)
        if file is not None:
            if failed is None:
                return file
            file.close()
        self.close()
        assert failed is not None
        raise SettingError(
            "muon_offload_dir",
            self.directory,
            failed,
            "choose a directory with room for it, {muon_momentum_dtype} bf16 or int8, or a smaller"
            " {muon_offload_fraction}",
        )


def offload_run(settings: MuonSettings) -> OffloadRun | None:
    """The stores of momentum, of all ranks, unless it is fp32 on the device."""
    if settings.muon_offload == "none" and settings.muon_momentum_dtype == "fp32":
        return None
    return OffloadRun(
        settings.muon_offload,
        settings.muon_momentum_dtype,
        fraction=settings.muon_offload_fraction,
        directory=settings.muon_offload_dir,
        buffer_mb=settings.muon_offload_buffer_mb,
    )
