"""What a plan costs on a named machine: bytes, memory and the time of a step, by arithmetic.

The step is played through wave by wave in the order of `exchange.owner`: one collective at a time, each rank's products
beside them. Left out: latency of collectives, kernel launches, elementwise work, other traffic. An estimate ranks
configurations; `megatron-muon bench` measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_muon.core.cost import DENSE, HALVES, KERNEL, Products
from megatron_muon.core.layout import Layout
from megatron_muon.core.plan import MIN_WAVES, UPDATE_BYTES, Plan, all_gather_bytes

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

PRODUCT_SHARE = 0.65
"""Part of the data sheet's matrix rate that large bf16 products reach; an assumption on the careful side."""

LINK_SHARE = 0.75
"""Part of the data sheet's link rate that an all-to-all reaches; an assumption on the careful side."""


@dataclass(frozen=True)
class Hardware:
    """A machine. Rates are what a rank can be expected to reach.

    Attributes:
        bf16_tflops: matrix products in bf16, 10^12 operations per second.
        fp32_tflops: matrix products in fp32.
        node_ranks: ranks that the fast link joins.
        node_gb_per_s: 10^9 bytes per second that a rank receives, and sends at the same time, within a node.
        network_gb_per_s: the same between nodes.
        source: where the figures come from.
        processor: Newton-Schulz runs on a CPU.
        symmetric_kernel: a GPU that runs the symmetric kernel, as `core.newton_schulz.products_on` finds it.
    """

    name: str
    bf16_tflops: float
    fp32_tflops: float
    node_ranks: int
    node_gb_per_s: float
    network_gb_per_s: float
    source: str
    processor: bool = False
    symmetric_kernel: bool = True

    def products(self, *, half: bool) -> Products:
        """How it forms symmetric products, in bf16 where `half`, else in fp32."""
        if self.processor:
            return HALVES
        return KERNEL if self.symmetric_kernel and half else DENSE

    def expected(self) -> Hardware:
        """The rates that can be expected where these are a data sheet's."""
        return replace(
            self,
            bf16_tflops=self.bf16_tflops * PRODUCT_SHARE,
            fp32_tflops=self.fp32_tflops * PRODUCT_SHARE,
            node_gb_per_s=self.node_gb_per_s * LINK_SHARE,
            network_gb_per_s=self.network_gb_per_s * LINK_SHARE,
            source=f"{self.source}; {PRODUCT_SHARE:.0%} of its matrix rate, {LINK_SHARE:.0%} of its links",
        )


_DATA_SHEETS = (
    Hardware(
        "h100-sxm", 989, 67, 8, 450, 50,
        "NVIDIA H100 data sheet (SXM, dense), NVLink 900 GB/s both ways, one 400 Gb/s adapter a GPU (DGX H100)",
    ),
    Hardware(
        "h200-sxm", 989, 67, 8, 450, 50,
        "NVIDIA H200 data sheet (SXM, dense), NVLink 900 GB/s both ways, one 400 Gb/s adapter a GPU (DGX H200)",
    ),
    Hardware(
        "a100-sxm", 312, 19.5, 8, 300, 25,
        "NVIDIA A100 data sheet (SXM, dense), NVLink 600 GB/s both ways, one 200 Gb/s adapter a GPU (DGX A100)",
        symmetric_kernel=False,
    ),
    Hardware(
        "gb300", 2500, 80, 72, 900, 100,
        "NVIDIA GB300 NVL72 data sheet (dense, a 72nd of the rack), NVLink 1.8 TB/s both ways, 800 Gb/s a GPU",
    ),
)  # fmt: skip
_CPU = Hardware(
    "cpu-2core", 0.2, 0.1, 64, 1.0, 1.0,
    "round figures for one core a rank with gloo on loopback; megatron-muon bench measures yours",
    processor=True,
)  # fmt: skip
HARDWARE = {machine.name: machine for machine in (*(sheet.expected() for sheet in _DATA_SHEETS), _CPU)}


@dataclass(frozen=True)
class Group:
    """A process group whose matrices are planned together: "dense", "experts", or a captured "layout".

    Attributes:
        stride: groups of this kind that lie side by side in the world.
        together: consecutive global ranks in one group.
    """

    name: str
    layout: Layout
    stride: int = 1
    together: int = 1


@dataclass(frozen=True)
class GroupEstimate:
    """Figures of one process group's plan.

    Attributes:
        ns_flops: operations of each rank of the group.
        received_bytes: bytes that each rank receives in a step.
        all_gather_bytes: bytes that each rank would receive in the all-gather scheme.
        extra_bytes: the most bytes that each rank holds for waves under way and for a filler between them.
        ns_ms: time of the products on the rank with most of them.
        exchange_ms: time of all collectives, one after the other.
        step_ms: time of the step with both overlapped.
    """

    ns_flops: Floats
    received_bytes: Ints
    all_gather_bytes: Ints
    extra_bytes: Ints
    ns_ms: float
    exchange_ms: float
    step_ms: float


