"""AdaMuon and NorMuon: sharded updates equal emerging-optimizers' AdaptiveMuon on whole matrices, however rows are cut.

Both divide an orthogonalised update by the root of its second moment. For AdaMuon an element near zero turns a
rounding of 1e-7 into a part of an update of size 0.05, so weights agree to 1e-4; for NorMuon to 4e-6. The number
of ranks and the exchange change no bit.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.support.case import STRATEGIES, Case
from tests.support.model import Trainer, sabotaged
from tests.support.pool import Pool
from tests.support.reference import Reference
from tests.support.wide import wide_but

STEPS = 5
CHECKED = (1, 2, STEPS)
METHODS = ("adamuon", "normuon")
ATOL = {"adamuon": 1e-4, "normuon": 4e-6}


def adaptive(method: str, case: Case | None = None, **settings: Any) -> Case:
    """A case of adaptive Muon."""
    case = case or Case()
    own = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": method}
    return case.but(optimizer={**own, **case.optimizer, **settings})


def run(rank: int, world_size: int, *, cases: dict[str, Case], sabotage: str = "") -> Any:
    """In a worker: whole weights and second moments of every case, and the form of the state of this rank."""
    seen: dict[str, Any] = {}
    for label, case in cases.items():
        trainer = Trainer(case, steps=STEPS)
        seen[label] = {"shapes": trainer.shapes, "start": forms(trainer)}
        with sabotaged(sabotage):
            for step in range(1, STEPS + 1):
                assert trainer.step()[0], "the step was skipped"
                if step in CHECKED:
                    seen[label][step] = (trainer.whole(), whole_moments(trainer))
        seen[label]["end"] = forms(trainer)
    return seen


def forms(trainer: Trainer) -> dict[str, Any]:
    """Of every matrix: the parts of its state, their types, dtypes, whole shapes and the numbers that this rank has."""
    return {
        name: {
            slot: (type(value).__name__, value.dtype, tuple(value.shape), value._local_tensor.numel())
            for slot, value in state.items()
        }
        for name, state in trainer.states().items()
        if "momentum_buffer" in state
    }


def whole_moments(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Second moments, whole: those that every rank holds are taken from this one. Without experts over ranks, or TP."""
    if trainer.case.expert_parallel > 1 or trainer.case.tensor > 1:
        return {}
    moments = {name: state["moment2_buffer"] for name, state in trainer.states().items() if "moment2_buffer" in state}
    columns = {
        name: moment._local_tensor.clone()
        for name, moment in moments.items()
        if moment.shape[0] != trainer.shapes[name][0]
    }
    rows = {name: moment._local_tensor for name, moment in moments.items() if name not in columns}
    if trainer.case.strategy == "no_shard":
        return columns | {name: moment.clone() for name, moment in rows.items()}
    return columns | trainer.assemble(rows, shapes={name: tuple(moments[name].shape) for name in rows})


def check(seen: dict[Any, Any], case: Case, *, atol: float) -> None:
    """Compare what a worker saw with the reference."""
    reference = Reference(case, seen["shapes"], steps=STEPS)
    for step in range(1, STEPS + 1):
        reference.step()
        if step in CHECKED:
            weights, moments = seen[step]
            expected_moments = reference.state("moment2_buffer") if moments else {}
            assert moments.keys() == expected_moments.keys()
            for what, found, expected in (
                ("weight", weights, reference.whole()),
                ("moment", moments, expected_moments),
            ):
                for name in expected:
                    torch.testing.assert_close(
                        found[name],
                        expected[name],
                        rtol=0.0,
                        atol=atol,
                        msg=lambda text, n=name, w=what, s=step: f"{n}, {w} after {s} steps: {text}",
                    )


VARIANTS = {
    "plain": Case(),
    "wide and tall": Case(ffn=7, query_groups=1),
    "small buffer": Case(optimizer={"muon_exchange_buffer_mb": 0.07}),
    "blocks": Case(swiglu=True, optimizer={"muon_split_gated_mlp": True, "muon_split_heads": True}),
    "settings": Case(
        optimizer={
            "adaptive_muon_beta2": 0.8,
            "adaptive_muon_eps": 1e-3,
            "muon_nesterov": False,
            "muon_scale_mode": "unit_rms_norm",
            "muon_lr": 0.02,
        }
    ),
}


