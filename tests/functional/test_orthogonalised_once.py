"""Every Muon matrix is orthogonalised exactly once per step, once per block, and never a shard of it.

The counter sits at the iterations themselves: below blocks, batches and exchanges. Blocks count as wide ones, as the
iterations see them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.case import STRATEGIES, Case, batches
from tests.support.model import Trainer, sabotaged
from tests.support.pool import Pool
from tests.support.wide import wide_but

STEPS = 2


def wide(shape: Sequence[int]) -> tuple[int, int]:
    """The shape of a block or of its transpose, whichever is wide."""
    return min(shape), max(shape)


@contextmanager
def recorded_shapes() -> Iterator[list[tuple[int, int]]]:
    """The shape of every block that an iteration works on; a batch counts as its members."""
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    from megatron_muon.core import newton_schulz as ns

    shapes: list[tuple[int, int]] = []

    def recording(iterate: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(x: Any, *args: Any, **kwargs: Any) -> Any:
            shapes.extend([wide(x.shape[-2:])] * (x.shape[0] if x.ndim == 3 else 1))
            return iterate(x, *args, **kwargs)

        return recorded

    # no_shard comes to upstream's function, the sharded Muon to one of ours.
    places = [(muon_utils, "newton_schulz"), (ns, "standard"), (ns, "gram")]
    originals = [getattr(module, name) for module, name in places]
    for (module, name), original in zip(places, originals, strict=True):
        setattr(module, name, recording(original))
    try:
        yield shapes
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)


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


def check(counts: list[list[Counter[tuple[int, int]]]], case: Case) -> None:
    """Each step has orthogonalised the blocks of the model once: all ranks together, or each by itself.

    In the owner scheme a block belongs to one rank, and under no_shard where the work is shared. In the all-gather
    scheme, and under plain no_shard, every rank does all.
    """
    expected = Counter(wide(block) for block in case.muon_blocks())
    together = case.settings.get("muon_exchange", "owner") == "owner"
    if case.strategy == "no_shard":
        together = case.settings.get("muon_share_replicated", False)
    for ranks_of_step in zip(*counts, strict=True):
        parts = [sum(ranks_of_step, Counter())] if together else list(ranks_of_step)
        for part in parts:
            assert part == expected


@pytest.mark.parametrize(
    ("strategy", "micro_batches"),
    wide_but([("no_shard", 1), ("optim", 3), ("optim_grads_params", 3)], itertools.product(STRATEGIES, (1, 3))),
)
def test_once_per_block_and_never_a_shard(ranks: Pool, strategy: str, micro_batches: int) -> None:
    case = Case(strategy=strategy)
    check(ranks(2, count, case=case, micro_batches=micro_batches), case)


@pytest.mark.parametrize("world_size", wide_but([3], [2, 3]))
def test_once_over_all_ranks_where_replicas_share_the_work(ranks: Pool, world_size: int) -> None:
    case = Case(strategy="no_shard", optimizer={"muon_share_replicated": True})
    counts = ranks(world_size, count, case=case, micro_batches=1)
    check(counts, case)
    assert all(counts_of_rank[0] for counts_of_rank in counts), "a rank had no work"


@pytest.mark.parametrize("exchange", wide_but(["owner"], ["owner", "allgather"]))
def test_fused_qkv_is_one_block(ranks: Pool, exchange: str) -> None:
    case = Case(swiglu=True, tied=True, optimizer={"muon_split_qkv": False, "muon_exchange": exchange})
    check(ranks(3, count, case=case, micro_batches=2), case)


BLOCKS = {
    "gated mlp, heads": Case(swiglu=True, optimizer={"muon_split_gated_mlp": True, "muon_split_heads": True}),
    "gated attention": Case(output_gate=True),
    "experts": Case(experts=3, swiglu=True, optimizer={"muon_split_gated_mlp": True}),
    "adamuon": Case(optimizer={"optimizer": "adaptive_muon"}),
    "normuon": Case(optimizer={"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon"}),
}


@pytest.mark.parametrize(
    ("strategy", "label"),
    wide_but(
        [("optim_grads_params", "gated mlp, heads"), ("no_shard", "experts"), ("optim_grads_params", "normuon")],
        itertools.product(("no_shard", "optim_grads_params"), BLOCKS),
    ),
)
def test_every_kind_of_block_once(ranks: Pool, label: str, strategy: str) -> None:
    case = BLOCKS[label].but(strategy=strategy)
    check(ranks(2, count, case=case, micro_batches=2), case)


def test_excluded_matrices_are_not_orthogonalised(ranks: Pool) -> None:
    """Routers here: as many blocks as without them."""
    case = Case(experts=3, optimizer={"muon_exclude": ["router"]})
    counts = ranks(2, count, case=case, micro_batches=1)
    assert (3, 30) in {wide(block) for block in case.muon_blocks()}
    with pytest.raises(AssertionError):
        check(counts, case)
    for ranks_of_step in zip(*counts, strict=True):
        found = sum(ranks_of_step, Counter())
        assert found + Counter({(3, 30): case.layers}) == Counter(wide(block) for block in case.muon_blocks())


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_stacked_and_latent_blocks_once(ranks: Pool, strategy: str) -> None:
    """By hand: what cannot be run forward here is stepped with given gradients."""
    for case, expected in (
        (Case(layers=1, stacked=3, trainable=(".experts.",)), {(6, 10): 3, (5, 6): 3}),
        (
            Case(layers=1, stacked=3, swiglu=True, trainable=(".experts.",), optimizer={"muon_split_gated_mlp": True}),
            {(5, 6): 6 + 3},
        ),
        (Case(layers=1, latent=True, trainable=("kv_down", "kv_up")), {(6, 30): 1, (2, 30): 1, (6, 24): 1, (6, 18): 1}),
    ):
        counts = ranks(2, count_given, case=case.but(strategy=strategy))
        for part in [sum(counts, Counter())] if strategy != "no_shard" else counts:
            assert part == Counter(expected)


def count_given(rank: int, world_size: int, *, case: Case) -> Any:
    """In a worker: how often each shape was orthogonalised in a step with given gradients."""
    trainer = Trainer(case)
    with recorded_shapes() as shapes:
        assert trainer.step()[0]
    return Counter(shapes)


@pytest.mark.parametrize("bug", ["shard", "skip", "per micro-batch"])
def test_the_count_can_fail(ranks: Pool, bug: str) -> None:
    """Negative control: shards, a matrix left out, and one step per micro-batch do not pass."""
    case = Case(layers=1)
    counts = ranks(2, count, case=case, micro_batches=1, sabotage=bug)
    with pytest.raises(AssertionError):
        check(counts, case)
