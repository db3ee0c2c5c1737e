"""Every parallel layout gives what the whole matrices give on one rank.

Given the same gradients, weights and momentum equal those of the independent reference, which knows no ranks: with
tensor parallelism, experts, several optimizer instances and context-parallel groups, alone and together. Tolerances as
in test_exact_updates. Replicas are compared bit by bit where they are put together (`Trainer.whole`). Trained on the
same batches, losses equal those of one rank, and gradient norms and counts of zeros those of megatron-core's DDP.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.functional.model import STRATEGIES, Case, Trainer, batches, ddp_statistics
from tests.functional.pool import Pool
from tests.functional.test_exact_updates import assert_same_bits, check, run

SHARDED = STRATEGIES[1:]
WHOLE = {"muon_tp_mode": "duplicated"}
TP = Case(vocabulary=132, ffn=46, query_groups=2, layers=1, tensor=2, optimizer=WHOLE)
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
    "expert tp2": (4, MOE.but(expert_tensor=2, optimizer=WHOLE)),
    "ep2 hsdp": (4, MOE.but(expert_parallel=2, instances=2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_updates_equal_the_reference(ranks: Pool, name: str) -> None:
    world_size, case = LAYOUTS[name]
    cases = {strategy: case.but(strategy=strategy) for strategy in SHARDED}
    if case.instances > 1:
        cases["optim_grads_params, outer optim"] = case.but(outer="optim")
    seen = ranks(world_size, run, cases=cases)[0]
    for label in cases:
        check(seen[label], case, atol=2e-6)


@pytest.mark.parametrize("name", ["tp2 dp2", "hsdp tp2", "expert tp2"])
def test_both_exchanges_give_the_same_bits(ranks: Pool, name: str) -> None:
    world_size, case = LAYOUTS[name]
    cases = {e: case.but(optimizer={**WHOLE, "muon_exchange": e}) for e in ("owner", "allgather")}
    assert_same_bits(ranks(world_size, run, cases=cases)[0])


def test_blockwise_orthogonalises_the_part_of_each_rank(ranks: Pool) -> None:
    """Upstream's default; also the negative control: it does not pass for the update of the whole matrix."""
    case = TP.but(optimizer={"muon_tp_mode": "blockwise"})
    seen = ranks(4, run, cases={"no_shard": case.but(strategy="no_shard"), "sharded": case})[0]
    with pytest.raises(AssertionError, match="weight after 1 steps"):
        check(seen["sharded"], case, atol=1e-4)
    for one, other in zip(seen["no_shard"][1], seen["sharded"][1], strict=True):
        for name, expected in one.items():
            assert (other[name] - expected).abs().max() <= 2e-6, name


def blocks_done(rank: int, world_size: int, *, case: Case) -> int:
    """In a worker: blocks that this rank orthogonalises in one step."""
    from megatron_muon.optim.orthogonalize import Orthogonalizer

    done = 0
    original = Orthogonalizer.orthogonalize_stack

    def counting(self: Any, stack: Any, block_shapes: Any) -> None:
        nonlocal done
        done += len(block_shapes)
        original(self, stack, block_shapes)

    Orthogonalizer.orthogonalize_stack = counting  # this process ends with the task
    Trainer(case).step()
    return done


@pytest.mark.parametrize(("name", "expected"), [("hsdp", 6), ("hsdp tp2", 6), ("tp2 dp2", 6)])
def test_every_block_is_orthogonalised_by_one_rank(ranks: Pool, name: str, expected: int) -> None:
    """No instance repeats the work of another, and no tensor-parallel rank that of its peers."""
    world_size, case = LAYOUTS[name]
    assert len(case.muon_blocks()) == expected
    done = ranks(world_size, blocks_done, case=case)
    assert sum(done) == expected
    assert max(done) < expected, "the work is shared"


STEPS = 8
CLIPPED = {"clip_grad": 0.3, "lr": 0.02, "min_lr": 0.02, "log_num_zeros_in_grad": True, **WHOLE}
DENSE = TP.but(tensor=1, optimizer=CLIPPED)
EXPERTS = MOE.but(query_groups=2, vocabulary=132, optimizer=CLIPPED)

TRAINED: dict[str, list[tuple[str, Case]]] = {
    "dense": [
        *((f"tp2, {strategy}", DENSE.but(tensor=2, strategy=strategy)) for strategy in SHARDED),
        ("tp2 with sequence parallelism", DENSE.but(tensor=2, sequence=True)),
        *((f"hsdp, {strategy}", DENSE.but(instances=2, strategy=strategy)) for strategy in SHARDED),
        *((f"hsdp, overlap, {s}", DENSE.but(instances=2, strategy=s, overlap=True)) for s in SHARDED),
        ("hsdp, outer optim", DENSE.but(instances=2, outer="optim")),
        ("hsdp, outer optim, overlap", DENSE.but(instances=2, outer="optim", overlap=True)),
        ("hsdp tp2", DENSE.but(instances=2, tensor=2)),
    ],
    "experts": [
        *((f"ep2, {strategy}", EXPERTS.but(expert_parallel=2, strategy=strategy)) for strategy in SHARDED),
        ("ep4", EXPERTS.but(expert_parallel=4)),
        ("dp4", EXPERTS),
        ("ep2 hsdp", EXPERTS.but(expert_parallel=2, instances=2)),
        ("tp2 ep2 with sequence parallelism", EXPERTS.but(tensor=2, sequence=True, expert_parallel=2)),
        ("expert tp2, dense tp2", EXPERTS.but(tensor=2, sequence=True, expert_tensor=2)),
        ("expert tp2, dense tp1", EXPERTS.but(expert_tensor=2)),
    ],
}


def curves(rank: int, world_size: int, *, cases: list[tuple[str, Case]], micro_batches: int) -> Any:
    """In a worker: losses, gradient norms and counts of zeros of every case."""
    seen = {}
    for label, case in cases:
        trainer = Trainer(case, steps=STEPS)
        steps = [trainer.train(tokens, micro_batches=micro_batches) for tokens in batches(STEPS)]
        seen[label] = [(loss, float(result[1]), float(result[2])) for loss, result in steps]
    return seen


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("model", TRAINED)
def test_training_equals_that_of_one_rank(ranks: Pool, model: str, micro_batches: int) -> None:
    one = DENSE if model == "dense" else EXPERTS
    alone = ranks(1, curves, cases=[("", one.but(strategy="no_shard"))], micro_batches=1)[0][""]
    assert alone[-1][0] < alone[0][0] - 0.5, "the model must learn, or agreement says nothing"
    assert max(norm for _, norm, _ in alone) > 0.3, "clipping must be at work"
    ddp = ranks(1, ddp_statistics, case=one)[0]
    found = ranks(4, curves, cases=TRAINED[model], micro_batches=micro_batches, timeout_s=300)[0]
    for label, steps in {"one rank": alone, **found}.items():
        loss, norm, zeros = steps[0]
        assert abs(norm - ddp[0]) <= 1e-5 * ddp[0], f"{label}: norm {norm}, DDP {ddp[0]}"
        assert abs(zeros - ddp[1]) <= 1e-5 * ddp[1], f"{label}: {zeros} zeros, DDP {ddp[1]}"
        for step, ((loss, norm, _), (other_loss, other_norm, _)) in enumerate(zip(steps, alone, strict=True)):
            assert abs(loss - other_loss) <= 1e-4, f"{label}: step {step} has loss {loss}, expected {other_loss}"
            assert abs(norm - other_norm) <= 1e-3 * other_norm, f"{label}: step {step}: norm {norm}, not {other_norm}"
