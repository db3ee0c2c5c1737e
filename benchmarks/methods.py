"""What `python -m benchmarks.step` steps: the same shards and gradients for every method, and the optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.fsdp2 import Fsdp2Muon
from benchmarks.layouts import gpt_layout, layout_of
from benchmarks.peers import NS_METHODS, DeepSpeedMuon, UpstreamOrthogonalizer
from benchmarks.step import StepSpec
from megatron_muon.core.build import exchange_by, make_exchange
from megatron_muon.core.cost import AUTO, Iteration
from megatron_muon.core.exchange import GATHERED, OWNER, Buffers, Exchange
from megatron_muon.core.layout import Layout
from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.rules import chosen_rules, make_rules
from megatron_muon.core.rules.rule import Held
from megatron_muon.offload.run import OffloadRun

Peer = DeepSpeedMuon | Fsdp2Muon

LR, MOMENTUM, WEIGHT_DECAY = 0.02, 0.95, 0.1


@dataclass(frozen=True)
class Problem:
    """What every method works on: matrices, rows cut evenly over the ranks.

    `weights` and `gradients` are this rank's rows of each matrix, fp32; no method changes them.
    `buffer_mb` is what the owner scheme's step may take.
    """

    layout: Layout
    weights: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor, ...]
    orthogonalizer: Orthogonalizer
    buffer_mb: float | None
    group: dist.ProcessGroup
    device: torch.device


def make_problem(spec: StepSpec, group: dist.ProcessGroup, device: torch.device) -> Problem:
    """Weights and gradients from a seed for each matrix: whole matrices are the same for any number of ranks."""
    if spec.matrices:
        layout = layout_of(group.size(), spec.matrices)
    else:
        assert spec.hidden_size is not None
        assert spec.num_layers is not None
        layout = gpt_layout(group.size(), spec.hidden_size, spec.num_layers)
    iteration = Iteration(precision="medium" if spec.ns_dtype == "bf16" else "highest")
    orthogonalizer = Orthogonalizer(iteration, device=device)
    parts = []
    for index, matrix in enumerate(layout.matrices):
        shard = matrix.shard_of(group.rank())
        rows = slice(shard.row_start, shard.row_start + shard.rows) if shard else slice(0)
        parts.append([full[rows].clone() for full in _whole_matrices(index, matrix.shape, device)])
    weights, gradients = zip(*parts, strict=True)
    return Problem(layout, weights, gradients, orthogonalizer, spec.buffer_mb, group, device)


def _whole_matrices(
    index: int, shape: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and gradient of the matrix with this index, `(rows, cols)`, fp32."""
    generator = torch.Generator(device).manual_seed(index)
    weight, gradient = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
    return weight.mul_(0.02), gradient.mul_(1e-3)


def make_peer(peer: str, problem: Problem) -> Peer:
    """Another implementation, on the same matrices and gradients. Collective."""
    weights, gradients = zip(
        *(
            _whole_matrices(i, m.shape, problem.device)
            for i, m in enumerate(problem.layout.matrices)
        ),
        strict=True,
    )
    if peer == "muon-fsdp2":
        return Fsdp2Muon(
            weights, problem.gradients, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
        )
    return DeepSpeedMuon(
        weights,
        gradients,
        ns_method=NS_METHODS[peer],
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
    )


def make_optimizer(
    method: str,
    problem: Problem,
    *,
    team_size: str = AUTO,
    run: OffloadRun | None = None,
    variant: str = "",
) -> torch.optim.Optimizer:
    """The optimizer of a method, on its own copy of the weights and with the gradients in place. Collective.

    Momentum is its state, or kept by `run`. A `variant` of Muon is "cautious" or "hyperball", which
    overwrites gradients and so has its own.
    """
    parameters = [torch.nn.Parameter(weight.clone()) for weight in problem.weights]
    for parameter, gradient in zip(parameters, problem.gradients, strict=True):
        parameter.grad = gradient.clone() if variant == "hyperball" else gradient
    if method == "adam":
        return _megatron_adam(parameters)
    matrices = problem.layout.matrices
    store = None
    if run is not None:
        store = run.make_store(problem.layout, problem.group.rank(), problem.device)
    held = Held(problem.layout, problem.group, problem.device, [1] * len(matrices))
    names = chosen_rules(cautious=variant == "cautious", hyperball=variant == "hyperball")
    decay = 0.0 if variant == "hyperball" else WEIGHT_DECAY
    return ShardedMuon(
        [{"params": parameters}],
        exchange_of(method, problem, team_size),
        make_rules(names, held, {"nesterov": True}),
        defaults={"lr": LR, "momentum": MOMENTUM, "weight_decay": decay},
        names={
            parameter: matrix.name for parameter, matrix in zip(parameters, matrices, strict=True)
        },
        store=store,
    )


def exchange_of(method: str, problem: Problem, team_size: str = AUTO) -> Exchange:
    """The exchange of a method; "allgather" is upstream's, with upstream's iteration. Collective."""
    layout, group, orthogonalizer, device = (
        problem.layout,
        problem.group,
        problem.orthogonalizer,
        problem.device,
    )
    if method == "allgather":
        upstream = UpstreamOrthogonalizer(
            orthogonalizer.iteration,
            orthogonalizer.scale_mode,
            orthogonalizer.extra_scale_factor,
            device=device,
        )
        return exchange_by(GATHERED, layout, group, upstream, Buffers(device))
    return make_exchange(
        GATHERED if method == "allgather-tuned" else OWNER,
        layout,
        group,
        orthogonalizer,
        Buffers(device),
        buffer_mb=problem.buffer_mb,
        wire=AUTO,
        team_size=team_size,
    )


def _megatron_adam(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """The Adam that megatron-core takes: transformer-engine's where it is installed and CUDA is there, else torch's.

    Source: megatron/core/optimizer/__init__.py, which passes torch's AdamW neither `foreach` nor
    `fused`.
    """
    settings: dict[str, Any] = {
        "lr": 1e-3,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": WEIGHT_DECAY,
    }
    if torch.cuda.is_available():
        try:
            from transformer_engine.pytorch.optimizers import FusedAdam
        except ImportError:
            pass
        else:
            return FusedAdam(parameters, **settings)  # type: ignore[no-any-return]
    return torch.optim.AdamW(parameters, **settings)
