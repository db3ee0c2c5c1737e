"""Costs of a plan on a named machine: bytes, memory and the time of Muon's step, by arithmetic.

The step's own loop runs over its waves with seconds in the place of work: one collective at a time,
overlapped with each rank's products. Elementwise work, launches and other traffic are left out. An
estimate ranks configurations; `python -m benchmarks.step` measures. Memory is
`Plan.step_bytes`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import yaml

from megatron_muon.core.buffers import Sizes
from megatron_muon.core.build import sizes_of, team_rules
from megatron_muon.core.cost import AUTO, DENSE, HALVES, KERNEL
from megatron_muon.core.engine import run
from megatron_muon.core.layout import Ints, Layout
from megatron_muon.core.methods.method import Method
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.core.plan import Plan, make_plan
from megatron_muon.core.rules.rule import Rule
from megatron_muon.core.traffic import Transfers
from megatron_muon.errors import SettingError
from megatron_muon.megatron.plan_figures import (
    all_to_alls,
    loads_of,
    received,
    received_bytes,
    refuse_unmet,
    sent,
)
from megatron_muon.megatron.run_device import BF16_TFLOPS
from megatron_muon.settings import flag_of, word_as_flags

Floats = np.ndarray[Any, np.dtype[np.float64]]

MESSAGE_US = 2.0
"""Microseconds of a rank for each peer of an all-to-all, whatever the message's size.

