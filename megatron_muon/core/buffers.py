"""The memory of a step: one table of buffers, the same for the run, the planner and the rehearsal.

    lanes    three, one for each wave under way
        rows     rows that leave, this rank's own rows last; then the updates that come back
        owned    rows that arrive for this rank's matrices; then the updates that are sent back
    scratch  one, for the wave that is worked on, or a batch of matrices that do not travel
        stacks   whole blocks
        behind   buffers of the method that do not fit the wave's lane, or the batch's chunk
        chunk    fp32 rows that are prepared, or updates that are applied, and a rule's scratch

A wave's chunk lies in the place of its stacks, a batch's before them. Each buffer is as large as
the largest of the waves that take it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_muon.core.route import aligned_elements
from megatron_muon.core.slices import BlockKind

if TYPE_CHECKING:
    from megatron_muon.core.methods.method import Method

LANES = 3
"""Waves under way: rows travel, blocks are orthogonalized, updates travel."""

CHUNK = {"cpu": 2**20, "cuda": 2 * 320 * 65_536}
"""Elements of rows that are prepared, or whose updates are applied, together: in fp32, beside the
lanes. On a GPU as many as two launches of a call on lists take."""

AUTO_BYTES = 248 * 2**20
"""Bytes of a step where nothing is said, and no matrix needs more unless its blocks are cut."""

ROW_BYTES = 4
"""Bytes of an element in a chunk, fp32."""

WHOLE = "whole"
"""Prefix of the names of buffers for whole updates in fp32."""

_ALIGNMENT = 512
"""Bytes; torch's allocator of GPU memory gives no less."""