def estimate(
    plan: Plan,
    flops: Sequence[float],
    hardware: Hardware,
    *,
    element_bytes: int,
    ns_dtype: str = "bf16",
    rank_stride: int = 1,
) -> GroupEstimate:
    """The figures of a plan.

    Args:
        plan: owners and waves of a group.
        flops: operations of each matrix.
        hardware: what it runs on.
        element_bytes: of an element on the wire.
        ns_dtype: "bf16" or "fp32", what the products run in.
        rank_stride: distance in the world between neighbours of the group, which decides who shares a node.
    """
    world_size, waves = plan.layout.world_size, plan.waves
    nodes = np.arange(world_size) * rank_stride // hardware.node_ranks
    rate = (hardware.bf16_tflops if ns_dtype == "bf16" else hardware.fp32_tflops) * 1e12
    received = np.zeros(world_size, dtype=np.int64)
    footprints = np.zeros((min(len(waves), MIN_WAVES), world_size), dtype=np.int64)  # the last waves, in turn
    extra = np.zeros(world_size, dtype=np.int64)
    transfer_s = []
    for k, wave in enumerate(waves):
        owners, holders, size = _transfers(plan, wave)
        size = size * element_bytes
        arriving, leaving = _sums(owners, size, world_size), _sums(holders, size, world_size)
        received += arriving + leaving
        far = nodes[owners] != nodes[holders]
        transfer_s.append(0.0)
        for part, gb_per_s in ((~far, hardware.node_gb_per_s), (far, hardware.network_gb_per_s)):
            busiest = max(_sums(ends[part], size[part], world_size).max() for ends in (owners, holders))
            transfer_s[-1] = max(transfer_s[-1], float(busiest) / (gb_per_s * 1e9))
        # As plan._footprint counts: rows out and back; at the owner also the whole matrix and its update.
        owned = np.array([plan.owners[index] for index in wave], dtype=np.int64)
        whole = np.array([plan.layout.matrices[index].numel for index in wave], dtype=np.int64)
        at_owner = _sums(owned, 2 * whole * (element_bytes + UPDATE_BYTES), world_size)
        footprints[k % len(footprints)] = 2 * leaving + at_owner
        extra = np.maximum(extra, footprints.sum(axis=0))
    loads = _loads(plan, range(len(flops)), flops)
    return GroupEstimate(
        ns_flops=loads,
        received_bytes=received,
        all_gather_bytes=np.asarray(all_gather_bytes(plan.layout, element_bytes), dtype=np.int64),
        extra_bytes=extra + _filler_bytes(plan),
        ns_ms=float(loads.max(initial=0.0)) / rate * 1e3,
        exchange_ms=2 * sum(transfer_s) * 1e3,
        step_ms=_play(plan, flops, transfer_s, rate) * 1e3,
    )


def _play(plan: Plan, flops: Sequence[float], transfer_s: Sequence[float], rate: float) -> float:
    """Seconds of a step: wave k+1 arrives and wave k-1 leaves beside the products of wave k and of a filler."""
    local = [index for indices in plan.whole for index in indices]
    filler = _loads(plan, local, flops) / rate
    if not plan.waves:
        return float(filler.max(initial=0.0))
    filler /= len(plan.waves)
    clock = np.zeros_like(filler)  # when each rank's products are done
    link = arrived = transfer_s[0]  # when the link is free, and when the current wave has arrived
    for k, wave in enumerate(plan.waves):
        here = arrived
        if k + 1 < len(plan.waves):
            link = arrived = link + transfer_s[k + 1]
        work = _loads(plan, wave, flops) / rate
        busy = work > 0
        clock += filler
        clock[busy] = np.maximum(clock[busy], here) + work[busy]
        link = max(link, float(clock[busy].max(initial=here))) + transfer_s[k]
    return max(link, float(clock.max(initial=0.0)))


def _filler_bytes(plan: Plan) -> Ints:
    """Bytes of the largest part of its whole matrices that each rank orthogonalises at a time: matrix and update."""
    largest = [
        max((sum(plan.layout.matrices[index].numel for index in part) for part in plan.fillers(rank)), default=0)
        for rank in range(plan.layout.world_size)
    ]
    return np.array(largest, dtype=np.int64) * 2 * UPDATE_BYTES


def _loads(plan: Plan, indices: Sequence[int] | range, flops: Sequence[float]) -> Floats:
    owners = np.array([plan.owners[index] for index in indices], dtype=np.int64)
    work = np.array([flops[index] for index in indices], dtype=np.float64)
    return np.bincount(owners, weights=work, minlength=plan.layout.world_size)


def _transfers(plan: Plan, wave: Sequence[int]) -> Ints:
    """Columns of owner, holder and elements of all that travels; rows travel to the owner from one replica only."""
    table = [
        (plan.owners[index], holder, shard.numel)
        for index in wave
        for shard in plan.layout.matrices[index].shards
        for holder in shard.holders
        if holder != plan.owners[index]
    ]
    return np.array(table, dtype=np.int64).reshape(-1, 3).T


def _sums(ranks: Ints, sizes: Ints, world_size: int) -> Ints:
    # In float64 sums of bytes are exact up to 2^53.
    return np.bincount(ranks, weights=sizes, minlength=world_size).astype(np.int64)
