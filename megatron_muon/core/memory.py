"""What orthogonalising takes of a rank's memory, by arithmetic: matrices as they are assembled, and temporaries.

The planner cuts waves by these figures and `megatron-muon plan` prints them. They follow the
buffers of `core.exchange` and the tensors of `core.newton_schulz` on a GPU; `benchmarks.rehearse`
counts by running that code, within 10 %.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_muon.core.cost import GRAM, HALVES, Iteration
from megatron_muon.core.layout import Layout, Matrix
from megatron_muon.core.slices import BlockKind, BlockSlice, Cuts
from megatron_muon.core.user_errors import SettingError

TOGETHER = {"cpu": 2**20, "cuda": 2**23}
"""Elements of the blocks that are iterated together. On a processor what an iteration touches stays in its cache; on a
GPU its temporaries stay small beside a wave's buffer."""

MOST_TOGETHER = 2**25
"""The same of small blocks on a GPU, where launches would take longer than products."""

WORK_OF_LAUNCHES = 400_000_000_000
"""Operations that an H100 does in bf16 at 65 % of its rate in twice the time of 60 launches, 5 microseconds each. One
showed 60 % and 7 microseconds (docs/gpu.md)."""

CHUNK = {"cpu": 2**20, "cuda": 2 * 320 * 65_536}
"""Elements of rows that are prepared, or whose updates are applied, together: in fp32, beside what travels. On a GPU as
many as two launches of a call on lists take."""

_ALIGNMENT = 512
"""Bytes; torch's allocator of GPU memory gives no less."""

AUTO_BYTES = 256 * 2**20
"""What a step may take where nothing is said, and no matrix needs more unless its blocks are cut."""

ROW_BYTES = 4
"""Of an element of prepared rows, fp32."""

_ALIVE = 4
"""Waves of which a rank holds something at a time, each of at most a wave's bytes: updates of wave k-1 leave, rows of
wave k have arrived, its matrices are assembled from them, rows of wave k+1 arrive. While wave k is orthogonalised there
are three, and the iteration's temporaries."""


def aligned(size: int) -> int:
    """Bytes up to the next aligned place."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def stacks(
    blocks: Sequence[tuple[int, int]], cuts: Cuts | None, steps: int = 0
) -> Counter[BlockKind]:
    """The stacks that blocks get which are cut so, `Team.cuts`, and how many blocks each has."""
    counts = [count for _, count in cuts] if cuts else [1] * len(blocks)
    pairs = zip(blocks, counts, strict=True)
    return Counter(_kind(block, -(-max(block) // count), count, steps) for block, count in pairs)


def _kind(block: tuple[int, int], length: int, team: int, steps: int) -> BlockKind:
    """Of a block that some team cuts: who is in it, and how updates are scaled, takes no memory."""
    return BlockKind(
        min(block), max(block), 1.0, steps, tuple(range(team)) if team > 1 else (), length
    )


class MomentBytes(NamedTuple):
    """Bytes an element that applying an update takes beside it: `core.rules` make such tensors.

    `held` are of an update row, on the ranks that hold it, of one shard at a time, or of several
    with `together`; `whole` of the largest matrix, on its owner, beside the update in fp32:
    squares.
    """

    held: int = 0
    whole: int = 0
    together: bool = False


def moment_bytes(method: str | None, *, cautious: bool) -> MomentBytes:
    """Of a second moment, by the names of adaptive_muon_moment2_method, and of cautious decay's products in fp32."""
    moment = {None: MomentBytes(), "adamuon": MomentBytes(held=5), "normuon": MomentBytes(whole=4)}[
        method
    ]
    return moment._replace(held=max(moment.held, 4), together=True) if cautious else moment


class Taken(NamedTuple):
    """Bytes that a matrix takes on a rank: of a wave, and beside all waves."""

    wave: int
    beside: int


