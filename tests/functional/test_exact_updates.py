"""Given the same gradients, updates equal those of an independent reference on whole matrices: the
table of parity.

`support/cases.py` has the cases and `support/parity.py` the comparison with its tolerances. A case
is added there.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch

from megatron_muon.errors import UserError
from tests.support.case import Case
from tests.support.cases import (
    ADAMUON,
    BLOCKS,
    BY_NAME,
    CLIP,
    CLIPPED,
    GATED,
    GATHERED,
    HEADS,
    HYPERBALL,
    NORMUON,
    REPLICATED,
    TABLE,
    TP,
    VARIANTS,
    but,
)
from tests.support.model import Trainer
from tests.support.parity import Seen, assert_same_bits, check, run
from tests.support.pool import Pool
from tests.support.wide import wide_but

TEN = 10
AT_ONCE = 8
"""Cases of a call: process groups have threads, which only the end of a call's processes ends."""


@pytest.mark.parametrize(
    ("name", "how"),
    wide_but(
        [(name, "gloo") for name, group in TABLE.items() if group.often],
        [(name, how) for name, group in TABLE.items() for how in ("gloo", *group.again)],
    ),
)
def test_updates_equal_the_reference(ranks: Pool, name: str, how: str) -> None:
    group = TABLE[name]
    steps, seen = 2 if how == "two_memories" else group.steps, dict[str, Seen]()
    with contextlib.nullcontext() if how == "gloo" else getattr(ranks, how)():
        for cases in itertools.batched(group.cases.items(), AT_ONCE):
            seen |= ranks(group.ranks, run, cases=dict(cases), steps=steps)[0]
    for label, case in group.cases.items():
        check(seen[label], case, label=label)
    for first, *others in group.same:
        for other in others:
            assert_same_bits(seen[first], seen[other], f"{first} and {other}")


BF16 = {"muon_fp32_matmul_prec": "medium"}
ON_ANY_NUMBER = {
    "bf16": Case(layers=1, optimizer=BF16),
    "adamuon": VARIANTS["adamuon"],
    "normuon": VARIANTS["normuon"],
    "adamuon, bf16": but(VARIANTS["adamuon"], **BF16),
    "normuon, bf16": but(VARIANTS["normuon"], **BF16),
    "shared, bf16": but(REPLICATED, **BF16),
    "shared, bf16 wire only": but(REPLICATED, muon_exchange_dtype="bf16"),
}


@pytest.mark.parametrize("world_size", wide_but([4], (2, 3, 4)))
def test_the_number_of_ranks_changes_no_bit(ranks: Pool, world_size: int) -> None:
    """Rows travel in bf16 where the iteration has it: rounding only those that travel would show
    who holds what.

    The owner of a replicated matrix applies what it sent, rounded; with its own fp32 update, ranks
    would differ.
    """
    alone, seen = (ranks(size, run, cases=ON_ANY_NUMBER)[0] for size in (1, world_size))
    for label in ON_ANY_NUMBER:
        assert_same_bits(alone[label], seen[label], label)
    gathered = ranks(
        2,
        run,
        cases={"": but(ON_ANY_NUMBER["bf16"], **GATHERED)},
    )[0][""].after[1]["weight"]
    for name, found in seen["bf16"].after[1]["weight"].items():
        # A weight moves by 0.01 in a step; bf16 keeps 2 to 3 digits of that.
        assert (found - gathered[name]).abs().max() <= 1e-3, name


def test_blockwise_orthogonalises_the_part_of_each_rank(ranks: Pool) -> None:
    """Megatron-core's default: a tensor-parallel rank's part is a matrix with a norm of its own,
    replicated or not.
    """
    cases = {
        f"{label}, {strategy}": but(TP, **settings, muon_tp_mode="blockwise").but(strategy=strategy)
        for label, settings in (
            ("plain", {}),
            *((name, VARIANTS[name].optimizer) for name in ("cautious", "hyperball")),
        )
        for strategy in ("no_shard", "optim_grads_params")
    }
    seen = ranks(4, run, cases=cases)[0]
    for label in ("plain", "cautious", "hyperball"):
        for step, kinds in seen[f"{label}, no_shard"].after.items():
            for kind, tensors in kinds.items():
                for name, expected in tensors.items():
                    found = seen[f"{label}, optim_grads_params"].after[step][kind][name]
                    assert (found - expected).abs().max() <= 2e-6, (label, name)
    # the update of the whole matrix is another
    with pytest.raises(AssertionError, match="weight after 1 steps"):
        check(seen["plain, optim_grads_params"], TP, atol=1e-4)


