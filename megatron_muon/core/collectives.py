"""The collectives that carry a wave's rows and updates; each is started here and waited for by the wave."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Works:
    """Several collectives, or messages of pairs, under way."""

    works: Sequence[Any] = ()

    def wait(self) -> None:
        """The stream of products waits for all of them."""
        for work in self.works:
            work.wait()


def all_to_all(
    received: torch.Tensor,
    sent: torch.Tensor,
    received_counts: Sequence[int],
    sent_counts: Sequence[int],
    group: dist.ProcessGroup,
    *,
    by_pairs: bool,
) -> Any:
    """Begin to send elements to each rank of a group and to receive from each, flat, in the order of ranks. Collective.

    An all-to-all of torch.distributed takes a message to every rank, also an empty one: NCCL (from 2.14 on, as torch
    calls it) then connects all pairs and keeps buffers for them, gloo waits for each. `by_pairs` leaves empty messages
    out.
    """
    what = received, sent, list(received_counts), list(sent_counts), group
    return exchange_pairs(*what) if by_pairs else dist.all_to_all_single(*what, async_op=True)


def exchange_pairs(
    received: torch.Tensor,
    sent: torch.Tensor,
    received_counts: Sequence[int],
    sent_counts: Sequence[int],
    group: dist.ProcessGroup,
) -> Any:
    """An asynchronous all-to-all without empty messages; in NCCL, the group has had another collective before it."""
    messages = [
        dist.P2POp(start, flat.narrow(0, end - count, count), group=group, group_peer=peer)
        for start, flat, counts in ((dist.irecv, received, received_counts), (dist.isend, sent, sent_counts))
        for peer, (count, end) in enumerate(zip(counts, itertools.accumulate(counts), strict=True))
        if count
    ]
    return Works(dist.batch_isend_irecv(messages) if messages else [])


def broadcasts(parts: Sequence[tuple[int, torch.Tensor]], group: dist.ProcessGroup) -> Works:
    """Begin to broadcast each part from its rank in the group, in place. Collective."""
    return Works([dist.broadcast(part, group=group, group_src=rank, async_op=True) for rank, part in parts])
