"""The elements that each rank sends to others: by arithmetic, from a layout and its owners.

Rows go from one holder to each rank that orthogonalizes some of them, update rows from there to
every holder.
"""

# Annotations are no strings here: documentation tools do not find all of their names then.

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_muon.core.layout import Ints, Layout, Matrix
from megatron_muon.core.slices import Team


class Transfers(NamedTuple):
    """Elements that go from one rank to another, in three columns of equal length."""

    sources: Ints
    targets: Ints
    elements: Ints

    def messages(self, ranks: int) -> tuple[Ints, Ints]:
        """Messages that each of `ranks` ranks sends and receives, one for each pair of ranks."""
        pairs = np.unique(self.sources * ranks + self.targets)
        sent = np.bincount(pairs // ranks, minlength=ranks)
        return sent, np.bincount(pairs % ranks, minlength=ranks)

    def peers(self, ranks: int) -> Ints:
        """Number of ranks that each rank sends to or receives from, whichever is more."""
        return np.maximum(*self.messages(ranks))


def transfers(
    layout: Layout,
    teams: Sequence[Team],
    indices: Iterable[int],
) -> tuple[Transfers, Transfers]:
    """Rows of these matrices, from one holder each to owners, and updates, to all holders."""
    rows = []
    updates = []
    for index in indices:
        matrix = layout.matrices[index]
        shards = matrix.shards
        for owner, elements in owned_elements(matrix, teams[index]):
            sources = shards.sources(owner, layout.world_size)
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


def owned_elements(matrix: Matrix, team: Team) -> Iterator[tuple[int, Ints]]:
    """The rank of each slice of a matrix, and the elements of it in each shard."""
    if team.cuts is None:
        yield team.ranks[0], matrix.shards.elements
        return
    for block_slice in team.slices(0, matrix):
        yield block_slice.rank, block_slice.overlaps(matrix.shards.rectangles)


def _joined(several: Iterable[Transfers]) -> Transfers:
    nothing = np.empty((3, 0), dtype=np.int64)
    columns = np.concatenate([nothing, *several], axis=1)
    sources, targets, elements = columns
    return Transfers(*columns[:, (elements > 0) & (sources != targets)])