TP = Case(layers=1, vocabulary=132, ffn=46, query_groups=2, tensor=2)
HSDP = Case(layers=1, ffn=7, instances=2)
EP = Case(layers=1, ffn=46, experts=4, expert_parallel=2)
LAYOUTS = {
    "tp2": TP,
    "tp2, wide and tall": TP.but(ffn=8, hidden=36),
    "tp2, no row of a wide matrix cut by columns": TP.but(ffn=128, hidden=32, heads=4),
    "tp2 hsdp": TP.but(instances=2),
    "hsdp": HSDP,
    "hsdp, outer optim": HSDP.but(outer="optim"),
    "ep2": EP,
    "ep2 hsdp": EP.but(instances=2),
}


@pytest.mark.parametrize(
    ("method", "strategy", "world_size"),
    wide_but(
        [("normuon", "optim_grads_params", 3)],
        [
            (method, strategy, size)
            for method in METHODS
            for strategy, size in (
                *((strategy, 2) for strategy in STRATEGIES),
                *(("optim_grads_params", size) for size in (1, 3, 4)),
            )
        ],
    ),
)
def test_updates_equal_the_reference(ranks: Pool, strategy: str, world_size: int, method: str) -> None:
    cases = {label: adaptive(method, case.but(strategy=strategy, layers=1)) for label, case in VARIANTS.items()}
    everyone = ranks(world_size, run, cases=cases)
    for label, case in cases.items():
        check(everyone[0][label], case, atol=ATOL[method])
        for seen in everyone[1:]:  # those that every rank holds are the same on all
            for name, moment in seen[label][STEPS][1].items():
                assert torch.equal(moment, everyone[0][label][STEPS][1][name]), f"{label}, {name}: ranks differ"


@pytest.mark.usefixtures("delayed_too")
@pytest.mark.parametrize("method", wide_but(["normuon"], METHODS))
def test_every_exchange_gives_the_same(ranks: Pool, method: str) -> None:
    """Owner and all-gather to the last bit; shared replicas as the reference."""
    case = adaptive(method, Case(layers=1))
    cases = {
        "owner": case,
        "allgather": adaptive(method, Case(layers=1), muon_exchange="allgather"),
        "shared": adaptive(method, Case(layers=1, strategy="no_shard"), muon_share_replicated=True),
        "shared, tiny": adaptive(
            method, Case(layers=1, strategy="no_shard"), muon_share_replicated=True, muon_exchange_buffer_mb=0.07
        ),
    }
    seen = ranks(3, run, cases=cases)[0]
    for label, given in cases.items():
        check(seen[label], given, atol=ATOL[method])
    for one, other in zip(seen["owner"][STEPS], seen["allgather"][STEPS], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("method", "precision", "world_size"),
    wide_but([("adamuon", "medium", 4)], itertools.product(METHODS, ("highest", "medium"), (2, 4))),
)
def test_the_number_of_ranks_changes_no_bit(ranks: Pool, method: str, precision: str, world_size: int) -> None:
    case = adaptive(method, Case(layers=1, ffn=47), muon_fp32_matmul_prec=precision)
    alone = ranks(1, run, cases={"": case})[0][""]
    seen = ranks(world_size, run, cases={"": case})[0][""]
    for one, other in zip(alone[STEPS], seen[STEPS], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("method", "label"),
    wide_but(
        [("adamuon", "tp2, wide and tall"), ("normuon", "ep2 hsdp")],
        itertools.product(METHODS, LAYOUTS),
    ),
)
def test_instances_experts_and_tensor_parallel_ranks(ranks: Pool, method: str, label: str) -> None:
    """Replicas of a shard count once where second moments are collected."""
    case = adaptive(method, LAYOUTS[label])
    seen = ranks(4, run, cases={"": case})[0][""]
    check({**seen, **{step: (seen[step][0], {}) for step in CHECKED}}, case, atol=ATOL[method])


