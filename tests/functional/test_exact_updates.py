"""Given the same gradients, updates equal those of an independent reference on whole matrices.

Newton-Schulz runs in fp32 on both sides and on the same blocks, no sum depends on the number of ranks, and elementwise
arithmetic is written in the same order. Under no_shard the tolerance is none: the first and the last update agree to
the last bit. Ten steps are made where strategies, sizes and teams are the subject, else three.
The sharded Muon multiplies blocks of equal shape in batches and iterates some of them by their Gram matrix: products
that round otherwise than the reference's, by 1e-7 of an update of size 0.01 in a step. Weights and momentum agree to
2e-6 there, and the two exchanges with each other to the last bit.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.case import STRATEGIES, Case
from tests.support.model import Trainer, sabotaged
from tests.support.pool import Pool
from tests.support.reference import Reference
from tests.support.wide import wide_but

pytestmark = pytest.mark.usefixtures("delayed_too")

TEN = 10
STEPS = 3
EXCHANGES = ("owner", "allgather")

VARIANTS = {
    "decay-in-gradient": ({"decoupled_weight_decay": False}, 1e-6),
    "no-nesterov": ({"muon_nesterov": False}, 0.0),
    "no-nesterov-decay-in-gradient": ({"muon_nesterov": False, "decoupled_weight_decay": False}, 1e-6),
    "muon-lr": ({"muon_lr": 0.04, "muon_min_lr": 0.02}, 0.0),
    "fused-qkv": ({"muon_split_qkv": False}, 0.0),
    "lion": ({"muon_scalar_optimizer": "lion"}, 0.0),
    "unit-rms-norm": ({"muon_scale_mode": "unit_rms_norm", "muon_extra_scale_factor": 1.0}, 0.0),
}


@dataclass(frozen=True)
class Seen:
    """Whole shapes, and whole weights and momentum after each step that is looked at, of `steps` in all."""

    shapes: dict[str, tuple[int, ...]]
    steps: int
    after: dict[int, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]


def run(rank: int, world_size: int, *, cases: dict[str, Case], sabotage: str = "", steps: int = STEPS) -> Any:
    """In a worker: every case, looked at after one step and after all; a `Seen` of each by its label."""
    seen: dict[str, Any] = {}
    for label, case in cases.items():
        trainer = Trainer(case, steps=steps)
        seen[label] = Seen(trainer.shapes, steps, {})
        with sabotaged(sabotage):
            for step in range(1, steps + 1):
                assert trainer.step()[0], "the step was skipped"
                if step in (1, steps):
                    seen[label].after[step] = (trainer.whole(), trainer.whole_state("momentum_buffer"))
    return seen if rank == 0 else None


def check(seen: Seen, case: Case, *, atol: float = 0.0) -> None:
    """Compare what a worker saw with the reference."""
    reference = Reference(case, seen.shapes, steps=seen.steps)
    for step in range(1, seen.steps + 1):
        reference.step()
        if step in seen.after:
            weights, momentum = seen.after[step]
            for what, found, expected in (
                ("momentum", momentum, reference.momentum()),
                ("weight", weights, reference.whole()),
            ):
                assert found.keys() == expected.keys(), what
                for name in expected:
                    torch.testing.assert_close(
                        found[name],
                        expected[name],
                        rtol=0.0,
                        atol=atol,
                        msg=lambda text, n=name, w=what, s=step: f"{n}, {w} after {s} steps: {text}",
                    )


def tolerance(case: Case, atol: float = 0.0) -> float:
    """The module's docstring says why."""
    return atol if case.strategy == "no_shard" else max(atol, 2e-6)


def assert_same_bits(one: Seen, other: Seen) -> None:
    """Weights and momentum are the same."""
    assert one.after.keys() == other.after.keys()
    for step, tensors in one.after.items():
        for these, those in zip(tensors, other.after[step], strict=True):
            assert these.keys() == those.keys()
            for name in these:
                assert torch.equal(these[name], those[name]), f"{name} after {step} steps"


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    wide_but(
        [("no_shard", 2), ("optim", 2), ("optim_grads", 2), ("optim_grads_params", 1), ("optim_grads_params", 3)],
        itertools.product(STRATEGIES, (1, 2, 3, 4)),
    ),
)
def test_updates_equal_the_reference(ranks: Pool, strategy: str, world_size: int) -> None:
    case = Case(strategy=strategy)
    exchanges = ("owner",) if strategy == "no_shard" else EXCHANGES
    cases = {exchange: case.but(optimizer={"muon_exchange": exchange}) for exchange in exchanges}
    seen = ranks(world_size, run, cases=cases, steps=TEN)[0]
    for label in cases:
        check(seen[label], case, atol=tolerance(case))
    if strategy != "no_shard":  # which exchanges nothing
        assert_same_bits(seen["owner"], seen["allgather"])


