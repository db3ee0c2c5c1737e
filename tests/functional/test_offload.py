"""Momentum on the host or on disk: the updates are those without, to the last bit, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.model import Case
from tests.functional.pool import Pool
from tests.functional.test_layouts import MOE, TP

STEPS = 20
BUFFER_MB = 0.04  # ten pages: what a rank holds goes through in several parts

LAYOUTS = {
    "optim": (2, Case(strategy="optim")),
    "optim_grads": (2, Case(strategy="optim_grads")),
    "optim_grads_params": (2, Case(strategy="optim_grads_params")),
    "allgather": (2, Case(optimizer={"muon_exchange": "allgather"})),
    "without nesterov": (2, Case(optimizer={"muon_nesterov": False, "decoupled_weight_decay": False})),
    "shared replicas": (2, Case(strategy="no_shard", optimizer={"muon_share_replicated": True})),
    "TP 2 x DP 2": (4, TP),
    "EP 2 x DP 2": (4, MOE.but(expert_parallel=2)),
    "HSDP 2 x DP 2": (4, Case(instances=2, layers=1)),
}


def train(rank: int, world_size: int, *, case: Case, settings: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """In a worker: this rank's weights and momentum after `STEPS` steps with each of the settings."""
    from megatron_muon.offload.run import close_runs
    from tests.functional.model import Trainer

    results = []
    for setting in settings:
        trainer = Trainer(case.but(optimizer={**case.optimizer, **setting}), steps=STEPS)
        for _ in range(STEPS):
            trainer.step()
        bits = {name: p._local_tensor.detach().clone() for name, p in trainer.parameters.items()}
        names = {parameter: name for name, parameter in trainer.parameters.items()}
        for member in trainer.optimizer.chained_optimizers:
            if hasattr(member.optimizer, "momentum_state"):
                for parameter, momentum in member.optimizer.momentum_state().items():
                    bits[f"{names[parameter]}:momentum"] = momentum._local_tensor.clone()
        results.append(bits)
        assert trainer.optimizer.offload_failure is None
        close_runs()
    return results


def offloads(folder: Path, **more: Any) -> list[dict[str, Any]]:
    """None, cpu, nvme, and half of it on nvme."""
    folder.mkdir(exist_ok=True)
    nvme = {"muon_offload": "nvme", "muon_offload_dir": str(folder), "muon_offload_buffer_mb": BUFFER_MB}
    settings = [{}, {"muon_offload": "cpu"}, nvme, {**nvme, "muon_offload_fraction": 0.5}]
    return [{**setting, **more} for setting in settings]


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_are_the_same_wherever_momentum_lives(ranks: Pool, tmp_path: Path, layout: str) -> None:
    world_size, case = LAYOUTS[layout]
    for of_rank in ranks(world_size, train, case=case, settings=offloads(tmp_path / "momentum")):
        for offloaded in of_rank[1:]:
            assert differing(of_rank[0], offloaded) == []
    assert list((tmp_path / "momentum").iterdir()) == []  # cleaned up
