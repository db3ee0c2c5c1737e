"""The benchmarks: arguments, errors, and tables of given figures."""

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from benchmarks import command, step
from benchmarks import train as bench_train
from benchmarks.command import run_logged
from benchmarks.train import ADAM, COMPARED, MUON, TrainRun
from megatron_muon.errors import ExitStatus, RunFailedError
from megatron_muon.tools.train import processes

GPT = "--ranks 2 --hidden-size 64 --num-layers 1"
QUICKSTART = ["--config", "configs/quickstart.yaml"]
MACHINE = {"processor": "a processor", "cores": 2, "load_average_before": 0.5}


def rows(results, monkeypatch):
    """The cells of the table of `benchmarks.train`, by the first of each row."""
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    monkeypatch.setattr("rich.console.Console", lambda **_: console)
    results = {**results, "machine": MACHINE, "commit": "0123456789"}
    command.show(results, bench_train.tables(results))
    found = {}
    for line in console.export_text().splitlines():
        name, *cells = (cell.strip() for cell in line.strip("│").split("│"))
        found[name] = cells
    return found


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ("--ranks 2 --matrices 0x64x64", "0x64x64 is not ROWSxCOLS"),
        ("--ranks 2 --hidden-size 64", "give --hidden-size H and --num-layers L"),
        (f"{GPT} --team-size 4", "--team-size 4 is more than --ranks 2; lower it"),
        (f"{GPT} --peers deepspeed", "not installed; type pip install '.[bench]'"),
        (f"{GPT} --json absent/x.json", "its directory does not exist"),
    ],
)
def test_usage_errors(argv, error, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert step.run(argv.split()) == ExitStatus.USAGE
    assert error in capsys.readouterr().err


def test_arguments_reach_the_ranks(monkeypatch):
    run = mock.Mock(side_effect=RunFailedError)
    monkeypatch.setattr(step, "run_logged", run)
    step.run(["--ranks", "4", "--matrices", "8192x1024", "8x96x64", "--team-size", "4", "1"])
    spec = json.loads(run.call_args.args[0][-2])
    assert spec["matrices"] == [[1, 8192, 1024], [8, 96, 64]]
    assert spec["team_size"] == ["4", "1"]


def test_train_table(monkeypatch):
    """Runs of a round are neighbors: a slower machine in one round does not change the ratio."""
    runs = {MUON: [], ADAM: [], COMPARED: []}
    for plain_ms, compared_ms in ((100.0, 101.0), (200.0, 206.0), (300.0, 303.0)):
        runs[MUON].append(TrainRun((plain_ms,), 2048))
        runs[ADAM].append(TrainRun((100.0,), 2048))
        runs[COMPARED].append(TrainRun((compared_ms,), 2048))
    figures = bench_train.figures(runs)
    found = rows(figures | {"compared_flags": "--qk-clip"}, monkeypatch)
    assert found[COMPARED] == ["206.0", "101 206 303"]
    assert "Muon / Adam: 2.000" in found
    assert "Muon with --qk-clip / Muon: 1.010" in found


def test_train_flags_unset_what_is_not_training(capsys):
    flags = " ".join(bench_train.run_flags(["--save", "--lr"], "adam", 20, Path("log")))
    assert flags.startswith("--unset --save --optimizer adam ")
    assert bench_train.run([*QUICKSTART, "--steps", "5", "--warmup", "5"]) == ExitStatus.USAGE
    assert "--warmup 5 leaves none of --steps 5" in capsys.readouterr().err


def test_a_training_is_measured_by_pretrain_gpt_under_torchrun(monkeypatch):
    """And Ctrl-C ends it."""
    watched = mock.Mock(return_value=processes.Ended(1, signal.SIGINT))
    monkeypatch.setattr(processes, "watch", watched)
    assert bench_train.run([*QUICKSTART, "--steps", "2", "--warmup", "1"]) == 130
    line = " ".join(watched.call_args.args[0])
    for part in ("-m torch.distributed.run", " ".join(QUICKSTART), "--train-iters 2"):
        assert part in line


def test_a_failed_run_shows_the_end_of_its_log(tmp_path, capsys):
    program = "print('first'); print('the reason'); raise SystemExit(3)"
    command = [sys.executable, "-c", program]
    with pytest.raises(RunFailedError, match="the run ended with status 3"):
        run_logged(command, tmp_path / "log", env=dict(os.environ), what="the run")
    assert "the reason" in capsys.readouterr().err


def test_environment_keeps_what_the_user_set(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("PYTHONPATH", "of-the-user")
    found = processes.environment(2)
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["PYTHONPATH"] == f"{processes.ROOT}:of-the-user"


@pytest.mark.wide
def test_the_host_of_a_shipped_model_is_measured(tmp_path):
    log = tmp_path / "log"
    program = ("-m", "benchmarks.host", "--configs", QUICKSTART[1], "--ranks", "4")
    run_logged([sys.executable, *program], log, env=dict(os.environ), what="the measurement")
    row = [cell.strip() for cell in log.read_text().splitlines()[-1].split("|")]
    assert row[1:3] == ["quickstart", "4"]
    assert float(row[3]) > 0.0
