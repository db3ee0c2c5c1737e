"""The sharded Muon on plain tensors, on waves that need no process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon

import megatron_muon
from megatron_muon.core.build import sizes_of
from megatron_muon.core.cost import AUTO, Iteration
from megatron_muon.core.exchange import ToOwners
from megatron_muon.core.layout import Layout
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.core.passes import BY_RULE, COUPLED, DECOUPLED
from megatron_muon.core.plan import Plan
from megatron_muon.core.probe import Probe
from megatron_muon.core.rules import RULES, make_rules
from megatron_muon.core.rules.held import Held
from megatron_muon.core.rules.rule import Rule
from megatron_muon.core.slices import Team
from megatron_muon.core.wave import Message
from megatron_muon.megatron.sharded_muon import ShardedMuon
from megatron_muon.ranks import Alone
from tests.support.cut_matrices import row_sharded
from tests.support.one_rank import CPU, muon_of, waves_of

SHAPES = [(9, 4), (4, 9), (5, 5)]
SETTINGS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}


class Counted(ToOwners):
    """A transport that counts its waves."""

    runs = 0

    def send_rows(self, message: Message, probe: Probe) -> Any:
        self.runs += 1
        return super().send_rows(message, probe)


def one_wave(params: list[torch.nn.Parameter], rules: list[str]) -> Plan:
    """Rank 0 owns the matrices that it holds, rank 1 those of which rank 0 holds no rows."""
    matrices = []
    teams = []
    for number, p in enumerate(params):
        rows, cols = p.shape
        held = [rows, 0] if rows else [0, 1]
        matrices.append(row_sharded(f"matrix{number}", (sum(held), cols), held))
        teams.append(Team((0 if rows else 1,), (1.0,)))
    method = NewtonSchulz(Iteration(precision="highest"))
    kinds = [RULES[name] for name in rules]
    sizes = sizes_of(method, AUTO, kinds, processor=True)
    layout = Layout(2, tuple(matrices))
    batches = []
    for rank in range(2):
        own = [index for index, team in enumerate(teams) if team.ranks == (rank,)]
        batches.append((tuple(own),) if own else ())
    return Plan(layout, tuple(teams), ((),), sizes, 2**20, tuple(batches))


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def sharded(
    params: list[torch.nn.Parameter],
    rules: tuple[str, ...] = (),
    *,
    nesterov: bool = True,
    decoupled: bool = True,
    further: Callable[[Held], Rule] | None = None,
    **changes: Any,
) -> ShardedMuon:
    """The Muon of rank 0 of two, which hold whole matrices."""
    plan = one_wave(params, list(rules))
    held: Any = Held(plan.layout, Alone(), CPU)  # type: ignore[arg-type]
    made = make_rules(rules, held, {})
    if further is not None:
        made.append(further(held))
    decay = DECOUPLED if decoupled else COUPLED
    if "cautious" in rules:
        decay = BY_RULE
    return muon_of(
        waves_of(plan, 0, Counted),
        params,
        SETTINGS | changes,
        rules=made,
        nesterov=nesterov,
        decay=decay,
    )


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


def runs_of(optimizer: ShardedMuon) -> int:
    transport: Any = optimizer.part.engine.transport
    return transport.runs


def test_an_empty_shard_takes_part_without_a_gradient() -> None:
    """Ranks that left out what had no gradient left the others waiting in a collective."""
    empty = torch.nn.Parameter(torch.zeros(0, 4))
    mine = [empty, torch.nn.Parameter(torch.ones(3, 4))]
    optimizer = sharded(mine)
    mine[1].grad = torch.eye(3, 4)
    optimizer.step()
    assert runs_of(optimizer) == 1
    nothing = sharded([torch.nn.Parameter(torch.zeros(0, 4))])
    nothing.step()
    assert runs_of(nothing) == 1


def test_a_missing_gradient_is_named() -> None:
    with pytest.raises(RuntimeError, match="matrix0 has no gradient"):
        sharded(parameters()).step()


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
        storage = optimizer.parts[0].waves.memory.tensor.untyped_storage()
        for step in range(3):
            sizes.append(storage.nbytes())
            for p, gradient in zip(mine, gradients(step), strict=True):
                p.grad = gradient
            optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in mine]))
    assert torch.equal(*weights)
    assert all(sizes[:3])
    assert not any(sizes[3:])
