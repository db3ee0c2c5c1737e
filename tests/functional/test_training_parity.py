"""Trained losses agree across strategies and numbers of ranks.

12 steps through Megatron's own schedule, forward and backward, on the same global batches, with clipping at work. In
fp32 gradients are summed in another order on every number of ranks, so losses agree to 1e-4, not to the last bit. bf16
weights round to 3 digits in every step: there the mean loss of the last five steps agrees to 0.05.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.case import STRATEGIES, Case, batches
from tests.support.model import Trainer
from tests.support.pool import Pool
from tests.support.wide import wide_but

STEPS = 12
TOLERANCE = 1e-4
BASE = Case(strategy="no_shard", layers=1, optimizer={"clip_grad": 0.3, "lr": 0.02, "min_lr": 0.02})


def losses(rank: int, world_size: int, *, cases: list[tuple[Case, int]]) -> Any:
    """In a worker: losses and gradient norms of every (case, number of micro-batches)."""
    curves = []
    for case, micro_batches in cases:
        trainer = Trainer(case, steps=STEPS)
        curve = [trainer.train(tokens, micro_batches=micro_batches) for tokens in batches(STEPS)]
        curves.append(([loss for loss, _ in curve], [float(result[1]) for _, result in curve]))
    return curves


@pytest.fixture(scope="module")
def expected(ranks: Pool) -> tuple[list[float], list[float]]:
    """Losses and gradient norms on one rank that holds everything."""
    curve, norms = ranks(1, losses, cases=[(BASE, 1)])[0][0]
    assert curve[-1] < curve[0] - 1.0, "the model must learn, or agreement says nothing"
    assert max(norms) > 0.3, "clipping must be at work"
    return curve, norms


def check(curves: list[Any], expected: tuple[list[float], list[float]], cases: list[tuple[Case, int]]) -> None:
    """Every curve is the expected one."""
    for (found, norms), (case, micro_batches) in zip(curves, cases, strict=True):
        label = f"{case.strategy}, overlap {case.overlap}, {micro_batches} micro-batches"
        for step, (one, other) in enumerate(zip(found, expected[0], strict=True)):
            assert abs(one - other) <= TOLERANCE, f"{label}: step {step} has loss {one}, expected {other}"
        for step, (one, other) in enumerate(zip(norms, expected[1], strict=True)):
            assert abs(one - other) <= 1e-3 * other, f"{label}: step {step} has norm {one}, expected {other}"


@pytest.mark.parametrize("world_size", wide_but([3], (1, 2, 3, 4)))
def test_losses_do_not_depend_on_layout(
    ranks: Pool, expected: tuple[list[float], list[float]], world_size: int
) -> None:
    cases = [(BASE.but(strategy=strategy), 1) for strategy in STRATEGIES]
    check(ranks(world_size, losses, cases=cases)[0], expected, cases)


def test_nor_on_overlap_and_accumulation(ranks: Pool, expected: tuple[list[float], list[float]]) -> None:
    cases = [(BASE.but(strategy=strategy), 2) for strategy in ("no_shard", "optim_grads")]
    cases += [(BASE.but(strategy=strategy, overlap=True), 2) for strategy in STRATEGIES[1:]]
    check(ranks(2, losses, cases=cases)[0], expected, cases)


def test_the_reduction_is_finished_exactly_once(ranks: Pool, expected: tuple[list[float], list[float]]) -> None:
    """Under `optim` Megatron-FSDP reduces in place: a second finish_grad_sync in the same step made gradients wrong."""
    cases = [(BASE.but(strategy=strategy, own_loop=True), 1) for strategy in STRATEGIES]
    check(ranks(2, losses, cases=cases)[0], expected, cases)


@pytest.mark.wide
def test_bf16_trains_alike(ranks: Pool, expected: tuple[list[float], list[float]]) -> None:
    bf16 = BASE.but(bf16=True)
    cases = [(bf16.but(strategy=strategy), 1) for strategy in ("no_shard", "optim", "optim_grads_params")]
    for curve, _ in ranks(2, losses, cases=cases)[0]:
        found, wanted = torch.tensor(curve), torch.tensor(expected[0])
        assert abs(found[-5:].mean() - wanted[-5:].mean()) <= 0.05


def test_other_learning_rates_would_be_noticed(ranks: Pool, expected: tuple[list[float], list[float]]) -> None:
    """Negative control: one percent on the learning rate of Muon does not pass."""
    cases = [(BASE.but(optimizer={**BASE.optimizer, "muon_lr": 0.0202}), 1)]
    curves = ranks(1, losses, cases=cases)[0]
    with pytest.raises(AssertionError, match="has loss"):
        check(curves, expected, cases)
