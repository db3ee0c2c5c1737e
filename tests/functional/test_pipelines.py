"""`megatron_muon.Muon` in pipelines of torch: each stage's ranks make one of their own, and wait
for no other stage.

Every data-parallel rank has the same batch, so that ten steps give the weights of one process up to
rounding (1e-6).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support import frameworks
from tests.support.pool import Pool
from tests.support.wide import wide_but

PAGE = Path(__file__).parents[2] / "docs" / "any-model.md"
STEPS, MICRO_BATCHES, MAX_NORM = 10, 4, 0.3


class Stage(frameworks.Net):
    """One of two halves of the net, under the names of the whole."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.is_last = number == 1
        for name in ("embed_tokens",) if self.is_last else ("narrow", "back", "norm", "lm_head"):
            delattr(self, name)
        self.layers = nn.ModuleDict({str(number): self.layers[number]})  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of tokens what the next stage takes, or of that the scores."""
        if not self.is_last:
            x = self.embed_tokens(x)
        for layer in self.layers.values():
            x = x + layer(x)
        if self.is_last:
            x = self.lm_head(self.norm(x + self.back(self.narrow(x))))
        return x


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("stage", "replicate", "shard") if len(shape) == 3 else ("stage", "shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def stage_of(
    mesh: DeviceMesh,
    *,
    apart: Sequence[str] = (),
    is_sharded: bool = True,
) -> Stage:
    """This rank's stage, by `fully_shard` over the other dimensions of the mesh, but for parameters
    that stay apart.
    """
    torch.manual_seed(0)  # as the whole net
    stage = Stage(mesh.get_local_rank("stage"))
    if is_sharded:
        inner = mesh[mesh.mesh_dim_names[1:]]  # type: ignore[index]
        ignored = {p for name, p in stage.named_parameters() if name in apart}
        for module in (*stage.layers.values(), stage):  # type: ignore[operator]
            fully_shard(module, mesh=inner, ignored_params=ignored)
    return stage


def clip_over_stages() -> Any:
    """The function of the page."""
    page = PAGE.read_text("utf-8")
    start = page.index("    def clip_over_stages")
    code = page[start : page.index("\n\n", start)]
    found: dict[str, Any] = {"torch": torch, "dist": dist, "DTensor": frameworks.DTensor}
    exec(textwrap.dedent(code), found)
    return found["clip_over_stages"]


def trained(
    rank: int, world_size: int, *, shape: tuple[int, ...], max_norm: float = 0.0, **settings: Any
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """In a worker: the weights of this rank's stage after training with 1F1B, and the norms of
    gradients.
    """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = mesh_of(shape)
    model, pipeline = stage_of(mesh), mesh.get_group("stage")
    training = frameworks.Training(model, frameworks.muon(model, **settings))

    def loss(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())

    number, norms = mesh.get_local_rank("stage"), []
    stage = PipelineStage(model, number, mesh.size(0), torch.device("cpu"), group=pipeline)
    schedule = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss)
    for batch in frameworks.tokens(STEPS):
        training.optimizer.zero_grad()
        if number:
            schedule.step(target=batch[:, 1:])
        else:
            schedule.step(batch[:, :-1])
        if max_norm:
            norms.append(float(clip_over_stages()(model.parameters(), max_norm, pipeline)))
        training.optimizer.step()
    return training.weights(), norms


def trained_alone(
    rank: int, world_size: int, *, max_norm: float = 0.0, **settings: Any
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """In a worker: the same in one process."""
    torch.manual_seed(0)
    training, norms = frameworks.plain(**settings), []
    for batch in frameworks.tokens(STEPS):
        training.optimizer.zero_grad()
        training.model(batch).backward()
        if max_norm:
            norms.append(float(nn.utils.clip_grad_norm_(training.model.parameters(), max_norm)))
        training.optimizer.step()
    return training.weights(), norms


FILES = {"offload": "nvme", "offload_dir": "{folder}"}
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "files, clipped": ((2, 2), {"max_norm": MAX_NORM, **FILES}),
    "hsdp": ((2, 2, 2), {"max_norm": MAX_NORM, **FILES}),
}


@pytest.mark.parametrize("case", wide_but(["files, clipped"], CASES))
def test_two_stages_train_as_one_process(ranks: Pool, case: str, tmp_path: Path) -> None:
    shape, options = CASES[case]
    options = {
        name: str(tmp_path) if value == "{folder}" else value for name, value in options.items()
    }
    expected, norms = ranks(1, trained_alone, **options)[0]
    found = ranks(math.prod(shape), trained, shape=shape, **options)
    weights = {**found[0][0], **found[-1][0]}
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.allclose(weights[name], weight, rtol=0.0, atol=1e-6), name
    assert all(of_rank == pytest.approx(norms, rel=1e-5) for _, of_rank in found)
    assert not norms or max(norms) > MAX_NORM > 0


Alone = tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]
"""Mesh, arguments of `stage_of`, settings."""

APART = ("layers.0.0.weight", "layers.1.0.weight")
ALONE: dict[str, Alone] = {
    "files, measured, teams of replicas, weights on no mesh": (
        (2, 2, 1),
        {"apart": APART},
        {**FILES, "metrics_interval": 1, "team_size": "2", "momentum_dtype": "int8"},
    ),
    "hsdp, normuon": ((2, 1, 2), {}, {"moment2_method": "normuon", "metrics_interval": 1}),
    "replicas": (
        (2, 2),
        {"is_sharded": False},
        {"share_replicated": True, "process_group": "stage"},
    ),
}


def one_after_the_other(rank: int, world_size: int, *, case: str, folder: str) -> bool:
    """In a worker: make a Muon, step, and read its state, while the other stage's ranks are in no
    collective.
    """
    shape, cut, settings = ALONE[case]
    mesh, store = mesh_of(shape), c10d._get_default_store()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    places = {"stage": groups[mesh.get_local_rank("stage")], "{folder}": folder}
    settings = {name: places.get(value, value) for name, value in settings.items()}
    for stage in range(2):
        if mesh.get_local_rank("stage") == stage:
            model = stage_of(mesh, **cut)
            optimizer = frameworks.muon(model, **settings)
            for batch in frameworks.tokens(2):
                given = torch.randn(4, 8, frameworks.WIDTH) if stage else batch
                model(given).square().mean().backward()
                optimizer.step()
            optimizer.state_dict()
            optimizer.close()
            store.set(f"{case} {rank}", "")
        peers = [
            f"{case} {rank}"
            for rank in (
                2 * stage,
                2 * stage + 1,
            )
        ]
        store.wait(peers, timedelta(seconds=40))
    return True


@pytest.mark.parametrize("case", wide_but([case for case in ALONE if "teams" in case], ALONE))
def test_a_stage_waits_for_no_other(ranks: Pool, case: str, tmp_path: Path) -> None:
    """Files of weights on no mesh were made by all ranks together, which waited for the others."""
    assert ranks(4, one_after_the_other, case=case, folder=str(tmp_path)) == [True] * 4
