"""What a plan costs on a named machine: bytes, memory and the time of Muon's step, by arithmetic.

The step is played wave by wave in the order of `core.plan`: one collective at a time, each rank's
products beside them. Elementwise work, launches and other traffic are left out. An estimate ranks
configurations; `python -m benchmarks.step` measures. Memory adds up the buffers of all ranks' waves
that are in use at the same time; `benchmarks.rehearse` has the places that buffers get, and a
test holds the two within 10 %.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
"""Shares of the data sheet's rates that large bf16 products, an all-to-all and an elementwise pass reach; assumed."""


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
    memory_gb: float = 0.0  # of a device, 1e9 bytes
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
    chip: str,
    fp32: float,
    link: float,
    network: float,
    memory: float,
    memory_gb: float,
    rack: int = 0,
) -> Hardware:
    """A GPU by NVIDIA's data sheet (dense TFLOP/s, GB/s of each link in one direction and of memory, GB of memory)."""
    return Hardware(
        name=chip.lower() if rack else f"{chip.lower()}-sxm",
        bf16_tflops=BF16_TFLOPS[chip] * PRODUCT_SHARE,
        fp32_tflops=fp32 * PRODUCT_SHARE,
        node_ranks=rack or 8,
        node_gb_per_s=link * LINK_SHARE,
        network_gb_per_s=network * LINK_SHARE,
        memory_gb_per_s=memory * MEMORY_SHARE,
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
        _gpu("GB300", 80, 900, 100, 8000, 279, 72),
        # round figures: a core a rank, gloo
        Hardware("cpu-2core", 0.2, 0.1, 64, 1.0, 1.0, 10.0, processor=True),
    )
}


