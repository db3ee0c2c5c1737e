"""The table of parity with kernels in the place of torch operations: on several ranks, with every
layout, split, variant and way of state that it has.
"""

from __future__ import annotations

import pytest
import torch

from tests.functional.test_exact_updates import ON_ANY_NUMBER
from tests.support.cases import TABLE
from tests.support.momentum_of_replicas import momentum_of_replicas
from tests.support.parity import assert_same_bits, check, run
from tests.support.pool import Pool


@pytest.mark.wide
@pytest.mark.parametrize("name", TABLE)
def test_updates_equal_the_reference(ranks: Pool, name: str) -> None:
    group = TABLE[name]
    with ranks.interpreted():
        seen = ranks(group.ranks, run, cases=group.cases)[0]
    for label, case in group.cases.items():
        check(seen[label], case, label=label)


@pytest.mark.wide
def test_the_number_of_ranks_changes_no_bit(ranks: Pool) -> None:
    """Rounded alike whether rows travel or not, and added up in one order."""
    with ranks.interpreted():
        alone, seen = (ranks(size, run, cases=ON_ANY_NUMBER)[0] for size in (1, 3))
    for label in ON_ANY_NUMBER:
        assert_same_bits(alone[label], seen[label], label)


def test_int8_scales_of_rows_that_another_replica_sends(ranks: Pool) -> None:
    """Teams cut 384 columns in the middle of the 128 of a scale, for those who send nothing too."""
    expected = ranks(4, momentum_of_replicas)
    with ranks.interpreted():
        found = ranks(4, momentum_of_replicas)
    for rank, (momentum, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(momentum, other, rtol=1e-5, atol=0, msg=f"rank {rank}")
