"""What a plan costs on a named machine: bytes, memory and the time of a step, by arithmetic.

The step is played through wave by wave in the order of `core.schedule`: one collective at a time, each rank's
products beside them; it takes no less than the busiest host does for what it enqueues. Left out: elementwise work,
other traffic. An estimate ranks configurations; `python -m benchmarks.step` measures.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_muon.core.assignment import TeamRules, Unmet
from megatron_muon.core.cost import AUTO, DENSE, HALVES, KERNEL, Iteration, Products
from megatron_muon.core.layout import Ints, Layout
from megatron_muon.core.memory import Memory, MomentBytes
from megatron_muon.core.plan import Plan, make_plan
from megatron_muon.core.traffic import MESSAGE_US, Links
from megatron_muon.megatron.gpu import BF16_TFLOPS
from megatron_muon.tools.plan.host import busy_hosts, counts_of
from megatron_muon.tools.plan.memory import extra_bytes

Floats = np.ndarray[Any, np.dtype[np.float64]]

PRODUCT_SHARE, LINK_SHARE, MEMORY_SHARE = 0.65, 0.75, 0.8
"""Parts of the data sheet's rates that large bf16 products, an all-to-all and an elementwise pass reach; assumed on the
careful side."""


@dataclass(frozen=True)
class Host:
    """Microseconds that a rank's host takes. Read, not measured: a launch and a view with Python around them.

    Memory comes from torch's cache; the call of a collective goes through torch.distributed to a queue.
    """

    launch_us: float = 5.0
    view_us: float = 2.0
    allocation_us: float = 1.0
    call_us: float = 30.0

    def seconds(self, counts: Mapping[str, int]) -> float:
        """Of so many kernels, views, allocations and collectives."""
        of_one = (self.launch_us, self.view_us, self.allocation_us, self.call_us)
        names = ("kernels", "views", "allocations", "collectives")
        return sum(counts.get(name, 0) * each for name, each in zip(names, of_one, strict=True)) * 1e-6


@dataclass(frozen=True)
class Hardware:
    """A machine. Rates are what a rank can be expected to reach, of links in each direction at the same time."""

    name: str
    bf16_tflops: float
    fp32_tflops: float
    node_ranks: int  # of a node, as the run's LOCAL_WORLD_SIZE
    node_gb_per_s: float
    network_gb_per_s: float  # between nodes
    memory_gb_per_s: float  # of the device's own memory
    source: str
    processor: bool = False
    symmetric_kernel: bool = True  # as `core.newton_schulz.products_on` finds it
    rack_ranks: int = 0  # that the fast link joins, where these are more than a node's
    host: Host = Host()

    @property
    def joined_ranks(self) -> int:
        """How many ranks the fast link joins."""
        return max(self.node_ranks, self.rack_ranks)

    @property
    def links(self) -> Links:
        """How fast its ranks exchange."""
        return Links(self.node_gb_per_s, self.network_gb_per_s, MESSAGE_US)

    def products(self, *, half: bool) -> Products:
        """How it forms symmetric products, in bf16 where `half`, else in fp32."""
        if self.processor:
            return HALVES
        return KERNEL if self.symmetric_kernel and half else DENSE


def _gpu(
    name: str,
    bf16: float,
    fp32: float,
    ranks: int,
    node: float,
    network: float,
    memory: float,
    source: str,
    *,
    rack: int = 0,
) -> Hardware:
    """A GPU whose data sheet has these rates, at the part of them that can be expected."""
    source = (
        f"{source}; {PRODUCT_SHARE:.0%} of its matrix rate, {LINK_SHARE:.0%} of its links, {MEMORY_SHARE:.0%} of its "
        f"memory's {memory:,} GB/s"
    )
    rates = bf16 * PRODUCT_SHARE, fp32 * PRODUCT_SHARE, ranks, node * LINK_SHARE, network * LINK_SHARE
    has_kernel = name != "a100-sxm"
    return Hardware(name, *rates, memory * MEMORY_SHARE, source, symmetric_kernel=has_kernel, rack_ranks=rack)


def _dgx(chip: str, fp32: float, node: int, network: int, memory: int) -> Hardware:
    return _gpu(
        f"{chip.lower()}-sxm", BF16_TFLOPS[chip], fp32, 8, node, network, memory,
        f"NVIDIA {chip} data sheet (SXM, dense), NVLink {2 * node} GB/s both ways, one {8 * network} Gb/s adapter a "
        f"GPU (DGX {chip})",
    )  # fmt: skip


_MACHINES = (
    _dgx("H100", 67, 450, 50, 3350),
    _dgx("H200", 67, 450, 50, 4800),
    _dgx("A100", 19.5, 300, 25, 2039),
    _gpu(
        "gb300", BF16_TFLOPS["GB300"], 80, 72, 900, 100, 8000,
        "NVIDIA GB300 NVL72 data sheet (dense, a 72nd of the rack), NVLink 1.8 TB/s both ways, 800 Gb/s a GPU",
        rack=72,
    ),
    Hardware(
        "cpu-2core", 0.2, 0.1, 64, 1.0, 1.0, 10.0,
        "round figures for one core a rank with gloo on loopback; python -m benchmarks.step measures yours",
        processor=True, host=Host(0.0, 0.0, 0.0, 0.0),
    ),
)  # fmt: skip
HARDWARE = {machine.name: machine for machine in _MACHINES}


@dataclass(frozen=True)
class Settings:
    """What decides costs and bytes.

    `--muon-exchange-buffer-mb`, what travels ("fp32" or "bf16"), the iteration, whether momentum looks ahead, what an
    adaptive Muon's second moment and cautious decay take, and whether decay is cautious or norms are kept.
    """

    buffer_mb: float | None
    exchange_dtype: str
    iteration: Iteration
    team_size: str = AUTO
    looks_ahead: bool = True
    moment: MomentBytes = field(default_factory=MomentBytes)
    cautious: bool = False
    hyperball: bool = False

    @property
    def memory(self) -> Memory:
        """What matrices take."""
        return Memory(2 if self.exchange_dtype == "bf16" else 4, self.iteration, self.moment)

    @property
    def buffer_bytes(self) -> int | None:
        """What a step may take; None is left to the planner."""
        return None if self.buffer_mb is None else int(self.buffer_mb * 2**20)


@dataclass(frozen=True)
class Group:
    """A process group whose matrices are planned together: "dense", "experts", or a captured "layout"."""

    name: str
    layout: Layout
    stride: int = 1  # groups of this kind that lie side by side in the world
    together: int = 1  # consecutive global ranks in one group
    ranks: tuple[int, ...] = ()  # global ones of the only group that is known, where they are not counted from 0

    def ranks_in(self, world_size: int) -> Ints:
        """For each rank of the world, its rank in its group of this kind; parallel_state orders tp-cp-ep-dp-pp."""
        return self._places(world_size) % self.layout.world_size

    def members(self, rank: int, world_size: int) -> list[int]:
        """The global ranks of the group of this kind that `rank` is in, in the order of the group."""
        number, beside = self._numbers(world_size)
        (ranks,) = np.nonzero((beside == beside[rank]) & (number == number[rank]))
        return [int(member) for member in ranks]

    def all_members(self, world_size: int) -> Ints:
        """The global ranks of every group of this kind, `(groups, ranks of a group)`, in the order of the groups."""
        number, beside = self._numbers(world_size)
        return np.lexsort((np.arange(world_size), beside, number)).reshape(-1, self.layout.world_size)

    def _numbers(self, world_size: int) -> tuple[Ints, Ints]:
        """For each rank of the world, where its group lies: among groups one after the other, and side by side."""
        beside = np.arange(world_size) // self.together % self.stride
        return self._places(world_size) // self.layout.world_size, beside

    def _places(self, world_size: int) -> Ints:
        ranks, together = np.arange(world_size), self.together
        return ranks // (self.stride * together) * together + ranks % together


@dataclass(frozen=True)
class GroupPlan:
    """A group's plan and its figures."""

    group: Group
    plan: Plan
    seconds: float  # of planning
    largest: float  # work of the costliest matrix, on the rank of its team with most of it
    extra: Ints  # the most that each rank's step takes beyond weights, gradients and state, in bytes
    ns_ms: float  # on the rank with most operations
    exchange_ms: float  # of all collectives, one after the other
    host_ms: float  # what the busiest host takes to enqueue a step
    step_ms: float  # with all overlapped
    unmet: Mapping[str, Unmet]  # settings that its ranks cannot have

    @property
    def extra_bytes(self) -> int:
        """The most that a rank takes."""
        return int(self.extra.max(initial=0))


