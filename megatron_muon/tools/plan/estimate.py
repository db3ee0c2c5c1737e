"""What a plan costs on a named machine: bytes, memory and the time of a step, by arithmetic.

The step is played wave by wave in the order of `core.schedule`: one collective at a time, each rank's products beside
them, and no less than the busiest host takes to enqueue it. Elementwise work and other traffic are left out. An
estimate ranks configurations; `python -m benchmarks.step` measures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_muon.core.assignment import TeamRules, Unmet, refuse_unmet
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
"""Shares of the data sheet's rates that large bf16 products, an all-to-all and an elementwise pass reach; assumed."""


HOST_US = (5.0, 2.0, 1.0, 30.0)
"""Microseconds of a rank's host for a kernel, a view, memory from torch's cache, the call of a collective; assumed."""


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
    memory_gb: float = 0.0  # of a device, 1e9 bytes
    processor: bool = False
    symmetric_kernel: bool = True  # as `core.newton_schulz.products_on` finds it
    rack_ranks: int = 0  # joined by the fast link, where these are more than a node's
    host_us: tuple[float, float, float, float] = HOST_US

    @property
    def joined_ranks(self) -> int:
        """Ranks that the fast link joins."""
        return max(self.node_ranks, self.rack_ranks)

    @property
    def links(self) -> Links:
        """Rates and latency of an exchange."""
        return Links(self.node_gb_per_s, self.network_gb_per_s, MESSAGE_US)

    def host_s(self, counts: Mapping[str, int]) -> float:
        """Seconds that a host takes to enqueue kernels, views, allocations and collectives."""
        names = ("kernels", "views", "allocations", "collectives")
        return sum(counts.get(name, 0) * us for name, us in zip(names, self.host_us, strict=True)) * 1e-6

    def products(self, *, half: bool) -> Products:
        """How it forms symmetric products, in bf16 where `half`, else in fp32."""
        if self.processor:
            return HALVES
        return KERNEL if self.symmetric_kernel and half else DENSE


def _gpu(
    chip: str, fp32: float, link: float, network: float, memory: float, memory_gb: float, *, rack: int = 0
) -> Hardware:
    """A GPU by its data sheet (dense TFLOP/s, GB/s of each link in one direction and of memory, GB of memory)."""
    form = f"NVL{rack}, a {rack}nd of the rack" if rack else "SXM"
    return Hardware(
        name=chip.lower() if rack else f"{chip.lower()}-sxm",
        bf16_tflops=BF16_TFLOPS[chip] * PRODUCT_SHARE,
        fp32_tflops=fp32 * PRODUCT_SHARE,
        node_ranks=rack or 8,
        node_gb_per_s=link * LINK_SHARE,
        network_gb_per_s=network * LINK_SHARE,
        memory_gb_per_s=memory * MEMORY_SHARE,
        source=f"NVIDIA {chip} data sheet ({form}, dense), NVLink {2 * link:,} GB/s both ways, {8 * network} Gb/s "
        f"between nodes for each GPU; {PRODUCT_SHARE:.0%} of its matrix rate, {LINK_SHARE:.0%} of its links, "
        f"{MEMORY_SHARE:.0%} of its memory's {memory:,} GB/s",
        memory_gb=memory_gb,
        symmetric_kernel=chip != "A100",
        rack_ranks=rack,
    )


