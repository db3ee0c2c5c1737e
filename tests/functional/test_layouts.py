"""Every parallel layout gives what the whole matrices give on one rank.

Given the same gradients, weights and momentum equal those of the independent reference, which knows no ranks: with
tensor parallelism, experts, several optimizer instances and context-parallel groups, alone and together. Tolerances as
in test_exact_updates. Replicas are compared bit by bit where they are put together (`Trainer.whole`). Trained on the
same batches, losses equal those of one rank, and gradient norms and counts of zeros those of megatron-core's DDP.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.functional.test_exact_updates import TEN, assert_same_bits, check, run
from tests.support.case import STRATEGIES, Case, batches
from tests.support.model import Trainer, ddp_statistics
from tests.support.pool import Pool
from tests.support.wide import wide_but

pytestmark = pytest.mark.usefixtures("delayed_too")

SHARDED = STRATEGIES[1:]
OUTER = "optim_grads_params, outer optim"
TP = Case(vocabulary=132, ffn=46, query_groups=2, layers=1, tensor=2)
HSDP = Case(layers=1, instances=2)
MOE = Case(ffn=46, layers=1, experts=4)

LAYOUTS = {
    "tp2": (2, TP),
    "tp2 dp2": (4, TP),
    "tp4, fewer query groups": (4, TP.but(tensor=4, heads=4, hidden=32, ffn=44, query_groups=2)),
    "tp2, one query group": (4, TP.but(query_groups=1)),
    "tp2, swiglu": (4, TP.but(swiglu=True)),
    "hsdp": (4, HSDP),
    "hsdp of single ranks": (3, HSDP.but(instances=3)),
    "hsdp tp2": (4, TP.but(instances=2)),
    "cp2": (4, Case(layers=1, context=2)),
    "ep2": (4, MOE.but(expert_parallel=2)),
    "ep4": (4, MOE.but(expert_parallel=4)),
    "more ranks than experts": (4, MOE.but(experts=2)),
    "expert tp2": (4, MOE.but(expert_tensor=2)),
    "ep2 hsdp": (4, MOE.but(expert_parallel=2, instances=2)),
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    wide_but(
        [("hsdp tp2", OUTER), ("ep2 hsdp", "optim_grads_params"), ("expert tp2", "optim"), ("hsdp", "optim_grads")],
        [
            (name, strategy)
            for name, (_, case) in LAYOUTS.items()
            for strategy in (*SHARDED, *((OUTER,) if case.instances > 1 else ()))
        ],
    ),
)
def test_updates_equal_the_reference(ranks: Pool, name: str, strategy: str) -> None:
    world_size, case = LAYOUTS[name]
    given = case.but(outer="optim") if strategy == OUTER else case.but(strategy=strategy)
    check(ranks(world_size, run, cases={"": given}, steps=TEN)[0][""], case, atol=2e-6)


@pytest.mark.parametrize("name", wide_but(["hsdp tp2"], ["tp2 dp2", "hsdp tp2", "expert tp2"]))
def test_both_exchanges_give_the_same_bits(ranks: Pool, name: str) -> None:
    world_size, case = LAYOUTS[name]
    cases = {e: case.but(optimizer={"muon_exchange": e}) for e in ("owner", "allgather")}
    seen = ranks(world_size, run, cases=cases)[0]
    assert_same_bits(seen["owner"], seen["allgather"])


def test_blockwise_orthogonalises_the_part_of_each_rank(ranks: Pool) -> None:
    """Megatron-core's default; also the negative control: it does not pass for the update of the whole matrix."""
    case = TP.but(optimizer={"muon_tp_mode": "blockwise"})
    seen = ranks(4, run, cases={"no_shard": case.but(strategy="no_shard"), "sharded": case}, steps=1)[0]
    with pytest.raises(AssertionError, match="weight after 1 steps"):
        check(seen["sharded"], case, atol=1e-4)
    for one, other in zip(seen["no_shard"].after[1], seen["sharded"].after[1], strict=True):
        for name, expected in one.items():
            assert (other[name] - expected).abs().max() <= 2e-6, name


def refusal(rank: int, world_size: int, *, case: Case) -> str:
    """In a worker: what the optimizer says to a case."""
    from megatron_muon.errors import UserError

    with pytest.raises(UserError) as caught:
        Trainer(case)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (TP.but(query_groups=1, strategy="no_shard"), "--num-query-groups 1 is less than --tensor-model-parallel-size"),
        (TP.but(query_groups=1, optimizer={"muon_tp_mode": "blockwise"}), "no rank's part of the QKV matrix"),
        (HSDP.but(strategy="no_shard"), "--num-distributed-optimizer-instances 2 has nothing to shard"),
    ],
)
def test_what_a_layout_cannot_do_is_refused(ranks: Pool, case: Case, message: str) -> None:
    assert message in ranks(2, refusal, case=case)[0]


def blocks_done(rank: int, world_size: int, *, case: Case) -> int:
    """In a worker: blocks that this rank orthogonalises in one step."""
    from megatron_muon.core.orthogonalize import Orthogonalizer

    done = 0
    original = Orthogonalizer.orthogonalize_stack

    def counting(self: Any, stack: Any, *rest: Any) -> Any:
        nonlocal done
        done += len(stack)
        return original(self, stack, *rest)

    Orthogonalizer.orthogonalize_stack = counting  # this process ends with the task
    Trainer(case).step()
    return done


