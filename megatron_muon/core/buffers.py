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

import functools
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_muon.core.route import Stack, aligned_elements, stacked_elements
from megatron_muon.core.slices import BlockKind, Cuts

if TYPE_CHECKING:
    from megatron_muon.core.methods.method import Method

LANES = 3
"""Waves under way: rows travel, blocks are orthogonalized, updates travel."""

CHUNK = {"cpu": 2**20, "cuda": 2 * 320 * 65_536}
"""Elements of rows that are prepared, or whose updates are applied, together: in fp32, beside the
lanes. On a GPU as many as two launches of a call on lists take."""

AUTO_BYTES = 256 * 2**20
"""Bytes of a step where nothing is said, and no matrix needs more unless its blocks are cut."""

ROW_BYTES = 4
"""Bytes of an element in a chunk, fp32."""

MANY = 2**20
"""More blocks than a stack has."""

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

    def wave(
        self,
        rows: int,
        owned: int,
        shares: Shares,
        stacks: Sequence[Stack],
    ) -> WaveBytes:
        """Bytes of a wave, from elements of both regions, on one rank."""
        size = self.dtype.itemsize
        lane = aligned(aligned_elements(rows) * size) + aligned(owned * size)
        return self._with_stacks(WaveBytes(lane, self._chunk(shares)), stacks)

    def batch(self, shares: Shares, stacks: Sequence[Stack]) -> WaveBytes:
        """Bytes of a batch on its rank."""
        return self._with_stacks(
            WaveBytes(0, self._chunk(shares), is_batch=True),
            stacks,
        )

    def _chunk(self, shares: Shares) -> int:
        numel = max(min(shares.numel, self.most_numel), shares.largest)
        return (1 + self.spare) * aligned(ROW_BYTES * numel)

    @property
    def most_numel(self) -> int:
        """Elements of a chunk at most, unless a shard is larger."""
        return sys.maxsize if self.apart else self.chunk_numel

    def chunk_bytes(self, numel: int) -> int:
        """Bytes of a chunk for so many elements, as if no shard were larger than a chunk."""
        return ROW_BYTES * (1 + self.spare) * min(numel, self.chunk_numel)

    def _with_stacks(self, wave: WaveBytes, stacks: Sequence[Stack]) -> WaveBytes:
        numels = Counter[int]()
        for stack in stacks:
            for slot in stack.slots:
                numels[slot.index] += slot.numel
        counts = {stack.kind: len(stack.slots) for stack in stacks}
        work = self._work(
            counts,
            max(numels.values(), default=0),
        )
        ahead, behind = _places(work, wave.chunk if wave.is_batch else wave.lane)
        nbytes = aligned(stacked_elements(stacks) * self.dtype.itemsize)
        return wave._replace(stacks=nbytes, ahead=ahead, behind=behind)

    def _work(
        self,
        counts: Mapping[BlockKind, int],
        largest: int,
    ) -> dict[str, int]:
        """Bytes of the method's buffers by name.

        `counts` are blocks by kind, `largest` the elements of the largest matrix.
        """
        work = Counter[str]()
        for kind, count in counts.items():
            work |= Counter(
                self.method.work_bytes(kind, count, self.dtype.itemsize),
            )
        whole = {f"{WHOLE}{number}": ROW_BYTES * largest for number in range(self.whole)}
        return dict(work) | whole

    @functools.cache  # noqa: B019  # there are few kinds of matrices, and few instances
    def of_owners(
        self, blocks: tuple[tuple[int, int], ...], cuts: Cuts | None, ranks: int, steps: int
    ) -> OwnerBytes:
        """Bytes of a matrix, cut by `Team.cuts`, on the busiest of its owners."""
        owned = [0] * ranks
        kinds = Counter[BlockKind]()
        cuts = cuts or ((0, 1),) * len(blocks)
        for (rows, cols), (first, count) in zip(
            blocks,
            cuts,
            strict=True,
        ):
            smaller, longer = sorted((rows, cols))
            length = -(-longer // count)
            team = tuple(range(count)) if count > 1 else ()
            kinds[BlockKind(smaller, longer, 1.0, steps, team, length)] += 1
            for place in range(first, first + count):
                owned[place] += smaller * length
        stacks = max(owned) * self.dtype.itemsize
        work = self._work(
            kinds,
            sum(rows * cols for rows, cols in blocks),
        )
        most = self._work(dict.fromkeys(kinds, MANY), 0)
        _, behind = _places(work, stacks)
        return OwnerBytes(stacks, *map(_total, (behind, work, most)))

    def most_gaps(self, kinds: int) -> int:
        """Most bytes of a step's buffers that are gaps, with a stack for each kind of blocks."""
        elements = (LANES + kinds) * aligned_elements(1)
        return elements * self.dtype.itemsize + (2 * LANES + 2 + self.spare) * _ALIGNMENT

    def step_bytes(self, taken: OwnerBytes) -> int:
        """Bytes of a step on an owner whose lanes are twice as large as its stacks."""
        chunk = self.chunk_bytes(taken.stacks // self.dtype.itemsize)
        return LANES * 2 * taken.stacks + max(
            taken.stacks + taken.behind,
            chunk,
        )


def _places(
    work: Mapping[str, int],
    free: int,
) -> tuple[dict[str, int], dict[str, int]]:
    """Put a method's buffers in `free` bytes, whose rows are in the stacks by then.

    Large ones first; those that do not fit lie behind the stacks.
    """
    ahead = {}
    behind = {}
    for name, size in sorted(
        work.items(),
        key=lambda item: -item[1],
    ):
        if aligned(size) <= free:
            ahead[name] = size
            free -= aligned(size)
        else:
            behind[name] = size
    return ahead, behind


def _total(sizes: Mapping[str, int]) -> int:
    return sum(map(aligned, sizes.values()))


class Shares(NamedTuple):
    """Elements of a rank's shards in a wave, and of the largest of them."""

    numel: int
    largest: int


class OwnerBytes(NamedTuple):
    """Bytes of a matrix on the busiest of its owners.

    Attributes:
        stacks: its blocks.
        behind: the method's buffers that do not fit as many.
        work, most_work: the method's buffers, and those for any number of such matrices.
    """

    stacks: int
    behind: int
    work: int
    most_work: int


class WaveBytes(NamedTuple):
    """Bytes of a wave or batch by buffer, on one rank.

    `ahead` are buffers of the method, by name, in the lane, or in the chunk of a batch; `behind`
    those behind the stacks.
    """

    lane: int
    chunk: int
    stacks: int = 0
    ahead: Mapping[str, int] = MappingProxyType({})
    behind: Mapping[str, int] = MappingProxyType({})
    is_batch: bool = False

    @property
    def scratch(self) -> int:
        """Bytes of the scratch while it is worked on."""
        worked = self.stacks + _total(self.behind)
        return self.chunk + worked if self.is_batch else max(worked, self.chunk)


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
        lanes = [0] * LANES
        for number, wave in enumerate(waves):
            lanes[number % LANES] = max(lanes[number % LANES], wave.lane)
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
