"""Metrics of a step are those of its tensors, and measuring changes nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import megatron_muon
from megatron_muon.tools.train.records import read_events
from tests.support import cli
from tests.support.case import Case
from tests.support.cases import ADAMUON, GATHERED, MOE, REPLICATED, TP, but, of_all
from tests.support.model import Trainer
from tests.support.pool import Pool
from tests.support.training import Trainings
from tests.support.wide import wide_but

CASES = {
    2: {
        "optim": Case(strategy="optim"),
        "allgather": Case(optimizer=GATHERED),
        "shared": REPLICATED,
        "experts": MOE.but(expert_parallel=2),
        "teams": Case(optimizer={"muon_team_size": "2"}),
        "adamuon": Case(optimizer=ADAMUON),
    },
    4: {
        "tp2 hsdp": TP.but(instances=2),
        "no_shard": Case(layers=1, strategy="no_shard"),
        "no_shard adamuon": Case(layers=1, strategy="no_shard", optimizer=ADAMUON),
    },
}


def measure(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """In a worker: what each case's second step's metrics say, and the same from whole tensors
    before and after it.
    """
    found = {}
    for label, case in of_all(CASES[world_size], weight_decay=0.0).items():
        plain, trainer = Trainer(case), Trainer(but(case, muon_metrics_interval=2))
        for _ in range(2):
            plain.step()
        trainer.step()
        assert trainer.optimizer.metrics.latest is None
        before = trainer.whole()
        rate = max(group["lr"] for group in trainer.optimizer.param_groups)
        trainer.step()
        after, momentum = trainer.whole(), trainer.whole_state("momentum_buffer")
        for name, value in plain.whole().items():
            assert torch.equal(value, after[name]), label
        updates = torch.cat(
            [((before[name] - after[name]) / rate).reshape(-1) for name in momentum]
        )
        found[label] = {
            "metrics": trainer.optimizer.metrics.latest,
            "update_rms": updates.square().mean().sqrt().item(),
            "momentum_norm": (
                torch.cat(
                    [value.reshape(-1) for value in momentum.values()],
                )
                .norm()
                .item()
            ),
        }
    return found


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("world_size", wide_but([4], CASES))
def test_metrics_are_those_of_the_tensors(ranks: Pool, world_size: int) -> None:
    first, *others = ranks(world_size, measure)
    for label, found in first.items():
        metrics = found["metrics"]
        assert all(other[label]["metrics"] == metrics for other in others), label
        assert metrics.step == 2
        values = metrics.values
        # Weights of 0.1 in fp32 hold differences of 0.01 to about 1e-6 of an update of 1.
        assert values["update_rms"] == pytest.approx(found["update_rms"], rel=1e-4), label
        assert values["momentum_norm"] == pytest.approx(found["momentum_norm"], rel=1e-5), label
        assert values["skipped_steps"] == 0
        parts = [
            values[f"{part}_ms"]
            for part in ("momentum", "gather", "newton_schulz", "scatter", "apply")
        ]
        assert values["newton_schulz_ms"] > 0
        assert sum(parts) <= values["step_ms"] * 1.001
        assert (values["exchanged_mb"] > 0) is (not label.startswith("no_shard"))
        assert label == "no_shard" or 0.0 < values["orthogonality_error"] < 1.0


def measure_mixture(rank: int, world_size: int, *, how: str) -> dict[str, float]:
    """In a worker: metrics of a weight on a mesh of all ranks, one on no mesh, and experts on a
    mesh of this rank's.
    """
    everyone = init_device_mesh("cpu", (world_size,))
    alone = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("ep", "dp"))["dp"]
    cut: Any = Replicate() if how == "replicas" else Shard(0)
    placed = {}
    if world_size > 1:
        placed = {"weight": (everyone, [cut]), "experts.w": (alone, [Shard(0)])}
    if how == "shared":
        placed.pop("weight", None)
    generator = torch.Generator().manual_seed(0)
    parameters, gradients = {}, {}
    shapes = {
        "weight": (8, 2),
        "apart": (10, 6),
        "experts.w": (12, 5, 3),
    }
    for name, shape in shapes.items():
        weight, gradient = torch.randn(2, *shape, generator=generator).unbind()
        if name == "experts.w":
            weight, gradient = (tensor.chunk(world_size)[rank] for tensor in (weight, gradient))
        if name in placed:
            weight, gradient = (
                distribute_tensor(tensor, *placed[name]) for tensor in (weight, gradient)
            )
        parameters[name], gradients[name] = torch.nn.Parameter(weight), gradient
    optimizer = megatron_muon.Muon(
        parameters.items(), share_replicated=how == "shared", metrics_interval=1
    )
    assert len(optimizer.selection.matrices) == len(parameters)
    for name, parameter in parameters.items():
        parameter.grad = gradients[name]
    optimizer.step()
    return optimizer.metrics.latest.values


@pytest.mark.parametrize("how", ["shards", "replicas", "shared"])
def test_metrics_of_any_model_count_each_matrix_once(ranks: Pool, how: str) -> None:
    """A matrix that all ranks hold weighed as often as there are ranks, and one that they shared
    less than once.
    """
    (expected,) = ranks(1, measure_mixture, how="shards")
    for found in ranks(2, measure_mixture, how=how):
        for name in ("update_rms", "momentum_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-6), name


def documented() -> set[str]:
    """The metrics in the two tables of docs/tuning.md, the second with its prefix."""
    text = (cli.ROOT / "docs/tuning.md").read_text("utf-8")
    of_megatron, ours = (part.partition("\n\n")[0] for part in text.split("\n| metric | ")[1:])
    names = [
        set(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)) for table in (of_megatron, ours)
    ]
    found, muons = (re.findall("`([^`]+)`", " ".join(cells)) for cells in names)
    return {*found, *(f"muon/{name}" for name in muons)}


@pytest.mark.usefixtures("two_memories_too")
def test_a_run_logs_metrics(ranks: Pool, tmp_path: Path) -> None:
    corpus = cli.make_corpus(tmp_path)
    batches = ("--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "6")
    training = Trainings(ranks, tmp_path, (*cli.TINY, *corpus, *batches, "--log-interval", "2"))
    rates = ("--muon-lr", "0.03", "--muon-min-lr", "0.003", "--lr-decay-style", "linear")
    metrics = ("--muon-metrics-interval", "3", "--timing-log-level", "1")
    training(*cli.MUON, *rates, "--tensorboard-dir", "events", *metrics).checked()
    scalars = read_events(tmp_path / "events").scalars
    assert {name for name in scalars if not name.endswith(" vs samples")} <= documented()
    assert {"tokens-per-second", "optimizer-share"} <= set(scalars)
    assert [point.value for point in scalars.pop("muon/learning-rate")] == pytest.approx(
        [0.0255, 0.021, 0.0165, 0.012, 0.0075, 0.003]
    )
    assert [point.value for point in scalars["learning-rate"]][-1] == pytest.approx(0.0, abs=1e-9)
    names = {name for name in scalars if name.startswith("muon/")}
    assert {
        "muon/update_rms",
        "muon/orthogonality_error",
        "muon/momentum_norm",
        "muon/skipped_steps",
    } <= names
    assert {
        f"muon/{part}_ms" for part in ("gather", "newton_schulz", "scatter", "apply", "step")
    } <= names
    assert all([point.step for point in scalars[name]] == [3, 6] for name in names)

    training("--optimizer", "adam", "--use-megatron-fsdp", "--tensorboard-dir", "of-adam").checked()
    assert not any(name.startswith("muon/") for name in read_events(tmp_path / "of-adam").scalars)
