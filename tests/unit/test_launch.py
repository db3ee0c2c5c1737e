"""How `pretrain_gpt.py` starts: --help, and a process that no torchrun has started."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_muon import exit_codes
from megatron_muon.errors import UserError
from megatron_muon.megatron import launch
from megatron_muon.megatron.launch import settle_one_process

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--config", "absent.yaml", "--help"]])
def test_help_is_the_flags_and_nothing_else(capsys, tmp_path, argv):
    """It ended in two tracebacks and status 1, because its SystemExit read as the end of a training."""
    assert launch.main(argv, root=tmp_path) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: pretrain_gpt.py ")
    assert "--muon-exchange" in out
    assert err == ""


def test_only_the_first_rank_prints_help(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert launch.main(["--help"], root=tmp_path) == 0
    assert capsys.readouterr().out == ""


def test_a_process_by_itself_is_a_group_of_one():
    """It ended in `environment variable MASTER_ADDR expected`, after 890 lines."""
    environ = {"HOME": "/root", "MASTER_ADDR": "10.0.0.1", "SLURM_STEP_NUM_TASKS": "1"}
    assert "torchrun --nproc-per-node" in settle_one_process(environ)
    assert {environ[name] for name in ("RANK", "LOCAL_RANK")} == {"0"}
    assert environ["WORLD_SIZE"] == "1"
    assert environ["MASTER_ADDR"] == "127.0.0.1"  # what a script exported for others is another machine
    assert environ["MASTER_PORT"] == "0"


def test_a_rank_of_torchrun_keeps_its_environment():
    environ = dict(TORCHRUN)
    assert settle_one_process(environ) is None
    assert environ == TORCHRUN


@pytest.mark.parametrize(
    ("environ", "fragments"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("has RANK", "lacks MASTER_ADDR, MASTER_PORT", "unset RANK WORLD_SIZE")),
        ({"WORLD_SIZE": "2"}, ("has WORLD_SIZE", "lacks RANK, MASTER_ADDR, MASTER_PORT", "torchrun")),
        ({"SLURM_STEP_NUM_TASKS": "8"}, ("SLURM_STEP_NUM_TASKS=8", "would train alone", "torchrun")),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ("OMPI_COMM_WORLD_SIZE=2", "torchrun")),
    ],
)
def test_processes_of_another_launcher_do_not_train_alone(environ, fragments):
    before = dict(environ)
    with pytest.raises(UserError) as caught:
        settle_one_process(environ)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert environ == before


FAILS_ALONE = """
import sys, time
from types import SimpleNamespace
from pathlib import Path
import megatron.training
import megatron.training.argument_utils as utils
import megatron.training.arguments as arguments
import torch.distributed as dist
from megatron_muon.megatron import launch
from megatron_muon.offload import run as offload

def fails(*_):
    raise {raised}

launch.prepare = lambda *_, **__: launch.Launch((), SimpleNamespace(save=None), "cpu", (), (), None, None)
arguments.parse_and_validate_args = lambda **_: None
utils.gpt_config_from_args = utils.pretrain_cfg_container_from_args = lambda *_: None
megatron.training.pretrain = fails
offload.close_runs = lambda: print("closed")
initialized = [True]
dist.is_initialized = lambda: initialized[0]

def destroy():  # as NCCL does while the others are in a collective
    print("destroying", flush=True)
    if {alone}:
        time.sleep(60)
    initialized[0] = False

dist.destroy_process_group = destroy
launch._ended_by_signal = lambda: {signal}
launch.run(root=Path())
"""


@pytest.mark.parametrize(
    ("raised", "status", "shown"),
    [
        ("RuntimeError('a rank by itself')", 1, "RuntimeError: a rank by itself"),
        ("launch.UserError('a wrong flag')", 2, "error: a wrong flag"),
    ],
)
def test_a_rank_that_fails_alone_ends_at_once_and_says_why(tmp_path, raised, status, shown):
    """It destroyed the process group first: with NCCL a wait for the others until the watchdog."""
    file = tmp_path / "status"
    script = FAILS_ALONE.format(raised=raised, alone=True, signal=False)
    environ = {**os.environ, **TORCHRUN, "LOCAL_RANK": "0", launch.STATUS_FILE: str(file)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=55, check=False
    )
    assert done.returncode == status, done.stderr
    assert shown in done.stderr
    assert done.stdout == "closed\n"
    assert file.read_text() == f"{status}\n"


def test_ranks_that_a_signal_ends_together_leave_their_group_as_before():
    status = exit_codes.TEMPFAIL
    script = FAILS_ALONE.format(raised="SystemExit(0)", alone=False, signal=True)
    environ = {**os.environ, **TORCHRUN, "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=55, check=False
    )
    assert done.returncode == status, done.stderr
    assert done.stdout == "closed\ndestroying\n"


def test_a_group_that_is_there_already_needs_no_environment(monkeypatch):
    """A caller that made the process group itself has set RANK for it, and no rendezvous."""
    monkeypatch.setattr(
        launch, "prepare", lambda *_, **__: launch.Launch((), SimpleNamespace(save=None), "cpu", (), (), None, None)
    )
    monkeypatch.setattr(launch, "_has_group", lambda: True)
    monkeypatch.setattr(launch, "_train", lambda: None)
    monkeypatch.setenv("RANK", "0")
    assert launch.main([], root=Path()) == 0
