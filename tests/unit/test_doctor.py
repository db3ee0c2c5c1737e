"""`megatron-muon doctor`: what it finds, and that it can find something wrong."""

from __future__ import annotations

import argparse
import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_muon import cli
from megatron_muon.checkpoint import files
from megatron_muon.errors import ExitStatus
from megatron_muon.offload.directory import LOCK, RunDirectory
from megatron_muon.offload.files import PAGE, Header, MomentumFile, boot_id
from megatron_muon.tools.doctor import checkpoint as doctor_checkpoint
from megatron_muon.tools.doctor import command as doctor_command
from megatron_muon.tools.doctor.offload import offload

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ARGS = argparse.Namespace(
    world_size=6, data_parallel_sharding_strategy="optim", tensor_model_parallel_size=2, expert_model_parallel_size=1
)


def state(**changes: Any) -> dict[str, Any]:
    """What megatron-core saves of a model of one SwiGLU projection, a norm and a frozen embedding."""
    tensor = torch.ones(2, 3)
    fc1, norm, embedding = "module.mlp.linear_fc1.weight", "module.norm.weight", "module.embedding.weight"
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
            folder = files.iteration_folder(tmp_path, iteration)
            dcp.save(state(**changes), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
        (tmp_path / files.TRACKER).write_text("8")
        return tmp_path

    return write


def findings(directory: Path) -> dict[str, tuple[str, str]]:
    return {finding.about: (finding.state, finding.text) for finding in doctor_checkpoint.checkpoint(directory)}


def test_a_sound_checkpoint(write) -> None:
    found = findings(write())
    assert found["checkpoint"][0] == "ok"
    assert "iter_0000008 is complete, iteration 8" in found["checkpoint"][1]
    assert found["written by"] == ("ok", "ranks 6, strategy optim, TP 2, EP 1")
    assert found["weights"] == ("ok", "4 tensors")
    assert found["optimizer state"] == ("ok", "of these, adam has 1, muon has 2")
    assert found["no state"] == ("note", "1 weights that did not train: embedding.weight")
    assert "missing state" not in found


def test_a_runs_folder(write, tmp_path) -> None:
    """What `train` makes: the checkpoints lie one folder deeper."""
    (tmp_path / "run").mkdir()
    for entry in list(write().iterdir()):
        if entry.name != "run":
            (tmp_path / "run" / "checkpoints").mkdir(exist_ok=True)
            entry.rename(tmp_path / "run" / "checkpoints" / entry.name)
    assert "iter_0000008 is complete" in findings(tmp_path / "run")["checkpoint"][1]


def test_one_of_its_folders(write) -> None:
    folder = write() / "iter_0000004"
    (folder.parent / "iter_0000012.saving").mkdir()
    found = findings(folder)
    assert "iter_0000004 is complete" in found["checkpoint"][1]
    assert "iter_0000012.saving is a save that did not finish" in found["beside it"][1]


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
    assert cli.main(["doctor", "--checkpoint", str(save_dir), "--json", str(report)]) == ExitStatus.FAILURE
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
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    wrong = [finding.about for finding in doctor_command.environment() if finding.state == "wrong"]
    assert wrong == ["CUDA_DEVICE_MAX_CONNECTIONS"]


# ------------------------------------------------------------------------------------------------ momentum files

LEFT = Header("0a1b2c3d", 100, 3, "dense0", "bf16", PAGE, host="node7", pid=4321, boot="")


def lying_there(directory: Path, *, remove: bool = False) -> dict[str, tuple[str, str]]:
    """State and text by what each finding is about, momentum files by their names."""
    found = {}
    for finding in offload(directory, remove=remove):
        is_file = finding.about == "momentum file"
        about, text = finding.text.split(": ", 1) if is_file else (finding.about, finding.text)
        found[about] = finding.state, text
    return found


def test_files_of_a_living_run_and_of_others(tmp_path) -> None:
    """Those of the living run are left alone, also the one that it has not locked yet."""
    run = RunDirectory(tmp_path, "living")
    mine = Header("living", 0, 0, "dense0", "fp32", PAGE)
    file, unlocked = MomentumFile(tmp_path, mine), MomentumFile(tmp_path, replace(mine, rank=1))
    file.take_space()
    kept = replace(LEFT, rank=4, iteration=200, kept=True)
    for left in (LEFT, kept):
        (tmp_path / left.name).write_bytes(left.pages())
    (tmp_path / "muon-momentum-junk").write_bytes(b"junk")
    (tmp_path / "muon-momentum-folder").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"weights")

    found = lying_there(tmp_path)
    assert "weights.bin" not in found
    who = f"run living (process {os.getpid()} on {socket.gethostname()})"
    assert found["offload"] == ("ok", f"{tmp_path} is in use by {who}")
    described = f"run living, rank 0, dense0 as fp32, begun at 0, by process {os.getpid()} on {socket.gethostname()}"
    assert found[file.path.name] == ("ok", f"{described}, 12,288 bytes, in use")
    assert found[unlocked.path.name] == ("ok", "is not a momentum file, 0 bytes, in use")
    described = "run 0a1b2c3d, rank 3, dense0 as bf16, begun at 100, by process 4321 on node7, 4,096 bytes"
    assert found[LEFT.name] == ("wrong", f"{described}, left over; to remove it type --remove")
    assert found[kept.name][0] == "wrong"
    assert "rank 4, dense0 as bf16, kept with iteration 200, by process 4321" in found[kept.name][1]
    assert found["muon-momentum-junk"] == (
        "wrong",
        "is not a momentum file, 4 bytes, left over; to remove it type --remove",
    )
    assert found["muon-momentum-folder"][0] == "wrong"

    os.truncate(file.path, 5000)
    cut = f"run living, rank 0, dense0 as fp32, begun at 0, by process {os.getpid()} on {socket.gethostname()}"
    assert lying_there(tmp_path)[file.path.name] == ("wrong", f"{cut}, 5,000 of 12,288 bytes, in use: its end is lost")

    removed = lying_there(tmp_path, remove=True)
    assert removed[LEFT.name] == ("ok", f"{described}, left over; removed")
    assert removed["muon-momentum-folder"] == ("wrong", "not a file, so not of a run; remove it by hand")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {LOCK, file.path.name, unlocked.path.name, "weights.bin", "muon-momentum-folder"}
    for of_run in (file, unlocked, run):
        of_run.close()
    assert lying_there(tmp_path).keys() == {"muon-momentum-folder"}


