"""What orthogonalising takes of a rank's memory, by arithmetic: matrices as they are assembled, and temporaries.

The planner cuts waves by these figures and `megatron-muon plan` prints them. They follow the tensors that `core.batch`
and `core.newton_schulz` make on a GPU; `megatron-muon rehearse` counts the same by running that code, and a test holds
the two within 10 %. Plain arithmetic, without torch.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_muon.core.cost import GRAM, HALVES, KERNEL, Iteration
from megatron_muon.core.errors import UserError
from megatron_muon.core.layout import Layout, Matrix
from megatron_muon.core.portions import Cuts, Portion

TOGETHER = {"cpu": 2**20, "cuda": 2**23}
"""Elements of the blocks that are iterated together. On a processor what an iteration touches stays in its cache; on a
GPU its temporaries stay small beside a wave's buffer."""

AUTO_BYTES = 256 * 2**20
"""What a step may take where nothing is said, and no matrix needs more unless its blocks are cut."""

ROW_BYTES = 4
"""Of an element of prepared rows, fp32."""

_ALIVE = 4
"""Waves of which a rank holds something at a time, each of at most a wave's bytes: updates of wave k-1 leave, rows of
wave k have arrived, its matrices are assembled from them, rows of wave k+1 arrive. While wave k is orthogonalised there
are three, and the iteration's temporaries."""


class Stack(NamedTuple):
    """Wide blocks alike."""

    rows: int
    cols: int  # of one rank
    longer: int  # columns of the whole block
    team: int = 1  # ranks that cut it
    steps: int = 0  # as `Matrix.steps`


