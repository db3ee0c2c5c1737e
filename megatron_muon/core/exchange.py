"""The exchange between rows and owners: an all-to-all of a wave's rows, and one of its updates.

`ToOwners` is the transport of the owner scheme; `replicas` and `gathered` have others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_muon.core.layout import Layout
from megatron_muon.core.probe import Probe
from megatron_muon.core.route import (
    Leg,
    Placed,
    Route,
    Unit,
    Units,
    aligned_elements,
    laid_out,
    to_stacks,
)
from megatron_muon.core.slices import BlockKind, BlockSlice, Team
from megatron_muon.core.wave import Message


class Works:
    """Several collectives, or messages of pairs, under way."""

    def __init__(self, works: Sequence[Any] = ()) -> None:
        self._works = works

    def wait(self) -> None:
        """Have the stream of products wait for all of them."""
        for work in self._works:
            work.wait()


class ToOwners:
    """Rows go to the owners of their matrices by all-to-all, and updates back.

    Args:
        layout: the matrices.
        teams: owners of each.
        group: the ranks of the layout.
        kind_of: as `Method.kind`.
        by_pairs: send messages to those ranks alone for which there are bytes.
    """

    def __init__(
        self,
        layout: Layout,
        teams: Sequence[Team],
        group: Any,
        kind_of: Callable[[BlockSlice], BlockKind],
        *,
        by_pairs: bool = False,
    ) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.teams = teams
        self.layout = layout
        self._kind_of = kind_of
        self._by_pairs = by_pairs

    def units(self, indices: Sequence[int]) -> Units:
        """The units of a wave of these matrices."""
        return Units(
            self.layout,
            indices,
            self.teams,
            self.rank,
            self._kind_of,
        )

    def route(self, indices: Sequence[int]) -> Route:
        """This rank's part in the wave of these matrices."""
        units = self.units(indices)
        others = []
        for unit in units.owned:
            others += [(rank, unit) for rank in unit.shard.holders if rank != self.rank]
        # what stays here is laid out behind the last rank
        return make_route(units, others, own=units.ranks)

    def batch(self, indices: Sequence[int]) -> Route:
        """The route of matrices that are whole on this rank, their owner."""
        units = self.units(indices)
        _, placed = laid_out(
            1,
            [(0, unit) for unit in units.owned],
        )
        rows = units.order_rows(placed)
        leg = Leg([], [], to_stacks(placed), [])
        return Route(indices, rows, units.stacks, leg, leg, is_batch=True)

    def send_rows(self, message: Message, probe: Probe) -> Any:
        """Start to send rows; the result can be waited for. Collective."""
        if not message.received_counts:
            return Works()
        probe.received(message.received.nbytes)
        if self._by_pairs:
            return exchange_pairs(*message, self.group)
        return dist.all_to_all_single(*message, self.group, async_op=True)

    send_updates = send_rows
    """Start to send updates, likewise."""


def make_route(
    units: Units,
    others: Sequence[tuple[int, Unit]],
    *,
    own: int,
) -> Route:
    """A rank's part in a wave with owners.

    Args:
        others: owned units that other ranks get updates of, with these ranks.
        own: place of what the rank owns itself among rows by owner.
    """
    if not units.indices:
        nothing = Leg([], [], [], [])
        return Route((), [], [], nothing, nothing)
    rank = units.rank

    def by_owner(chosen: Sequence[Unit]) -> tuple[list[int], Placed]:
        places = [
            (
                own if unit.owner == rank else unit.owner,
                unit,
            )
            for unit in chosen
        ]
        return laid_out(units.ranks + 1, places)

    sent, out = by_owner(
        [unit for unit in units.all if unit.source == rank],
    )
    returned, updates = by_owner(units.kept)
    start = aligned_elements(sum(returned))
    arriving = [(unit.source, unit) for unit in units.owned if unit.source != rank]
    received, arrived = laid_out(units.ranks, arriving, start)
    back, leaving = laid_out(units.ranks, others, start)
    rows = units.order_rows(updates)
    return Route(
        units.indices,
        rows,
        units.stacks,
        Leg(sent, received, units.from_rows(out), to_stacks(out + arrived)),
        Leg(returned, back, units.from_rows(updates), to_stacks(leaving + updates)),
        units.unsent(lambda unit: unit.source == rank),
    )


def exchange_pairs(
    received: Tensor,
    sent: Tensor,
    received_counts: list[int],
    sent_counts: list[int],
    group: ProcessGroup,
) -> Any:
    """An asynchronous all-to-all without empty messages.

    In NCCL, the group has had another collective before. The all-to-all of torch.distributed sends
    a message to every rank, also an empty one: NCCL (from 2.14 on, as torch calls it) then connects
    all pairs and keeps buffers for them, gloo waits for each.
    """
    messages = []
    for start, flat, counts in (
        (dist.irecv, received, received_counts),
        (dist.isend, sent, sent_counts),
    ):
        for peer, part in enumerate(flat.split(counts)):
            if part.numel():
                messages.append(dist.P2POp(start, part, group=group, group_peer=peer))
    return Works(dist.batch_isend_irecv(messages) if messages else [])
