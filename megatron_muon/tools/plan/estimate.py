"""Costs of a plan on a named machine: bytes, memory and the time of Muon's step, by arithmetic.

The step is simulated wave by wave in the order of `core.plan`: one collective at a time, overlapped
with each rank's products. Elementwise work, launches and other traffic are left out. An estimate
ranks configurations; `python -m benchmarks.step` measures. Memory adds up the buffers of all ranks'
waves that are in use at the same time; a test compares it with the buffers that a step allocates.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import yaml

from megatron_muon.core.assignment import TeamRules, Unmet, refuse_unmet
from megatron_muon.core.cost import AUTO, DENSE, HALVES, KERNEL, Iteration
from megatron_muon.core.layout import Ints, Layout, Matrix
from megatron_muon.core.memory import CHUNK, ROW_BYTES, TOGETHER, Memory
from megatron_muon.core.plan import LIFETIMES, MOMENTS, Plan, make_plan, moments_of, schedule
from megatron_muon.core.slices import BlockSlice
from megatron_muon.core.traffic import all_to_all_s
from megatron_muon.megatron.run_device import BF16_TFLOPS
from megatron_muon.settings import flag_of, word_as_flags

Floats = np.ndarray[Any, np.dtype[np.float64]]

PRODUCT_SHARE, LINK_SHARE, MEMORY_SHARE = 0.65, 0.75, 0.8
"""Assumed shares of data sheet rates: large bf16 products, all-to-all, elementwise passes."""


@dataclass(frozen=True)
class Hardware:
    """A machine. Rates are those that a rank can reach; of links, in each direction at once."""

    name: str
    bf16_tflops: float
    fp32_tflops: float
    node_ranks: int  # of a node, as the run's LOCAL_WORLD_SIZE
    node_gb_per_s: float
    network_gb_per_s: float  # between nodes
    memory_gb_per_s: float  # of the device's own memory
    processor: bool = False
    symmetric_kernel: bool = False  # as `core.newton_schulz.products_on` finds it
    rack_ranks: int = 0  # joined by the fast link, where these are more than a node's

    @property
    def joined_ranks(self) -> int:
        """Ranks that the fast link joins."""
        return max(self.node_ranks, self.rack_ranks)

    def tflops(self, *, half: bool) -> float:
        """The rate of products in bf16 where `half`, else in fp32."""
        return self.bf16_tflops if half else self.fp32_tflops

    def iterate(self, iteration: Iteration) -> Iteration:
        """The iteration with symmetric products as the machine forms them."""
        of_gpu = KERNEL if self.symmetric_kernel and iteration.half else DENSE
        return replace(iteration, products=HALVES if self.processor else of_gpu)


def _gpu(
    chip: str, fp32: float, link: float, network: float, memory: float, rack: int = 0
) -> Hardware:
    """A GPU by NVIDIA's data sheet: dense TFLOP/s, GB/s of links in one direction and of memory."""
    return Hardware(
        name=chip.lower() if rack else f"{chip.lower()}-sxm",
        bf16_tflops=BF16_TFLOPS[chip] * PRODUCT_SHARE,
        fp32_tflops=fp32 * PRODUCT_SHARE,
        node_ranks=rack or 8,
        node_gb_per_s=link * LINK_SHARE,
        network_gb_per_s=network * LINK_SHARE,
        memory_gb_per_s=memory * MEMORY_SHARE,
        symmetric_kernel=chip != "A100",
        rack_ranks=rack,
    )


HARDWARE = {
    machine.name: machine
    for machine in (
        _gpu("H100", 67, 450, 50, 3350),
        _gpu("H200", 67, 450, 50, 4800),
        _gpu("A100", 19.5, 300, 25, 2039),
        _gpu("GB300", 80, 900, 100, 8000, 72),
        # round figures: a core a rank, gloo
        Hardware("cpu-2core", 0.2, 0.1, 64, 1.0, 1.0, 10.0, processor=True),
    )
}