def stacks(blocks: Sequence[tuple[int, int]], divided: Cuts | None, steps: int = 0) -> Counter[Stack]:
    """The stacks that blocks get which are divided so, `Team.cuts` or None, and how many blocks each has."""
    cuts = divided or ((0, 1),) * len(blocks)
    return Counter(
        Stack(min(block), -(-max(block) // count), max(block), count, steps)
        for block, (_, count) in zip(blocks, cuts, strict=True)
    )


class MomentBytes(NamedTuple):
    """Bytes an element that applying an update takes beside it: `core.adaptive` and `core.decay` make such tensors.

    `held` are of an update row, on the ranks that hold it; `whole` of the largest matrix, on its owner, beside an fp32
    copy of one that is bf16.
    """

    held: int = 0
    whole: int = 0


MOMENT_BYTES = {"adamuon": MomentBytes(held=8), "normuon": MomentBytes(whole=4)}
"""By the names of --adaptive-muon-moment2-method."""


def moment_bytes(method: str | None, *, cautious: bool) -> MomentBytes:
    """What a variant takes: with a second moment or None, and with cautious decay or without.

    Cautious decay multiplies weights and updates, in fp32, when AdaMuon has one copy of the update left.
    """
    moment = MomentBytes() if method is None else MOMENT_BYTES[method]
    return moment._replace(held=max(moment.held, 4)) if cautious else moment


class Taken(NamedTuple):
    """Bytes that a matrix takes on a rank: of a wave, and beside all waves."""

    wave: int
    beside: int


@dataclass(frozen=True)
class Memory:
    """What decides the bytes.

    Attributes:
        element_bytes: of an element on the wire, and of the matrices that are assembled from what arrives.
        iteration: which products run, and in which precision.
        moment: what an adaptive Muon takes besides.
    """

    element_bytes: int
    iteration: Iteration = field(default_factory=Iteration)
    moment: MomentBytes = field(default_factory=MomentBytes)

    def held_bytes(self, *, is_team: bool) -> int:
        """What an element fills of a wave on a rank that holds it: its rows leave, or its update rows arrive.

        Rows are packed from what was prepared, and second moments applied, in the room of two waves. The updates of a
        team are put together.
        """
        updates = (2 if is_team else 1) * self.element_bytes
        packed, normalized = self.element_bytes + ROW_BYTES, updates + self.moment.held
        return max(updates, -(-max(packed, normalized if self.moment.held else 0) // 2))

    def own_bytes(self, size: int, elements: int) -> int:
        """What a matrix that fills `size` fills on its sole owner, which holds so many elements of it."""
        return max(size, self.moment.held * elements)

    def normalizing(self, numel: int) -> int:
        """Bytes of normalising a whole update."""
        each = self.moment.whole + (4 if self.element_bytes < 4 else 0) if self.moment.whole else 0
        return each * numel

    def owned_bytes(self, portion: Portion) -> int:
        """What a portion fills of a wave on its rank: it arrives, it is assembled, its updates leave.

        A matrix of several blocks is there a second time, as stacks of its blocks.
        """
        copies = 2 if portion.block is None and len(portion.split.parts) > 1 else 1
        return copies * portion.numel * self.element_bytes

    @functools.cache  # noqa: B019  # there are few kinds of matrices, and few instances
    def of_owners(self, blocks: tuple[tuple[int, int], ...], divided: Cuts | None, ranks: int, steps: int = 0) -> Taken:
        """What the busiest rank of a team takes for a matrix of these blocks, where it serves as many rows to others.

        `divided` are `Team.cuts`, None for a sole owner; `steps` the matrix's.
        """
        cuts = divided or ((0, 1),) * len(blocks)
        owned = [0] * ranks
        for (rows, cols), (first, count) in zip(blocks, cuts, strict=True):
            part = min(rows, cols) * -(-max(rows, cols) // count)
            for place in range(first, first + count):
                owned[place] += part
        copies = 2 if divided is None and len(blocks) > 1 else 1
        wave = max(owned) * (copies * self.element_bytes + self.held_bytes(is_team=divided is not None))
        numel = sum(rows * cols for rows, cols in blocks)
        return Taken(wave, max(self.of_stacks(stacks(blocks, divided, steps)), self.normalizing(numel)))

    def of_stacks(self, counts: Mapping[Stack, int]) -> int:
        """Bytes of the temporaries of so many blocks of each kind."""
        return max((self.of_stack(kind, count) for kind, count in counts.items()), default=0)

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

    def whole(self, matrices: Sequence[Matrix], row_bytes: int = ROW_BYTES) -> int:
        """Bytes of orthogonalising matrices that lie whole on their owner; `row_bytes` are of prepared elements."""
        assembled, _, temporaries = self.of_batch(matrices)
        elements = sum(matrix.numel for matrix in matrices)
        return assembled + max(elements * max(row_bytes, self.moment.held), temporaries)

    @staticmethod
    def check(given: int | None, smallest: int, layout: Layout) -> None:
        """Raises a UserError where the bytes that a step is given are fewer than the smallest that it can do with."""
        if given is None or given >= smallest:
            return
        largest = max(layout.matrices, key=lambda matrix: matrix.numel)
        needed = math.ceil(smallest * 1000 / 2**20) / 1000
        raise UserError(
            f"--muon-exchange-buffer-mb {given / 2**20:g} is too small: {largest.name} of {largest.shape[0]} x "
            f"{largest.shape[1]} needs {needed:.3f}; give at least that, or leave the flag out"
        )

    def parts(self, matrices: Sequence[Matrix], room: int, at_least: int = 1) -> int:
        """In how many parts, each every so many-th of the matrices, they fit `room` bytes; one a part where none do."""
        parts = min(at_least, len(matrices))
        while parts < len(matrices) and max(self.whole(matrices[k::parts]) for k in range(parts)) > room:
            parts = min(parts + 1 + parts // 8, len(matrices))
        return parts

    def of_batch(self, matrices: Sequence[Matrix], portions: Sequence[Portion] = ()) -> tuple[int, int, int]:
        """Bytes of matrices that are orthogonalised together: assembled, of their updates, and of temporaries.

        As `core.batch` has them: blocks in stacks of equal shape; a matrix of one block is a view of its stack.
        """
        blocks: Counter[Stack] = Counter()
        kept = set[Stack]()  # those that updates are views of
        several = 0
        for matrix in matrices:
            blocks += stacks(matrix.blocks, None, matrix.steps)
            if len(matrix.split.parts) > 1:
                several += matrix.numel
            else:
                kept.add(Stack(min(matrix.shape), max(matrix.shape), max(matrix.shape), steps=matrix.steps))
        for portion in portions:
            cols = portion.numel // min(portion.of)
            kind = Stack(min(portion.of), cols, max(portion.of), len(portion.ranks), portion.steps)
            blocks[kind] += 1
            kept.add(kind)
        stacked = sum(kind.rows * kind.cols * count for kind, count in blocks.items())
        updates = several + sum(kind.rows * kind.cols * blocks[kind] for kind in kept)
        largest = max((matrix.numel for matrix in matrices), default=0)
        temporaries = max(self.of_stacks(blocks), self.normalizing(largest))
        return (stacked + several) * self.element_bytes, updates * self.element_bytes, temporaries

    def of_stack(self, kind: Stack, count: int) -> int:
        """Bytes that iterating over `count` wide blocks takes beside them, as `core.newton_schulz` makes tensors."""
        rows, cols, longer, team, steps = kind
        iteration = self.iteration.with_steps(steps)
        products, size = iteration.products, 2 if iteration.half else 4
        each = rows * -(-longer // team)
        together = min(max(TOGETHER["cpu" if products is HALVES else "cuda"] // each, 1), count)
        wide, small = rows * cols * size, rows * rows * size  # of a block: as it is, and its Gram matrix
        # The symmetric kernel makes its results one by one; those of several blocks are then copied into a stack.
        made = 2 if products is KERNEL and products.shares(rows, cols)[0] < 1.0 and together > 1 else 1
        # A team's sum is fp32; this rank's part, and the sum in the iteration's dtype, are there beside it.
        total = 2 * small + 4 * rows * rows if team > 1 else 0
        if iteration.method_for(rows, longer, team) == GRAM:
            runs = iteration.runs
            inner = (2 if max(runs) == 1 else 3) + made  # Gram matrix, polynomial, their product, and a new one
            later = wide if len(runs) > 1 else 0
            most = max(later + max(inner * small, total), wide * min(len(runs), 2) + small)
        else:
            later = wide if iteration.steps > 1 else 0
            most = max(later + max((1 + made) * small, total), wide * min(iteration.steps, 2) + small)
        if self.element_bytes != size:
            most += wide  # in the iteration's dtype
        if products is HALVES and iteration.half:
            most = max(most, 3 * wide)  # a processor sums up bf16 in an fp32 copy
        return together * max(most, rows * cols * self.element_bytes)  # magnitudes, before it begins
