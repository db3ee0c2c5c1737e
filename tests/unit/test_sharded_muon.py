"""The sharded Muon on plain tensors, with exchanges that need no process group."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon

import megatron_muon
from megatron_muon.core.cost import Iteration
from megatron_muon.core.exchange import LOCAL, Buffers, Exchange, RowPhases
from megatron_muon.core.layout import Layout, row_sharded
from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.probe import Probe
from megatron_muon.core.route import make_route
from megatron_muon.core.rules import chosen_rules, make_rules
from megatron_muon.core.rules.rule import Held
from megatron_muon.core.slices import Team

CPU = torch.device("cpu")
SHAPES = [(9, 4), (4, 9), (5, 5)]
SETTINGS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}


class WholeMatrices(Exchange):
    """An exchange for one rank: what it holds is the matrix. What it holds nothing of lies on
    another rank.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.runs = 0
        self.orthogonalize = Orthogonalizer(Iteration(precision="highest"))
        shapes = [
            (
                parameter.shape[:-1].numel(),
                parameter.shape[-1],
            )
            for parameter in parameters
        ]
        matrices = []
        for number, (rows, cols) in enumerate(shapes):
            held = [rows, 0] if rows else [0, 1]
            matrices.append(row_sharded(f"w{number}", (sum(held), cols), held))
        layout = Layout(2, tuple(matrices))
        held = [index for index, (rows, _) in enumerate(shapes) if rows]
        teams = [Team((0,), (1.0,))] * len(shapes)
        route = make_route(layout, held, teams, 0, self.orthogonalize.scale)
        group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
        super().__init__(
            LOCAL, layout, group, self.orthogonalize, Buffers(CPU), routes=[], local=[route]
        )

    def run(self, rows: RowPhases, probe: Probe) -> None:
        self.runs += 1
        super().run(rows, probe)


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def sharded(params: Any, **changes: Any) -> ShardedMuon:
    tensors = [p for g in params for p in g["params"]] if isinstance(params[0], dict) else params
    names = {p: f"matrix{index}" for index, p in enumerate(tensors)}
    settings = {**SETTINGS, **changes}
    defaults = {name: settings.pop(name) for name in ("lr", "momentum", "weight_decay")}
    nesterov, skip = settings.pop("nesterov"), settings.pop("skip_missing", False)
    exchange = WholeMatrices(tensors)
    alone: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    counts = [p.shape[0] if p.ndim == 3 else 1 for p in tensors]
    held = Held(exchange.layout, alone, CPU, counts)
    rules = make_rules(chosen_rules(**settings), held, {"nesterov": nesterov})
    return ShardedMuon(params, exchange, rules, defaults=defaults, names=names, skip_missing=skip)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
def test_ten_updates_equal_emerging_optimizers(nesterov: bool, decoupled: bool) -> None:
    """Same fp32 arithmetic in the same order; decay added to the gradient may differ in the last
    bit.
    """
    mine, theirs = parameters(), parameters()
    optimizer = sharded(mine, nesterov=nesterov, decoupled=decoupled)
    reference = Muon(
        theirs,
        lr=0.1,
        momentum=0.9,
        weight_decay=0.05,
        nesterov=nesterov,
        weight_decay_method="decoupled" if decoupled else "l2",
        fp32_matmul_prec="highest",
    )
    for step in range(10):
        for p, q, gradient in zip(mine, theirs, gradients(step), strict=True):
            p.grad, q.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0.0, atol=1e-5)
        momentum = reference.state[q]["momentum_buffer"]
        torch.testing.assert_close(
            optimizer.state[p]["momentum_buffer"], momentum, rtol=0.0, atol=1e-5
        )


def test_gradients_are_left_alone() -> None:
    """They live in Megatron-FSDP's buffers."""
    mine = parameters()
    optimizer = sharded(mine, decoupled=False)
    for p, gradient in zip(mine, gradients(0), strict=True):
        p.grad = gradient.clone()
    optimizer.step()
    for p, gradient in zip(mine, gradients(0), strict=True):
        assert torch.equal(p.grad, gradient)


def test_state_is_there_from_the_start_also_for_empty_shards() -> None:
    mine = [
        torch.nn.Parameter(torch.zeros(0, 4)),
        torch.nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16)),
    ]
    optimizer = sharded(mine)
    for p in mine:
        momentum = optimizer.state[p]["momentum_buffer"]
        assert (momentum.shape, momentum.dtype) == (p.shape, torch.float32)


def test_an_empty_shard_takes_part_without_a_gradient() -> None:
    """Ranks that left out what had no gradient left the others waiting in a collective."""
    empty = torch.nn.Parameter(torch.zeros(0, 4))
    mine = [empty, torch.nn.Parameter(torch.ones(3, 4))]
    optimizer = sharded(mine)
    mine[1].grad = torch.eye(3, 4)
    optimizer.step()
    assert optimizer.exchange.runs == 1
    nothing = sharded([torch.nn.Parameter(torch.zeros(0, 4))])
    nothing.step()
    assert nothing.exchange.runs == 1


def test_misuse_is_named() -> None:
    with pytest.raises(RuntimeError, match="matrix0 has no gradient"):
        sharded(parameters()).step()
    with pytest.raises(ValueError, match=r"matrix0: Muon takes 2D .*, got shape \(3,\)"):
        sharded([torch.nn.Parameter(torch.zeros(3))])


def test_buffers_are_given_back_between_steps() -> None:
    """`free_buffers` ended construction with an error of torch: views were made after the memory
    was given back.
    """
    weights, sizes = [], []
    for is_free in (False, True):
        mine = parameters()
        optimizer = megatron_muon.Muon(
            zip("abc", mine, strict=True), fp32_matmul_prec="highest", free_buffers=is_free
        )
        storage = optimizer.parts[0].exchange.arena.memory.untyped_storage()
        for step in range(3):
            sizes.append(storage.nbytes())
            for p, gradient in zip(mine, gradients(step), strict=True):
                p.grad = gradient
            optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in mine]))
    assert torch.equal(*weights)
    assert all(sizes[:3])
    assert not any(sizes[3:])