HARDWARE = {
    machine.name: machine
    for machine in (
        _gpu("H100", 67, 450, 50, 3350, 80),
        _gpu("H200", 67, 450, 50, 4800, 141),
        _gpu("A100", 19.5, 300, 25, 2039, 80),
        _gpu("GB300", 80, 900, 100, 8000, 279, rack=72),
        Hardware(
            "cpu-2core", 0.2, 0.1, 64, 1.0, 1.0, 10.0,
            "round figures for one core a rank with gloo on loopback; python -m benchmarks.step measures yours",
            processor=True, host_us=(0.0, 0.0, 0.0, 0.0),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What decides costs and bytes."""

    buffer_mb: float | None  # --muon-exchange-buffer-mb
    exchange_dtype: str  # what travels, "fp32" or "bf16"
    iteration: Iteration
    team_size: str = AUTO
    looks_ahead: bool = True
    moment: MomentBytes = field(default_factory=MomentBytes)  # of second moments and cautious decay
    cautious: bool = False
    hyperball: bool = False

    @property
    def memory(self) -> Memory:
        """What matrices take."""
        return Memory(2 if self.exchange_dtype == "bf16" else 4, self.iteration, self.moment)


@dataclass(frozen=True)
class Group:
    """A process group whose matrices are planned together: "dense", "experts", or a captured "layout"."""

    name: str
    layout: Layout
    stride: int = 1  # groups of this kind that lie side by side in the world
    together: int = 1  # consecutive global ranks in one group
    ranks: tuple[int, ...] = ()  # global ones of the only group that is known, where they are not counted from 0

    def all_members(self, world_size: int) -> Ints:
        """The global ranks of every group of this kind, `(groups, ranks of a group)`; Megatron orders tp-cp-ep-dp."""
        size = self.layout.world_size
        ranks = np.arange(world_size).reshape(-1, size // self.together, self.stride, self.together)
        return ranks.swapaxes(1, 2).reshape(-1, size)

    def members(self, rank: int, world_size: int) -> list[int]:
        """The global ranks of the group that `rank` is in, in the order of the group."""
        groups = self.all_members(world_size)
        found: list[int] = groups[(groups == rank).any(axis=1)][0].tolist()
        return found


@dataclass(frozen=True)
class GroupPlan:
    """A group's plan and its figures."""

    group: Group
    plan: Plan
    largest: float  # work of the costliest matrix, on the rank of its team with most of it
    extra: Ints  # the most that each rank's step takes beyond weights, gradients and state, in bytes
    ns_ms: float  # on the rank with most operations
    exchange_ms: float  # of all collectives, one after the other
    host_ms: float  # of the busiest host, to enqueue a step
    step_ms: float  # with all overlapped
    unmet: Mapping[str, Unmet]  # settings that its ranks cannot have

    @functools.cached_property
    def digest(self) -> str:
        """The plan's."""
        return self.plan.digest()


@dataclass(frozen=True)
class KindPlan:
    """The plans of all groups of a kind: one for each way in which a group's ranks lie in nodes."""

    group: Group
    plans: tuple[GroupPlan, ...]  # different ones
    members: Ints  # global ranks of each group, `(groups, ranks)`
    numbers: Ints  # for each group, which of `plans` it has

    @property
    def worst(self) -> GroupPlan:
        """The slowest."""
        return max(self.plans, key=lambda item: item.step_ms)

    def of(self, rank: int) -> GroupPlan:
        """The plan of a rank's group."""
        return self.plans[int(self.numbers[(self.members == rank).any(axis=1)][0])]

    def of_ranks(self, figure: Callable[[GroupPlan], Sequence[float] | Ints | Floats]) -> np.ndarray[Any, Any]:
        """A figure that plans have for each rank of a group, for each rank of the world."""
        each = np.array([figure(item) for item in self.plans])[self.numbers]
        return each.ravel()[np.argsort(self.members, axis=None)]


def plan_kinds(
    groups: Sequence[Group], settings: Settings, hardware: Hardware, world_size: int, *, alone: bool = False
) -> tuple[list[KindPlan], list[str]]:
    """Plan all groups; the second result names the settings that some of them cannot have.

    A group of one rank has nothing to share: where there is no other, its settings count only if `alone`.

    Raises:
        UserError: no group can have a setting.
    """
    kinds = [plan_kind(group, settings, hardware, world_size) for group in groups]
    shared = [kind for kind in kinds if kind.group.layout.world_size > 1] or (kinds if alone else [])
    unmet: dict[str, Mapping[str, Unmet]] = {}
    for kind in shared:
        first, *others = (item.unmet for item in kind.plans)
        flags = {flag: why for flag, why in first.items() if all(flag in other for other in others)}
        unmet[kind.group.name.removesuffix("s")] = flags
    return kinds, refuse_unmet(unmet)


def plan_kind(group: Group, settings: Settings, hardware: Hardware, world_size: int) -> KindPlan:
    """Plan all groups of a kind in a world."""
    members = group.all_members(world_size)
    places = np.array(group.ranks)[members] if group.ranks else members
    patterns = [node_pattern(each, hardware) for each in places]
    different = list(dict.fromkeys(patterns))
    plans = tuple(plan_group(group, settings, hardware, places[patterns.index(pattern)]) for pattern in different)
    return KindPlan(group, plans, members, np.array([different.index(pattern) for pattern in patterns]))


def node_pattern(members: Sequence[int] | Ints, hardware: Hardware) -> tuple[int, ...]:
    """The node of each of these global ranks, counted from 0: all that a plan knows of nodes."""
    _, nodes = np.unique(np.asarray(members) // hardware.node_ranks, return_inverse=True)
    return tuple(nodes.tolist())


def plan_group(
    group: Group, settings: Settings, hardware: Hardware, members: Sequence[int] | Ints | None = None
) -> GroupPlan:
    """Make a group's plan as training would, and estimate it; `members` are its global ranks, or the first group's."""
    layout, iteration = group.layout, settings.iteration
    members = group.members(0, layout.world_size * group.stride) if members is None else members
    ranks = layout.world_size
    cost = functools.cache(iteration.flops)
    costs = [float(sum(cost(*block, 1, matrix.steps) for block in matrix.blocks)) for matrix in layout.matrices]
    size = 0 if settings.team_size == AUTO else int(settings.team_size)
    rules = TeamRules(functools.cache(iteration.cost), node_pattern(members, hardware), size)
    limit = None if settings.buffer_mb is None else int(settings.buffer_mb * 2**20)
    plan = make_plan(layout, costs, buffer_bytes=limit, memory=settings.memory, rules=rules.possible())
    rate = (hardware.bf16_tflops if iteration.half else hardware.fp32_tflops) * 1e12

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
    host_s = max((hardware.host_s(counts_of(plan, rank)) for rank in busy_hosts(plan)), default=0.0)
    return GroupPlan(
        group=group,
        plan=plan,
        largest=max((max(team.loads) for team in plan.teams), default=0.0),
        extra=extra_bytes(plan),
        ns_ms=max(plan.loads) / rate * 1e3,
        exchange_ms=sum(arrive_s + leave_s) * 1e3,
        host_ms=host_s * 1e3,
        step_ms=max(_play(plan, products_s, arrive_s, leave_s, host_s), host_s) * 1e3,
        unmet=rules.unmet(),
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
