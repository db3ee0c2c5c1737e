"""Cautious weight decay and MuonHyperball equal references on whole matrices, however these are cut and travel.

The references are emerging-optimizers' Muon with the paper's decay, and its MuonHyperball. Tolerances are those of
test_exact_updates, 2e-6: norms add up over ranks, so they round otherwise than a whole matrix's, by 1e-7 of weights
of size 0.1 in a step. Decay depends on a sign, which rounding changes only where a product of weight and update is
nearly zero: that moves a weight of 1e-6 by a thousandth of itself.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.test_adaptive_muon import ATOL
from tests.functional.test_exact_updates import (
    BLOCKS,
    BLOCKS_OVER_LAYOUTS,
    SMALL_WAVES,
    TEN,
    check,
    run,
)
from tests.functional.test_layouts import LAYOUTS, TP
from tests.support.case import STRATEGIES, Case
from tests.support.model import Trainer
from tests.support.pool import Pool
from tests.support.wide import wide_but

pytestmark = pytest.mark.timeout(330)

CAUTIOUS = {"muon_cautious_weight_decay": True, "weight_decay": 1.0}
HYPERBALL = {"muon_hyperball": True, "weight_decay": 0.0}
VARIANTS = {"cautious": CAUTIOUS, "hyperball": HYPERBALL}


def of_all(case: Case, **optimizer: Any) -> dict[str, Case]:
    """A case with each variant."""
    return {
        label: case.but(optimizer={**case.optimizer, **settings, **optimizer}) for label, settings in VARIANTS.items()
    }


def compare(ranks: Pool, world_size: int, cases: dict[str, Case], *, atol: float = 2e-6) -> dict[str, Any]:
    """Ten steps of every case against its reference; what the first rank saw."""
    seen: dict[str, Any] = ranks(world_size, run, cases=cases, steps=TEN, timeout_s=300)[0]
    for label, case in cases.items():
        check(seen[label], case, atol=atol)
    return seen


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    wide_but([("optim_grads_params", 3)], itertools.product(STRATEGIES, (1, 2, 3, 4))),
)
def test_updates_equal_the_reference(ranks: Pool, strategy: str, world_size: int) -> None:
    """With ffn 47 small matrices lie whole on one rank, and others have no row of them."""
    compare(ranks, world_size, of_all(Case(strategy=strategy, layers=1, ffn=47)))


@pytest.mark.usefixtures("delayed_too")
@pytest.mark.wide
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_how_rows_travel_and_where_momentum_lives_changes_no_bit(
    ranks: Pool, tmp_path: Path, world_size: int, variant: str
) -> None:
    case = of_all(Case(layers=1, ffn=47))[variant]
    others: dict[str, dict[str, Any]] = {"plain": {}, "waves": SMALL_WAVES, "gathered": {"muon_exchange": "allgather"}}
    others |= {"on the host": {"muon_offload": "cpu"}}
    others |= {"in files": {"muon_offload": "nvme", "muon_offload_dir": str(tmp_path)}}
    cases = {name: case.but(optimizer={**case.optimizer, **settings}) for name, settings in others.items()}
    seen = ranks(world_size, trained, cases=cases, timeout_s=300)[0]
    for name, weights in seen.items():
        assert all(torch.equal(weights[key], seen["plain"][key]) for key in weights), name


def trained(rank: int, world_size: int, *, cases: dict[str, Case]) -> Any:
    """In a worker: whole weights of every case after some steps."""
    seen = {}
    for label, case in cases.items():
        trainer = Trainer(case)
        for _ in range(3):
            assert trainer.step()[0], "the step was skipped"
        seen[label] = trainer.whole()
    return seen if rank == 0 else None


@pytest.mark.parametrize(
    ("name", "strategy"),
    wide_but(
        [],
        [(name, strategy) for name in LAYOUTS for strategy in STRATEGIES[1:]],
    ),
)
def test_layouts_equal_the_reference(ranks: Pool, name: str, strategy: str) -> None:
    """A norm is that of the whole matrix over tensor-parallel ranks; instances count once, experts apart."""
    world_size, case = LAYOUTS[name]
    compare(ranks, world_size, of_all(case.but(strategy=strategy)))


@pytest.mark.usefixtures("delayed_too")
@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name, (_, case) in LAYOUTS.items() if case.instances > 1])
def test_instances_that_share_state_too(ranks: Pool, name: str) -> None:
    world_size, case = LAYOUTS[name]
    compare(ranks, world_size, of_all(case.but(outer="optim")))


@pytest.mark.wide
@pytest.mark.parametrize("label", BLOCKS)
def test_blocks_equal_the_reference(ranks: Pool, label: str) -> None:
    """Blocks of a parameter share its norm, as upstream's; experts of a stack have one each."""
    compare(ranks, 3, of_all(BLOCKS[label].but(layers=1)))