def test_a_killed_runs_files_and_the_exit_status(tmp_path, capsys) -> None:
    (tmp_path / LEFT.name).write_bytes(LEFT.pages()[:50])
    (tmp_path / LOCK).write_text('{"run": "0a1b2c3d", "host": "node7", "pid": 4321}')
    arguments = ["doctor", "--offload-dir", str(tmp_path)]
    assert cli.main(arguments) == ExitStatus.FAILURE
    assert lying_there(tmp_path)[LEFT.name][1].startswith("has a damaged header, 50 bytes, left over")
    assert lying_there(tmp_path)[LOCK][0] == "note"
    assert cli.main([*arguments, "--remove"]) == ExitStatus.OK
    assert list(tmp_path.iterdir()) == []
    assert cli.main(arguments) == ExitStatus.OK
    assert lying_there(tmp_path) == {"offload": ("ok", f"{tmp_path} holds no momentum files")}


def test_files_that_the_next_run_removes_are_a_note(tmp_path) -> None:
    mine = replace(LEFT, host=socket.gethostname(), boot=boot_id())
    (tmp_path / mine.name).write_bytes(mine.pages())
    state, text = lying_there(tmp_path)[mine.name]
    assert (state, text.endswith(", left over; the next run removes it, and so does --remove")) == ("note", True)
    assert lying_there(tmp_path, remove=True)[mine.name][1].endswith("left over; removed")
    assert list(tmp_path.iterdir()) == []


def test_no_directory_of_momentum_files(tmp_path, capsys) -> None:
    assert lying_there(tmp_path / "absent") == {"offload": ("wrong", f"{tmp_path}/absent: No such file or directory")}
    assert cli.main(["doctor", "--remove"]) == ExitStatus.USAGE
    assert "--remove needs --offload-dir DIR" in capsys.readouterr().err