@dataclass(frozen=True)
class KindPlan:
    """The plans of all groups of a kind.

    Groups whose ranks lie in nodes alike have the same plan; where strides do not divide a node, there are several.

    Attributes:
        group: what the groups have in common.
        plans: one for each way in which ranks lie in nodes.
        numbers: for each rank of the world, which of them its group has.
    """

    group: Group
    plans: tuple[GroupPlan, ...]
    numbers: Ints

    @property
    def worst(self) -> GroupPlan:
        """The slowest."""
        return max(self.plans, key=lambda item: item.step_ms)

    @property
    def unmet(self) -> Mapping[str, Unmet]:
        """Settings that none of the groups can have."""
        first, *others = (item.unmet for item in self.plans)
        return {flag: why for flag, why in first.items() if all(flag in other for other in others)}

    def of(self, rank: int) -> GroupPlan:
        """The plan of a rank's group."""
        return self.plans[int(self.numbers[rank])]

    def of_ranks(self, figure: Callable[[GroupPlan], Sequence[float] | Ints | Floats]) -> np.ndarray[Any, Any]:
        """A figure that plans have for each rank of a group, for each rank of the world."""
        each = np.array([figure(item) for item in self.plans])
        return each[self.numbers, self.group.ranks_in(len(self.numbers))]


