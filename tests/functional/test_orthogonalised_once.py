"""Every Muon matrix is orthogonalised exactly once per step, once per block, and never a shard of it.

The counter sits at emerging-optimizers' Newton-Schulz itself, below everything that this package or megatron-core adds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.functional.model import STRATEGIES, Case, Trainer, batches, sabotaged
from tests.functional.pool import Pool

STEPS = 2


@contextmanager
def recorded_shapes() -> Iterator[list[tuple[int, ...]]]:
    """The shape of every input of Newton-Schulz; a batch counts as its members."""
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    from megatron_muon.optim import orthogonalize

    shapes: list[tuple[int, ...]] = []
    original = muon_utils.newton_schulz

    def recording(x: Any, *args: Any, **kwargs: Any) -> Any:
        members = x.shape[0] if x.ndim == 3 else 1
        shapes.extend([tuple(x.shape[-2:])] * members)
        return original(x, *args, **kwargs)

    places = [muon_utils, orthogonalize]  # no_shard comes here through newton_schulz_tp, the sharded Muon directly
    for place in places:
        assert place.newton_schulz is original
        place.newton_schulz = recording
    try:
        yield shapes
    finally:
        for place in places:
            place.newton_schulz = original


def count(rank: int, world_size: int, *, case: Case, micro_batches: int, sabotage: str = "") -> Any:
    """In a worker: how often each shape was orthogonalised in each step."""
    trainer = Trainer(case)
    counts = []
    for tokens in batches(STEPS):
        with recorded_shapes() as shapes, sabotaged("" if sabotage == "per micro-batch" else sabotage):
            trainer.train(tokens, micro_batches=micro_batches)
            if sabotage == "per micro-batch":
                trainer.step()
        counts.append(Counter(shapes))
    return counts


def check(counts: list[Counter[tuple[int, int]]], case: Case) -> None:
    """Each step has orthogonalised the blocks of the model, once each."""
    for step in counts:
        assert step == Counter(case.muon_blocks())


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_once_per_block_and_never_a_shard(ranks: Pool, strategy: str, micro_batches: int) -> None:
    case = Case(strategy=strategy)
    counts = ranks(2, count, case=case, micro_batches=micro_batches)
    # In the all-gather scheme every rank orthogonalises every matrix; under no_shard each has its own copy.
    for rank_counts in counts:
        check(rank_counts, case)


def test_fused_qkv_is_one_block(ranks: Pool) -> None:
    case = Case(swiglu=True, tied=True, optimizer={"muon_split_qkv": False})
    for rank_counts in ranks(3, count, case=case, micro_batches=2):
        check(rank_counts, case)


@pytest.mark.parametrize("bug", ["shard", "skip", "per micro-batch"])
def test_the_count_can_fail(ranks: Pool, bug: str) -> None:
    """Negative control: shards, a matrix left out, and one step per micro-batch do not pass."""
    case = Case(layers=1)
    for rank_counts in ranks(2, count, case=case, micro_batches=1, sabotage=bug):
        with pytest.raises(AssertionError):
            check(rank_counts, case)