@dataclass(frozen=True)
class Memory:
    """What decides the bytes: those of an element on the wire and in the stacks, the products, the second moment."""

    element_bytes: int
    iteration: Iteration = field(default_factory=Iteration)
    moment: MomentBytes = field(default_factory=MomentBytes)

    def held_bytes(self, *, is_team: bool) -> int:
        """What an element fills of a wave on a rank that holds it: its rows leave, or its update rows arrive.

        Rows are packed from what was prepared, and second moments applied, in the bytes of two
        waves. The updates of a team are put together.
        """
        updates = (2 if is_team else 1) * self.element_bytes
        packed, normalized = self.element_bytes + ROW_BYTES, updates + self.moment.held
        return max(updates, -(-max(packed, normalized if self.moment.held else 0) // 2))

    def normalizing(self, numel: int, blocks: int) -> int:
        """Bytes of normalising a whole update, which is copied to fp32 unless it is one block of that."""
        is_copied = self.element_bytes < ROW_BYTES or blocks > 1
        return (self.moment.whole + ROW_BYTES * is_copied) * numel if self.moment.whole else 0

    @functools.cache  # noqa: B019  # there are few kinds of matrices, and few instances
    def of_owners(
        self,
        blocks: tuple[tuple[int, int], ...],
        cuts: Cuts | None,
        ranks: int,
        steps: int = 0,
    ) -> Taken:
        """What the busiest of the owners takes for a matrix cut by `Team.cuts`, if it serves as many rows."""
        owned = [0] * ranks
        for (rows, cols), (first, count) in zip(
            blocks, cuts or ((0, 1),) * len(blocks), strict=True
        ):
            part = min(rows, cols) * -(-max(rows, cols) // count)
            for place in range(first, first + count):
                owned[place] += part
        wave = max(owned) * (self.element_bytes + self.held_bytes(is_team=cuts is not None))
        numel = sum(rows * cols for rows, cols in blocks)
        return Taken(
            wave,
            max(self.of_stacks(stacks(blocks, cuts, steps)), self.normalizing(numel, len(blocks))),
        )

    @staticmethod
    def of_step(wave: int, beside: int) -> int:
        """What a step takes with waves that fill so many bytes, and so many for temporaries or matrices beside them."""
        return max(_ALIVE * wave, (_ALIVE - 1) * wave + beside)

    @staticmethod
    def of_wave(step: int, beside: int) -> int:
        """What each wave may fill, so that a step takes no more than `step`."""
        return min(step // _ALIVE, (step - beside) // (_ALIVE - 1))

    @staticmethod
    def beside_waves(step: int, wave: int) -> int:
        """What is left for matrices that need no wire, beside waves of so many bytes."""
        return step - (_ALIVE - 1) * wave

    @staticmethod
    def check(given: int | None, smallest: int, layout: Layout) -> None:
        """Raises a UserError where the bytes that a step is given are fewer than the smallest that it can do with."""
        if given is None or given >= smallest:
            return
        largest = max(layout.matrices, key=lambda matrix: matrix.numel)
        needed = math.ceil(smallest * 1000 / 2**20) / 1000
        rows, cols = largest.shape
        raise SettingError(
            "muon_exchange_buffer_mb",
            given / 2**20,
            f"is too small: {largest.name} of {rows} x {cols} needs {needed:.3f}",
            "give at least that, or leave it out",
        )

    def parts(
        self, layout: Layout, indices: Iterable[int], limit: int, at_least: int = 1
    ) -> tuple[tuple[int, ...], ...]:
        """Whole matrices in at least so many parts of as many elements, equal shapes together.

        In as many more as it takes for each part to fit `limit` bytes; a matrix that does not fit
        is alone.
        """
        order = sorted(indices, key=lambda index: (layout.matrices[index].shape, index))
        sizes = [layout.matrices[index].numel for index in order]
        middles = [
            end - size / 2 for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)
        ]
        count = min(at_least, len(order))
        while count < len(order):
            numbers = [int(middle * count / sum(sizes)) for middle in middles]
            pairs = itertools.groupby(zip(numbers, order, strict=True), lambda pair: pair[0])
            parts = tuple(tuple(index for _, index in part) for _, part in pairs)
            if (
                max(self.whole([layout.matrices[index] for index in part]) for part in parts)
                <= limit
            ):
                return parts
            count = min(count + 1 + count // 8, len(order))
        return tuple((index,) for index in order)

    def whole(self, matrices: Sequence[Matrix]) -> int:
        """Bytes of orthogonalising matrices that lie whole on their owner."""
        stacked, work, made = self.of_batch(matrices)
        return stacked + max(
            sum(matrix.numel for matrix in matrices) * ROW_BYTES, work + made, stacked
        )

    def of_batch(
        self, matrices: Sequence[Matrix], slices: Sequence[BlockSlice] = ()
    ) -> tuple[int, int, int]:
        """Bytes of matrices that are orthogonalised together: stacks, buffers of the iteration, other temporaries."""
        kinds: Counter[BlockKind] = Counter()
        for matrix in matrices:
            kinds += stacks(matrix.blocks, None, matrix.steps)
        kinds.update(
            _kind(
                one.of,
                one.numel // min(one.of),
                len(one.ranks),
                one.steps,
            )
            for one in slices
        )
        stacked = sum(kind.smaller * kind.length * count for kind, count in kinds.items())
        work = max((self.work_of(kind, count) for kind, count in kinds.items()), default=0)
        made = [self.made_for(kind, count) for kind, count in kinds.items()]
        normalized = [self.normalizing(matrix.numel, len(matrix.blocks)) for matrix in matrices]
        return stacked * self.element_bytes, work, max([*normalized, *made], default=0)

    def of_stacks(self, counts: Mapping[BlockKind, int]) -> int:
        """Bytes that iterating over so many blocks of each kind takes beside them."""
        return max(
            (self.work_of(*each) + self.made_for(*each) for each in counts.items()), default=0
        )

    def work_of(self, kind: BlockKind, count: int) -> int:
        """Of these the buffers, which exist since construction."""
        sizes = work_bytes(self.iteration, kind, self._together(kind, count), self.element_bytes)
        return sum(map(aligned, sizes.values()))

    def made_for(self, kind: BlockKind, count: int) -> int:
        """Of these what is made within the step: a team's sum in fp32, or a processor's fp32 copy of bf16 to sum up."""
        blocks = 4 * self._together(kind, count) * kind.smaller
        of_team = blocks * kind.smaller if kind.team > 1 else 0
        is_copied = self.iteration.products is HALVES and self.iteration.half
        return max(of_team, blocks * kind.length if is_copied else 0)

    def _together(self, kind: BlockKind, count: int) -> int:
        device = "cpu" if self.iteration.products is HALVES else "cuda"
        return min(blocks_together(kind.smaller, kind.longer, kind.team, device), count)


def blocks_together(rows: int, longer: int, team: int, device: str) -> int:
    """How many wide blocks are iterated together, on all ranks of a team as many.

    On a GPU small ones are more than `TOGETHER`: as many as have the device at work for twice as
    long as the host takes for the launches of an iteration.
    """
    numel = rows * -(-longer // team)
    usual = max(TOGETHER[device] // numel, 1)
    if device == "cpu":
        return usual
    return max(
        usual, min(MOST_TOGETHER // numel, math.ceil(WORK_OF_LAUNCHES / (20 * rows * numel)))
    )


def work_bytes(
    iteration: Iteration, kind: BlockKind, count: int, element_bytes: int
) -> dict[str, int]:
    """Bytes of the buffers that iterating over `count` blocks takes, by their names in `core.newton_schulz`."""
    iteration = iteration.with_steps(kind.steps)
    each = 2 if iteration.half else 4
    wide, small = (
        count * kind.smaller * kind.length * each,
        count * kind.smaller * kind.smaller * each,
    )
    sizes = {"wide": wide, "r": small, "z": small}
    if (
        iteration.method_for(kind.smaller, kind.longer, kind.team) == GRAM
        and max(iteration.runs) > 1
    ):
        sizes |= {"q": small, "t": small}
    return sizes | ({"x": wide} if each != element_bytes else {})