WRONG: dict[str, tuple[Case, str, Case]] = {
    "a shard for its matrix": (Case(layers=1), "shard", Case(layers=1)),
    "a matrix left out": (Case(layers=1), "skip", Case(layers=1)),
    "norms of shards": (
        Case(layers=1, optimizer=HYPERBALL),
        "norms",
        Case(layers=1, optimizer=HYPERBALL),
    ),
    "plain decay": (
        but(VARIANTS["cautious"], muon_cautious_weight_decay=False),
        "",
        VARIANTS["cautious"],
    ),
    "plain steps": (but(VARIANTS["hyperball"], muon_hyperball=False), "", VARIANTS["hyperball"]),
    "steps of all matrices": (BY_NAME, "", BY_NAME.but(steps_for=())),
    "normuon for adamuon": (
        VARIANTS["normuon"].but(layers=1),
        "",
        VARIANTS["normuon"].but(optimizer=ADAMUON),
    ),
    "adamuon for normuon": (
        VARIANTS["adamuon"].but(layers=1),
        "",
        VARIANTS["adamuon"].but(optimizer=NORMUON),
    ),
    "another share for the queries": (
        CLIPPED["grouped queries"],
        "",
        CLIPPED["grouped queries"].but(attention=CLIP | {"qk_clip_alpha": 0.4}),
    ),
    "not excluded": (
        BLOCKS["more excluded"],
        "",
        BLOCKS["more excluded"].but(excluded=("linear_proj",)),
    ),
    "whole experts split": (
        BLOCKS["stacked experts, whole"],
        "",
        BLOCKS["stacked experts, whole"].but(optimizer=GATED),
    ),
    "heads of gated attention": (
        BLOCKS["gated attention"],
        "",
        BLOCKS["gated attention"].but(optimizer=HEADS),
    ),
    "latent attention split": (
        BLOCKS["latent attention, whole"],
        "",
        BLOCKS["latent attention, whole"].but(optimizer={}),
    ),
    **{
        f"{label} whole": (
            BLOCKS[label],
            "",
            BLOCKS[label].but(optimizer={"muon_split_qkv": False}),
        )
        for label in (
            "gated mlp",
            "heads",
            "gated attention, heads",
            "latent attention",
            "experts",
        )
    },
}
"""What is trained, with which bug, and what it is compared with."""


def test_the_comparison_can_fail(ranks: Pool) -> None:
    """Negative controls: none passes for the other, even with a large tolerance."""
    cases = {label: case for label, (case, _, _) in WRONG.items()}
    bugs = {label: bug for label, (_, bug, _) in WRONG.items()}
    seen = ranks(2, run, cases=cases, sabotage=bugs, steps=1)[0]
    for label, (_, bug, other) in WRONG.items():
        with pytest.raises(
            AssertionError, match=r"(weight|momentum|second moment)( after 1 steps|$)"
        ):
            check(seen[label], other, atol=2e-6 if bug == "norms" else 1e-4, label=label)


def forms(trainer: Trainer) -> dict[str, Any]:
    """Of every matrix: the parts of its state, their types, dtypes, whole shapes and the numbers
    that this rank has.
    """
    return {
        name: {
            slot: (
                type(value).__name__,
                value.dtype,
                tuple(value.shape),
                value._local_tensor.numel(),
            )
            for slot, value in state.items()
        }
        for name, state in trainer.states().items()
        if "momentum_buffer" in state
    }


def stepped(rank: int, world_size: int) -> Any:
    """In a worker: the form of both variants' state before a step and after it, and whole
    shapes.
    """
    found = []
    for settings in (ADAMUON, NORMUON):
        trainer = Trainer(Case(layers=1, ffn=47, heads=3, query_groups=1, optimizer=settings))
        before = forms(trainer)
        trainer.step()
        found.append((before, forms(trainer), trainer.shapes))
    return found


def test_state_is_there_from_the_start_also_for_empty_shards(ranks: Pool) -> None:
    """Ranks whose state differs in its keys hang when a checkpoint is saved: the slots never
    change, nor their form.
    """
    everyone = ranks(4, stepped)
    empty = 0
    for of_rank in everyone:
        for by_element, (before, after, shapes), (first, _, _) in zip(
            (True, False), of_rank, everyone[0], strict=True
        ):
            assert before == after
            assert before.keys() == first.keys()
            for name, slots in before.items():
                rows, cols = shapes[name]
                moments = (rows, cols) if by_element else (rows, 1) if rows >= cols else (1, cols)
                expected = {"momentum_buffer": (rows, cols), "moment2_buffer": moments}
                found = {slot: form[:3] for slot, form in slots.items()}
                assert found == {
                    slot: ("DTensor", torch.float32, shape) for slot, shape in expected.items()
                }, name
                empty += slots["momentum_buffer"][3] == 0
    assert empty, "no shard was empty"


def refused(rank: int, world_size: int, *, case: Case) -> str:
    """In a worker: the error by which a model's optimizer is refused."""
    with pytest.raises(UserError) as error:
        Trainer(case)
    return str(error.value)


@pytest.mark.parametrize("mode", ["duplicated", "blockwise"])
def test_fused_latents_over_tensor_parallel_ranks_are_refused(ranks: Pool, mode: str) -> None:
    """In megatron-core's `FusedMLASelfAttention` each rank has rows of both latents, which blocks
    would mix.
    """
    case = TP.but(latent=True, query_latent=True, fused_down=True, optimizer={"muon_tp_mode": mode})
    assert "--mla-down-proj-fusion with tensor parallelism" in ranks(2, refused, case=case)[0]
