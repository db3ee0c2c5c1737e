"""Gradients that are not finite, and gradients that clipping makes tiny."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.case import Case, gradient_of
from tests.support.model import Trainer
from tests.support.pool import Pool
from tests.support.wide import wide_but


def one_bad_gradient(rank: int, world_size: int, *, strategies: tuple[str, ...], bad: float, victim: str) -> Any:
    """In a worker: two good steps, one with a gradient that is not finite on one rank only, one more good step."""
    seen = {}
    for strategy in strategies:
        trainer = Trainer(Case(strategy=strategy, layers=1, optimizer={"clip_grad": 1.0}))
        trainer.step()
        trainer.step()
        before = trainer.bits()

        def gradient(name: str, shape: Sequence[int], step: int) -> torch.Tensor:
            whole = gradient_of(name, shape, step)
            if name == victim:  # in the last row, which one rank holds
                whole.view(-1)[-1] = bad
            return whole

        updated = trainer.step(gradient)[0]
        after = trainer.bits()
        changed = [key for key in before if not torch.equal(before[key], after[key])]
        recovered = trainer.step()[0]
        finite = all(value.isfinite().all() for value in trainer.bits().values())
        moved = not torch.equal(before["output_layer.weight"], trainer.bits()["output_layer.weight"])
        moved = moved or not len(before["output_layer.weight"])
        seen[strategy] = (updated, changed, recovered, finite, moved)
    return seen


def clipped_updates(rank: int, world_size: int, *, strategy: str, steps: list[tuple[float, float]]) -> Any:
    """In a worker: how far every matrix moves in a first step whose gradient is scaled, then clipped."""
    moved = []
    for clip, scale in steps:
        trainer = Trainer(Case(strategy=strategy, layers=1, optimizer={"clip_grad": clip, "weight_decay": 0.0}))
        before = trainer.whole()
        updated, norm, _ = trainer.step(lambda *what, scale=scale: scale * gradient_of(*what))
        assert updated
        after = trainer.whole()
        matrices = trainer.whole_state("momentum_buffer")
        moved.append((float(norm), {name: after[name] - before[name] for name in matrices}))
    return moved


@pytest.mark.parametrize("bad", wide_but([math.inf], [math.inf, math.nan]))
@pytest.mark.parametrize("victim", ["decoder.layers.0.mlp.linear_fc2.weight", "decoder.final_layernorm.bias"])
def test_one_bad_gradient_poisons_nothing(ranks: Pool, bad: float, victim: str) -> None:
    """A gradient that was not finite went into the momentum and stayed there for good."""
    strategies = ("no_shard", "optim", "optim_grads", "optim_grads_params")
    for seen in ranks(2, one_bad_gradient, strategies=strategies, bad=bad, victim=victim):
        for strategy, (updated, changed, recovered, finite, moved) in seen.items():
            assert updated is False, strategy
            assert changed == [], strategy
            assert recovered is True, strategy
            assert finite, strategy
            assert moved, strategy


@pytest.mark.parametrize("strategy", wide_but(["optim_grads_params"], ["no_shard", "optim_grads_params"]))
def test_a_tiny_clip_factor_keeps_the_update(ranks: Pool, strategy: str) -> None:
    """Clipping pushed Newton-Schulz's input under the eps of its normalisation, and the matrices stood still."""
    steps = [(0.0, 1.0), (1e-12, 1.0), (1e-12, 1e6), (1.0, 1e12)]
    (_, expected), *moved = ranks(2, clipped_updates, strategy=strategy, steps=steps)[0]
    for (clip, scale), (norm, found) in zip(steps[1:], moved, strict=True):
        assert norm > 0.1 * scale
        for name, update in expected.items():
            assert update.norm() > 1e-3
            # Clipping multiplies by a factor that rounds, so the input's last bits differ.
            torch.testing.assert_close(found[name], update, rtol=1e-3, atol=1e-6, msg=f"{name}, clip {clip}")


def one_bad_momentum(rank: int, world_size: int, *, case: Case, victim: str) -> Any:
    """In a worker: a step after one element of a matrix's momentum has become NaN on the rank that holds its end."""
    trainer = Trainer(case)
    trainer.step()
    for name, state in trainer.states().items():
        if name == victim and (rows := state["momentum_buffer"]._local_tensor).numel():
            last = trainer._place(name)[0].stop == trainer.shapes[name][0]
            if last:
                rows.view(-1)[-1] = float("nan")
    before = trainer.whole()
    updated = trainer.step()[0]
    after = trainer.whole()
    counted = trainer.optimizer.skipped_updates()
    same = [name for name in before if torch.equal(before[name], after[name])]
    finite = all(weight.isfinite().all() for weight in after.values())
    return updated, same, finite, counted, trainer.optimizer.skipped_updates()


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


@pytest.mark.parametrize("victim", wide_but([QKV], [QKV, "decoder.layers.0.mlp.linear_fc2.weight"]))
@pytest.mark.parametrize(
    "case",
    [
        Case(strategy="no_shard", layers=1),
        Case(strategy="no_shard", layers=1, optimizer={"muon_share_replicated": True}),
        Case(strategy="optim_grads_params", layers=1),
        Case(strategy="optim_grads_params", layers=1, optimizer={"muon_team_size": "2"}),
        Case(strategy="optim", layers=1, optimizer={"muon_exchange": "allgather"}),
        pytest.param(
            Case(strategy="optim_grads_params", layers=1, optimizer={"muon_fp32_matmul_prec": "medium"}),
            marks=pytest.mark.wide,
        ),
        Case(
            strategy="optim_grads_params",
            layers=1,
            optimizer={"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon"},
        ),
        pytest.param(
            Case(
                strategy="optim_grads_params",
                layers=1,
                optimizer={"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "adamuon"},
            ),
            marks=pytest.mark.wide,
        ),
    ],
    ids=lambda case: f"{case.strategy} {case.optimizer}",
)
def test_a_matrix_whose_update_is_not_finite_keeps_its_weights(ranks: Pool, case: Case, victim: str) -> None:
    """Gradients alone were checked: an iteration that ran away made weights NaN. Its other blocks keep theirs too."""
    assert case.settings["weight_decay"] > 0.0, "decay would change the weights"
    for updated, same, finite, counted, later in ranks(2, one_bad_momentum, case=case, victim=victim):
        assert updated is True
        assert same == [victim]
        assert finite
        assert counted == {f"module.{victim}": 1} or counted == {victim: 1}
        assert later == {}
