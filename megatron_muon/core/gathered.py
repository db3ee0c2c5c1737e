"""The all-gather scheme: every rank gathers and orthogonalizes every matrix, one after another.

The readable reference with which the owner scheme is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_muon.core.exchange import ToOwners, Works
from megatron_muon.core.probe import Probe
from megatron_muon.core.route import Leg, Route, aligned_elements, laid_out, to_stacks
from megatron_muon.core.wave import Message
from megatron_muon.ranks import all_gather_single


class ToEveryRank(ToOwners):
    """Each rank gathers one shard of a matrix from every rank, padded to the largest."""

    def route(self, indices: Sequence[int]) -> Route:
        """This rank's part in the wave of one matrix."""
        units = self.units(indices)
        (index,) = indices
        padded = max(shard.numel for shard in self.layout.matrices[index].shards)
        kept, updates = laid_out(1, [(0, unit) for unit in units.kept])
        rows = units.order_rows(updates)
        start = aligned_elements(max(*kept, padded))
        out = [(0, unit) for unit in units.owned if unit.shard.rank == self.rank]
        arrived = [(start + unit.shard.rank * padded, unit) for unit in units.owned]
        return Route(
            indices,
            rows,
            units.stacks,
            Leg(
                [padded, 0],
                [padded] * units.ranks,
                units.from_rows(out),
                to_stacks(arrived),
            ),
            Leg(
                kept,
                [],
                units.from_rows(updates),
                to_stacks(updates),
            ),
            units.unsent(lambda unit: unit.shard.rank == self.rank),
        )

    def send_rows(self, message: Message, probe: Probe) -> Any:
        """Start the all-gather of a matrix."""
        whole, mine = message.received, message.sent
        probe.received(whole.nbytes - mine.nbytes)
        return all_gather_single(
            whole,
            mine,
            self.group,
            async_op=True,
        )

    def send_updates(self, message: Message, probe: Probe) -> Any:
        """Send nothing: every rank has the update."""
        return Works()