def measured(figures: Mapping[str, Any]) -> Hardware:
    """The machine that `megatron-muon doctor --gpu` measured; missing rates by the data sheet."""
    name = figures.get("GPU", "cpu")
    fitting = [key for key in HARDWARE if key.partition("-")[0] in name.lower()]
    known = HARDWARE[fitting[0] if fitting else "h100-sxm"]
    nodes = figures.get("nodes", 1)
    link = figures.get("all_to_all_gb_per_s")
    rates = {rate: figures[rate] for rate in ("bf16_tflops", "fp32_tflops", "memory_gb_per_s")}
    if link is not None:
        rates["network_gb_per_s" if nodes > 1 else "node_gb_per_s"] = link
    node_ranks = max(1, figures["ranks"] // nodes) if figures["ranks"] > 1 else known.node_ranks
    return replace(known, name=f"measured {name}", node_ranks=node_ranks, **rates)


def profile(figures: Mapping[str, Any]) -> str:
    """The content of a file for `--hardware`, from measured figures."""
    text: str = yaml.safe_dump(asdict(measured(figures)), sort_keys=False)
    return text


@dataclass(frozen=True)
class PlanSettings:
    """Settings that decide costs and bytes."""

    buffer_mb: float | None  # --muon-exchange-buffer-mb
    memory: Memory  # of matrices: by exchanged dtype, iteration, and the rule that applies updates
    team_size: str = AUTO
    momentum_bytes: float = 4.0  # of an element's state on the device, second moment included
    adam_bytes: float = 8.0  # of an element of the scalar optimizer, on the device


@dataclass(frozen=True)
class Group:
    """A process group whose matrices are planned together: "dense" or "experts"."""

    name: str
    layout: Layout
    stride: int = 1  # groups of this kind that interleave
    together: int = 1  # consecutive global ranks in one group

    def members(self, rank: int) -> list[int]:
        """The global ranks of the group of `rank`, in order; Megatron's order is tp-cp-ep-dp."""
        size = self.layout.world_size * self.stride  # of ranks whose groups interleave
        ranks = np.arange(size).reshape(-1, self.stride, self.together) + rank // size * size
        found: list[int] = ranks[:, rank // self.together % self.stride].ravel().tolist()
        return found


@dataclass(frozen=True)
class Times:
    """Milliseconds of a group's step."""

    ns_ms: float  # on the rank with most operations
    exchange_ms: float  # all collectives, one after the other
    step_ms: float  # with overlap
    elementwise_ms: float  # passes over momentum, rows and weights


@dataclass(frozen=True)
class GroupPlan:
    """A group's plan and its figures."""

    name: str  # of the group
    plan: Plan
    extra: Ints  # bytes of each rank's step beyond weights, gradients and state, at most
    held: Ints  # elements in each rank's shards
    times: Times
    unmet: Unmet | None  # a setting that its ranks do not support
    digest: str
    received: tuple[int, ...]  # bytes that each rank receives in a step


@word_as_flags()
def plan_groups(
    groups: Sequence[Group], settings: PlanSettings, hardware: Hardware
) -> tuple[list[GroupPlan], list[str]]:
    """Plan rank 0's group of each kind; the second result names settings that some do not support.

    Raises:
        UserError: no group supports a setting. A group of one rank does not count.
    """
    plans = [plan_group(group, settings, hardware) for group in groups]
    unmet = {}
    for item in plans:
        if item.plan.layout.world_size > 1:
            unmet[item.name.removesuffix("s")] = item.unmet
    return plans, [note.worded(flag_of) for note in refuse_unmet(unmet)]


def node_pattern(members: Sequence[int], hardware: Hardware) -> tuple[int, ...]:
    """The node of each of these global ranks, numbered from 0."""
    _, nodes = np.unique(np.asarray(members) // hardware.node_ranks, return_inverse=True)
    return tuple(nodes.tolist())


def plan_group(
    group: Group, settings: PlanSettings, hardware: Hardware, rank: int = 0
) -> GroupPlan:
    """Make the plan of a rank's group as training would, and estimate it."""
    layout, iteration = group.layout, settings.memory.iteration
    members = group.members(rank)
    costs = []
    for matrix in layout.matrices:
        costs.append(sum(iteration.flops(*block, steps=matrix.steps) for block in matrix.blocks))
    size = 0 if settings.team_size == AUTO else int(settings.team_size)
    rules = TeamRules(functools.cache(iteration.cost), node_pattern(members, hardware), size)
    limit = None if settings.buffer_mb is None else int(settings.buffer_mb * 2**20)
    plan = make_plan(
        layout, costs, buffer_bytes=limit, memory=settings.memory, rules=rules.possible()
    )
    rate = hardware.tflops(half=iteration.half) * 1e12

    def products_s(indices: Sequence[int]) -> Floats:
        """Seconds of each rank's products for the matrices with these indices."""
        loads = np.zeros(layout.world_size)
        for index in indices:
            team = plan.teams[index]
            for owner, load in zip(team.ranks, team.loads, strict=True):
                loads[owner] += load
        return loads / rate

    seconds_of = functools.partial(
        all_to_all_s,
        nodes=np.asarray(members) // hardware.joined_ranks,
        element_bytes=plan.memory.element_bytes,
        near_gb_per_s=hardware.node_gb_per_s,
        far_gb_per_s=hardware.network_gb_per_s,
    )
    exchanges = [(seconds_of(rows), seconds_of(updates)) for rows, updates in plan.all_to_alls()]
    matrices = layout.matrices
    held = _held(plan, range(len(matrices)))[0]
    # elements of the busiest owner: one owns each, however many hold it
    owned = plan.imbalance * sum(matrix.numel for matrix in matrices) / layout.world_size
    times = Times(
        ns_ms=max(plan.loads) / rate * 1e3,
        exchange_ms=sum(map(sum, exchanges)) * 1e3,
        step_ms=_simulate(plan, products_s, exchanges) * 1e3,
        elementwise_ms=_elementwise_ms(int(held.max()), owned, settings, hardware),
    )
    return GroupPlan(
        name=group.name,
        plan=plan,
        extra=extra_bytes(plan),
        held=held,
        times=times,
        unmet=rules.unmet(),
        digest=plan.digest(),
        received=plan.exchanged_bytes(),
    )


def _elementwise_ms(held: float, owned: float, settings: PlanSettings, hardware: Hardware) -> float:
    """Milliseconds of elementwise passes, by the elements that a rank holds and owns.

    Momentum and look-ahead each read two fp32 tensors and write one; decay and update each read and
    write the weight, and the update is read. An owned element is assembled, measured, scaled to
    about 1 in the iteration's dtype, checked for finiteness, and copied to its stack and on to a
    buffer: `core.exchange`, `core.orthogonalize`.
    """
    memory = settings.memory
    holder_bytes = 24 + 2 * memory.element_bytes + 20
    owner_bytes = 9 * memory.element_bytes + 3 * (2 if memory.iteration.half else 4)
    moved = held * holder_bytes + owned * owner_bytes
    return moved / hardware.memory_gb_per_s / 1e6


def _simulate(
    plan: Plan,
    products_s: Callable[[Sequence[int]], Floats],
    exchanges_s: Sequence[tuple[float, float]],
) -> float:
    """Seconds of a step.

    The gather of wave k+1 and the scatter of wave k-1 overlap with the products of wave k and of
    local matrices. Updates of wave k are sent after those of wave k-1 have arrived.
    """
    filler = products_s([index for indices in plan.whole for index in indices])
    if not plan.waves:
        return float(filler.max())
    filler /= len(plan.waves)
    clock = np.zeros_like(filler)  # when each rank's products are done
    link = exchanges_s[0][0]  # when the link is free
    next_gathered = link  # when the next wave's rows have arrived
    scattered = 0.0  # when the updates of the wave before have arrived
    for k, wave in enumerate(plan.waves):
        gathered = next_gathered
        if k + 1 < len(plan.waves):
            link += exchanges_s[k + 1][0]
            next_gathered = link
        work = products_s(wave)
        busy = work > 0
        clock += filler
        done = np.maximum(clock[busy], gathered) + work[busy]
        clock[busy] = np.maximum(done, scattered)
        last = float(clock[busy].max(initial=gathered))
        link = max(link, last) + exchanges_s[k][1]
        scattered = link
    return max(scattered, float(clock.max()))


def extra_bytes(plan: Plan) -> Ints:
    """Bytes of each rank's step beyond weights, gradients and state at their peak."""
    ranks = plan.layout.world_size
    local = itertools.zip_longest(*map(plan.fillers, range(ranks)), fillvalue=())
    waves = [_buffers(plan, indices) for indices in plan.waves]
    waves += [_buffers(plan, itertools.chain.from_iterable(indices)) for indices in local]
    order = schedule(len(plan.waves), len(waves) - len(plan.waves))
    in_use = np.zeros((MOMENTS * len(order) + 1, ranks), dtype=np.int64)
    temporary = np.zeros(ranks, dtype=np.int64)
    for moments, (buffers, made) in zip(moments_of(order), waves, strict=True):
        for name, size in buffers.items():
            (first, after), (last, until) = LIFETIMES[name]
            in_use[moments[first] + after : moments[last] + until + 1] += size
        temporary = np.maximum(temporary, made)
    peak: Ints = in_use.max(axis=0) + temporary
    return peak


def _buffers(plan: Plan, indices: Iterable[int]) -> tuple[dict[str, Ints], Ints]:
    """Bytes on each rank for the matrices of a wave: of buffers, by name, and of temporaries."""
    indices, ranks = tuple(indices), plan.layout.world_size
    memory, moment = plan.memory, plan.memory.moment
    held, largest = _held(plan, indices)
    stacks, work, made = np.zeros((3, ranks), dtype=np.int64)
    for rank, (matrices, slices) in _owned(plan, indices).items():
        stacks[rank], work[rank], made[rank] = memory.of_batch(matrices, slices)
    gathered = plan.traffic.gathered(indices)
    rows = gathered.between_ranks()
    updates = plan.traffic.returned(indices).between_ranks()
    sent = rows.sent(ranks)
    chunk = np.maximum(np.minimum(held, CHUNK["cuda"]), largest)
    buffers = {
        "prepared": ROW_BYTES * chunk,
        "updates": ROW_BYTES * chunk,
        "stacks": stacks,
        "work": work,
        "send": memory.element_bytes * sent,
        "own": memory.element_bytes * (gathered.sent(ranks) - sent),
        "receive": memory.element_bytes * rows.received(ranks),
        "back": memory.element_bytes * updates.sent(ranks),
        "returned": memory.element_bytes * held,
    }
    applied = largest
    if moment.together:
        applied = np.maximum(largest, np.minimum(chunk, TOGETHER["cuda"]))
    return buffers, np.maximum(made, moment.held * applied)


def _held(plan: Plan, indices: Iterable[int]) -> tuple[Ints, Ints]:
    """Elements of these matrices in each rank's shards: all, and those of the largest shard."""
    held, largest = np.zeros((2, plan.layout.world_size), dtype=np.int64)
    for index in indices:
        holders = plan.layout.holders[index]
        elements = holders.elements[holders.numbers]
        held[holders.ranks] += elements
        largest[holders.ranks] = np.maximum(largest[holders.ranks], elements)
    return held, largest


Batch = tuple[list[Matrix], list[BlockSlice]]


def _owned(plan: Plan, indices: Iterable[int]) -> dict[int, Batch]:
    """The matrices and slices that each rank orthogonalizes."""
    owned: dict[int, Batch] = defaultdict(lambda: ([], []))
    for index in indices:
        if plan.teams[index].cuts is None:
            owned[plan.owners[index]][0].append(plan.layout.matrices[index])
            continue
        for block_slice in plan.slices(index):
            owned[block_slice.rank][1].append(block_slice)
    return owned
