"""The ranks of `python -m benchmarks.step`: times optimizer steps on the same shards and gradients.

Run under torchrun as `python -m benchmarks.step_ranks SPEC OUTPUT`, SPEC being the arguments of
`benchmarks.step` as JSON; the first rank writes the figures to OUTPUT. Runs on CPU over gloo and on
CUDA over NCCL. Within a repeat the methods run one after the other, so that a machine that slows
down slows all of them.
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
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.layouts import gpt_layout, layout_of
from benchmarks.memory import peak_extra_bytes
from benchmarks.peers import DeepSpeedMuon, UpstreamNewtonSchulz
from megatron_muon.core.build import GATHERED, OWNER, StepOptions, make_waves
from megatron_muon.core.cost import AUTO, Iteration
from megatron_muon.core.layout import Matrix
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.core.passes import BY_RULE, DECOUPLED
from megatron_muon.core.probe import PHASES
from megatron_muon.core.rules import RULES, make_rules
from megatron_muon.core.rules.held import Held
from megatron_muon.cpu import keep_freed_memory
from megatron_muon.errors import UserError, end_alone
from megatron_muon.fsdp.part import Part, view_parameters
from megatron_muon.matrices.views import Matrices, View
from megatron_muon.megatron.run_device import refuse_unusable_gpu
from megatron_muon.megatron.sharded_muon import ShardedMuon
from megatron_muon.metrics import PhaseTimer, synchronize
from megatron_muon.patching import Patches

type Steps = torch.optim.Optimizer | DeepSpeedMuon

LR, MOMENTUM, WEIGHT_DECAY = 0.02, 0.95, 0.1
PROFILED_STEPS = 3


class Bench:
    """The matrices that every method steps on, rows cut evenly over the ranks, fp32.

    Weights and gradients come from a seed for each matrix: whole matrices are the same for any
    number of ranks.
    """

    def __init__(self, spec: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        self.spec = spec
        self.group = group
        self.device = device
        ranks = group.size()
        if spec.matrices:
            self.layout = layout_of(ranks, spec.matrices)
        else:
            self.layout = gpt_layout(ranks, spec.hidden_size, spec.num_layers)
        rectangles = [shard.rectangle for shard in self.layout.held(group.rank())]
        self.held = Held(self.layout, group, device, rectangles)
        precision = "medium" if spec.ns_dtype == "bf16" else "highest"
        self.iteration = Iteration(precision=precision)
        self.whole = [self._values(at, one) for at, one in enumerate(self.layout.matrices)]
        self.gradients = [gradient for _, gradient in self._own_rows()]

    def _values(self, seed: int, matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and gradient of a whole matrix, `(rows, cols)`."""
        generator = torch.Generator(self.device).manual_seed(seed)
        both = torch.randn(2, *matrix.shape, generator=generator, device=self.device)
        return 0.02 * both[0], 1e-3 * both[1]

    def _own_rows(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of this rank's rows of each weight and gradient."""
        found = []
        for matrix, (weight, gradient) in zip(self.layout.matrices, self.whole, strict=True):
            shard = matrix.held_by(self.group.rank())
            rows = slice(shard.row_start, shard.row_start + shard.rows)
            found.append((weight[rows].clone(), gradient[rows].clone()))
        return found

    def optimizer(self, method: str) -> Steps:
        """The optimizer of a method, on its own copy of the weights. Collective."""
        spec = self.spec
        if method in spec.peers:
            weights, gradients = zip(*self.whole, strict=True)
            return DeepSpeedMuon(weights, gradients, LR, MOMENTUM, WEIGHT_DECAY)
        parameters = []
        for weight, gradient in self._own_rows():
            parameter = torch.nn.Parameter(weight)
            parameter.grad = gradient
            parameters.append(parameter)
        if method == "adam":
            return megatron_adam(parameters)
        decay = 0.0 if method == "hyperball" else WEIGHT_DECAY
        defaults = {"lr": LR, "momentum": MOMENTUM, "weight_decay": decay}
        return ShardedMuon([{"params": parameters}], self.part(parameters, method), defaults)

    def part(self, parameters: Sequence[torch.Tensor], method: str) -> Part:
        """The matrices of a method. Collective.

        "allgather" has upstream's exchange and iteration, others those of training.
        """
        spec = self.spec
        options = StepOptions(
            self.device,
            buffer_mb=spec.buffer_mb,
            team_size=method.removeprefix("team-") if method.startswith("team-") else AUTO,
        )
        gathers = method == "allgather"
        iteration = UpstreamNewtonSchulz if gathers else NewtonSchulz
        rules = make_rules([method] if method in RULES else [], self.held, {})
        waves = make_waves(
            GATHERED if gathers else OWNER,
            self.layout,
            self.group,
            iteration(self.iteration, device=self.device),
            options,
            rules,
        )
        read = {}
        for one, matrix in zip(parameters, self.layout.matrices, strict=True):
            read[one] = Matrices(name=matrix.name, view=View(matrix.shape))
        viewed = view_parameters(read, self.held.rectangles)
        decay = BY_RULE if method == "cautious" else DECOUPLED
        return Part(viewed, waves, rules, {"decay": decay})

    def seconds(self, optimizer: Steps) -> float:
        """Seconds of one step on this rank, from a barrier on."""
        if isinstance(optimizer, DeepSpeedMuon):
            optimizer.prepare()
        else:
            self._restore_gradients(optimizer)
        synchronize(self.device)
        dist.barrier(self.group)
        start = time.perf_counter()
        optimizer.step()
        synchronize(self.device)
        elapsed = time.perf_counter() - start
        dist.barrier(self.group)
        return elapsed

    def _restore_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Hyperball overwrites gradients."""
        parameters = optimizer.param_groups[0]["params"]
        for parameter, gradient in zip(parameters, self.gradients, strict=True):
            parameter.grad.copy_(gradient)

    def over_ranks(self, values: Sequence[float], operation: Any) -> list[float]:
        """Values reduced over the ranks. Collective."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=operation, group=self.group)
        return tensor.tolist()


def megatron_adam(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Transformer Engine's Adam if it is installed and CUDA is available, else torch's.

    Source: megatron/core/optimizer/__init__.py, which passes torch's AdamW neither `foreach` nor
    `fused`.
    """
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": WEIGHT_DECAY}
    if torch.cuda.is_available():
        try:
            from transformer_engine.pytorch.optimizers import FusedAdam
        except ImportError:
            pass
        else:
            return FusedAdam(parameters, **settings)  # type: ignore[no-any-return]
    return torch.optim.AdamW(parameters, **settings)


def measure(bench: Bench) -> dict[str, Any]:
    """All figures of a run; the same on every rank. Collective."""
    spec = bench.spec
    teams = [f"team-{size}" for size in spec.team_size]
    methods = dict.fromkeys((*spec.methods, *teams, *spec.variants, *spec.peers))
    optimizers = {method: bench.optimizer(method) for method in methods}
    for _ in range(spec.warmup):  # the first step allocates state and buffers
        for optimizer in optimizers.values():
            bench.seconds(optimizer)
    seconds: dict[str, list[float]] = {method: [] for method in optimizers}
    for _ in range(spec.repeat):
        for method, optimizer in optimizers.items():
            seconds[method].append(bench.seconds(optimizer))
    results = {}
    for method, optimizer in optimizers.items():
        slowest = bench.over_ranks(seconds[method], dist.ReduceOp.MAX)
        times = [second * 1e3 for second in slowest]
        figures = {"median_ms": statistics.median(times), "min_ms": min(times), "times_ms": times}
        results[method] = figures | profile(bench, optimizer) | teams_of(optimizer)
    cuda = bench.device.type == "cuda"
    return {
        "methods": results,
        "parameters": sum(matrix.numel for matrix in bench.layout.matrices),
        "device": torch.cuda.get_device_name(bench.device) if cuda else "cpu",
        "threads_per_rank": torch.get_num_threads(),
    }


def profile(bench: Bench, optimizer: Steps) -> dict[str, Any]:
    """Phases, received bytes and memory of a method, from steps that are not timed otherwise.

    Phases are means over ranks of each rank's mean; they add up to the profiled step. Phases and
    bytes are known of this package's schemes only. Collective.
    """
    timer = PhaseTimer(bench.device)
    patches = Patches()
    if isinstance(optimizer, ShardedMuon):
        patches.replace(optimizer.part, "probe", timer)
    total = sum(bench.seconds(optimizer) for _ in range(PROFILED_STEPS))
    patches.undo()
    mine: list[float] = [timer.seconds[phase] for phase in PHASES[:-1]]
    mine.append(total - sum(mine))  # other
    summed = bench.over_ranks(mine, dist.ReduceOp.SUM)
    steps = PROFILED_STEPS * bench.group.size()
    phases = {name: 1e3 * value / steps for name, value in zip(PHASES, summed, strict=True)}
    if isinstance(optimizer, DeepSpeedMuon):
        optimizer.prepare()
    dist.barrier(bench.group)
    peak = peak_extra_bytes(optimizer.step, bench.device)
    received = timer.bytes_received // PROFILED_STEPS
    received_max, peak_max = bench.over_ranks([received, peak], dist.ReduceOp.MAX)
    return {
        "phases_ms": {name: value for name, value in phases.items() if value},
        "received_bytes": int(received_max),
        "peak_extra_bytes": int(peak_max),
    }


def teams_of(optimizer: Steps) -> dict[str, Any]:
    """How many matrices teams own, by the size of the team."""
    plan = optimizer.part.waves.plan if isinstance(optimizer, ShardedMuon) else None
    if plan is None:
        return {}
    sizes = Counter(len(team.ranks) for team in plan.teams)
    return {"matrices_of_teams": {size: count for size, count in sizes.items() if size > 1}}


def settle_device(wanted: str, ranks: int) -> torch.device:
    """The device of this rank.

    Raises:
        UserError: CUDA is unavailable or cannot be used, or there are fewer GPUs than ranks.
    """
    refuse_unusable_gpu(wanted)
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count < ranks:
        text = f"--ranks {ranks} needs as many GPUs, and torch finds {count}"
        raise UserError(f"{text}; lower --ranks, or use --device cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def main(argv: Sequence[str]) -> int:
    """Measures as the specification in `argv[0]` says, and writes `argv[1]`."""
    spec = SimpleNamespace(**json.loads(argv[0]))
    try:
        device = settle_device(spec.device, spec.ranks)
        if spec.peers and device.type != "cpu":
            raise UserError("--peers: measured on CPU only; add --device cpu")
    except UserError as error:
        print(f"benchmarks.step: error: {error}", file=sys.stderr)
        return 2
    if device.type == "cpu":
        keep_freed_memory()  # as a training does
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("nccl", device_id=device)
    try:
        group = dist.group.WORLD
        assert group is not None
        results = measure(Bench(spec, group, device))
        if group.rank() == 0:
            Path(argv[1]).write_text(json.dumps(results), "utf-8")
        dist.barrier(group)
    except Exception:
        end_alone(1)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
