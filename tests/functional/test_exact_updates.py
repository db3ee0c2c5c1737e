"""Given the same gradients, updates equal those of an independent reference on whole matrices: the
table of parity.

`support/cases.py` has the cases and `support/parity.py` the comparison with its tolerances. A case
is added there.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.case import Case
from tests.support.cases import (
    ADAMUON,
    BLOCKS,
    CLIP,
    CLIPPED,
    HYPERBALL,
    NORMUON,
    PLAIN,
    REPLICATED,
    TABLE,
    TP,
    VARIANTS,
    WHOLE,
    but,
)
from tests.support.model import Trainer
from tests.support.parity import assert_same_bits, check, run
from tests.support.pool import Pool
from tests.support.wide import wide_but


@pytest.mark.parametrize(
    ("name", "how"),
    wide_but(
        [(name, "gloo") for name, group in TABLE.items() if group.often],
        [(name, how) for name, group in TABLE.items() for how in ("gloo", "audited", *group.again)],
    ),
)
def test_updates_equal_the_reference(ranks: Pool, name: str, how: str) -> None:
    group = TABLE[name]
    with contextlib.nullcontext() if how == "gloo" else getattr(ranks, how)():
        seen = ranks(group.ranks, run, cases=group.cases)[0]
    for label, case in group.cases.items():
        check(seen[label], case, label=label)
    for first, *others in group.same:
        for other in others:
            assert_same_bits(seen[first], seen[other], f"{first} and {other}")


BF16 = {"muon_fp32_matmul_prec": "medium"}
ON_ANY_NUMBER = {
    "bf16": but(PLAIN, **BF16),
    "normuon, bf16": but(VARIANTS["normuon"], **BF16),
    "shared, bf16": but(REPLICATED, **BF16),
    "shared, bf16 wire only": but(REPLICATED, muon_exchange_dtype="bf16"),
}


@pytest.mark.parametrize("world_size", wide_but([3], (3, 4)))
def test_the_number_of_ranks_changes_no_bit(ranks: Pool, world_size: int) -> None:
    """Rows travel in bf16 where the iteration has it: rounding only those that travel would show
    who holds what.

    The owner of a replicated matrix applies what it sent, rounded; with its own fp32 update, ranks
    would differ.
    """
    alone, seen = (
        ranks(
            size,
            run,
            cases=ON_ANY_NUMBER,
        )[0]
        for size in (1, world_size)
    )
    for label in ON_ANY_NUMBER:
        assert_same_bits(alone[label], seen[label], label)


def test_blockwise_orthogonalises_the_part_of_each_rank(ranks: Pool) -> None:
    """Megatron-core's default: a tensor-parallel rank's part is a matrix with a norm of its own,
    replicated or not.
    """
    cases = {}
    for label, settings in (("plain", {}), ("hyperball", HYPERBALL)):
        case = but(TP, **settings, muon_tp_mode="blockwise")
        cases |= {label: case, f"{label}, replicated": case.but(strategy="no_shard")}
    seen = ranks(4, run, cases=cases)[0]
    for label in ("plain", "hyperball"):
        assert_same_bits(seen[label], seen[f"{label}, replicated"], label, atol=2e-6)
    # the update of the whole matrix is another
    with pytest.raises(AssertionError, match="weight after 1 steps"):
        check(seen["plain"], TP, atol=1e-4)


BUGS = {"shard": PLAIN, "norms": but(PLAIN, **HYPERBALL)}
"""What is trained with each bug of `sabotaged`."""

OTHERS = {
    "plain decay": (but(VARIANTS["cautious"], muon_cautious_weight_decay=False), "cautious"),
    "plain steps": (but(VARIANTS["hyperball"], muon_hyperball=False), "hyperball"),
    "steps of all matrices": (VARIANTS["steps by name"].but(steps_for=()), "steps by name"),
    "adamuon for normuon": (but(VARIANTS["normuon"], **ADAMUON), "normuon"),
    "normuon for adamuon": (but(VARIANTS["adamuon"], **NORMUON), "adamuon"),
    "another share for the queries": (
        CLIPPED["grouped queries"].but(attention=CLIP | {"qk_clip_alpha": 0.4}),
        "grouped queries",
    ),
    "not excluded": (BLOCKS["excluded"].but(excluded=("linear_proj",)), "excluded"),
    **{
        f"{label}, whole": (BLOCKS[label].but(optimizer=WHOLE), label)
        for label in ("gated mlp", "heads", "gated attention, heads", "latent attention", "experts")
    },
}
"""Cases that a trained one of the table is compared with."""


def test_the_comparison_can_fail(ranks: Pool) -> None:
    """Negative controls: none passes for the other, even with a large tolerance."""
    table = VARIANTS | BLOCKS | CLIPPED
    trained = {label: table[label] for _, label in OTHERS.values()}
    seen = ranks(
        2,
        run,
        cases=BUGS | trained,
        sabotage=list(BUGS),
        steps=1,
    )[0]
    compared = [
        (
            bug,
            case,
            2e-6 if bug == "norms" else 1e-4,
        )
        for bug, case in BUGS.items()
    ]
    compared += [(label, other, 1e-4) for other, label in OTHERS.values()]
    for label, case, atol in compared:
        with pytest.raises(AssertionError, match=r"(weight|momentum|second moment)( after 1|$)"):
            check(seen[label], case, atol=atol, label=label)


def forms(trainer: Trainer) -> dict[str, Any]:
    """Of every matrix: type, dtype, whole shape and this rank's elements of each part of its
    state.
    """
    return {
        f"{name}:{slot}": (
            type(value),
            value.dtype,
            value.shape,
            value._local_tensor.numel(),
        )
        for name, state in trainer.states().items()
        if "momentum_buffer" in state
        for slot, value in state.items()
    }


def stepped(rank: int, world_size: int) -> Any:
    """In a worker: the form of both variants' state before a step and after it, and whole
    shapes.
    """
    found = []
    for settings in (ADAMUON, NORMUON):
        trainer = Trainer(
            Case(layers=1, ffn=47, heads=3, query_groups=1, optimizer=settings),
        )
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
        for by_element, (before, after, shapes) in zip((True, False), of_rank, strict=True):
            assert before == after
            names = {key.partition(":")[0] for key in before}
            assert "decoder.layers.0.mlp.linear_fc1.weight" in names
            for name in names:
                rows, cols = shapes[name]
                moments = (rows, cols) if by_element else (rows, 1) if rows >= cols else (1, cols)
                of_momentum, of_moments = (
                    before[f"{name}:{slot}"] for slot in ("momentum_buffer", "moment2_buffer")
                )
                assert of_momentum[:3] == (DTensor, torch.float32, (rows, cols)), name
                assert of_moments[:3] == (DTensor, torch.float32, moments), name
                empty += of_momentum[3] == 0
        assert of_rank[0][0].keys() == everyone[0][0][0].keys()
    assert empty, "no shard was empty"
