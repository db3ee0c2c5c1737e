"""The least time that a Muon step can take on this machine, measured in the run that it is compared with.

Newton-Schulz's part is its FLOPs over the rate at which the ranks, all busy at once, multiply
matrices of the shapes that the iteration multiplies; the exchange's part is the plan's bytes over
the bandwidth of one large all-to-all. In a team each rank multiplies its part and repeats the small
products, and what the sums bring it are bytes like others. Both are probed between the timed steps,
so that a machine that slows down slows both. Elementwise work, assembly and imbalance are not in
the floor, and nothing overlaps in it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_muon.core.cost import KERNEL, SUM_BYTES, Iteration
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.plan import Plan
from megatron_muon.core.probe import synchronize
from megatron_muon.core.slices import BlockSlice

WINDOW_S = 0.04
"""How long each product is repeated in a probe. Every rank goes on until the last has finished: with more ranks than
cores, those that finish early would leave their core to the others and the rates would add up to more than it has."""

PROBE_BYTES = 256 * 2**20
"""The most that a rank sends in a probe of the bandwidth; larger steps are scaled from it."""

Block = tuple[int, int]


@dataclass(frozen=True)
class Product:
    """`(batch, m, k) @ (batch, k, n)`; with `transposed` the right side is the left's transpose or part of it."""

    batch: int
    m: int
    k: int
    n: int
    transposed: bool

    @property
    def flops(self) -> int:
        """Operations of the batch."""
        return 2 * self.batch * self.m * self.k * self.n


