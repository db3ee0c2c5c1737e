"""Every Muon matrix is orthogonalised exactly once per step, once per block, and never a shard of
it.

The counter sits at the iterations themselves: below blocks, batches and exchanges. Blocks count as
wide ones, as the iterations see them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest

from tests.support.case import STRATEGIES, Case, batches
from tests.support.cases import BLOCKS, GATHERED, LAYOUTS, REPLICATED, but, spread
from tests.support.model import Trainer, sabotaged
from tests.support.pool import Pool
from tests.support.reference import is_matrix, row_blocks
from tests.support.wide import wide_but


def wide(shape: Sequence[int]) -> tuple[int, int]:
    """The shape of a block or of its transpose, whichever is wide."""
    return min(shape), max(shape)


@contextmanager
def recorded_shapes() -> Iterator[list[tuple[int, int]]]:
    """The shape of every block that an iteration works on; a batch counts as its members."""
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    from megatron_muon.core.methods import newton_schulz as ns

    shapes: list[tuple[int, int]] = []

    def recording(iterate: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(x: Any, *args: Any, **kwargs: Any) -> Any:
            count = x.shape[0] if x.ndim == 3 else 1
            shapes.extend([wide(x.shape[-2:])] * count)
            return iterate(x, *args, **kwargs)

        return recorded

    with ExitStack() as stack:
        # no_shard comes to upstream's function, the sharded Muon to one of ours.
        for module, name in ((muon_utils, "newton_schulz"), (ns, "iterate")):
            stack.enter_context(mock.patch.object(module, name, recording(getattr(module, name))))
        yield shapes


def count(
    rank: int, world_size: int, *, cases: dict[str, tuple[Case, int]], sabotage: str = ""
) -> dict[str, Any]:
    """In a worker: whole shapes, and how often each shape of block was orthogonalised in each of
    two steps.

    Cases have their number of micro-batches; with 0, for what cannot be run forward here, a step
    has given gradients.
    """
    found = {}
    for label, (case, micro_batches) in cases.items():
        trainer = Trainer(but(case, muon_audit_interval=0))  # audits orthogonalise too
        counts = []
        for tokens in batches(2):
            with recorded_shapes() as shapes, sabotaged(sabotage.replace("per micro-batch", "")):
                if micro_batches:
                    trainer.train(tokens, micro_batches=micro_batches)
                if not micro_batches or sabotage == "per micro-batch":
                    assert trainer.step()[0]
            counts.append(Counter(shapes))
        found[label] = trainer.shapes, counts
    return found


def blocks_of(
    case: Case,
    shapes: dict[str, tuple[int, ...]],
) -> Counter[tuple[int, int]]:
    """The blocks of the reference's matrices."""
    blocks = Counter[tuple[int, int]]()
    for name, shape in shapes.items():
        if is_matrix(case, name, shape) and case.trains(name):
            experts = shape[0] if len(shape) == 3 else 1
            for rows in row_blocks(case, name, shape) or [range(shape[-2])]:
                blocks[wide((len(rows), shape[-1]))] += experts
    return blocks


def check(
    found: list[dict[str, Any]],
    case: Case,
    label: str = "",
) -> None:
    """Each step has orthogonalised the blocks of the model once: all ranks together, or each by
    itself.

    In the owner scheme a block belongs to one rank, and under no_shard where the work is shared. In
    the all-gather scheme, and under plain no_shard, every rank does all.
    """
    expected = blocks_of(case, found[0][label][0])
    together = case.settings.get("muon_exchange", "owner") == "owner"
    if case.strategy == "no_shard":
        together = case.settings.get("muon_share_replicated", False)
    for ranks_of_step in zip(*(of_rank[label][1] for of_rank in found), strict=True):
        for part in [sum(ranks_of_step, Counter())] if together else ranks_of_step:
            assert part == expected, label
        assert not together or max(map(Counter.total, ranks_of_step)) < expected.total(), (
            f"{label}: the work is shared"
        )


ROWS: dict[int, dict[str, tuple[Case, int]]] = {
    2: {
        **{strategy: (Case(strategy=strategy), 3) for strategy in STRATEGIES},
        **{label: (case, 0) for label, case in spread(BLOCKS, 0).items()},
    },
    3: {
        "shared": (REPLICATED, 1),
        "fused qkv, gathered": (but(BLOCKS["fused qkv"], **GATHERED), 2),
        "experts": (BLOCKS["experts"], 2),
        "stacked experts": (BLOCKS["stacked experts"], 0),
    },
    4: {"hsdp tp2": (LAYOUTS["hsdp tp2"][1], 1)},
}


@pytest.mark.parametrize("world_size", wide_but([3], ROWS))
def test_once_per_block_and_never_a_shard(ranks: Pool, world_size: int) -> None:
    """No instance repeats the work of another, no tensor-parallel rank that of its peers, no
    micro-batch any.
    """
    found = ranks(world_size, count, cases=ROWS[world_size])
    for label, (case, _) in ROWS[world_size].items():
        check(found, case, label)


@pytest.mark.parametrize("bug", ["shard", "per micro-batch"])
def test_the_count_can_fail(ranks: Pool, bug: str) -> None:
    """Negative control: shards, and one step per micro-batch, do not pass."""
    case = Case(layers=1)
    found = ranks(2, count, cases={"": (case, 1)}, sabotage=bug)
    assert blocks_of(case, found[0][""][0]).total() == 6, "query, key, value, projection, fc1, fc2"
    with pytest.raises(AssertionError):
        check(found, case)
