"""The ranks of `python -m benchmarks.step`: times optimizer steps on the same shards and gradients.

Run under torchrun as `python -m benchmarks.step_ranks SPEC OUTPUT`, SPEC being a `StepSpec` as
JSON; the first rank writes the figures to OUTPUT. Works on CPU over gloo and on CUDA over NCCL.
Within a repeat the methods run one after the other, so that a machine that slows down slows all of
them; a step's time is that of the slowest rank.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.floor import Floor, sum_bytes
from benchmarks.memory import peak_extra_bytes
from benchmarks.methods import Peer, Problem, exchange_of, make_optimizer, make_peer, make_problem
from benchmarks.offload import DiskProbe, momentum_figures
from benchmarks.step import StepSpec
from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.core.plan import Plan
from megatron_muon.core.probe import PHASES, PhaseTimer, synchronize
from megatron_muon.cpu import keep_freed_memory
from megatron_muon.errors import UserError, end_alone
from megatron_muon.megatron.run_device import refuse_unusable_gpu
from megatron_muon.offload.run import OffloadRun
from megatron_muon.offload.store import RecordStore
from megatron_muon.patching import Patches

type Steps = torch.optim.Optimizer | Peer
"""What has a step to be timed."""

PROFILED_STEPS = 3


def measure(spec: StepSpec, group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """All figures of a run; the same on every rank. Collective."""
    problem = make_problem(spec, group, device)
    optimizers: dict[str, Steps] = {
        method: make_optimizer(method, problem) for method in spec.methods
    }
    for size in spec.team_size:
        optimizers[f"team-{size}"] = make_optimizer("owner", problem, team_size=size)
    optimizers |= {
        variant: make_optimizer("owner", problem, variant=variant) for variant in spec.variants
    }
    optimizers |= {peer: make_peer(peer, problem) for peer in spec.peers}
    runs = {
        f"owner+{offload}": OffloadRun(
            offload,
            spec.momentum_dtype,
            directory=spec.offload_dir if offload == "nvme" else None,
            buffer_mb=spec.offload_buffer_mb,
        )
        for offload in spec.offload
    }
    optimizers |= {method: make_optimizer(method, problem, run=run) for method, run in runs.items()}
    disk = DiskProbe(Path(spec.offload_dir), group) if spec.offload_dir else None
    owner = exchange_of("owner", problem)
    assert owner.plan is not None
    floor = Floor(owner.plan, problem.orthogonalizer, group, device)
    for _ in range(max(spec.warmup, 1)):  # the first step allocates state and buffers
        for optimizer in optimizers.values():
            _timed(optimizer, problem)
        floor.probe()
    floor.forget()

    seconds: dict[str, list[float]] = {method: [] for method in optimizers}
    for repeat in range(spec.repeat):
        for method, optimizer in optimizers.items():
            seconds[method].append(_timed(optimizer, problem))
        floor.probe()
        if disk is not None:
            disk.probe()
        if group.rank() == 0:
            latest = ", ".join(
                f"{method} {times[-1] * 1e3:,.0f} ms" for method, times in seconds.items()
            )
            print(f"repeat {repeat + 1} of {spec.repeat}: {latest}", flush=True)

    floor_ms, rates = floor.result()
    results = {}
    for method, optimizer in optimizers.items():
        slowest = _over_ranks(seconds[method], dist.ReduceOp.MAX, problem)
        results[method] = {
            "median_ms": statistics.median(slowest) * 1e3,
            "min_ms": min(slowest) * 1e3,
            "times_ms": [second * 1e3 for second in slowest],
            **_profile(method, optimizer, problem, min(spec.repeat, PROFILED_STEPS)),
        }
        if isinstance(optimizer, ShardedMuon) and optimizer.exchange.plan is not None:
            results[method]["plan"] = _plan_figures(optimizer.exchange.plan, problem)
        if isinstance(optimizer, ShardedMuon) and isinstance(optimizer.store, RecordStore):
            results[method] |= momentum_figures(optimizer.store, group, device)
    for run in runs.values():
        run.close()
    on_disk = results.get("owner+nvme", {}).get("momentum_bytes_all_ranks", {}).get("disk")
    return {
        "floor_ms": floor_ms,
        "rates": rates,
        "methods": results,
        **({"disk": disk.result(on_disk)} if disk is not None else {}),
        "plan": _plan_figures(owner.plan, problem),
        "parameters": sum(matrix.numel for matrix in problem.layout.matrices),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads_per_rank": torch.get_num_threads(),
    }


def _plan_figures(plan: Plan, problem: Problem) -> dict[str, Any]:
    sizes = Counter(len(team.ranks) for team in plan.teams)
    return {
        "load_max_over_mean": plan.imbalance,
        "matrices_of_teams": {size: count for size, count in sorted(sizes.items()) if size > 1},
        "waves": len(plan.waves),
        "buffer_mb": plan.buffer_bytes / 2**20,
    }


def _timed(optimizer: Steps, problem: Problem) -> float:
    """Seconds of one step on this rank, from a barrier on."""
    if isinstance(optimizer, Peer):
        optimizer.prepare()
    synchronize(problem.device)
    dist.barrier(problem.group)
    start = time.perf_counter()
    optimizer.step()
    synchronize(problem.device)
    elapsed = time.perf_counter() - start
    dist.barrier(problem.group)
    return elapsed


def _profile(method: str, optimizer: Steps, problem: Problem, steps: int) -> dict[str, Any]:
    """Phases, bytes and memory of a method, from steps that are not timed otherwise. Collective.

    Phases are means over ranks of each rank's mean, so that they add up to the profiled step.

    Raises:
        RuntimeError: the bytes counted at the collectives are not those that the plan promises.
    """
    timer = PhaseTimer(problem.device)
    patches = optimizer.attach(timer) if isinstance(optimizer, Peer) else Patches()
    if isinstance(optimizer, ShardedMuon):
        patches.replace(optimizer, "probe", timer)
    seconds = [_timed(optimizer, problem) for _ in range(steps)]
    patches.undo()
    total = sum(seconds) / steps
    if method == "adam":
        timer.seconds["apply"] = total * steps  # type: ignore[assignment]  # a Counter of floats
    mine = [timer.seconds[phase] / steps for phase in PHASES[:-1]]
    mine.append(total - sum(mine))
    ranks = problem.group.size()
    phases = [value / ranks * 1e3 for value in _over_ranks(mine, dist.ReduceOp.SUM, problem)]

    counted = timer.bytes_received // steps
    if isinstance(optimizer, Peer):
        planned = counted
        optimizer.prepare()
    else:
        planned = _received_bytes(method, optimizer, problem)
    dist.barrier(problem.group)
    peak = peak_extra_bytes(optimizer.step, problem.device)
    wrong, planned_max, counted_max, peak_max = _over_ranks(
        [float(counted != planned), planned, counted, peak], dist.ReduceOp.MAX, problem
    )
    if wrong:
        raise RuntimeError(
            f"{method}: the plan says that rank {problem.group.rank()} receives {planned:,} bytes"
            f" in a step, its collectives carried {counted:,}"
        )
    return {
        "phases_ms": {name: value for name, value in zip(PHASES, phases, strict=True) if value},
        "exchange_bytes_per_rank": int(planned_max),
        "exchange_bytes_counted_per_rank": int(counted_max),
        "peak_extra_bytes": int(peak_max),
        **(
            {"ns_dtype": str(optimizer.ns_dtype).removeprefix("torch.")}
            if isinstance(optimizer, Peer)
            else {}
        ),
    }


def _received_bytes(method: str, optimizer: torch.optim.Optimizer, problem: Problem) -> int:
    """Bytes that this rank receives in a step, by arithmetic on the plan or the layout.

    The all-gather scheme pads every shard to the largest, and gathers fp32.
    """
    rank, ranks, orthogonalizer = problem.group.rank(), problem.group.size(), problem.orthogonalizer
    if isinstance(optimizer, ShardedMuon) and optimizer.exchange.plan is not None:
        plan = optimizer.exchange.plan
        slices = (
            block_slice for index in range(len(plan.teams)) for block_slice in plan.slices(index)
        )
        sums = sum(
            sum_bytes(block_slice, orthogonalizer.iteration)
            for block_slice in slices
            if block_slice.rank == rank
        )
        return plan.exchanged_bytes()[rank] + sums
    if method.startswith("allgather"):
        padded = sum(
            max(shard.numel for shard in matrix.shards) for matrix in problem.layout.matrices
        )
        return (ranks - 1) * padded * torch.float32.itemsize
    return 0


def _over_ranks(values: Sequence[float], operation: Any, problem: Problem) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=problem.device)
    dist.all_reduce(tensor, op=operation, group=problem.group)
    return tensor.tolist()


def settle_device(wanted: str, ranks: int) -> torch.device:
    """The device of this rank.

    Raises:
        UserError: CUDA is not there or cannot be used, or there are fewer GPUs than ranks.
    """
    refuse_unusable_gpu(wanted)
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if torch.cuda.device_count() < ranks:
        raise UserError(
            f"--ranks {ranks} needs as many GPUs, this machine has {torch.cuda.device_count()}; "
            "lower --ranks, or use --device cpu"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def main(argv: Sequence[str]) -> int:
    """Measure as the specification in `argv[0]` says, and write `argv[1]`."""
    spec = StepSpec(**json.loads(argv[0]))
    try:
        device = settle_device(spec.device, spec.ranks)
        if spec.peers and device.type != "cpu":
            raise UserError(
                f"--peers {' '.join(spec.peers)}: measured on CPU alone; add --device cpu"
            )
    except UserError as error:
        print(f"benchmarks.step: error: {error}", file=sys.stderr)
        return 2
    if device.type == "cpu":
        keep_freed_memory()  # as a training does
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        device_id=device if device.type == "cuda" else None,
    )
    try:
        group = dist.group.WORLD
        assert group is not None
        results = measure(spec, group, device)
        if group.rank() == 0:
            Path(argv[1]).write_text(json.dumps(results), "utf-8")
        dist.barrier(group)
    except Exception:
        end_alone(1)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
