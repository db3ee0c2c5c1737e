"""What travels: which rank has which elements of a matrix for another, by arithmetic.

Rows go from one holder to each rank that orthogonalises some of them, update rows from there to
every holder.
"""

# Annotations are no strings here: documentation tools do not find all of their names then.

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from megatron_muon.core.layout import Ints, Layout, RowSplit
from megatron_muon.core.slices import Cuts, Team

MESSAGE_US = 2.0
"""Of a rank for each peer of an all-to-all, whatever the message's size. Assumed, for NCCL's proxy, which posts a send
and a receive; not in it are the connections and buffers that NCCL makes once for each pair."""

_MAX_CACHED = 2**18
"""Transfers of a wave that are kept, as plans and estimates ask for the same waves again."""


class Transfers(NamedTuple):
    """Elements that go from one rank to another, also to itself, in three columns of equal length."""

    sources: Ints
    targets: Ints
    elements: Ints

    def between_ranks(self) -> "Transfers":
        """Those that leave their rank."""
        leave = self.sources != self.targets
        return Transfers(*(column[leave] for column in self))

    def received(self, ranks: int) -> Ints:
        """Elements that each of `ranks` ranks receives."""
        return np.bincount(self.targets, self.elements, ranks).astype(np.int64)

    def sent(self, ranks: int) -> Ints:
        """Elements that each of `ranks` ranks sends."""
        return np.bincount(self.sources, self.elements, ranks).astype(np.int64)

    def peers(self, ranks: int) -> Ints:
        """How many others each of `ranks` ranks sends to or receives from, whichever is more."""
        pairs = np.unique(self.sources * ranks + self.targets)
        return np.maximum(
            np.bincount(pairs // ranks, minlength=ranks),
            np.bincount(pairs % ranks, minlength=ranks),
        )


def all_to_all_s(
    transfers: Transfers,
    *,
    nodes: Ints,
    element_bytes: int,
    near_gb_per_s: float,
    far_gb_per_s: float,
) -> float:
    """Seconds of an all-to-all: the busiest rank's bytes over both links at once, and its messages."""
    sources, targets, elements = transfers.between_ranks()
    ranks, far = len(nodes), nodes[sources] != nodes[targets]
    pairs = np.unique(sources * ranks + targets)
    slowest = 0.0
    for ends, messages in ((sources, pairs // ranks), (targets, pairs % ranks)):
        near_s, far_s = (
            np.bincount(ends[part], weights=elements[part], minlength=ranks)
            * element_bytes
            / (gb_per_s * 1e9)
            for part, gb_per_s in ((~far, near_gb_per_s), (far, far_gb_per_s))
        )
        posted_s = MESSAGE_US * 1e-6 * np.bincount(messages, minlength=ranks)
        slowest = max(slowest, float((posted_s + np.maximum(near_s, far_s)).max(initial=0.0)))
    return slowest


class Traffic:
    """What the matrices of a layout with these owners have to send. Matrices that are cut alike are counted once."""

    def __init__(self, layout: Layout, teams: Sequence[Team]) -> None:
        self._layout, self._teams = layout, teams
        self._of_slices: dict[
            tuple[int, tuple[int, int], RowSplit, Cuts], list[tuple[int, Ints]]
        ] = {}
        self._cached: dict[tuple[bool, tuple[int, ...]], Transfers] = {}

    def gathered(self, indices: Iterable[int]) -> Transfers:
        """Rows of these matrices, from a holder to those that orthogonalise them."""
        return self._transfers(tuple(indices), is_return=False)

    def returned(self, indices: Iterable[int]) -> Transfers:
        """Their update rows, from there to all holders."""
        return self._transfers(tuple(indices), is_return=True)

    def _transfers(self, indices: tuple[int, ...], *, is_return: bool) -> Transfers:
        if (is_return, indices) in self._cached:
            return self._cached[is_return, indices]
        columns = [(np.empty(0, dtype=np.int64),) * 3]
        for index in indices:
            held = self._layout.holders[index]
            for owner, elements in self._by_owner(index):
                others = held.ranks if is_return else held.sources(owner, self._layout.world_size)
                count = elements[held.numbers] if is_return else elements
                there = count > 0
                owners = np.full(int(there.sum()), owner)
                columns.append((others[there], owners, count[there]))
        others, owners, elements = (np.concatenate(column) for column in zip(*columns, strict=True))
        found = (
            Transfers(owners, others, elements)
            if is_return
            else Transfers(others, owners, elements)
        )
        if len(elements) < _MAX_CACHED:
            self._cached[is_return, indices] = found
        return found

    def _by_owner(self, index: int) -> list[tuple[int, Ints]]:
        """For each slice of a matrix its rank, and how many elements each shard has of it."""
        matrix, team, held = (
            self._layout.matrices[index],
            self._teams[index],
            self._layout.holders[index],
        )
        if team.cuts is None:
            return [(team.ranks[0], held.elements)]
        key = id(matrix.shards), matrix.shape, matrix.split, team.cuts
        if key not in self._of_slices:
            self._of_slices[key] = [
                (team.ranks.index(part.rank), part.overlaps(held.rectangles))
                for part in team.slices(index, matrix)
            ]
        return [(team.ranks[place], elements) for place, elements in self._of_slices[key]]
