"""A step played over a machine's rates, against times worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_muon.core.traffic import MESSAGE_US
from megatron_muon.tools.plan.estimate import HARDWARE
from megatron_muon.tools.rehearse import playback
from megatron_muon.tools.rehearse.trace import Call, Event, Members, Products, RankTrace, Split, StepTrace, Wait

ROUND = dataclasses.replace(
    HARDWARE["h100-sxm"],
    bf16_tflops=1.0,
    fp32_tflops=0.5,
    node_ranks=2,
    node_gb_per_s=10.0,
    network_gb_per_s=1.0,
    host_us=(0.0, 0.0, 0.0, 0.0),
)
"""A second for 1e12 bf16 operations or 1e9 bytes between nodes; a tenth within a node of two ranks; none for a host."""
GB = 10**9


def trace(rank: int, group: tuple[int, ...], *events: Event) -> RankTrace:
    return RankTrace(rank, [Members(group, 0)], steps=[StepTrace(list(events))])


def products(seconds: float, *, half: bool = True) -> Products:
    return Products("orthogonalize", round(seconds * 1e12), half)


def split(**gigabytes: float) -> Split:
    peers = [int(name[1:]) for name in gigabytes]
    return Split(np.array(peers, dtype=np.int64), np.array([round(each * GB) for each in gigabytes.values()]))


def all_to_all(sent: Split, received: Split) -> Call:
    return Call(0, "all_to_all", "bfloat16", 0, -1, "gather", sent, received)


def test_a_collective_starts_with_its_last_member_and_delays_those_who_wait() -> None:
    reduce = Call(0, "all_reduce", "float32", 5 * GB, -1, "gather")
    played = playback.play(
        {
            0: trace(0, (0, 1), products(1), reduce, products(2), Wait(0, "gather_wait")),
            1: trace(1, (0, 1), products(4), reduce, Wait(0, "gather_wait"), products(1)),
        },
        0,
        ROUND,
    )
    # 2 * (1 / 2) * 5 GB at 10 GB/s: half a second, from second 4 on.
    assert (played[0].end_s, played[1].end_s) == pytest.approx((4.5, 5.5))
    assert dict(played[0].waits) == {
        ("gather_wait", "rank 1"): pytest.approx(1.0),
        ("gather_wait", "the transfer"): pytest.approx(0.5),
    }
    assert dict(played[1].waits) == {("gather_wait", "the transfer"): pytest.approx(0.5)}
    assert (played[0].products_s, played[1].products_s) == pytest.approx((3.0, 5.0))


def test_links_within_and_between_nodes_work_at_the_same_time() -> None:
    exchanged = {
        0: all_to_all(split(r1=20, r2=3), split(r1=1)),
        1: all_to_all(split(r0=1), split(r0=20)),
        2: all_to_all(split(), split(r0=3)),
        3: all_to_all(split(), split()),
    }
    traces = {rank: trace(rank, (0, 1, 2, 3), call, Wait(0, "gather_wait")) for rank, call in exchanged.items()}
    assert playback.play(traces, 0, ROUND)[3].end_s == pytest.approx(3.0 + 2 * MESSAGE_US * 1e-6)
    near = {**exchanged, 0: all_to_all(split(r1=50, r2=3), split(r1=1))}
    traces = {rank: trace(rank, (0, 1, 2, 3), call, Wait(0, "gather_wait")) for rank, call in near.items()}
    assert playback.play(traces, 0, ROUND)[3].end_s == pytest.approx(5.0 + 2 * MESSAGE_US * 1e-6)


def test_collectives_of_a_group_come_one_after_the_other_beside_products() -> None:
    broadcast = Call(0, "broadcast", "float32", 10 * GB, 0, "send_back")
    events = (broadcast, broadcast, products(0.5, half=False), Wait(1, "scatter_wait"))
    played = playback.play({rank: trace(rank, (0, 1), *events) for rank in (0, 1)}, 0, ROUND)
    assert played[0].products_s == pytest.approx(1.0)
    assert played[0].end_s == pytest.approx(2.0)
    assert [span.note for span in played[1].spans if span.stream] == ["rank 0", "the collective before it"]


def test_a_device_waits_for_its_host() -> None:
    """Launches take a second each: products begin behind the first and end with the last, or later."""
    slow = dataclasses.replace(ROUND, host_us=(1e6, 1e5, 0.0, 2e6))
    reduce = Call(0, "all_reduce", "float32", 5 * GB, -1, "gather")
    events = (
        Products("momentum", 0, half=False, kernels=2, views=10),
        reduce,
        Products("orthogonalize", 10**13, half=True, kernels=3),
        Products("apply", 0, half=False, kernels=1),
        Wait(0, "gather_wait"),
    )
    played = playback.play({rank: trace(rank, (0, 1), *events) for rank in (0, 1)}, 0, slow)[0]
    # Three seconds of momentum, two for the call; ten of products behind the sixth; the rest is enqueued meanwhile.
    assert played.host_s == pytest.approx(3 + 2 + 3 + 1)
    assert played.end_s == pytest.approx(6 + 10)
    assert dict(played.waits) == {
        ("momentum", "the host"): pytest.approx(3.0),
        ("orthogonalize", "the host"): pytest.approx(3.0),
    }
    limited = [Products("orthogonalize", 10**12, half=True, kernels=5)]
    played = playback.play({0: trace(0, (0,), *limited)}, 0, slow)[0]
    assert (played.end_s, played.waits["orthogonalize", "the host"]) == pytest.approx((5.0, 4.0))


def test_a_member_that_issues_nothing_is_named() -> None:
    reduce = Call(0, "all_reduce", "float32", GB, -1, "gather")
    with pytest.raises(playback.StuckError, match=r"rank 0 waits .* rank 1 does not start: its step is over"):
        playback.play({0: trace(0, (0, 1), reduce, Wait(0, "x")), 1: trace(1, (0, 1))}, 0, ROUND)