@pytest.mark.parametrize("world_size", wide_but([3], (1, 2, 3, 4)))
def test_shared_replicas_equal_the_reference(ranks: Pool, world_size: int) -> None:
    """Replicas are compared bit by bit where they are put together; with a tiny buffer one parcel is under way."""
    case = Case(strategy="no_shard", layers=1, optimizer={"muon_share_replicated": True})
    cases = {
        "plenty": case,
        "tiny": case.but(optimizer={**case.optimizer, "muon_exchange_buffer_mb": 0.07}),
        "narrow": case.but(ffn=2),  # not every rank has a row of a matrix of two, in the plan's eyes
    }
    seen = ranks(world_size, run, cases=cases)[0]
    for label, given in cases.items():
        check(seen[label], given, atol=2e-6)
    assert_same_bits(seen["plenty"], seen["tiny"])


@pytest.mark.wide
def test_shared_replicas_in_bf16_stay_the_same(ranks: Pool) -> None:
    """The owner applies what it sent, rounded: with its own fp32 update, `whole` would find that ranks differ."""
    settings = {"muon_share_replicated": True, "muon_fp32_matmul_prec": "medium"}
    cases = {"auto": Case(strategy="no_shard", optimizer=settings)}
    cases["bf16 wire only"] = Case(
        strategy="no_shard", optimizer={"muon_share_replicated": True, "muon_exchange_dtype": "bf16"}
    )
    alone, shared = (ranks(world_size, run, cases=cases, steps=1)[0] for world_size in (1, 3))
    for label in cases:
        for name, found in shared[label].after[1][0].items():
            assert torch.equal(found, alone[label].after[1][0][name]), f"{label}, {name}"


@pytest.mark.wide
def test_every_setting_means_the_same_where_work_is_shared(ranks: Pool) -> None:
    cases = {
        label: Case(strategy="no_shard", layers=1, optimizer={**settings, "muon_share_replicated": True})
        for label, (settings, _) in VARIANTS.items()
    }
    seen = ranks(2, run, cases=cases)[0]
    for label, (_, atol) in VARIANTS.items():
        check(seen[label], cases[label], atol=max(atol, 2e-6))


SMALL_WAVES = {"muon_exchange_buffer_mb": 0.07}


@pytest.mark.parametrize(
    "settings", wide_but([SMALL_WAVES], [SMALL_WAVES, {"muon_ns": "standard"}, {"muon_ns": "gram"}])
)
def test_nor_do_waves_and_iterations_matter(ranks: Pool, settings: dict[str, Any]) -> None:
    """Waves as small as they can be; and either iteration for all blocks."""
    case = Case(strategy="optim_grads_params", layers=1, ffn=47)
    cases = {e: case.but(optimizer={"muon_exchange": e, **settings}) for e in EXCHANGES}
    if "muon_exchange_buffer_mb" in settings:  # the all-gather exchange has no waves
        cases["allgather"] = case.but(optimizer={"muon_exchange": "allgather"})
    seen = ranks(4, run, cases=cases)[0]
    check(seen["owner"], case, atol=tolerance(case))
    assert_same_bits(seen["owner"], seen["allgather"])


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    wide_but([("optim_grads_params", 2)], [("no_shard", 2), ("optim_grads_params", 2), ("optim_grads_params", 3)]),
)
def test_every_setting_means_what_the_reference_means(ranks: Pool, strategy: str, world_size: int) -> None:
    cases = {label: Case(strategy=strategy, layers=1, optimizer=settings) for label, (settings, _) in VARIANTS.items()}
    seen = ranks(world_size, run, cases=cases)[0]
    for label, (_, atol) in VARIANTS.items():
        check(seen[label], cases[label], atol=tolerance(cases[label], atol))


def test_a_bf16_iteration_does_not_depend_on_layout_either(ranks: Pool) -> None:
    """Rows travel in bf16 then: rounding only those that travel would make the result depend on who holds what."""
    case = Case(strategy="optim_grads_params", layers=1, optimizer={"muon_fp32_matmul_prec": "medium"})
    seen = {size: ranks(size, run, cases={"": case}, steps=1)[0][""] for size in (1, 2, 4)}
    weights = {size: seen[size].after[1][0] for size in seen}
    gathered = case.but(optimizer={"muon_fp32_matmul_prec": "medium", "muon_exchange": "allgather"})
    reference = ranks(2, run, cases={"": gathered}, steps=1)[0][""].after[1][0]
    for name, found in weights[1].items():
        for other in (2, 4):
            assert torch.equal(found, weights[other][name]), f"{name} on {other} ranks"
        # A weight moves by 0.01 in a step; bf16 keeps 2 to 3 digits of that.
        torch.testing.assert_close(found, reference[name], rtol=0.0, atol=1e-3)


