"""What a checkpoint needs of the optimizer's state, before anything is saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.case import STRATEGIES, Case, batches
from tests.support.model import Trainer
from tests.support.pool import Pool
from tests.support.wide import wide_but


def state_keys(rank: int, world_size: int, *, case: Case) -> Any:
    """In a worker: keys of the sharded state before and after steps, empty shards, step
    counters.
    """
    trainer = Trainer(case)
    described = []
    for _ in range(2):
        sharded = trainer.optimizer.sharded_state_dict(
            {}, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"}
        )
        keys = {name: sorted(slots) for name, slots in sharded["state"].items()}
        dtypes = {
            f"{name}:{slot}": str(value.dtype)
            for name, slots in sharded["state"].items()
            for slot, value in slots.items()
            if isinstance(value, torch.Tensor)
        }
        settings = {name: sorted(group) for name, group in sharded["param_to_group_meta"].items()}
        described.append((keys, settings, dtypes))
        for tokens in batches(3):
            assert trainer.train(tokens)[1][0]
    counters = {
        name: float(state["step"]) for name, state in trainer.states().items() if "step" in state
    }
    empty = [name for name, p in trainer.parameters.items() if p._local_tensor.numel() == 0]
    return described, counters, empty


@pytest.mark.parametrize("strategy", wide_but(["no_shard", "optim_grads_params"], STRATEGIES))
def test_state_has_the_same_keys_on_every_rank(ranks: Pool, strategy: str) -> None:
    """torch's AdamW keeps no state for empty shards, ranks saved other keys, and the save never
    returned.
    """
    case = Case(strategy=strategy, ffn=47)
    seen = ranks(3, state_keys, case=case)
    if strategy != "no_shard":
        assert any(empty for _, _, empty in seen), "some rank must have an empty shard"
    first, counters, _ = seen[0]
    assert first[0] == first[1], "keys and dtypes must be there from the start"
    names, in_groups, _ = first[0]
    assert sorted(names) == sorted(in_groups)
    assert sum("momentum_buffer" in slots for slots in names.values()) == 4 * case.layers
    for described, their_counters, _ in seen:
        assert described == first
        assert their_counters == counters
    assert set(counters.values()) == {6.0}, "AdamW counts every step, also over shards without rows"
