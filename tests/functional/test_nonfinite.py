"""Gradients that are not finite, and gradients that clipping makes tiny."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.case import STRATEGIES, Case, gradient_of
from tests.support.cases import GATHERED, NORMUON, REPLICATED
from tests.support.model import Trainer
from tests.support.pool import Pool
from tests.support.reference import Reference, is_matrix
from tests.support.wide import wide_but

QKV, FC2 = (
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.mlp.linear_fc2.weight",
)


def one_bad_gradient(rank: int, world_size: int, *, bad: float, victim: str) -> None:
    """In a worker: two good steps, one with a gradient that is not finite on one rank only, one
    more good step.
    """
    for strategy in STRATEGIES:
        trainer = Trainer(Case(strategy=strategy, layers=1, optimizer={"clip_grad": 1.0}))
        trainer.step()
        trainer.step()
        before = trainer.bits()

        def gradient(name: str, shape: Sequence[int], step: int) -> torch.Tensor:
            whole = gradient_of(name, shape, step)
            if name == victim:  # in the last row, which one rank holds
                whole.view(-1)[-1] = bad
            return whole

        assert trainer.step(gradient)[0] is False, strategy
        after = trainer.bits()
        assert [key for key in before if not torch.equal(before[key], after[key])] == [], strategy
        assert trainer.step()[0] is True, strategy
        later = trainer.bits()
        assert all(value.isfinite().all() for value in later.values()), strategy
        weight = before["output_layer.weight"]
        assert not len(weight) or not torch.equal(weight, later["output_layer.weight"]), strategy


@pytest.mark.parametrize(
    ("bad", "victim"), [(math.inf, FC2), (math.nan, "decoder.final_layernorm.bias")]
)
def test_one_bad_gradient_poisons_nothing(ranks: Pool, bad: float, victim: str) -> None:
    """A gradient that was not finite went into the momentum and stayed there for good."""
    ranks(2, one_bad_gradient, bad=bad, victim=victim)


SCALED = {
    "muon": Case(layers=1),
    "bf16": Case(layers=1, optimizer={"muon_fp32_matmul_prec": "medium"}),
    "normuon": Case(layers=1, optimizer=NORMUON),
    "no_shard": Case(layers=1, strategy="no_shard"),
}
BY_SCALE = [(1.0, 1e-20, 1.0), (1e-12, 1e-8, 1.0), (1.0, 1e-8, 1e20)]
"""`clip_grad`, the scale of all gradients, and a factor on that of FC2. The last two are clipped;
in the last one FC2 shrinks all others.
"""
ATOL = [1e-4, 5e-3, 5e-3]
"""Errors relative to an update. Where gradients are clipped, two steps are weighed by their norms,
which differ by thousandths.
"""


def scaled_steps(
    rank: int, world_size: int, *, case: Case, steps: list[tuple[float, float, float]]
) -> Any:
    """In a worker: the matrices after two steps, for each scale of the gradients."""
    found = []
    for clip, scale, factor in steps:
        trainer = Trainer(case.but(optimizer={**case.optimizer, "clip_grad": clip}))

        def gradient(
            name: str, *what: Any, scale: float = scale, factor: float = factor
        ) -> torch.Tensor:
            return scale * (factor if name == FC2 else 1.0) * gradient_of(name, *what)

        for _ in range(2):
            assert trainer.step(gradient)[0]
        found.append(trainer.whole())
    return trainer.shapes, found


@pytest.mark.parametrize("label", wide_but(["muon"], SCALED))
def test_the_scale_of_gradients_changes_no_update(ranks: Pool, label: str) -> None:
    """Weights as emerging-optimizers has them from gradients of size 1; also where one gradient
    clips all others. Clipping pushed Newton-Schulz's input under the eps of its normalization, and
    the matrices did not move.
    """
    case = SCALED[label]
    shapes, found = ranks(2, scaled_steps, case=case, steps=BY_SCALE)[0]
    reference = Reference(case, shapes)
    matrices = [name for name, shape in shapes.items() if is_matrix(case, name, shape)]
    start = reference.whole()
    for _ in range(2):
        reference.step()
    expected = reference.whole()
    for atol, weights in zip(ATOL, found, strict=True):
        for name in matrices:
            update = expected[name] - start[name]
            off = (weights[name] - expected[name]).norm() / update.norm()
            assert off < (0.02 if label == "bf16" else atol), name


def one_bad_momentum(
    rank: int, world_size: int, *, cases: dict[str, Case], victim: str
) -> dict[str, Any]:
    """In a worker: a step after one element of a matrix's momentum has become NaN on the rank that
    holds its end.
    """
    found = {}
    for label, case in cases.items():
        trainer = Trainer(case)
        trainer.step()
        rows = trainer.states()[victim]["momentum_buffer"]._local_tensor
        if rows.numel() and trainer._place(victim)[0].stop == trainer.shapes[victim][0]:
            rows.view(-1)[-1] = float("nan")
        before = trainer.whole()
        updated = trainer.step()[0]
        after = trainer.whole()
        counted = trainer.optimizer.skipped_updates()
        same = [name for name in before if torch.equal(before[name], after[name])]
        finite = all(weight.isfinite().all() for weight in after.values())
        found[label] = updated, same, finite, counted, trainer.optimizer.skipped_updates()
    return found


WITH_BAD_MOMENTUM = {
    "no_shard": Case(layers=1, strategy="no_shard"),
    "shared": REPLICATED,
    "owner": Case(layers=1),
    "teams": Case(layers=1, optimizer={"muon_team_size": "2"}),
    "gathered": Case(layers=1, strategy="optim", optimizer=GATHERED),
    "normuon": Case(layers=1, optimizer=NORMUON),
}


@pytest.mark.parametrize("victim", wide_but([QKV], [QKV, FC2]))
def test_a_matrix_whose_update_is_not_finite_keeps_its_weights(ranks: Pool, victim: str) -> None:
    """Gradients alone were checked: an iteration that ran away made weights NaN. Its other blocks
    keep theirs too.
    """
    assert Case().settings["weight_decay"] > 0.0, "decay would change the weights"
    for of_rank in ranks(2, one_bad_momentum, cases=WITH_BAD_MOMENTUM, victim=victim):
        for label, (updated, same, finite, counted, later) in of_rank.items():
            assert updated is True, label
            assert same == [victim], label
            assert finite, label
            assert counted == {f"module.{victim}": 1} or counted == {victim: 1}, label
            assert later == {}, label
