"""The elements that each rank sends to others: by arithmetic, from a layout and its owners.

Rows go from one holder to each rank that orthogonalizes some of them, update rows from there to
every holder.
"""

# Annotations are no strings here: documentation tools do not find all of their names then.

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_muon.core.layout import Ints, Layout
from megatron_muon.core.slices import Team


class Transfers(NamedTuple):
    """Elements that go from one rank to another, in three columns of equal length."""

    sources: Ints
    targets: Ints
    elements: Ints

    def received(self, ranks: int) -> Ints:
        """Elements that each of `ranks` ranks receives."""
        return np.bincount(
            self.targets,
            self.elements,
            ranks,
        ).astype(np.int64)

    def sent(self, ranks: int) -> Ints:
        """Elements that each of `ranks` ranks sends."""
        return np.bincount(
            self.sources,
            self.elements,
            ranks,
        ).astype(np.int64)

    def messages(self, ranks: int) -> tuple[Ints, Ints]:
        """Messages that each of `ranks` ranks sends and receives, one for each pair of ranks."""
        pairs = np.unique(self.sources * ranks + self.targets)
        sent = np.bincount(pairs // ranks, minlength=ranks)
        return sent, np.bincount(pairs % ranks, minlength=ranks)

    def peers(self, ranks: int) -> Ints:
        """Number of ranks that each rank sends to or receives from, whichever is more."""
        return np.maximum(*self.messages(ranks))


class Traffic:
    """Transfers of the matrices of a layout, between holders and these owners."""

    def __init__(
        self,
        layout: Layout,
        teams: Sequence[Team],
    ) -> None:
        self._layout = layout
        self._teams = teams

    def of(self, indices: Iterable[int]) -> tuple[Transfers, Transfers]:
        """Rows of these matrices, from one holder each, and updates, to all holders."""
        rows = []
        updates = []
        for index in indices:
            shards = self._layout.matrices[index].shards
            for owner, elements in self.owned(index):
                sources = shards.sources(owner, self._layout.world_size)
                rows.append(
                    Transfers(
                        sources,
                        np.full_like(sources, owner),
                        elements,
                    )
                )
                updates.append(
                    Transfers(
                        np.full_like(shards.ranks, owner),
                        shards.ranks,
                        elements[shards.numbers],
                    )
                )
        return _joined(rows), _joined(updates)

    def owned(self, index: int) -> Iterator[tuple[int, Ints]]:
        """The rank of each slice of a matrix, and the elements of it in each shard."""
        matrix = self._layout.matrices[index]
        team = self._teams[index]
        if team.cuts is None:
            yield team.ranks[0], matrix.shards.elements
            return
        for block_slice in team.slices(index, matrix):
            yield block_slice.rank, block_slice.overlaps(matrix.shards.rectangles)


def _joined(transfers: Iterable[Transfers]) -> Transfers:
    nothing = np.empty((3, 0), dtype=np.int64)
    joined = Transfers(
        *np.concatenate([nothing, *transfers], axis=1),
    )
    there = (joined.elements > 0) & (joined.sources != joined.targets)
    return Transfers(*(column[there] for column in joined))
