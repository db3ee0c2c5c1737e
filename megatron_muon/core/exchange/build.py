"""Builds the exchange of a layout: its batches, its plan, and the check that all ranks have the same plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_muon.core.adaptive import SecondMoment
from megatron_muon.core.exchange.owner import OwnerExchange
from megatron_muon.core.exchange.repeated import AllGatherExchange, LocalExchange
from megatron_muon.core.exchange.shared import SharedExchange
from megatron_muon.core.exchange.steps import Batch, Exchange
from megatron_muon.core.layout import Layout
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.plan import Plan, make_plan
from megatron_muon.core.ranks import of_all_ranks

OWNER, ALL_GATHER, SHARED, LOCAL = "owner", "allgather", "shared", "local"


def make_exchange(
    scheme: str,
    layout: Layout,
    group: dist.ProcessGroup,
    orthogonalizer: Orthogonalizer,
    *,
    moment: SecondMoment | None,
    buffer_mb: float,
    wire: str,
    device: torch.device,
    plan: Plan | None = None,
) -> Exchange:
    """The exchange of `layout` by one of the schemes OWNER, ALL_GATHER, SHARED and LOCAL. Collective, but for LOCAL.

    Args:
        scheme: the last two are for matrices that every rank holds whole.
        layout: who holds which rectangle; the same on every rank.
        group: the process group of the layout.
        orthogonalizer: of the matrices.
        moment: of an adaptive Muon.
        buffer_mb: MiB that the waves under way may fill on a rank.
        wire: "fp32", "bf16", or "auto" for the dtype in which the iteration starts.
        device: where the rows lie.
        plan: of OWNER and SHARED, where it has been made before; None makes it.

    Raises:
        RuntimeError: ranks have made different plans.
    """

    def batches(indices: Sequence[int]) -> Batch:
        normalize = None if moment is None else moment.normalizer(indices)
        return orthogonalizer.batch([layout.matrices[i] for i in indices], normalize)

    buffer_bytes = int(buffer_mb * 2**20)
    if scheme == LOCAL:
        return LocalExchange(layout, group, batches, buffer_bytes=buffer_bytes, device=device)
    if scheme == ALL_GATHER:
        return AllGatherExchange(layout, group, batches, device=device)
    wire_dtype = {"auto": orthogonalizer.dtype, "bf16": torch.bfloat16, "fp32": torch.float32}[wire]
    plan = _plan(layout, group, orthogonalizer, buffer_bytes, wire_dtype, plan)
    kind = {OWNER: OwnerExchange, SHARED: SharedExchange}[scheme]
    return kind(plan, group, batches, wire_dtype=wire_dtype, device=device)


def _plan(
    layout: Layout,
    group: dist.ProcessGroup,
    orthogonalizer: Orthogonalizer,
    buffer_bytes: int,
    wire_dtype: torch.dtype,
    made: Plan | None,
) -> Plan:
    """Owners and waves, the same on every rank; the symmetric kernel is tuned for this rank's blocks."""
    matrices, rank = layout.matrices, group.rank()
    costs = [orthogonalizer.flops(matrix) for matrix in matrices]
    plan = made or make_plan(layout, costs, buffer_bytes=buffer_bytes, element_bytes=wire_dtype.itemsize)
    if plan.oversized and rank == 0:
        largest = max((matrices[index] for index in plan.oversized), key=lambda matrix: matrix.numel)
        most = plan.buffer_bytes(wire_dtype.itemsize)
        print(
            f"megatron-muon: {len(plan.oversized)} of {len(matrices)} matrices do not fit an exchange buffer of "
            f"{buffer_bytes / 2**20:.4g} MiB; waves are as large as {largest.name} needs, {most / 2**20:,.0f} MiB on a "
            "rank",
            flush=True,
        )
    for other, digest in enumerate(found := of_all_ranks(plan.digest(), group)):
        if digest != found[0]:
            raise RuntimeError(
                f"rank 0 of the group has plan {found[0]} and rank {other} has {digest}: they would wait for each "
                "other; start all ranks with the same settings, software and devices"
            )
    owned = (matrix for matrix, owner in zip(matrices, plan.owners, strict=True) if owner == rank)
    blocks = (block for matrix in owned for block in matrix.blocks)
    if (kinds := orthogonalizer.warm_up(blocks)) and rank == 0:
        print(f"megatron-muon: the symmetric kernel is tuned for {kinds} sizes of blocks", flush=True)
    return plan