def measured(figures: Mapping[str, Any]) -> Hardware:
    """The machine that `megatron-muon doctor --gpu` has measured; what it could not, by the data sheet."""
    name = figures.get("GPU", "cpu")
    alike = [
        one for key, one in HARDWARE.items() if re.search(rf"\b{key.split('-')[0]}\b", name.lower())
    ]
    known = alike[0] if alike else HARDWARE["h100-sxm"]
    nodes, link = figures.get("nodes", 1), figures.get("all_to_all_gb_per_s")
    rates = {rate: figures[rate] for rate in ("bf16_tflops", "fp32_tflops", "memory_gb_per_s")}
    if link is not None:
        rates["network_gb_per_s" if nodes > 1 else "node_gb_per_s"] = link
    node_ranks = max(1, figures["ranks"] // nodes) if figures["ranks"] > 1 else known.node_ranks
    memory_gb = figures.get("memory_gb", known.memory_gb)
    return replace(
        known, name=f"measured {name}", node_ranks=node_ranks, memory_gb=memory_gb, **rates
    )


def profile(figures: Mapping[str, Any]) -> str:
    """The file that `--hardware FILE.yaml` reads, of what was measured."""
    machine = asdict(measured(figures))
    rates = (key for key in figures if key in machine or key.startswith("all_to_all"))
    text = yaml.safe_dump(machine, sort_keys=False)
    return f"# Measured: {', '.join(rates)}; the rest by data sheets\n{text}"


@dataclass(frozen=True)
class Settings:
    """What decides costs and bytes."""

    buffer_mb: float | None  # --muon-exchange-buffer-mb
    memory: Memory  # what matrices take: by what travels, the iteration and what applies updates
    team_size: str = AUTO


@dataclass(frozen=True)
class Group:
    """A process group whose matrices are planned together: "dense" or "experts"."""

    name: str
    layout: Layout
    stride: int = 1  # groups of this kind that lie side by side in the world
    together: int = 1  # consecutive global ranks in one group

    def members(self, rank: int) -> list[int]:
        """The global ranks of the group that `rank` is in, in the order of the group; Megatron orders tp-cp-ep-dp."""
        size = self.layout.world_size * self.stride  # of ranks whose groups interleave
        ranks = np.arange(size).reshape(-1, self.stride, self.together) + rank // size * size
        found: list[int] = ranks[:, rank // self.together % self.stride].ravel().tolist()
        return found


@dataclass(frozen=True)
class GroupPlan:
    """A group's plan and its figures."""

    plan: Plan
    # the most that each rank's step takes beyond weights, gradients and state, in bytes
    extra: Ints
    ns_ms: float  # on the rank with most operations
    exchange_ms: float  # of all collectives, one after the other
    step_ms: float  # with all overlapped
    unmet: Unmet | None  # a setting that its ranks cannot have
    digest: str
    received: tuple[int, ...]  # bytes that each rank receives in a step


@dataclass
class KindPlan:
    """The plans of all groups of a kind, made when they are asked for: one for each way to lie in nodes."""

    group: Group
    settings: Settings
    hardware: Hardware
    _plans: dict[tuple[int, ...], GroupPlan] = field(default_factory=dict)

    def of(self, rank: int) -> GroupPlan:
        """The plan of a rank's group."""
        pattern = node_pattern(self.group.members(rank), self.hardware)
        if pattern not in self._plans:
            self._plans[pattern] = plan_group(self.group, self.settings, self.hardware, rank)
        return self._plans[pattern]


@word_as_flags()
def plan_kinds(
    groups: Sequence[Group], settings: Settings, hardware: Hardware
) -> tuple[list[KindPlan], list[str]]:
    """Plan rank 0's group of each kind; the second result names the settings that some of them cannot have.

    Raises:
        UserError: no group can have a setting. One of a single rank, which has nothing to share,
            does not count.
    """
    kinds = [KindPlan(group, settings, hardware) for group in groups]
    shared = [kind for kind in kinds if kind.group.layout.world_size > 1]
    unmet = {kind.group.name.removesuffix("s"): kind.of(0).unmet for kind in shared}
    return kinds, [note.worded(flag_of) for note in refuse_unmet(unmet)]


def node_pattern(members: Sequence[int], hardware: Hardware) -> tuple[int, ...]:
    """The node of each of these global ranks, counted from 0: all that a plan knows of nodes."""
    _, nodes = np.unique(np.asarray(members) // hardware.node_ranks, return_inverse=True)
    return tuple(nodes.tolist())


def plan_group(group: Group, settings: Settings, hardware: Hardware, rank: int = 0) -> GroupPlan:
    """Make the plan of a rank's group as training would, and estimate it."""
    layout, iteration, members = group.layout, settings.memory.iteration, group.members(rank)
    costs = [
        float(sum(iteration.flops(*block, 1, each.steps) for block in each.blocks))
        for each in layout.matrices
    ]
    size = 0 if settings.team_size == AUTO else int(settings.team_size)
    rules = TeamRules(functools.cache(iteration.cost), node_pattern(members, hardware), size)
    limit = None if settings.buffer_mb is None else int(settings.buffer_mb * 2**20)
    plan = make_plan(
        layout, costs, buffer_bytes=limit, memory=settings.memory, rules=rules.possible()
    )
    rate = hardware.tflops(half=iteration.half) * 1e12

    def products_s(indices: Sequence[int]) -> Floats:
        """Seconds that each rank multiplies for the matrices with these indices."""
        of = [plan.teams[index] for index in indices]
        owners = np.array([owner for team in of for owner in team.ranks], dtype=np.int64)
        loads = np.array([load for team in of for load in team.loads])
        return np.bincount(owners, weights=loads, minlength=layout.world_size) / rate

    seconds_of = functools.partial(
        all_to_all_s,
        nodes=np.asarray(members) // hardware.joined_ranks,
        element_bytes=plan.memory.element_bytes,
        near_gb_per_s=hardware.node_gb_per_s,
        far_gb_per_s=hardware.network_gb_per_s,
    )
    each = [(seconds_of(rows), seconds_of(updates)) for rows, updates in plan.all_to_alls()]
    return GroupPlan(
        plan=plan,
        extra=extra_bytes(plan),
        ns_ms=max(plan.loads) / rate * 1e3,
        exchange_ms=sum(map(sum, each)) * 1e3,
        step_ms=_play(plan, products_s, each) * 1e3,
        unmet=rules.unmet(),
        digest=plan.digest(),
        received=plan.exchanged_bytes(),
    )


def _play(
    plan: Plan,
    products_s: Callable[[Sequence[int]], Floats],
    exchanges_s: Sequence[tuple[float, float]],
) -> float:
    """Seconds of a step: wave k+1 arrives and wave k-1 leaves beside the products of wave k and of a filler.

    Updates of wave k leave after those of wave k-1 have arrived.
    """
    filler = products_s([index for indices in plan.whole for index in indices])
    if not plan.waves:
        return float(filler.max())
    filler /= len(plan.waves)
    clock = np.zeros_like(filler)  # when each rank's products are done
    # when the link is free, and when the current wave has arrived
    link = arrived = exchanges_s[0][0]
    left = 0.0  # when the updates of the wave before have
    for k, wave in enumerate(plan.waves):
        here = arrived
        if k + 1 < len(plan.waves):
            arrived = link = link + exchanges_s[k + 1][0]
        work = products_s(wave)
        busy = work > 0
        clock += filler
        clock[busy] = np.maximum(np.maximum(clock[busy], here) + work[busy], left)
        left = link = max(link, float(clock[busy].max(initial=here))) + exchanges_s[k][1]
    return max(left, float(clock.max()))


def extra_bytes(plan: Plan) -> Ints:
    """The most that each rank's step takes beyond weights, gradients and state, by the lifetimes of buffers."""
    fillers = itertools.zip_longest(*map(plan.fillers, range(plan.layout.world_size)), fillvalue=())
    waves = [
        _buffers(plan, indices)
        for indices in (*plan.waves, *map(itertools.chain.from_iterable, fillers))
    ]
    order = schedule(len(plan.waves), len(waves) - len(plan.waves))
    nothing = np.zeros(plan.layout.world_size, dtype=np.int64)
    taken = np.zeros((MOMENTS * len(order) + 1, len(nothing)), dtype=np.int64)
    for when, (buffers, _) in zip(moments_of(order), waves, strict=True):
        for name, size in buffers.items():
            (first, after), (last, until) = LIFETIMES[name]
            taken[when[first] + after : when[last] + until + 1] += size
    found: Ints = taken.max(axis=0) + np.max([nothing, *(made for _, made in waves)], axis=0)
    return found


def _buffers(plan: Plan, indices: Iterable[int]) -> tuple[dict[str, Ints], Ints]:
    """Bytes on each rank of the buffers of a wave's matrices, and of what is made beside them within the step."""
    indices, traffic, ranks = tuple(indices), plan.traffic, plan.layout.world_size
    wire, moment = plan.memory.element_bytes, plan.memory.moment
    gathered, updates = traffic.gathered(indices), traffic.returned(indices).between_ranks()
    rows = gathered.between_ranks()
    held, largest, stacks, work, made = np.zeros((5, ranks), dtype=np.int64)
    owned: dict[int, tuple[list[Matrix], list[BlockSlice]]] = defaultdict(lambda: ([], []))
    for index in indices:
        holders = plan.layout.holders[index]
        elements = holders.elements[holders.numbers]
        held[holders.ranks] += elements
        largest[holders.ranks] = np.maximum(largest[holders.ranks], elements)
        if plan.teams[index].cuts is None:
            owned[plan.owners[index]][0].append(plan.layout.matrices[index])
        else:
            for block_slice in plan.slices(index):
                owned[block_slice.rank][1].append(block_slice)
    for rank, batch in owned.items():
        stacks[rank], work[rank], made[rank] = plan.memory.of_batch(*batch)
    chunk = np.maximum(np.minimum(held, CHUNK["cuda"]), largest)
    applied = (
        np.maximum(largest, np.minimum(chunk, TOGETHER["cuda"])) if moment.together else largest
    )
    sent = rows.sent(ranks)
    elements_of = {
        "send": sent,
        "own": gathered.sent(ranks) - sent,
        "receive": rows.received(ranks),
        "back": updates.sent(ranks),
        "returned": held,
    }
    of_rows = {"prepared": ROW_BYTES * chunk, "updates": ROW_BYTES * chunk}
    travelling = {name: wire * elements for name, elements in elements_of.items()}
    return {**of_rows, "stacks": stacks, "work": work, **travelling}, np.maximum(
        made, moment.held * applied
    )