@pytest.mark.parametrize("name", wide_but(["hsdp tp2"], ["hsdp", "hsdp tp2", "tp2 dp2"]))
def test_every_block_is_orthogonalised_by_one_rank(ranks: Pool, name: str) -> None:
    """No instance repeats the work of another, and no tensor-parallel rank that of its peers."""
    world_size, case = LAYOUTS[name]
    expected = 6
    assert len(case.muon_blocks()) == expected
    done = ranks(world_size, blocks_done, case=case)
    assert sum(done) == expected
    assert max(done) < expected, "the work is shared"


STEPS = 5
CLIPPED = {"clip_grad": 0.3, "lr": 0.02, "min_lr": 0.02, "log_num_zeros_in_grad": True}
DENSE = TP.but(tensor=1, optimizer=CLIPPED)
EXPERTS = MOE.but(query_groups=2, vocabulary=132, optimizer=CLIPPED)

TRAINED: dict[str, tuple[Case, dict[str, Case]]] = {
    "dense": (
        DENSE,
        {
            "DP": DENSE,
            "TP 2 x DP 2": DENSE.but(tensor=2),
            "TP 2 x DP 2, sequence parallel": DENSE.but(tensor=2, sequence=True),
            "HSDP 2 x DP 2": DENSE.but(instances=2),
            "HSDP 2 x TP 2": DENSE.but(instances=2, tensor=2),
        },
    ),
    "experts": (
        EXPERTS,
        {
            "experts, DP": EXPERTS,
            "EP 2 x DP 2": EXPERTS.but(expert_parallel=2),
            "EP 4": EXPERTS.but(expert_parallel=4),
            "EP 2 x HSDP 2": EXPERTS.but(expert_parallel=2, instances=2),
            "EP 2 x TP 2, sequence parallel": EXPERTS.but(tensor=2, sequence=True, expert_parallel=2),
            "expert TP 2, dense TP 2": EXPERTS.but(tensor=2, sequence=True, expert_tensor=2),
            "expert TP 2, dense TP 1": EXPERTS.but(expert_tensor=2),
        },
    ),
}


def of_all_strategies(case: Case) -> dict[str, Case]:
    """By strategy; several instances also with overlap and with state that the instances share."""
    hsdp = case.instances > 1
    cases = {strategy: case.but(strategy=strategy) for strategy in STRATEGIES[hsdp:]}
    if hsdp:
        cases |= {f"{s}, overlap": case.but(strategy=s, overlap=True) for s in ("optim", "optim_grads")}
        cases[OUTER] = case.but(outer="optim")
        cases[f"{OUTER}, overlap"] = case.but(outer="optim", overlap=True)
    return cases


def curves(rank: int, world_size: int, *, cases: dict[str, Case], micro_batches: int) -> Any:
    """In a worker: losses, gradient norms and counts of zeros of every case."""
    seen = {}
    for label, case in cases.items():
        trainer = Trainer(case, steps=STEPS)
        steps = [trainer.train(tokens, micro_batches=micro_batches) for tokens in batches(STEPS)]
        seen[label] = [(loss, float(result[1]), float(result[2])) for loss, result in steps]
    return seen


TRAINED_OFTEN = [
    ("dense", "HSDP 2 x TP 2", ["optim_grads", f"{OUTER}, overlap"]),
    ("experts", "EP 2 x TP 2, sequence parallel", ["optim_grads_params"]),
]


@pytest.fixture(scope="module")
def alone(ranks: Pool) -> dict[str, list[tuple[float, float, float]]]:
    """Losses, gradient norms and counts of zeros on one rank that holds everything; the first ones are DDP's too."""
    seen = {}
    for model, (one, _) in TRAINED.items():
        steps = ranks(1, curves, cases={"": one.but(strategy="no_shard")}, micro_batches=1)[0][""]
        assert steps[-1][0] < steps[0][0] - 0.2, "the model must learn, or agreement says nothing"
        assert max(norm for _, norm, _ in steps) > 0.3, "clipping must be at work"
        norm, zeros = ranks(1, ddp_statistics, case=one)[0]
        assert norm == pytest.approx(steps[0][1], rel=1e-6)
        assert zeros == steps[0][2]
        seen[model] = steps
    return seen


@pytest.mark.parametrize(
    ("model", "layout", "labels"),
    wide_but(
        TRAINED_OFTEN,
        [
            *TRAINED_OFTEN,
            *(
                (model, layout, list(of_all_strategies(case)))
                for model, (_, layouts) in TRAINED.items()
                for layout, case in layouts.items()
            ),
        ],
    ),
)
def test_training_equals_that_of_one_rank(ranks: Pool, alone: Any, model: str, layout: str, labels: list[str]) -> None:
    of_all = of_all_strategies(TRAINED[model][1][layout])
    cases = {label: of_all[label] for label in labels}
    found = ranks(4, curves, cases=cases, micro_batches=3)[0]
    for label, steps in found.items():
        assert steps[0][1] == pytest.approx(alone[model][0][1], rel=1e-5), f"{label}: gradient norm"
        assert steps[0][2] == pytest.approx(alone[model][0][2], rel=1e-5), f"{label}: zeros"
        for step, ((loss, norm, _), (other_loss, other_norm, _)) in enumerate(zip(steps, alone[model], strict=True)):
            assert abs(loss - other_loss) <= 1e-4, f"{label}: step {step} has loss {loss}, expected {other_loss}"
            assert abs(norm - other_norm) <= 1e-3 * other_norm, f"{label}: step {step}: norm {norm}, not {other_norm}"
