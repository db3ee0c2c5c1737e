"""`megatron-muon doctor`: its findings, and that it can find something wrong."""

from __future__ import annotations

import argparse
import json
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_muon import cli
from megatron_muon.checkpoint import folders
from megatron_muon.errors import ExitStatus
from megatron_muon.tools.doctor import doctor_command

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ARGS = argparse.Namespace(
    world_size=6,
    data_parallel_sharding_strategy="optim",
    tensor_model_parallel_size=2,
)
FC1, NORM, EMBEDDING = "mlp.linear_fc1.weight", "norm.weight", "embedding.weight"


def state(**changes):
    """A checkpoint of a model of one SwiGLU projection, a norm and a frozen embedding."""
    tensor = torch.ones(2, 3)
    adam = {"exp_avg": tensor, "exp_avg_sq": tensor, "step": torch.tensor(8.0)}
    muon = {"momentum_buffer": tensor}
    names = (f"{FC1}_w", f"{FC1}_v", NORM, EMBEDDING)
    prefix = "module.module."
    states = {
        f"{prefix}{FC1}_w": muon,
        f"{prefix}{FC1}_v": muon,
        f"{prefix}{NORM}": adam,
    }
    groups = {f"{prefix}{name}": {"lr": 0.1} for name in (FC1, NORM)}
    return {
        "model": {f"module.{name}": tensor for name in names},
        "optimizer": {"state": states, "param_to_group_meta": groups},
        "iteration": 8,
        "args": ARGS,
        **changes,
    }


@pytest.fixture
def write(tmp_path):
    def write(**changes):
        for iteration in (4, 8):
            folder = folders.iteration_folder(tmp_path, iteration)
            dcp.save(state(**changes), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
        (tmp_path / folders.TRACKER).write_text("8")
        return tmp_path

    return write


def findings(directory):
    found = doctor_command.checkpoint(directory)
    return {finding.about: (finding.state, finding.text) for finding in found}


def test_a_sound_checkpoint(write):
    found = findings(write())
    assert found["checkpoint"][0] == "ok"
    assert "iter_0000008 is complete, iteration 8" in found["checkpoint"][1]
    assert found["written by"] == ("ok", "ranks 6, strategy optim, TP 2")
    assert found["weights"] == ("ok", "4 tensors")
    assert found["optimizer state"] == ("ok", "of these, adam has 1, muon has 2")
    assert "missing state" not in found


def test_a_class_has_one_state_of_two_halves(write):
    """SOAP's state of a gated projection was reported as missing."""
    optimizer = state()["optimizer"]
    prefix = "module.module."
    for half in ("_w", "_v"):
        del optimizer["state"][f"{prefix}{FC1}{half}"]
    optimizer["state"][f"{prefix}{FC1}"] = {"update_count": torch.ones(2), "L": torch.ones(8)}
    found = findings(write(optimizer=optimizer))
    assert found["optimizer state"] == ("ok", "of these, L+update_count has 1, adam has 1")
    assert "missing state" not in found


def test_missing_momentum_and_weights_alone(write):
    optimizer = state()["optimizer"]
    del optimizer["state"][f"module.module.{FC1}_v"]
    status, text = findings(write(optimizer=optimizer))["missing state"]
    assert status == "wrong"
    assert text.startswith(f"1: {FC1}_v; ")
    found = findings(write(optimizer={}, args=None))
    assert found["optimizer state"] == ("note", "none: load it with --no-load-optim")
    assert found["written by"][0] == "note"


def test_a_damaged_one_and_the_exit_status(write, tmp_path, capsys):
    save_dir = write()
    command = ["doctor", "--checkpoint", str(save_dir)]
    assert cli.main(command) == ExitStatus.OK
    os.truncate(save_dir / "iter_0000008" / "__0_0.distcp", 100)
    report = tmp_path / "report.json"
    assert cli.main([*command, "--json", str(report)]) == ExitStatus.FAILURE
    found = json.loads(report.read_text())
    damage, remedy = (one["text"] for one in found if one["state"] == "wrong")
    assert "cut short" in damage
    assert "--ckpt-step 4" in remedy
    assert "megatron-core 0.19" in capsys.readouterr().out


def test_no_checkpoint(tmp_path, capsys):
    assert cli.main(["doctor", "--checkpoint", str(tmp_path)]) == ExitStatus.USAGE
    assert "error: " in capsys.readouterr().err