def products(
    block: Block, iteration: Iteration, *, batch: int = 1, team: int = 1
) -> Counter[Product]:
    """How many products of each kind one Newton-Schulz run of `batch` blocks takes each rank of a team that cuts them.

    Where symmetric products are formed in halves, only what is computed counts.
    """
    small, large = min(block), -(-max(block) // team)
    counts = iteration.counts(iteration.method_for(*block, team))
    (square, _), (power, symmetric) = (
        iteration.products.shares(small, side) for side in (large, small)
    )

    def kinds(inner: int, *, transposed: bool, share: float) -> Counter[Product]:
        if share == 1.0 or iteration.products is KERNEL:  # the probe has no symmetric kernel
            return Counter({Product(batch, small, inner, small, transposed): 1})
        half = small // 2
        return Counter(
            {
                Product(1, small, inner, half, transposed): batch,
                Product(1, small - half, inner, small - half, transposed): batch,
            }
        )

    total: Counter[Product] = Counter()
    for made, count in (
        (kinds(large, transposed=True, share=square), counts.gram),
        (kinds(small, transposed=False, share=power), counts.square),
        (kinds(small, transposed=False, share=symmetric), counts.symmetric),
        (Counter({Product(batch, small, small, large, False): 1}), counts.wide),
    ):
        for product, times in made.items():
            total[product] += times * count
    return total


class Floor:
    """Probes of the matrix-product rate and the bandwidth, for the owner scheme's plan."""

    def __init__(
        self,
        plan: Plan,
        orthogonalizer: Orthogonalizer,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._group = group
        self._device = device
        self._work = _work(plan, orthogonalizer)
        self._operands = {
            product: _operands(product, orthogonalizer.dtype, device) for product in self._work
        }
        travels = _travels(plan, orthogonalizer)
        most = max(max(map(sum, travels)), max(map(sum, zip(*travels, strict=True))))
        self._scale = max(1.0, most / PROBE_BYTES)
        rank = group.rank()
        self._sent = [int(size / self._scale) for size in travels[rank]]
        self._received = [int(row[rank] / self._scale) for row in travels]
        self._buffers = (self._bytes(sum(self._sent)), self._bytes(sum(self._received)))
        self._rates: list[list[float]] = []
        self._seconds: list[float] = []

    def probe(self) -> None:
        """Measure every kind of product and the exchange once. Collective."""
        rates = []
        for product, operands in self._operands.items():
            dist.barrier(self._group)
            rates.append(_rate(product, operands, self._group))
        self._rates.append(rates)
        self._seconds.append(self._exchange() if self._group.size() > 1 else 0.0)

    def forget(self) -> None:
        """Drop what was measured so far: the warm-up."""
        self._rates.clear()
        self._seconds.clear()

    def result(self) -> tuple[dict[str, float], dict[str, float]]:
        """`floor_ms` with `ns`, `exchange` and `total`, and the rates behind it. Collective."""
        together = torch.tensor(self._rates, dtype=torch.float64, device=self._device)
        dist.all_reduce(together, group=self._group)
        slowest = torch.tensor(self._seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self._group)
        medians = [statistics.median(column) for column in zip(*together.tolist(), strict=True)]
        flops = [product.flops * count for product, count in self._work.items()]
        ns = sum(operations / rate for operations, rate in zip(flops, medians, strict=True))
        exchange = statistics.median(slowest.tolist()) * self._scale
        moved = max(sum(self._received), sum(self._sent)) * self._scale
        floor = {"ns": ns * 1e3, "exchange": exchange * 1e3, "total": (ns + exchange) * 1e3}
        rates = {
            "ns_gflop": sum(flops) / 1e9,
            "matmul_gflop_per_s": sum(flops) / ns / 1e9,
            "bandwidth_gb_per_s": moved / exchange / 1e9 if exchange else 0.0,
        }
        return floor, rates

    def _bytes(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def _exchange(self) -> float:
        """Seconds that the step's bytes, or the probe's share of them, take in one all-to-all."""
        send, receive = self._buffers
        dist.barrier(self._group)
        synchronize(self._device)
        start = time.perf_counter()
        dist.all_to_all_single(receive, send, self._received, self._sent, group=self._group)
        synchronize(self._device)
        return time.perf_counter() - start


def sum_bytes(block_slice: BlockSlice, iteration: Iteration) -> int:
    """Bytes that a rank receives in the sums that its team forms of a block_slice's block, each in a ring."""
    team = len(block_slice.ranks)
    sums = iteration.counts(iteration.method_for(*block_slice.of, team)).gram if team > 1 else 0
    return sums * 2 * (team - 1) * SUM_BYTES * min(block_slice.of) ** 2 // team


def _work(plan: Plan, orthogonalizer: Orthogonalizer) -> dict[Product, float]:
    """How often each batch of products runs in a step, over all ranks; batches as large as an owner's in a wave."""
    blocks: Counter[tuple[Block, int]] = Counter()  # whole blocks, and how many ranks cut them
    stacks: dict[tuple[Block, int], list[int]] = {}
    parts = [*plan.waves, *plan.whole]
    for part in parts:
        owned: dict[int, Counter[tuple[Block, int]]] = {}
        for index in part:
            for block_slice in plan.slices(index):
                shapes = (
                    plan.layout.matrices[index].blocks
                    if block_slice.block is None
                    else [block_slice.of]
                )
                kinds = [((min(shape), max(shape)), len(block_slice.ranks)) for shape in shapes]
                owned.setdefault(block_slice.rank, Counter()).update(kinds)
        for counts in owned.values():
            blocks.update(counts)
            for kind, count in counts.items():
                stacks.setdefault(kind, []).append(count)
    work: dict[Product, float] = Counter()  # type: ignore[assignment]
    for (shape, team), count in blocks.items():
        batch = statistics.median_low(stacks[shape, team])
        for product, times in products(
            shape, orthogonalizer.iteration, batch=batch, team=team
        ).items():
            work[product] += times * count / batch
    return work


def _operands(
    product: Product, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    left = (
        torch.randn(product.batch, product.m, product.k, device=device).to(dtype) / product.k**0.5
    )
    right = (
        left[:, : product.n].mT
        if product.transposed
        else torch.randn(product.batch, product.k, product.n, device=device).to(dtype)
    )
    return left, right, left.new_empty(product.batch, product.m, product.n)


def _rate(product: Product, operands: tuple[torch.Tensor, ...], group: dist.ProcessGroup) -> float:
    """FLOPs per second of this rank while all ranks are busy, from products repeated for `WINDOW_S`."""
    left, right, out = operands
    # a GPU's queue must not run dry between looks at the clock
    at_a_time = 20 if out.is_cuda else 1

    def some() -> None:
        for _ in range(at_a_time):
            torch.bmm(left, right, out=out)
        synchronize(out.device)

    _until_all_are_here(some, group)
    rate = at_a_time * product.flops * _per_second(some)
    _until_all_are_here(some, group)
    return rate


def _until_all_are_here(call: Callable[[], None], group: dist.ProcessGroup) -> None:
    """Repeat `call` until every rank does. Collective."""
    barrier = dist.barrier(group, async_op=True)
    call()
    while not barrier.is_completed():
        call()
    barrier.wait()


def _per_second(call: Callable[[], None]) -> float:
    count, start = 0, time.perf_counter()
    while True:
        call()
        count += 1
        elapsed = time.perf_counter() - start
        if elapsed >= WINDOW_S:
            return count / elapsed


def _travels(plan: Plan, orthogonalizer: Orthogonalizer) -> list[list[int]]:
    """Bytes from rank i to rank j in a step: rows to owners, update rows back, and the sums of teams, in a ring."""
    size, itemsize = plan.layout.world_size, orthogonalizer.dtype.itemsize
    travels = [[0] * size for _ in range(size)]
    for index in itertools.chain(*plan.waves):
        for block_slice in plan.slices(index):
            if len(block_slice.ranks) > 1:
                before = block_slice.ranks[block_slice.place - 1]
                travels[before][block_slice.rank] += sum_bytes(
                    block_slice, orthogonalizer.iteration
                )
    for transfers in itertools.chain(*plan.all_to_alls()):
        columns = (column.tolist() for column in transfers)
        for source, target, elements in zip(*columns, strict=True):
            travels[source][target] += elements * itemsize
    return travels