def test_models_of_other_shapes(ranks: Pool) -> None:
    """Uneven and empty shards: with ffn 47 most ranks hold no row of the small matrices; tied and gated models too."""
    cases = {
        "empty shards": Case(layers=1, ffn=47),
        "one query group": Case(layers=1, query_groups=1, strategy="optim"),
        "swiglu, tied": Case(layers=1, swiglu=True, tied=True),
    }
    seen = ranks(4, run, cases=cases)[0]
    for label, case in cases.items():
        check(seen[label], case, atol=tolerance(case))


def test_momentum_is_no_alias_of_what_is_normalised(ranks: Pool) -> None:
    """Normalising in place would shrink the momentum itself when nesterov is off: after a step it is the average."""
    case = Case(strategy="no_shard", layers=1, optimizer={"muon_nesterov": False, "weight_decay": 0.0})
    for strategy in ("no_shard", "optim_grads"):
        seen = ranks(2, run, cases={"": case.but(strategy=strategy)}, steps=1)[0][""]
        reference = Reference(case, seen.shapes, steps=1)
        reference.step()
        for name, momentum in seen.after[1][1].items():
            expected = 0.1 * reference.weights[name].grad
            torch.testing.assert_close(momentum, expected, rtol=1e-6, atol=0.0)


HEADS = {"muon_split_heads": True}
GATED = {"muon_split_gated_mlp": True}
BLOCKS = {
    "gated mlp": Case(swiglu=True, optimizer=GATED),
    "heads": Case(optimizer=HEADS),
    "heads, one query group": Case(query_groups=1, optimizer=HEADS),
    "gated attention": Case(output_gate=True),
    "gated attention, heads": Case(output_gate=True, optimizer=HEADS),
    "latent attention": Case(latent=True),
    "latent attention, query latent, heads": Case(latent=True, query_latent=True, optimizer=HEADS),
    "latent attention, nothing split": Case(latent=True, query_latent=True, optimizer={"muon_split_qkv": False}),
    "hybrid": Case(hybrid="MG*", output_gate=True),
    "hybrid, latent attention": Case(hybrid="M+", latent=True, query_latent=True),
    "hybrid, whole": Case(hybrid="MG", optimizer={"muon_split_qkv": False}),
    "experts": Case(experts=3, swiglu=True, optimizer=GATED),
    "stacked experts": Case(stacked=3, swiglu=True, optimizer=GATED),
    "stacked experts, whole": Case(stacked=5, swiglu=True),
    "routers excluded": Case(experts=3, optimizer={"muon_exclude": ["router"]}, excluded=("router",)),
    "more excluded": Case(
        optimizer={"muon_exclude": ["layers.0.*fc1", "linear_pro?."], "muon_lr": 0.03},
        excluded=("layers.0.mlp.linear_fc1", "linear_proj"),
    ),
}


FUSED = ["gated mlp", "heads", "gated attention, heads", "latent attention", "hybrid", "experts", "stacked experts"]
SHARDED_OVER_THREE = ("optim_grads_params", 3, FUSED)


@pytest.mark.parametrize(
    ("strategy", "world_size", "labels"),
    wide_but(
        [SHARDED_OVER_THREE],
        [
            SHARDED_OVER_THREE,
            *((strategy, 2, list(BLOCKS)) for strategy in STRATEGIES),
            *(("optim_grads_params", size, list(BLOCKS)) for size in (1, 3, 4)),
        ],
    ),
)
def test_blocks_equal_the_reference(ranks: Pool, strategy: str, world_size: int, labels: list[str]) -> None:
    """Whatever is fused into a parameter, each part of it is a matrix of its own, however its rows are cut."""
    cases = {label: BLOCKS[label].but(strategy=strategy, layers=1) for label in labels}
    seen = ranks(world_size, run, cases=cases)[0]
    for label, case in cases.items():
        check(seen[label], case, atol=tolerance(case))


OVER_TP = {"muon_tp_mode": "duplicated"}
BLOCKS_OVER_LAYOUTS = {
    "tp2 dp2": Case(
        swiglu=True, vocabulary=132, ffn=46, query_groups=2, tensor=2, optimizer={**GATED, **HEADS, **OVER_TP}
    ),
    "hsdp": Case(swiglu=True, instances=2, stacked=3, optimizer={**GATED, **HEADS}),
    "ep2": Case(
        swiglu=True,
        ffn=46,
        experts=4,
        expert_parallel=2,
        optimizer={**GATED, "muon_exclude": ["router"]},
        excluded=("router",),
    ),
    "hybrid tp2": Case(
        hybrid="MG*", output_gate=True, vocabulary=132, ffn=46, query_groups=2, tensor=2, optimizer=OVER_TP
    ),
    "hybrid, latent attention, tp2": Case(
        hybrid="M+", latent=True, query_latent=True, vocabulary=132, ffn=46, tensor=2, optimizer=OVER_TP
    ),
    "expert tp2": Case(swiglu=True, ffn=46, experts=2, expert_tensor=2, optimizer={**GATED, **OVER_TP}),
}


