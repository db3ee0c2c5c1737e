"""Rehearses many ranks, in processes that share what was read and planned."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence

from megatron_muon.tools.rehearse.rank import Rehearsal, rehearse_rank
from megatron_muon.tools.rehearse.trace import RankTrace

BATCH = 8
"""Ranks that a process is given at a time."""

_shared: list[Rehearsal] = []


def rehearse(
    rehearsal: Rehearsal,
    ranks: Sequence[int],
    *,
    processes: int | None = None,
    done: Callable[[int], None] | None = None,
) -> dict[int, RankTrace]:
    """The traces of some ranks.

    Args:
        rehearsal: what they have in common.
        ranks: in the world.
        processes: how many work at it; by default one for each core that this process may use.
        done: is told how many ranks are done.
    """
    first, *others = ranks
    traces = {first: rehearse_rank(first, rehearsal)}  # makes the plans, for which the others would wait
    processes = min(processes or len(os.sched_getaffinity(0)), -(-len(others) // BATCH))
    for trace in map_forked(rehearsal, others, processes) if processes > 1 else _one_by_one(rehearsal, others):
        traces[trace.rank] = trace
        if done is not None:
            done(len(traces))
    return {rank: traces[rank] for rank in sorted(traces)}


def _one_by_one(rehearsal: Rehearsal, ranks: Sequence[int]) -> Iterator[RankTrace]:
    for rank in ranks:
        yield rehearse_rank(rank, rehearsal)


def map_forked(rehearsal: Rehearsal, ranks: Sequence[int], processes: int) -> Iterator[RankTrace]:
    """The traces of ranks, as they come, from forked processes: they need not import, read or plan anything again."""
    gc.collect()
    gc.freeze()  # what is shared stays shared: the collector would write to it
    _shared.append(rehearsal)
    try:
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            yield from pool.imap_unordered(_of_shared, ranks, chunksize=BATCH)
    finally:
        _shared.pop()
        gc.unfreeze()


def _of_shared(rank: int) -> RankTrace:
    return rehearse_rank(rank, _shared[-1])
