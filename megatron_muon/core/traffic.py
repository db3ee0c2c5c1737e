"""What travels: which rank has which elements of a matrix for another, by arithmetic.

Rows go from one holder to each rank that orthogonalises some of them, update rows from there to every holder. The
planner and the estimates ask here.
"""

# Annotations are no strings here: documentation tools do not find all of their names then.

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_muon.core.layout import Layout, Shard
from megatron_muon.core.slices import Team, rectangles

Ints = np.ndarray[Any, np.dtype[np.int64]]

_KEPT = 2**18


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
        return _total(self.targets, self.elements, ranks)

    def sent(self, ranks: int) -> Ints:
        """Elements that each of `ranks` ranks sends."""
        return _total(self.sources, self.elements, ranks)

    def peers(self, ranks: int) -> Ints:
        """How many others each of `ranks` ranks sends to or receives from, whichever is more."""
        pairs = np.unique(self.sources * ranks + self.targets)
        return np.maximum(np.bincount(pairs // ranks, minlength=ranks), np.bincount(pairs % ranks, minlength=ranks))


class Links(NamedTuple):
    """How fast ranks exchange: in a node, between nodes, and for each peer, whatever the size of its message."""

    near_gb_per_s: float
    far_gb_per_s: float
    message_us: float

    def seconds(self, transfers: Transfers, nodes: Ints, element_bytes: int) -> float:
        """Of an all-to-all: bytes of the busiest rank over both links at the same time, and its messages."""
        sources, targets, elements = transfers.between_ranks()
        ranks, far = len(nodes), nodes[sources] != nodes[targets]
        pairs = np.unique(sources * ranks + targets)
        slowest = 0.0
        for ends, messages in ((sources, pairs // ranks), (targets, pairs % ranks)):
            near_s, far_s = (
                np.bincount(ends[part], weights=elements[part], minlength=ranks) * element_bytes / (gb_per_s * 1e9)
                for part, gb_per_s in ((~far, self.near_gb_per_s), (far, self.far_gb_per_s))
            )
            posted_s = self.message_us * 1e-6 * np.bincount(messages, minlength=ranks)
            slowest = max(slowest, float((posted_s + np.maximum(near_s, far_s)).max(initial=0.0)))
        return slowest


MESSAGE_US = 2.0
"""Of a rank for each peer of an all-to-all. Assumed, for NCCL's proxy, which posts a send and a receive; not in it are
the connections and buffers that NCCL makes once for each pair."""


@dataclass(frozen=True)
class Holders:
    """Who holds the shards of a matrix.

    Attributes:
        shards: those of the matrix.
        ranks: of each pair of a rank and a shard that it holds.
        numbers: of the shard in each pair.
        elements: of each shard.
    """

    shards: tuple[Shard, ...]
    ranks: Ints
    numbers: Ints
    elements: Ints

    @classmethod
    def of(cls, shards: tuple[Shard, ...]) -> "Holders":
        """The holders of `shards`."""
        pairs = [(holder, number) for number, shard in enumerate(shards) for holder in shard.holders]
        ranks, numbers = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return cls(shards, ranks, numbers, np.array([shard.numel for shard in shards], dtype=np.int64))

    def sources(self, owner: int, world_size: int) -> Ints:
        """For each shard the rank from which `owner` has it."""
        if len(self.ranks) == len(self.shards):
            return self.ranks
        return np.array([shard.source(owner, world_size) for shard in self.shards], dtype=np.int64)


class Traffic:
    """What the matrices of a layout with these owners have to send. Matrices that are cut alike are counted once."""

    def __init__(self, layout: Layout, teams: Sequence[Team]) -> None:
        self._layout, self._teams = layout, teams
        self._holders: dict[int, Holders] = {}
        self._common: dict[tuple[Any, ...], list[tuple[int, Ints]]] = {}
        self._kept: dict[tuple[str, tuple[int, ...]], Transfers] = {}

    def holders(self, index: int) -> Holders:
        """Who holds a matrix."""
        shards = self._layout.matrices[index].shards
        if id(shards) not in self._holders:
            self._holders[id(shards)] = Holders.of(shards)
        return self._holders[id(shards)]

    def common(self, index: int) -> list[tuple[int, Ints]]:
        """For each slice of a matrix its rank, and how many elements each shard has of it."""
        matrix, team = self._layout.matrices[index], self._teams[index]
        if team.cuts is None:
            return [(team.ranks[0], self.holders(index).elements)]
        key = id(matrix.shards), matrix.shape, matrix.split, team.cuts
        if key not in self._common:
            places = {rank: place for place, rank in enumerate(team.ranks)}
            of_shards = rectangles(matrix.shards)
            self._common[key] = [
                (places[block_slice.rank], block_slice.overlaps(of_shards))
                for block_slice in team.slices(index, matrix)
            ]
        return [(team.ranks[place], elements) for place, elements in self._common[key]]

    def gathered(self, indices: Iterable[int]) -> Transfers:
        """Rows of these matrices, from a holder to those that orthogonalise them."""
        return self._keep("gathered", tuple(indices))

    def returned(self, indices: Iterable[int]) -> Transfers:
        """Their update rows, from there to all holders."""
        return self._keep("returned", tuple(indices))

    def _keep(self, what: str, indices: tuple[int, ...]) -> Transfers:
        """Waves are asked for again and again: small ones are kept."""
        found = self._kept.get((what, indices))
        if found is None:
            found = self._gathered(indices) if what == "gathered" else self._returned(indices)
            if len(found.elements) < _KEPT:
                self._kept[what, indices] = found
        return found

    def _gathered(self, indices: Sequence[int]) -> Transfers:
        ranks = self._layout.world_size
        return _joined(
            (self.holders(index).sources(owner, ranks), owner, elements)
            for index in indices
            for owner, elements in self.common(index)
        )

    def _returned(self, indices: Sequence[int]) -> Transfers:
        columns = []
        for index in indices:
            holders = self.holders(index)
            columns += [(holders.ranks, owner, elements[holders.numbers]) for owner, elements in self.common(index)]
        targets, sources, elements = _joined(columns)
        return Transfers(sources, targets, elements)


def _joined(columns: Iterable[tuple[Ints, int, Ints]]) -> Transfers:
    """Of ranks, one rank at the other end, and elements."""
    found = [(ranks[there], np.full(int(there.sum()), other), elements[there])
             for ranks, other, elements in columns for there in (elements > 0,)]  # fmt: skip
    if not found:
        return Transfers(*(np.empty(0, dtype=np.int64) for _ in range(3)))
    return Transfers(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _total(ranks: Ints, elements: Ints, count: int) -> Ints:
    return np.bincount(ranks, weights=elements, minlength=count).astype(np.int64)
