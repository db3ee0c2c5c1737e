"""How `pretrain_gpt.py` starts: --help, and a process that no torchrun has started."""

import pytest

from megatron_muon.errors import UserError
from megatron_muon.mcore import launch
from megatron_muon.mcore.one_process import settle_one_process

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