def aligned(size: int) -> int:
    """Bytes up to the next aligned position."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, eq=False)
class Sizes:
    """What decides the bytes of waves, beside their routes.

    Attributes:
        method: its buffers lie in the wave's lane or behind the stacks.
        dtype: of lanes and stacks.
        chunk_numel: an element of `CHUNK`.
        spare: further chunks that rules take to apply updates.
        whole: fp32 copies of a whole update that rules take on its owner.
        broadcast: owners broadcast updates, from the rows region.
        apart: a wave's rows are prepared together, on another stream, in a chunk of their own.
    """

    method: Method
    dtype: torch.dtype
    chunk_numel: int
    spare: int = 0
    whole: int = 0
    broadcast: bool = False
    apart: bool = False

    def of(self, contents: Contents) -> WaveBytes:
        """Bytes of a wave, or a batch, on one rank."""
        size = self.dtype.itemsize
        is_batch = contents.owned is None
        lane = 0
        if contents.owned is not None:
            lane = aligned(aligned_elements(contents.rows) * size) + aligned(contents.owned * size)
        numel = max(min(contents.rows, self.most_numel), contents.largest_shard)
        chunk = (1 + self.spare) * aligned(ROW_BYTES * numel)
        stacks = 0
        work = Counter[str]()
        for kind, count in contents.blocks:
            stacks += aligned_elements(count * kind.smaller * kind.length)
            work |= Counter(self.method.work_bytes(kind, count, size))
        for number in range(self.whole):
            work[f"{WHOLE}{number}"] = ROW_BYTES * contents.largest_matrix
        # rows are in the stacks by then
        free = chunk if is_batch else lane
        ahead = {}
        behind = {}
        for name, needed in sorted(work.items(), key=lambda item: -item[1]):
            if aligned(needed) <= free:
                ahead[name] = needed
                free -= aligned(needed)
            else:
                behind[name] = needed
        stack_bytes = aligned(stacks * size)
        scratch = stack_bytes + sum(map(aligned, behind.values()))
        scratch = scratch + chunk if is_batch else max(scratch, chunk)
        return WaveBytes(lane, chunk, stack_bytes, ahead, behind, scratch)

    @property
    def most_numel(self) -> int:
        """Elements of a chunk at most, unless a shard is larger."""
        return sys.maxsize if self.apart else self.chunk_numel


class Contents(NamedTuple):
    """A rank's part of a wave, or of a batch, in elements.

    Attributes:
        rows: of its shards, largest_shard: of one of them.
        blocks: number of blocks of each kind.
        largest_matrix: of the blocks of one matrix.
        owned: in the lane's region for owned matrices; None for a batch, which has no lane.
    """

    rows: int
    largest_shard: int
    blocks: tuple[tuple[BlockKind, int], ...]
    largest_matrix: int
    owned: int | None = None


class WaveBytes(NamedTuple):
    """Bytes of a wave or batch by buffer, on one rank.

    `ahead` are buffers of the method, by name, in the lane, or in the chunk of a batch; `behind`
    those behind the stacks. `scratch` is taken while it is worked on.
    """

    lane: int
    chunk: int
    stacks: int
    ahead: Mapping[str, int]
    behind: Mapping[str, int]
    scratch: int


@dataclass(frozen=True)
class Buffers:
    """Bytes of a step's buffers on one rank.

    Attributes:
        lanes: each is as large as the largest of the waves that take it in turn.
        apart: each of two chunks of whole waves, for rows that are prepared on another stream.
    """

    lanes: Sequence[int]
    scratch: int
    apart: int = 0

    @classmethod
    def of(
        cls, waves: Sequence[WaveBytes], batches: Sequence[WaveBytes], *, apart: bool = False
    ) -> Buffers:
        """The buffers that waves and batches share."""
        lanes = []
        for number in range(LANES):
            lanes.append(max((wave.lane for wave in waves[number::LANES]), default=0))
        every = [*waves, *batches]
        scratch = max(each.scratch for each in every)
        chunk = max(each.chunk for each in every) if apart else 0
        return cls(lanes, scratch, chunk)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.scratch_start + self.scratch + 2 * self.apart

    @property
    def scratch_start(self) -> int:
        """First byte of the scratch."""
        return sum(self.lanes)

    def lane_start(self, wave: int) -> int:
        """First byte of a wave's lane."""
        return sum(self.lanes[: wave % LANES])

    def apart_start(self, wave: int) -> int:
        """First byte of the chunk in which a wave's rows are prepared."""
        return self.scratch_start + self.scratch + wave % 2 * self.apart


class StepMemory:
    """The memory of the buffers: one tensor, or that of another step, which runs at another time.

    Args:
        nbytes: of the buffers. A shared tensor grows.
        shared: memory of another step.
        is_freed: give the memory back between steps.
    """

    def __init__(
        self,
        device: torch.device,
        nbytes: int,
        shared: torch.Tensor | None = None,
        *,
        is_freed: bool = False,
    ) -> None:
        self.nbytes = nbytes
        if shared is None:
            shared = torch.empty(0, dtype=torch.uint8, device=device)
        self.tensor = shared
        self._is_freed = is_freed
        self.acquire()

    def acquire(self) -> None:
        """Have the memory again. Tensors stay what they are, without their values."""
        storage = self.tensor.untyped_storage()
        if storage.nbytes() < self.nbytes:
            storage.resize_(self.nbytes)

    def release(self) -> None:
        """Give the memory back, where that is wanted; no tensor of it may be used until acquired."""
        if self._is_freed:
            self.tensor.untyped_storage().resize_(0)

    def view(
        self,
        start: int,
        numel: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """`(numel,)` elements from byte `start` on."""
        size = numel * dtype.itemsize
        return self.tensor.as_strided((size,), (1,), start).view(dtype)

    def views(
        self,
        start: int,
        sizes: Mapping[str, int],
    ) -> dict[str, torch.Tensor]:
        """Consecutive aligned bytes from byte `start` on, by name."""
        found = {}
        for name, size in sizes.items():
            found[name] = self.view(start, size, torch.uint8)
            start += aligned(size)
        return found
