"""Replicas that share work: every rank holds whole matrices, one owner orthogonalizes each.

Owners broadcast their updates, each as one message. An owner too applies the update as it travels,
so replicas stay the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron_muon.core.exchange import ToOwners, Works, make_route
from megatron_muon.core.probe import Probe
from megatron_muon.core.route import Route
from megatron_muon.core.wave import Message


class ToReplicas(ToOwners):
    """Rows stay, as every rank has them; updates are broadcast."""

    def route(self, indices: Sequence[int]) -> Route:
        """This rank's part in the wave of these matrices."""
        return make_route(
            self.units(indices),
            [],
            own=self.rank,
        )

    def send_rows(self, message: Message, probe: Probe) -> Any:
        """Send nothing."""
        return Works()

    def send_updates(self, message: Message, probe: Probe) -> Any:
        """Start a broadcast from each owner."""
        if self.group.size() == 1:
            return Works()
        works = []
        for owner, part in enumerate(message.received.split(message.received_counts)):
            if part.numel():
                if owner != self.rank:
                    probe.received(part.nbytes)
                works.append(
                    dist.broadcast(
                        part,
                        group=self.group,
                        group_src=owner,
                        async_op=True,
                    )
                )
        return Works(works)