Assumed, for NCCL's proxy, which posts a send and a receive; not in it are the connections and
buffers that NCCL makes once for each pair.
"""

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

    def tflops(self, method: Method) -> float:
        """The rate of a method's products: bf16, fp32, or for classes TF32's, half of bf16's.

        Factorizations of classes count at this rate, too, which no GPU has been measured to reach.
        """
        if method.dtype.itemsize < 4:
            return self.bf16_tflops
        if isinstance(method, NewtonSchulz) or self.processor:
            return self.fp32_tflops
        return self.bf16_tflops / 2

    def sizes(self, method: Method, wire: str, rules: Sequence[type[Rule]] = ()) -> Sizes:
        """Sizes of waves on the machine, with symmetric products as it forms them."""
        if isinstance(method, NewtonSchulz):
            of_gpu = KERNEL if self.symmetric_kernel and method.iteration.half else DENSE
            products = HALVES if self.processor else of_gpu
            method.iteration = replace(method.iteration, products=products)
        return sizes_of(method, wire, rules, processor=self.processor)


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
    sizes: Sizes  # of waves: by method, exchanged dtype, and rules
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
    held: Ints  # elements in each rank's shards
    times: Times
    unmet: SettingError | None  # a setting that its ranks do not support
    received: tuple[int, ...]  # bytes that each rank receives in a step
    moved: Ints  # bytes of memory that each rank's elementwise passes read and write


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
    layout = group.layout
    method = settings.sizes.method
    members = group.members(rank)
    costs = [method.flops(matrix) for matrix in layout.matrices]
    size = 0 if settings.team_size == AUTO else int(settings.team_size)
    rules = team_rules(method, node_pattern(members, hardware), size)
    limit = None if settings.buffer_mb is None else int(settings.buffer_mb * 2**20)
    plan = make_plan(
        layout, costs, buffer_bytes=limit, sizes=settings.sizes, rules=rules.possible()
    )
    rate = hardware.tflops(method) * 1e12

    nodes = np.asarray(members) // max(hardware.node_ranks, hardware.rack_ranks)
    seconds_of = functools.partial(
        all_to_all_s,
        nodes=nodes,
        element_bytes=plan.sizes.dtype.itemsize,
        hardware=hardware,
    )
    exchanges = all_to_alls(plan)
    seconds = [(seconds_of(rows), seconds_of(updates)) for rows, updates in exchanges]
    held = np.zeros(layout.world_size, dtype=np.int64)
    for matrix in layout.matrices:
        shards = matrix.shards
        held[shards.ranks] += shards.elements[shards.numbers]
    moved = moved_bytes(plan, held, settings, hardware)
    clock = _Clock(plan, rate, seconds, np.zeros(layout.world_size))
    run(len(plan.waves), clock)
    times = Times(
        ns_ms=max(loads_of(plan)) / rate * 1e3,
        exchange_ms=sum(map(sum, seconds)) * 1e3,
        step_ms=float(clock.time.max()) * 1e3,
        elementwise_ms=moved.max() / hardware.memory_gb_per_s / 1e6,
    )
    return GroupPlan(
        name=group.name,
        plan=plan,
        held=held,
        times=times,
        unmet=rules.unmet(),
        received=received_bytes(plan, exchanges),
        moved=moved,
    )


def all_to_all_s(
    transfers: Transfers, *, nodes: Ints, element_bytes: int, hardware: Hardware
) -> float:
    """Seconds of an all-to-all on the busiest rank: bytes over both links at once, and messages."""
    ranks = len(nodes)
    is_far = nodes[transfers.sources] != nodes[transfers.targets]
    near = Transfers(*(column[~is_far] for column in transfers))
    far = Transfers(*(column[is_far] for column in transfers))
    near_rate = hardware.node_gb_per_s * 1e9 / element_bytes
    far_rate = hardware.network_gb_per_s * 1e9 / element_bytes
    sent_s = np.maximum(sent(near, ranks) / near_rate, sent(far, ranks) / far_rate)
    received_s = np.maximum(received(near, ranks) / near_rate, received(far, ranks) / far_rate)
    sends, receives = transfers.messages(ranks)
    posted_s = MESSAGE_US * 1e-6
    return float(np.maximum(sent_s + posted_s * sends, received_s + posted_s * receives).max())


def moved_bytes(plan: Plan, held: Ints, settings: PlanSettings, hardware: Hardware) -> Ints:
    """Bytes of memory that the elementwise passes of each rank's step read and write.

    By kernels (`core.kernels`): gradient, momentum, wire; wire to stacks and back, if rows travel;
    two passes over the small matrices of the iteration; wire, weight. NorMuon puts updates into
    stacks, squares and multiplies them; where rows do not travel it squares alone. A processor's
    operations are counted as they are in `core.passes`.
    """
    wire, half = plan.sizes.dtype.itemsize, settings.sizes.method.dtype.itemsize
    is_fused = not hardware.processor
    of_holder = 12 + 2 * settings.momentum_bytes if is_fused else 44
    moved = (of_holder + 2 * wire) * held.astype(float)
    of_owner = 4 * wire if is_fused else 9 * wire + 3 * half
    cast = wire + half if is_fused and wire != half else 0
    of_norms = wire if is_fused and settings.sizes.whole else 0
    alone = [set(itertools.chain(*batches)) for batches in plan.batches]
    for index, (team, matrix) in enumerate(zip(plan.teams, plan.layout.matrices, strict=True)):
        for part in team.slices(index, matrix):
            stays = is_fused and index in alone[part.rank]
            of_element = cast + of_norms if stays else of_owner + cast + 5 * of_norms
            moved[part.rank] += of_element * part.numel
            if is_fused:
                moved[part.rank] += 4 * half * min(part.of) ** 2
    return moved.astype(np.int64)


@dataclass
class _Clock:
    """The stages of a step, with seconds in the place of work.

    One collective at a time. It starts when the link is free and all ranks have come to it.

    Attributes:
        time: when each rank's products and waits are done, `(ranks,)`.
    """

    plan: Plan
    rate: float  # of products, in operations a second
    exchanges_s: Sequence[tuple[float, float]]  # of each wave: rows, updates
    time: Floats
    _link: float = 0.0  # when it is free
    _arrived: dict[int, float] = field(default_factory=dict)

    def send_rows(self, k: int) -> None:
        """Start the all-to-all of rows."""
        self._send(k, self.exchanges_s[k][0])

    def orthogonalize(self, k: int) -> None:
        """Wait for rows, do the products, and start the all-to-all of updates."""
        self._wait(k)
        for index in self.plan.waves[k]:
            team = self.plan.teams[index]
            self.time[list(team.ranks)] += np.array(team.loads) / self.rate
        self._send(k, self.exchanges_s[k][1])
        for rank in range(len(self.time)):
            for index in itertools.chain(*self.plan.beside(rank, k)):
                self.time[rank] += self.plan.teams[index].loads[0] / self.rate

    def apply(self, k: int) -> None:
        """Wait for updates."""
        self._wait(k)

    def _send(self, k: int, seconds: float) -> None:
        start = max(self._link, float(self.time.max())) if seconds else 0.0
        self._link = max(self._link, start + seconds)
        self._arrived[k] = start + seconds

    def _wait(self, k: int) -> None:
        self.time = np.maximum(self.time, self._arrived[k])
