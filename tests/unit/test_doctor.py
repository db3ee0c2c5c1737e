"""`megatron-muon doctor`: what it finds, and that it can find something wrong."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_muon import cli
from megatron_muon.checkpoint import folders
from megatron_muon.errors import ExitStatus
from megatron_muon.tools.doctor import command as doctor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ARGS = argparse.Namespace(
    world_size=6,
    data_parallel_sharding_strategy="optim",
    tensor_model_parallel_size=2,
    expert_model_parallel_size=1,
)


def state(**changes: Any) -> dict[str, Any]:
    """What megatron-core saves of a model of one SwiGLU projection, a norm and a frozen embedding."""
    tensor = torch.ones(2, 3)
    fc1, norm, embedding = (
        "module.mlp.linear_fc1.weight",
        "module.norm.weight",
        "module.embedding.weight",
    )
    adam = {"exp_avg": tensor, "exp_avg_sq": tensor, "step": torch.tensor(8.0)}
    muon = {"momentum_buffer": tensor}
    return {
        "model": {f"{fc1}_w": tensor, f"{fc1}_v": tensor, norm: tensor, embedding: tensor},
        "optimizer": {
            "state": {f"module.{fc1}_w": muon, f"module.{fc1}_v": muon, f"module.{norm}": adam},
            "param_to_group_meta": {f"module.{fc1}": {"lr": 0.1}, f"module.{norm}": {"lr": 0.1}},
        },
        "iteration": 8,
        "args": ARGS,
        **changes,
    }


@pytest.fixture
def write(tmp_path: Path):
    def write(**changes: Any) -> Path:
        for iteration in (4, 8):
            folder = folders.iteration_folder(tmp_path, iteration)
            dcp.save(state(**changes), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
        (tmp_path / folders.TRACKER).write_text("8")
        return tmp_path

    return write


def findings(directory: Path) -> dict[str, tuple[str, str]]:
    return {
        finding.about: (finding.state, finding.text) for finding in doctor.checkpoint(directory)
    }


def test_a_sound_checkpoint(write) -> None:
    found = findings(write())
    assert found["checkpoint"][0] == "ok"
    assert "iter_0000008 is complete, iteration 8" in found["checkpoint"][1]
    assert found["written by"] == ("ok", "ranks 6, strategy optim, TP 2, EP 1")
    assert found["weights"] == ("ok", "4 tensors")
    assert found["optimizer state"] == ("ok", "of these, adam has 1, muon has 2")
    assert "missing state" not in found


def test_missing_momentum(write) -> None:
    optimizer = state()["optimizer"]
    del optimizer["state"]["module.module.mlp.linear_fc1.weight_v"]
    found = findings(write(optimizer=optimizer))
    assert found["missing state"][0] == "wrong"
    assert found["missing state"][1].startswith("1: mlp.linear_fc1.weight_v; ")


def test_weights_alone(write) -> None:
    found = findings(write(optimizer={}, args=None))
    assert found["optimizer state"] == ("note", "none: load it with --no-load-optim")
    assert found["written by"][0] == "note"


def test_a_damaged_one_and_the_exit_status(write, tmp_path, capsys) -> None:
    save_dir = write()
    assert cli.main(["doctor", "--checkpoint", str(save_dir)]) == ExitStatus.OK
    os.truncate(save_dir / "iter_0000008" / "__0_0.distcp", 100)
    report = tmp_path / "report.json"
    assert (
        cli.main(["doctor", "--checkpoint", str(save_dir), "--json", str(report)])
        == ExitStatus.FAILURE
    )
    wrong = [finding for finding in json.loads(report.read_text()) if finding["state"] == "wrong"]
    assert len(wrong) == 2
    assert "cut short" in wrong[0]["text"]
    assert "--ckpt-step 4" in wrong[1]["text"]
    assert "megatron-core 0.19" in capsys.readouterr().out


@pytest.mark.parametrize("directory", ["nowhere", "."])
def test_no_checkpoint(directory, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", "--checkpoint", directory]) == ExitStatus.USAGE
    assert "error: " in capsys.readouterr().err


def test_an_environment_that_keeps_a_run_from_starting(monkeypatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    wrong = [finding.text for finding in doctor.environment() if finding.state == "wrong"]
    assert wrong == ["2.10.1; 2.11 is needed"]