@pytest.mark.parametrize("method", wide_but(["adamuon"], METHODS))
def test_stacked_experts_are_matrices_of_their_own(ranks: Pool, method: str) -> None:
    """Each like a 2D parameter of its own under upstream's class, which takes no stacks."""
    case = adaptive(method, Case(layers=1, stacked=3, trainable=(".experts.",)))
    for strategy in ("no_shard", "optim_grads_params"):
        given = case.but(strategy=strategy)
        seen = ranks(2, run, cases={"": given})[0][""]
        for name in (name for name in seen["shapes"] if ".experts." in name):
            for expert in range(3):
                alone = {
                    "shapes": {name: seen["shapes"][name][1:]},
                    **{step: ({name: seen[step][0][name][expert]}, {name: seen[step][1][name][expert]})
                       for step in CHECKED},
                }  # fmt: skip
                check_alone(alone, given, name, expert, seen["shapes"][name], atol=ATOL[method])


def check_alone(seen: dict[Any, Any], case: Case, name: str, expert: int, shape: Any, *, atol: float) -> None:
    from tests.support.case import gradient_of, initial_value

    reference = Reference(case.but(stacked=0), {name: shape[1:]}, steps=STEPS)
    with torch.no_grad():
        reference.weights[name].copy_(initial_value(name, shape)[expert])
    for step in range(1, STEPS + 1):
        reference.step(lambda _name, _shape, number: gradient_of(name, shape, number)[expert])
        if step in CHECKED:
            weights, moments = seen[step]
            torch.testing.assert_close(weights[name], reference.whole()[name], rtol=0.0, atol=atol)
            expected = reference.state("moment2_buffer")[name]
            torch.testing.assert_close(moments[name], expected, rtol=0.0, atol=atol)


@pytest.mark.parametrize("method", wide_but(["normuon"], METHODS))
def test_state_is_there_from_the_start_also_for_empty_shards(ranks: Pool, method: str) -> None:
    """Ranks whose state differs in its keys hang when a checkpoint is saved: the slots never change, nor their form."""
    case = adaptive(method, Case(layers=1, ffn=47, heads=3, query_groups=1))
    everyone = ranks(4, run, cases={"": case})
    empty = 0
    for seen in everyone:
        assert seen[""]["start"] == seen[""]["end"]
        assert seen[""]["start"].keys() == everyone[0][""]["start"].keys()
        for name, slots in seen[""]["start"].items():
            assert sorted(slots) == ["moment2_buffer", "momentum_buffer"]
            rows, cols = seen[""]["shapes"][name]
            by_element = method == "adamuon"
            whole = (rows, cols) if by_element else (rows, 1) if rows >= cols else (1, cols)
            for slot, shape in (("momentum_buffer", (rows, cols)), ("moment2_buffer", whole)):
                kind, dtype, found, _ = slots[slot]
                assert (kind, dtype, found) == ("DTensor", torch.float32, shape), (name, slot)
            empty += slots["momentum_buffer"][3] == 0
    assert empty, "no shard was empty"


@pytest.mark.parametrize("method", wide_but(["normuon"], METHODS))
def test_the_comparison_can_fail(ranks: Pool, method: str) -> None:
    """Negative control: a matrix left out, or plain Muon's update, does not pass."""
    case = adaptive(method, Case(layers=1))
    seen = ranks(2, run, cases={"": case}, sabotage="skip")[0][""]
    with pytest.raises(AssertionError, match="after 1 steps"):
        check(seen, case, atol=ATOL[method])
    other = adaptive("normuon" if method == "adamuon" else "adamuon", Case(layers=1))
    seen = ranks(2, run, cases={"": case})[0][""]
    seen = {step: (seen[step][0], {}) if step in CHECKED else seen[step] for step in seen}
    reference = Reference(other, seen["shapes"], steps=STEPS)
    reference.step()
    name = next(name for name in seen["shapes"] if "linear_fc1.weight" in name)
    assert (seen[1][0][name] - reference.whole()[name]).abs().max() > 1e-3