@pytest.mark.wide
def test_blocks_over_other_layouts(ranks: Pool) -> None:
    """Gate and up of every tensor-parallel rank lie one after the other, and make two blocks in all."""
    cases = {label: case.but(layers=1) for label, case in BLOCKS_OVER_LAYOUTS.items()}
    seen = ranks(4, run, cases=cases)[0]
    for label, case in cases.items():
        check(seen[label], case, atol=2e-6)


def test_fused_projections_over_tensor_parallel_ranks(ranks: Pool) -> None:
    """Each tensor-parallel rank has a part of every matrix in Mamba's and GatedDeltaNet's `in_proj`."""
    cases = {label: case for label, case in BLOCKS_OVER_LAYOUTS.items() if label.startswith("hybrid")}
    seen = ranks(2, run, cases=cases)[0]
    for label, case in cases.items():
        check(seen[label], case, atol=2e-6)


@pytest.mark.parametrize(("world_size", "size"), wide_but([], [(2, "2"), (3, "2"), (4, "2"), (4, "4")]))
def test_teams_equal_the_reference(ranks: Pool, world_size: int, size: str) -> None:
    """All matrices cut, each over `size` ranks; the sums are formed in another order, so the last bits differ."""
    labels = BLOCKS if world_size == 4 else ["gated mlp", "heads", "stacked experts, whole"]
    base = {"plain": Case(ffn=47), **{label: BLOCKS[label] for label in labels}}
    cases = {
        label: case.but(layers=1, optimizer={**case.optimizer, "muon_team_size": size}) for label, case in base.items()
    }
    if world_size == 4:
        cases |= {
            label: case.but(layers=1, optimizer={**case.optimizer, "muon_team_size": "2"})
            for label, case in BLOCKS_OVER_LAYOUTS.items()
            if label != "ep2"  # whose experts' groups have one rank on some layouts
        }
    seen, *_ = ranks(world_size, run, cases=cases, steps=TEN)
    for label, case in cases.items():
        check(seen[label], case, atol=4e-6)
    again, *_ = ranks(world_size, run, cases={"plain": cases["plain"]}, steps=TEN)
    assert_same_bits(again["plain"], seen["plain"])


@pytest.mark.wide
@pytest.mark.parametrize("exchange", ["allgather", "shared"])
def test_blocks_are_the_same_for_every_exchange(ranks: Pool, exchange: str) -> None:
    settings = {"muon_share_replicated": True} if exchange == "shared" else {"muon_exchange": exchange}
    cases = {
        label: case.but(
            strategy="no_shard" if exchange == "shared" else case.strategy,
            layers=1,
            optimizer={**case.optimizer, **settings},
        )
        for label, case in BLOCKS.items()
    }
    seen = ranks(2, run, cases=cases)[0]
    for label, case in cases.items():
        check(seen[label], case, atol=2e-6)


@pytest.mark.parametrize("label", wide_but(["gated mlp", "latent attention", "hybrid", "more excluded"], BLOCKS))
def test_other_blocks_give_other_updates(ranks: Pool, label: str) -> None:
    """Negative control: what was split differently, or not excluded, does not pass."""
    case = BLOCKS[label].but(layers=1)
    other = {
        "gated mlp": case.but(optimizer={}),
        "experts": case.but(optimizer={}),
        "stacked experts": case.but(optimizer={}),
        "stacked experts, whole": case.but(optimizer=GATED),
        "routers excluded": case.but(excluded=()),
        "more excluded": case.but(excluded=("linear_proj",)),
        **{
            label: case.but(optimizer={"muon_split_qkv": False})
            for label in ("latent attention", "hybrid", "hybrid, latent attention")
        },
        "latent attention, nothing split": case.but(optimizer={}),
        "gated attention": case.but(optimizer=HEADS),
    }.get(label, case.but(optimizer={}))
    seen = ranks(1, run, cases={"": case})[0][""]
    with pytest.raises(AssertionError, match=r"(weight|momentum) after 1 steps|^weight|^momentum"):
        check(seen, other, atol=1e-4)


@pytest.mark.parametrize("bug", ["shard", "skip"])
def test_the_comparison_can_fail(ranks: Pool, bug: str) -> None:
    """Negative control: Newton-Schulz on a shard, or a matrix that is left out, does not pass."""
    case = Case(layers=1)
    seen = ranks(2, run, cases={"": case}, sabotage=bug)[0][""]
    with pytest.raises(AssertionError, match="weight after 1 steps"):
        check(seen, case, atol=1e-4)
