"""What an exchange in several stages costs beside one that goes straight, over gloo, with simulated nodes, in one run.

    OMP_NUM_THREADS=1 python -m benchmarks.stages --ranks 8 16 32 --node-ranks 4 --hidden-size 64 256 512

Starts its ranks itself, as forks of one process that has imported torch. A node is `--node-ranks` ranks side by side.
The first table is the exchange of a GPT's matrices in Megatron-FSDP's buckets, rows to their owners and updates back in
bf16, without the products between; what comes back is checked. `ratio` is of times to those of the first `--stages`.
The second is one all-to-all in which each rank sends as many bytes to more or fewer peers: in groups of that many
ranks, or among all ranks with nothing for the others. Its last column is the time in groups of all cores over all
messages. Within a round all kinds run one after the other, and the slowest rank's time counts.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, override

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from benchmarks.layouts import fsdp_layout
from megatron_muon.core.cost import Iteration
from megatron_muon.core.exchange.build import OWNER, make_exchange
from megatron_muon.core.exchange.steps import PlannedExchange
from megatron_muon.core.layout import Layout
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.probe import SILENT
from megatron_muon.cpu import keep_freed_memory
from megatron_muon.patching import Patches
from megatron_muon.provenance import cores
from megatron_muon.settings import STAGES

DEVICE = torch.device("cpu")
EXCHANGE = ("ranks", "hidden size", "stages", "waves", "peers", "messages", "MB", "median ms", "ratio")
MESSAGES = ("ranks", "KiB", "peers", "in groups, ms", "among all, ms", "us of a core, a message")

IN_A_ROW = 3
"""So many all-to-alls of the second table are timed together."""


class Unchanged(Orthogonalizer):
    """Leaves matrices as they are, so that an exchange takes only what it takes itself."""

    @override
    def orthogonalize_stack(self, stack: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ones(len(stack), dtype=torch.bool)


class Rows:
    """This rank's rows of each matrix, and a look at what comes back in their place."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self._rows = {index: torch.randn(held.rows, held.cols) for index, held in enumerate(layout.held(rank))}
        self.is_checked = True
        self.finalized = 0

    def prepare(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """The rows."""
        return [self._rows[index] for index in indices]

    def finalize(self, indices: Sequence[int], updates: Sequence[torch.Tensor], finite: torch.Tensor) -> None:
        """Compare, where asked, what an exchange of `Unchanged` brings with what this rank gave."""
        self.finalized += sum(update.numel() for update in updates)
        for index, update in zip(indices, updates, strict=True) if self.is_checked else ():
            if not torch.equal(update, self._rows[index].to(update.dtype)):
                raise RuntimeError(f"matrix {index}: other rows came back than were given")

    @property
    def numel(self) -> int:
        """Elements of all rows."""
        return sum(rows.numel() for rows in self._rows.values())


def slowest(act: Callable[[], object]) -> float:
    """Seconds that the slowest rank takes, of ranks that begin together."""
    dist.barrier()
    start = time.perf_counter()
    act()
    elapsed = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


def timed(acts: Mapping[Any, Callable[[], object]], args: argparse.Namespace) -> dict[Any, list[float]]:
    """Seconds of each in every round but the first ones; all of a round run one after the other."""
    rounds = [{kind: slowest(act) for kind, act in acts.items()} for _ in range(args.warmup + args.repeat)]
    return {kind: [found[kind] for found in rounds[args.warmup :]] for kind in acts}


def messages(act: Callable[[], object]) -> int:
    """How many messages all ranks together send in `act`; in an all-to-all gloo sends one to each other rank."""
    count = 0
    with Patches() as patches:

        @patches.around(dist, "all_to_all_single")
        def counted(all_to_all: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            *_, group = args
            count += dist.get_world_size(group) - 1
            return all_to_all(*args, **kwargs)

        @patches.around(dist, "batch_isend_irecv")
        def counted_pairs(start: Callable[..., Any], of_pairs: list[dist.P2POp]) -> Any:
            nonlocal count
            count += sum(message.op is dist.isend for message in of_pairs)
            return start(of_pairs)

        act()
    total = torch.tensor(count)
    dist.all_reduce(total)
    return int(total)


def exchanges(hidden_size: int, layout: Layout, args: argparse.Namespace) -> list[list[str]]:
    """The first table's lines for one size."""
    group = dist.group.WORLD
    assert group is not None
    rows = Rows(layout, group.rank())
    made, counts, acts = {}, {}, {}
    for stages in args.stages:
        exchange = make_exchange(
            OWNER,
            layout,
            group,
            Unchanged(Iteration()),
            moment=None,
            buffer_mb=None,
            wire="bf16",
            device=DEVICE,
            team_size="1",
            stages=stages,
        )
        assert isinstance(exchange, PlannedExchange)
        made[stages], acts[stages] = exchange.plan, functools.partial(exchange.run, rows, SILENT)
        rows.is_checked, rows.finalized = True, 0
        counts[stages] = messages(acts[stages])
        if rows.finalized != rows.numel:
            raise RuntimeError(f"{rows.finalized} of {rows.numel} elements came back")
        rows.is_checked = False
    times = timed(acts, args)
    first = times[args.stages[0]]
    return [
        [
            f"{group.size()}",
            f"{hidden_size}",
            stages,
            f"{len(plan.waves)}",
            f"{plan.peers()}",
            f"{counts[stages]:,}",
            f"{max(plan.exchanged_bytes()) / 1e6:.1f}",
            f"{1e3 * statistics.median(times[stages]):.1f}",
            f"{statistics.median(mine / its for mine, its in zip(times[stages], first, strict=True)):.2f}",
        ]
        for stages, plan in made.items()
    ]


def all_to_alls(size: int, args: argparse.Namespace) -> list[list[str]]:
    """The second table's lines where each rank sends `size` bytes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    acts: dict[tuple[int, str], Callable[[], object]] = {}
    members = [2**power for power in range(1, ranks.bit_length()) if ranks % 2**power == 0]
    for each in members:
        first = rank // each * each
        near = list(range(first, first + each))
        group = dist.new_group(near, use_local_synchronization=True)
        counts = [size // (each - 1) if other in near and other != rank else 0 for other in range(ranks)]
        send, receive = torch.zeros(sum(counts), dtype=torch.uint8), torch.empty(sum(counts), dtype=torch.uint8)
        for kind, of, splits in (("groups", group, counts[first : first + each]), ("all", dist.group.WORLD, counts)):
            once = functools.partial(dist.all_to_all_single, receive, send, splits, splits, group=of)
            acts[each, kind] = functools.partial(_in_a_row, once)
    ms = {kind: 1e3 * statistics.median(times) / IN_A_ROW for kind, times in timed(acts, args).items()}
    return [
        [
            f"{ranks}",
            f"{size / 2**10:.0f}",
            f"{each - 1}",
            f"{ms[each, 'groups']:.2f}",
            f"{ms[each, 'all']:.2f}",
            f"{1e3 * ms[each, 'groups'] * cores() / ranks / (each - 1):.0f}",
        ]
        for each in members
    ]


def _in_a_row(act: Callable[[], object]) -> None:
    for _ in range(IN_A_ROW):
        act()


def measure(rank: int, folder: str, layouts: Mapping[int, Layout], args: argparse.Namespace) -> None:
    """What a rank does; the first prints the lines."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as a training does
    os.environ["LOCAL_WORLD_SIZE"] = str(args.node_ranks)  # by which ranks know their nodes
    ranks = next(iter(layouts.values())).world_size
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    for hidden_size, layout in layouts.items():
        lines = exchanges(hidden_size, layout, args)
        if rank == 0:
            show(lines)
    if rank == 0:
        print()
        heading(MESSAGES)
    for kib in args.kib:
        lines = all_to_alls(kib * 2**10, args)
        if rank == 0:
            show(lines)
    dist.destroy_process_group()


def heading(names: Sequence[str]) -> None:
    """The first lines of a table."""
    show([names, ["---"] * len(names)])


def show(lines: Sequence[Sequence[str]]) -> None:
    """Lines of a table as Markdown."""
    for line in lines:
        print(f"| {' | '.join(line)} |", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure with each number of ranks in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--node-ranks", type=int, default=4, help="ranks of a simulated node")
    parser.add_argument("--stages", choices=STAGES, nargs="+", default=["1", "2"])
    parser.add_argument("--hidden-size", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--num-layers", type=int, default=16)
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 1024], help="sent by a rank in the second table")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    args = parser.parse_args(argv)
    for ranks in args.ranks:
        if args.node_ranks < 2 or ranks % args.node_ranks or ranks == args.node_ranks:
            parser.error(
                f"--ranks {ranks} --node-ranks {args.node_ranks}: two nodes or more are needed, of two ranks or more "
                "each; make --ranks a multiple of --node-ranks"
            )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    print(f"{cores()} cores, nodes of {args.node_ranks} ranks, {args.num_layers} layers")
    for ranks in args.ranks:
        layouts = {hidden_size: fsdp_layout(ranks, hidden_size, args.num_layers) for hidden_size in args.hidden_size}
        print()
        heading(EXCHANGE)
        with tempfile.TemporaryDirectory(prefix="stages-") as folder:
            start_processes(measure, (folder, layouts, args), ranks, start_method="fork")


if __name__ == "__main__":
    main()