@pytest.mark.wide
@pytest.mark.parametrize("label", BLOCKS_OVER_LAYOUTS)
def test_blocks_over_other_layouts(ranks: Pool, label: str) -> None:
    compare(ranks, 4, of_all(BLOCKS_OVER_LAYOUTS[label].but(layers=1)))


@pytest.mark.wide
@pytest.mark.parametrize("size", ["2", "4"])
def test_teams_equal_the_reference(ranks: Pool, size: str) -> None:
    """No owner has a whole update there; norms are the holders' business. Tolerance as of teams of plain Muon."""
    compare(ranks, 4, of_all(Case(layers=1, ffn=47, swiglu=True), muon_team_size=size), atol=4e-6)


@pytest.mark.wide
@pytest.mark.parametrize("settings", [{}, {"muon_exchange_buffer_mb": 0.07}])
def test_shared_replicas_equal_the_reference(ranks: Pool, settings: dict[str, Any]) -> None:
    compare(ranks, 3, of_all(Case(strategy="no_shard", layers=1), muon_share_replicated=True, **settings))


@pytest.mark.wide
def test_replicas_of_tensor_parallel_parts_equal_their_shards(ranks: Pool) -> None:
    """Blockwise, each tensor-parallel rank's part is a matrix with a norm of its own, replicated or not."""
    case = TP.but(optimizer={"muon_tp_mode": "blockwise"})
    for label, given in of_all(case).items():
        cases = {strategy: given.but(strategy=strategy) for strategy in ("no_shard", "optim_grads_params")}
        seen = ranks(4, run, cases=cases, steps=TEN)[0]
        for one, other in zip(*(seen[strategy].after[TEN] for strategy in cases), strict=True):
            for name, expected in one.items():
                assert (other[name] - expected).abs().max() <= 2e-6, f"{label}, {name}"


@pytest.mark.wide
@pytest.mark.parametrize(("method", "strategy"), list(itertools.product(ATOL, ("no_shard", "optim_grads_params"))))
def test_adaptive_muon_decays_cautiously_too(ranks: Pool, method: str, strategy: str) -> None:
    """The sign is that of the normalised update. Tolerances as for adaptive Muon, whose updates round as much."""
    adaptive = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": method}
    case = Case(strategy=strategy, layers=1, optimizer={**CAUTIOUS, **adaptive})
    seen = ranks(3, run, cases={"": case}, steps=5)[0][""]
    check(seen, case, atol=10 * ATOL[method])


@pytest.mark.wide
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_comparison_can_fail(ranks: Pool, variant: str) -> None:
    """Negative control: neither plain Muon nor, on the sphere, norms of shards instead of matrices pass."""
    case = of_all(Case(layers=1))[variant]
    plain = case.but(optimizer={"weight_decay": case.optimizer["weight_decay"]})
    wrong = [ranks(2, run, cases={"": plain}, steps=1)[0][""]]
    if variant == "hyperball":
        wrong.append(ranks(2, norms_of_shards, case=case)[0])
    for seen in wrong:
        with pytest.raises(AssertionError, match="weight after 1 steps"):
            check(seen, case, atol=2e-6)


def norms_of_shards(rank: int, world_size: int, *, case: Case) -> Any:
    """In a worker: what `run` sees where each rank takes its shard for the matrix."""
    from megatron_muon.core.rules.hyperball import Hyperball

    end = Hyperball.end

    def end_alone(self: Hyperball) -> None:
        self._group = None
        end(self)

    Hyperball.end = end_alone  # type: ignore[method-assign]  # this process ends with the task
    seen = run(rank, world_size, cases={"": case}, steps=1)
    return seen[""] if rank == 0 else None
