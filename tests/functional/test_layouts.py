"""Every parallel layout gives the updates of the whole matrices.

Given the same gradients, weights and momentum equal those of the independent reference, which knows no ranks: with
tensor parallelism, experts, several optimizer instances and context-parallel groups, alone and together. Tolerances as
in test_exact_updates. Replicas are compared bit by bit where they are put together (`Trainer.whole`).
"""

from __future__ import annotations

import pytest

from tests.functional.model import STRATEGIES, Case
from tests.functional.pool import Pool
from tests.functional.test_exact_updates import check, run

SHARDED = STRATEGIES[1:]
WHOLE = {"muon_tp_mode": "duplicated"}
TP = Case(vocabulary=132, ffn=46, query_groups=2, layers=1, tensor=2, optimizer=WHOLE)
MOE = Case(ffn=46, layers=1, experts=4)

CASES = {
    "tp2": (2, TP),
    "tp2 dp2": (4, TP),
    "tp4, fewer query groups": (4, TP.but(tensor=4, heads=4, hidden=32, ffn=44, query_groups=2)),
    "tp2, one query group": (4, TP.but(query_groups=1)),
    "tp2, swiglu": (4, TP.but(swiglu=True)),
    "hsdp": (4, Case(layers=1, instances=2)),
    "hsdp of single ranks": (3, Case(layers=1, instances=3)),
    "hsdp tp2": (4, TP.but(instances=2)),
    "cp2": (4, Case(layers=1, context=2)),
    "ep2": (4, MOE.but(expert_parallel=2)),
    "ep4": (4, MOE.but(expert_parallel=4)),
    "more ranks than experts": (4, MOE.but(experts=2)),
    "expert tp2": (4, MOE.but(expert_tensor=2, optimizer=WHOLE)),
    "ep2 hsdp": (4, MOE.but(expert_parallel=2, instances=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_updates_equal_the_reference(ranks: Pool, name: str) -> None:
    world_size, case = CASES[name]
    seen = ranks(world_size, run, cases={strategy: case.but(strategy=strategy) for strategy in SHARDED})[0]
    for strategy in SHARDED:
        check(seen[strategy], case, atol=2e-6)