def plan_kind(group: Group, settings: Settings, hardware: Hardware, world_size: int) -> KindPlan:
    """Plan all groups of a kind in a world, one plan for each way in which ranks lie in nodes."""
    members = group.all_members(world_size)
    if group.ranks:
        members = np.array(group.ranks)[members]
    nodes = (node_pattern(each, hardware) for each in members)
    numbers: dict[tuple[int, ...], int] = {}
    of_groups = [numbers.setdefault(each, len(numbers)) for each in nodes]
    of_ranks = np.empty(world_size, dtype=np.int64)
    of_ranks[group.all_members(world_size)] = np.array(of_groups)[:, np.newaxis]
    firsts = (members[of_groups.index(number)] for number in numbers.values())
    return KindPlan(group, tuple(plan_group(group, settings, hardware, ranks) for ranks in firsts), of_ranks)


def node_pattern(members: Sequence[int] | Ints, hardware: Hardware) -> tuple[int, ...]:
    """The node of each of these global ranks, in ascending order, counted from 0: what plans know of nodes."""
    _, nodes = np.unique(np.asarray(members) // hardware.node_ranks, return_inverse=True)
    return tuple(nodes.tolist())


def plan_group(
    group: Group, settings: Settings, hardware: Hardware, members: Sequence[int] | Ints | None = None
) -> GroupPlan:
    """Make a group's plan as training would, and estimate it.

    `members` are its global ranks; without them it is the first of its kind.
    """
    layout, half = group.layout, settings.iteration.half
    members = group.members(0, layout.world_size * group.stride) if members is None else members
    ranks = layout.world_size
    cost = functools.cache(settings.iteration.flops)
    costs = [float(sum(cost(*block, 1, matrix.steps) for block in matrix.blocks)) for matrix in layout.matrices]
    started = time.perf_counter()
    size = 0 if settings.team_size == AUTO else int(settings.team_size)
    asked = TeamRules(functools.cache(settings.iteration.cost), node_pattern(members, hardware), size)
    plan = make_plan(layout, costs, buffer_bytes=settings.buffer_bytes, memory=settings.memory, rules=asked.possible())
    seconds = time.perf_counter() - started
    rate = (hardware.bf16_tflops if half else hardware.fp32_tflops) * 1e12

    def products_s(indices: Sequence[int]) -> Floats:
        """Seconds that each rank multiplies for the matrices with these indices."""
        of = [plan.teams[index] for index in indices]
        members = np.array([rank for team in of for rank in team.ranks], dtype=np.int64)
        loads = np.array([load for team in of for load in team.loads])
        return np.bincount(members, weights=loads, minlength=ranks) / rate

    joined = np.asarray(members) // hardware.joined_ranks
    seconds_of = functools.partial(hardware.links.seconds, nodes=joined, element_bytes=plan.memory.element_bytes)
    each = [(seconds_of(rows), seconds_of(updates)) for rows, updates in plan.all_to_alls()]
    arrive_s, leave_s = [rows for rows, _ in each], [updates for _, updates in each]
    host_s = max((hardware.host.seconds(counts_of(plan, rank)) for rank in busy_hosts(plan)), default=0.0)
    return GroupPlan(
        group=group,
        plan=plan,
        seconds=seconds,
        largest=max((max(team.loads) for team in plan.teams), default=0.0),
        extra=extra_bytes(plan),
        ns_ms=max(plan.loads) / rate * 1e3,
        exchange_ms=sum(arrive_s + leave_s) * 1e3,
        host_ms=host_s * 1e3,
        step_ms=max(_play(plan, products_s, arrive_s, leave_s, host_s), host_s) * 1e3,
        unmet=asked.unmet(),
    )


def _play(
    plan: Plan,
    products_s: Callable[[Sequence[int]], Floats],
    arrive_s: Sequence[float],
    leave_s: Sequence[float],
    host_s: float,
) -> float:
    """Seconds of a step: wave k+1 arrives and wave k-1 leaves beside the products of wave k and of a filler.

    Updates of wave k leave after those of wave k-1 have arrived. A wave takes no less than its share of the host's.
    """
    filler = products_s([index for indices in plan.whole for index in indices])
    if not plan.waves:
        return float(filler.max())
    filler /= len(plan.waves)
    host_s /= len(plan.waves)
    clock = np.zeros_like(filler)  # when each rank's products are done
    link = arrived = arrive_s[0]  # when the link is free, and when the current wave has arrived
    left = 0.0  # when the updates of the wave before have
    for k, wave in enumerate(plan.waves):
        here = arrived
        if k + 1 < len(plan.waves):
            arrived = link = link + arrive_s[k + 1]
        work = products_s(wave)
        busy = work > 0
        clock += filler
        clock[busy] = np.maximum(np.maximum(clock[busy], here) + np.maximum(work[busy], host_s - filler[busy]), left)
        left = link = max(link, float(clock[busy].max(initial=here))) + leave_s[k]
    return max(left, float(clock.max()))
