"""Delayed collectives find what gloo hides, and change no update.

The table of parity, exchanges, metrics and offload run with them too, with `-m ''`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.case import Case
from tests.support.cases import REPLICATED, TINY
from tests.support.delayed import DelayedError, delayed_collectives
from tests.support.parity import check, run
from tests.support.pool import Pool

CASES = {"owner": Case(layers=1, optimizer=TINY), "shared": REPLICATED}
MISUSES = {
    "written to": (
        "rank 0 waits for allreduce: a buffer that it fills was written to before the wait"
    ),
    "freed": "rank 0 waits for allreduce: one of its buffers was freed before the wait",
    "not waited for": "rank 0 never waited for allreduce",
    "refused": (
        "delayed collectives do not know ProcessGroup.send: add it to tests.support.delayed"
    ),
}


def misuse(rank: int, how: str) -> None:
    values = torch.ones(2)
    if how == "refused":
        dist.isend(values, 1 - rank)
    work = dist.all_reduce(values, async_op=True)
    if how == "written to":
        values[1] = 0.0
    if how == "freed":
        del values
    if how != "not waited for":
        work.wait()


def misuses(rank: int, world_size: int) -> dict[str, str]:
    """In a worker: the error of each misuse."""
    errors = {}
    for how in MISUSES:
        with pytest.raises((DelayedError, NotImplementedError)) as raised, delayed_collectives():
            misuse(rank, how)
        errors[how] = str(raised.value)
    return errors


def test_misuse_is_an_error(ranks: Pool) -> None:
    assert ranks(2, misuses)[0] == MISUSES


@contextmanager
def buggy(bug: str) -> Iterator[None]:
    """Bugs that gloo hides: when they strike, the collective is through."""
    from megatron_muon.core.exchange import ToOwners
    from megatron_muon.core.replicas import ToReplicas

    all_to_all = dist.all_to_all_single
    buffer = torch.empty(2**16)

    def through(work: Any) -> Any:
        while hasattr(work, "is_completed") and not work.is_completed():
            time.sleep(1e-4)
        return work

    def reading_early(send_updates: Any) -> Any:
        def send_and_read(transport: Any, message: Any, probe: Any) -> Any:
            work = send_updates(transport, message, probe)
            for one in getattr(work, "_works", [work]):
                through(one)
            returned = message.received
            return mock.Mock(wait=partial(too_late, work, returned, returned.clone()))

        return send_and_read

    def too_late(work: Any, returned: torch.Tensor, early: torch.Tensor) -> None:
        work.wait()
        returned.copy_(early)

    def send(receive: Any, sent: torch.Tensor, *counts: Any, **how: Any) -> Any:
        reused = buffer[: sent.numel()].copy_(sent)
        return through(all_to_all(receive, reused, *counts, **how))

    replaced: list[tuple[Any, str, Any]] = [(dist, "all_to_all_single", send)]
    if bug == "reads early":
        name = "send_updates"
        replaced = [
            (kind, name, reading_early(getattr(kind, name))) for kind in (ToOwners, ToReplicas)
        ]
    with ExitStack() as stack:
        for place, name, instead in replaced:
            stack.enter_context(mock.patch.object(place, name, instead))
        yield


def run_buggy(rank: int, world_size: int, *, bug: str, case: Case) -> Any:
    """In a worker: as for the table of parity, with a bug in the exchange."""
    with buggy(bug):
        return run(rank, world_size, cases={"": case})


@pytest.mark.parametrize(
    ("exchange", "bug", "error"),
    [
        ("owner", "reads early", "weight after 1 steps"),
        ("owner", "reuses what it sends", "weight after 1 steps"),
        ("shared", "reads early", r"rank \d has other values|weight after 1 steps"),
    ],
)
def test_a_bug_that_gloo_hides_is_found(ranks: Pool, exchange: str, bug: str, error: str) -> None:
    """Negative control: it passes with plain gloo, and not with delays."""
    case = CASES[exchange]
    check(ranks(2, run_buggy, bug=bug, case=case)[0][""], case)
    with ranks.delayed(), pytest.raises(AssertionError, match=error):
        check(ranks(2, run_buggy, bug=bug, case=case)[0][""], case)
