"""What a rank takes to build its Muon for many matrices on many ranks: seconds and memory, by stage, in one process.

    OMP_NUM_THREADS=1 python -m benchmarks.construction --ranks 4096 --layers 24 --experts 512

The process is one rank of torch's fake process group. A mixture of experts without expert
parallelism, the largest group there is, lies in Megatron-FSDP's own buckets, on the meta device;
or, with `dtensor`, every matrix is cut over all ranks, as by `fully_shard` of FSDP2. Layout, its
check against other ranks, plan and routes are those of a run, with the collectives of the fake
group. Each stage runs twice: for its seconds, which are the processor's and do not depend on what
else runs, and under tracemalloc, for the most that its Python and numpy objects take and what is
left of them.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffers
from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import FSDPDistributedIndex
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_muon.core.assignment import TeamRules
from megatron_muon.core.build import exchange_by
from megatron_muon.core.cost import Iteration
from megatron_muon.core.exchange import OWNER, Buffers, Exchange
from megatron_muon.core.layout import Layout, Matrix
from megatron_muon.core.memory import Memory
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.plan import Plan, make_plan
from megatron_muon.fsdp.buckets import BufferCut
from megatron_muon.fsdp.cuts import check_alike, placed_shards
from megatron_muon.fsdp.views import View

HIDDEN, EXPERT, SHARED, LATENT = 2048, 512, 1024, 512
DENSE = {
    "q_proj": (HIDDEN, HIDDEN),
    "kv_down_proj": (LATENT, HIDDEN),
    "kv_up_proj": (2 * HIDDEN, LATENT),
    "proj": (HIDDEN, HIDDEN),
    "shared_experts.fc1": (2 * SHARED, HIDDEN),
    "shared_experts.fc2": (HIDDEN, SHARED),
}


def layer(experts: int) -> nn.Module:
    """The matrices of a layer, on the meta device: dense ones, router, experts."""
    module = nn.Module()
    shapes = {**DENSE, "router": (experts, HIDDEN)}
    for number in range(experts):
        shapes |= {
            f"experts.fc1.{number}": (2 * EXPERT, HIDDEN),
            f"experts.fc2.{number}": (HIDDEN, EXPERT),
        }
    for name, shape in shapes.items():
        module.register_parameter(
            name.replace(".", "_"), nn.Parameter(torch.empty(shape, device="meta"))
        )
    return module


def megatron_fsdp(modules: list[nn.Module]) -> Any:
    """What Megatron-FSDP notes about these layers, each a unit of it, before it allocates a byte."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    ddp_config = SimpleNamespace(data_parallel_sharding_strategy="optim_grads_params")
    policy = buffers.BucketingPolicy(None, [], ddp_config.data_parallel_sharding_strategy)
    groups = [
        group
        for module in modules
        for group in buffers._get_parameter_groups(module, policy, {})[0]
    ]
    for number, group in enumerate(groups):
        group.main_weight_buffer = buffers.DataParallelBuffer(
            ddp_config,
            group.params,
            is_data_distributed=True,
            bucket_id=number,
            data_parallel_group=mesh.get_group("dp"),
            chunk_size_factor=group.chunk_size_factor,
        )
    return SimpleNamespace(
        ddp_config=ddp_config,
        parameter_groups=groups,
        param_to_param_group={
            p: number for number, group in enumerate(groups) for p in group.params
        },
        dist_index=FSDPDistributedIndex(device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp"),
    )


@dataclass
class Table:
    """The stages so far: seconds in all, MiB that they have left, the most MiB at a time."""

    seconds: float = 0.0
    kept: float = 0.0
    peak: float = 0.0

    def measure[T](self, name: str, act: Callable[[], T]) -> T:
        """What `act` returns; prints what it takes."""
        gc.collect()
        start = time.process_time()
        result = act()
        elapsed = time.process_time() - start
        del result
        gc.collect()
        tracemalloc.start()
        result = act()
        kept, peak = (size / 2**20 for size in tracemalloc.get_traced_memory())
        tracemalloc.stop()
        self.line(name, elapsed, peak, kept)
        self.peak = max(self.peak, self.kept + peak)
        self.seconds, self.kept = self.seconds + elapsed, self.kept + kept
        return result

    @staticmethod
    def line(name: str, *figures: float) -> None:
        """Print one line of the table."""
        print(f"{name:<20}{figures[0]:>9.2f}{figures[1]:>11,.0f}{figures[2]:>11,.0f}", flush=True)


def main() -> None:
    """Build it all as one rank would, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=512)
    parser.add_argument("cut", nargs="?", choices=["megatron", "dtensor"], default="megatron")
    args = parser.parse_args()
    rank = args.ranks // 4
    dist.init_process_group("fake", rank=rank, world_size=args.ranks, store=FakeStore())
    group, device = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    modules = [layer(args.experts) for _ in range(args.layers)]
    parameters = {
        f"layers.{n}.{name}": p
        for n, module in enumerate(modules)
        for name, p in module.named_parameters()
    }
    orthogonalizer = Orthogonalizer(Iteration())
    if args.cut == "megatron":
        for parameter in parameters.values():
            parameter.orig_param = parameter  # type: ignore[attr-defined]  # as of the optimizer's parameters
        buffer = megatron_fsdp(modules)

    def layout() -> Layout:
        alike: dict[Any, Any] = {}
        matrices = []
        of_buffer = BufferCut(buffer, group) if args.cut == "megatron" else None
        for name, parameter in parameters.items():
            shape = parameter.shape[0], parameter.shape[1]
            if of_buffer is not None:
                shards = of_buffer.shards(parameter, shape)
            else:
                if shape not in alike:
                    alike[shape] = placed_shards(View(shape), np.arange(args.ranks), [Shard(0)])[0]
                shards = alike[shape]
            matrices.append(Matrix(name, shape, shards))
        return Layout(args.ranks, tuple(matrices))

    def checked(layout: Layout) -> None:
        held = layout.held(rank)
        rectangles = [(shard.row_start, shard.rows, shard.col_start, shard.cols) for shard in held]
        check_alike(layout, rectangles, group, remedy="")

    def plan(layout: Layout) -> Plan:
        costs = [orthogonalizer.flops(matrix) for matrix in layout.matrices]
        rules = TeamRules(
            orthogonalizer.iteration.cost, [rank // 8 for rank in range(layout.world_size)]
        )
        made = make_plan(layout, costs, memory=Memory(2, orthogonalizer.iteration), rules=rules)
        made.digest()
        return made

    def routes(plan: Plan) -> Exchange:
        return exchange_by(
            OWNER,
            plan.layout,
            group,
            orthogonalizer,
            Buffers(device),
            wire_dtype=torch.bfloat16,
            plan=plan,
        )

    table = Table()
    print(f"{'stage':<20}{'seconds':>9}{'peak MiB':>11}{'kept MiB':>11}")
    made = table.measure("layout", layout)
    table.measure("check over ranks", lambda: checked(made))
    planned = table.measure("plan", lambda: plan(made))
    table.measure("routes", lambda: routes(planned))
    table.line("all", table.seconds, table.peak, table.kept)
    shards = sum(len(matrix.shards) for matrix in made.matrices)
    told = pickle.dumps(
        [(shard.row_start, shard.rows, shard.col_start, shard.cols) for shard in made.held(rank)]
    )
    tracemalloc.start()
    objects = pickle.loads(told)
    gathered = [
        args.ranks * size / 2**30 for size in (len(told), tracemalloc.get_traced_memory()[0])
    ]
    assert len(objects) == len(parameters)
    print(
        f"{len(parameters):,} matrices in {shards:,} shards on {args.ranks:,} ranks, as rank"
        f" {rank}; {len(planned.waves)} waves, load {planned.imbalance:.2f} times the mean\nwere"
        f" every rank to send its rectangles: {gathered[0]:,.1f} GiB of pickles, {gathered[1]:,.1f}"
        " GiB of objects"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
