"""Matrices with numbers of Newton-Schulz steps of their own get the updates of the independent
reference.

Its Muon iterates each matrix with the steps that `Case.steps_for` names. Tolerances as in
test_exact_updates.
"""

from __future__ import annotations

import pytest

from tests.functional.test_exact_updates import TEN, check, run
from tests.support.case import Case
from tests.support.pool import Pool
from tests.support.wide import wide_but

STEPS = {"muon_ns_steps_for": ["linear_fc*=3", "linear_fc2=8", "layers.0.*qkv=4"]}
BY_NAME = (("linear_fc", 3), ("linear_fc2", 8), ("layers.0.self_attention.linear_qkv", 4))
BASE = Case(layers=1, ffn=47, optimizer=STEPS, steps_for=BY_NAME)


def but(case: Case, **optimizer: object) -> Case:
    return case.but(optimizer={**case.optimizer, **optimizer})


CASES = {
    "owner": (3, BASE),
    "allgather": (3, but(BASE, muon_exchange="allgather")),
    "shared": (3, but(BASE.but(strategy="no_shard"), muon_share_replicated=True)),
    "teams": (3, but(BASE, muon_team_size="2")),
    "heads, gate and up": (
        3,
        but(BASE.but(swiglu=True), muon_split_heads=True, muon_split_gated_mlp=True),
    ),
    "tp2 dp2": (4, BASE.but(vocabulary=132, ffn=46, query_groups=2, tensor=2)),
    "experts": (4, BASE.but(ffn=46, experts=4, expert_parallel=2)),
}


@pytest.mark.parametrize("name", wide_but(["owner", "teams"], CASES))
def test_updates_equal_the_reference(ranks: Pool, name: str) -> None:
    world_size, case = CASES[name]
    seen = ranks(world_size, run, cases={"": case}, steps=TEN)[0][""]
    check(seen, case, atol=4e-6 if name == "teams" else 2e-6)
    if name == "owner":  # Negative control: with the steps of all matrices it does not pass.
        with pytest.raises(AssertionError, match="weight after 1 steps"):
            check(seen, case.but(steps_for=()), atol=1e-4)
