"""Every Muon matrix is orthogonalised exactly once per step, once per block, and never a shard of it.

The counter sits at the iterations themselves: below blocks, batches and exchanges. Blocks count as wide ones, as the
iterations see them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest

from tests.support.case import STRATEGIES, Case, batches
from tests.support.cases import ADAMUON, BLOCKS, GATED, GATHERED, HEADS, LAYOUTS, NORMUON, SHARED
from tests.support.model import Trainer, sabotaged
from tests.support.pool import Pool
from tests.support.wide import wide_but

Counts = list[Counter[tuple[int, int]]]


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

    with ExitStack() as stack:
        # no_shard comes to upstream's function, the sharded Muon to one of ours.
        for module, name in ((muon_utils, "newton_schulz"), (ns, "standard"), (ns, "gram")):
            stack.enter_context(mock.patch.object(module, name, recording(getattr(module, name))))
        yield shapes


def count(rank: int, world_size: int, *, cases: dict[str, tuple[Case, int]], sabotage: str = "") -> dict[str, Counts]:
    """In a worker: how often each shape was orthogonalised in each of two steps.

    Cases have their number of micro-batches; with 0, for what cannot be run forward here, a step has given gradients.
    """
    counts: dict[str, Counts] = {label: [] for label in cases}
    for label, (case, micro_batches) in cases.items():
        trainer = Trainer(case)
        for tokens in batches(2):
            with recorded_shapes() as shapes, sabotaged(sabotage.replace("per micro-batch", "")):
                if micro_batches:
                    trainer.train(tokens, micro_batches=micro_batches)
                if not micro_batches or sabotage == "per micro-batch":
                    assert trainer.step()[0]
            counts[label].append(Counter(shapes))
    return counts


def check(counts: list[Counts], case: Case, blocks: Counter[tuple[int, int]] | None = None) -> None:
    """Each step has orthogonalised the blocks of the model once: all ranks together, or each by itself.

    In the owner scheme a block belongs to one rank, and under no_shard where the work is shared. In the all-gather
    scheme, and under plain no_shard, every rank does all.
    """
    expected = blocks or Counter(wide(block) for block in case.muon_blocks())
    together = case.settings.get("muon_exchange", "owner") == "owner"
    if case.strategy == "no_shard":
        together = case.settings.get("muon_share_replicated", False)
    for ranks_of_step in zip(*counts, strict=True):
        if together:
            assert sum(expected.values()) < 5 or all(ranks_of_step), "a rank had no work"
        for part in [sum(ranks_of_step, Counter())] if together else ranks_of_step:
            assert part == expected


WHOLE = Case(swiglu=True, tied=True, optimizer={"muon_split_qkv": False})
KINDS = {
    "gated mlp, heads": Case(swiglu=True, optimizer={**GATED, **HEADS}),
    "gated attention": Case(output_gate=True),
    "experts": Case(experts=3, swiglu=True, optimizer=GATED),
    "adamuon": Case(optimizer=ADAMUON),
    "normuon": Case(optimizer=NORMUON),
}
ROWS: dict[int, dict[str, tuple[Case, int]]] = {
    2: {
        **{f"{strategy}, {n}": (Case(strategy=strategy), n) for strategy in STRATEGIES for n in (1, 3)},
        **{f"{label}, {strategy}": (case.but(strategy=strategy), 2)
           for label, case in KINDS.items() for strategy in ("no_shard", "optim_grads_params")},
        "shared": (Case(strategy="no_shard", optimizer=SHARED), 1),
    },
    3: {
        "shared": (Case(strategy="no_shard", optimizer=SHARED), 1),
        "fused qkv": (WHOLE, 2),
        "fused qkv, gathered": (WHOLE.but(optimizer={**WHOLE.optimizer, **GATHERED}), 2),
    },
    4: {name: (LAYOUTS[name][1], 1) for name in ("hsdp", "hsdp tp2", "tp2 dp2")},
}  # fmt: skip


@pytest.mark.parametrize("world_size", wide_but([3], ROWS))
def test_once_per_block_and_never_a_shard(ranks: Pool, world_size: int) -> None:
    """No instance repeats the work of another, no tensor-parallel rank that of its peers, no micro-batch any."""
    found = ranks(world_size, count, cases=ROWS[world_size])
    for label, (case, _) in ROWS[world_size].items():
        check([of_rank[label] for of_rank in found], case)


EXPERTS = {"stacked": 3, "trainable": (".experts.",), "layers": 1}
BY_HAND = {
    "stacked experts": (Case(**EXPERTS), {(6, 10): 3, (5, 6): 3}),
    "gated stacked experts": (Case(**EXPERTS, swiglu=True, optimizer=GATED), {(5, 6): 6 + 3}),
    "latent attention": (
        Case(layers=1, latent=True, trainable=("kv_down", "kv_up")),
        {(6, 30): 1, (2, 30): 1, (6, 24): 1, (6, 18): 1},
    ),
}


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_stacked_and_latent_blocks_once(ranks: Pool, strategy: str) -> None:
    cases = {label: (case.but(strategy=strategy), 0) for label, (case, _) in BY_HAND.items()}
    found = ranks(2, count, cases=cases)
    for label, (_, blocks) in BY_HAND.items():
        check([of_rank[label] for of_rank in found], cases[label][0], Counter(blocks))


def test_excluded_matrices_are_not_orthogonalised(ranks: Pool) -> None:
    """Routers here: as many blocks as without them."""
    case = BLOCKS["routers excluded"]
    found = ranks(2, count, cases={"": (case, 1)})
    expected = Counter(wide(block) for block in case.muon_blocks())
    assert expected.pop((3, 30)) == case.layers
    check([of_rank[""] for of_rank in found], case, expected)


@pytest.mark.parametrize("bug", ["shard", "skip", "per micro-batch"])
def test_the_count_can_fail(ranks: Pool, bug: str) -> None:
    """Negative control: shards, a matrix left out, and one step per micro-batch do not pass."""
    case = Case(layers=1)
    found = ranks(2, count, cases={"": (case, 1)}, sabotage=bug)
    with pytest.raises(AssertionError):
        check([of_rank[""] for of_rank in found], case)
