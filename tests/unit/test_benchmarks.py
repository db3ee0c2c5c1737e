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

from benchmarks import any_model, command, host, step
from benchmarks import train as bench_train
from benchmarks.command import run_logged
from benchmarks.layouts import gpt_layout
from benchmarks.train import ADAM, COMPARED, MUON, TrainRun
from megatron_muon.core.layout import Layout, row_sharded
from megatron_muon.errors import ExitStatus, RunFailedError
from megatron_muon.tools.train import processes

STEP = ("--ranks", "2", "--hidden-size", "64", "--num-layers", "1")
QUICKSTART = ("--config", "configs/quickstart.yaml")
MACHINE = {"processor": "a processor", "cores": 2, "load_average_before": 0.5}


def shown(module, results, monkeypatch):
    """The lines that a benchmark prints."""
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    monkeypatch.setattr("rich.console.Console", lambda **_: console)
    results = {**results, "machine": MACHINE, "commit": "0123456789", "dirty": True}
    command.show(results, module.tables(json.loads(json.dumps(results))))
    return console.export_text().splitlines()


def cells(lines, name):
    """The cells of a table's first row with this name."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    return next(row for row in rows if row[:1] == [name])


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ([], "required"),
        ([*STEP, "--repeat", "0"], "at least 1"),
        ([*STEP, "--buffer-mb", "-1"], "out of range"),
        ([*STEP, "--methods", "sgd"], "invalid choice"),
        ([*STEP, "--team-size", "auto"], "invalid choice"),
        (["--ranks", "2", "--matrices", "8192"], "8192 is not ROWSxCOLS or COUNTxROWSxCOLS"),
        (["--ranks", "2", "--matrices", "0x64x64"], "0x64x64 is not ROWSxCOLS"),
        (["--ranks", "2"], "give --hidden-size H and --num-layers L, or --matrices"),
        (["--ranks", "2", "--hidden-size", "64"], "give --hidden-size H and --num-layers L"),
        ([*STEP, "--matrices", "64x64"], "or --matrices ROWSxCOLS alone"),
        ([*STEP, "--team-size", "4"], "--team-size 4 is more than --ranks 2; lower it"),
        ([*STEP, "--peers", "deepspeed"], "not installed; type pip install '.[bench]'"),
        ([*STEP, "--json", "absent/x.json"], "its directory does not exist"),
    ],
)
def test_usage_errors(argv, error, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert step.run(argv) == ExitStatus.USAGE
    assert error in capsys.readouterr().err


def test_arguments_reach_the_ranks(monkeypatch):
    run = mock.Mock(side_effect=RunFailedError)
    monkeypatch.setattr(step, "run_logged", run)
    step.run(["--ranks", "4", "--matrices", "8192x1024", "8x96x64", "--team-size", "4", "1"])
    spec = json.loads(run.call_args.args[0][-2])
    assert spec["matrices"] == [[1, 8192, 1024], [8, 96, 64]]
    assert (spec["team_size"], spec["methods"]) == (["4", "1"], ["owner", "allgather", "adam"])
    assert (spec["ns_dtype"], spec["repeat"], spec["peers"]) == ("bf16", 5, [])


def test_step_table(monkeypatch):
    owner = {
        "median_ms": 1500.0,
        "min_ms": 1400.0,
        "phases_ms": {"momentum": 12.3, "orthogonalize": 1200.0},
        "received_bytes": 50_000_000,
        "peak_extra_bytes": 7_000_000,
    }
    methods = {"owner": owner, "adam": {**owner, "median_ms": 60.0, "phases_ms": {"other": 60.0}}}
    setting = {"matrices": [[8, 96, 64]], "ranks": 2, "ns_dtype": "bf16"}
    results = {"methods": methods, "ratios": step.ratios(methods), "setting": setting}
    assert results["ratios"] == {"adam_over_owner": 0.04}
    lines = shown(step, results, monkeypatch)
    assert "Optimizer step, 8 of 96x64, 2 ranks, bf16" in lines[0]
    assert cells(lines, "owner") == ["owner", "1,500.0", "1,400.0", "1.00", "50.00", "7.00"]
    assert cells(lines, "adam")[3] == "0.04"
    assert cells(lines, "orthogonalize") == ["orthogonalize", "1,200.0", ""]
    assert "commit 0123456789-dirty" in lines[-1]


def test_train_table(monkeypatch):
    """Runs of a round are neighbors: a slower machine in one round does not change the ratio."""
    rounds = [(100.0, 101.0), (200.0, 206.0), (300.0, 303.0)]
    runs = {
        MUON: [TrainRun((plain,), 2048) for plain, _ in rounds],
        ADAM: [TrainRun((100.0,), 2048) for _ in rounds],
        COMPARED: [TrainRun((more,), 2048) for _, more in rounds],
    }
    figures = bench_train.figures(runs)
    assert figures["step_ms"] == {MUON: 200.0, ADAM: 100.0, COMPARED: 206.0}
    assert (figures["muon_over_adam"], figures["compared_over_muon"]) == (2.0, 1.01)
    lines = shown(bench_train, figures | {"compared_flags": "--qk-clip"}, monkeypatch)
    assert "2,048 tokens" in lines[0]
    assert cells(lines, COMPARED) == [COMPARED, "206.0", "101 206 303"]
    assert any("Muon with --qk-clip / Muon: 1.010" in line for line in lines)
    del runs[COMPARED]
    lines = shown(bench_train, bench_train.figures(runs) | {"compared_flags": None}, monkeypatch)
    assert cells(lines, ADAM) == [ADAM, "100.0", "100 100 100"]


def test_train_flags_unset_what_is_not_training(capsys):
    flags = bench_train.run_flags(["--save", "--lr"], "adam", 20, Path("log"))
    assert flags[:2] == ["--unset", "--save"]
    assert flags.count("--unset") == 1
    assert flags[flags.index("--optimizer") + 1] == "adam"
    assert bench_train.run([*QUICKSTART, "--steps", "5", "--warmup", "5"]) == ExitStatus.USAGE
    assert "--warmup 5 leaves none of --steps 5" in capsys.readouterr().err


def test_a_training_is_measured_by_pretrain_gpt_under_torchrun(monkeypatch):
    """And Ctrl-C ends it."""
    watched = mock.Mock(return_value=processes.Ended(1, signal.SIGINT))
    monkeypatch.setattr(processes, "watch", watched)
    assert bench_train.run([*QUICKSTART, "--steps", "2", "--warmup", "1"]) == 130
    line = watched.call_args.args[0]
    for part in ("-m torch.distributed.run", " ".join(QUICKSTART), "--train-iters 2"):
        assert part in " ".join(line)
    program = line[line.index("--config") - 1]
    assert Path(program).exists() or importlib.util.find_spec(program), program


def test_a_failed_run_shows_the_end_of_its_log(tmp_path, capsys, monkeypatch):
    program = "print('first'); print('the reason'); raise SystemExit(3)"
    run = [sys.executable, "-c", program], tmp_path / "log"
    with pytest.raises(RunFailedError, match="the run ended with status 3"):
        run_logged(*run, env=dict(os.environ), what="the run")
    assert "the reason" in capsys.readouterr().err
    monkeypatch.setattr(processes, "watch", lambda *_, **__: processes.Ended(1, signal.SIGTERM))
    with pytest.raises(SystemExit):
        run_logged(*run, env={}, what="the run")


def test_a_directory_without_dion_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit):
        any_model.parse(["--dion", str(tmp_path)])
    assert "is not a checkout of microsoft/dion" in capsys.readouterr().err


def test_layout_of_more_ranks_than_rows():
    layout = gpt_layout(7, 5, 1)
    assert [matrix.shape for matrix in layout.matrices] == [
        (15, 5),
        (5, 5),
        (20, 5),
        (5, 20),
    ]
    assert layout.matrices[0].blocks == [(5, 5)] * 3
    assert layout.matrices[1].shard_of(6) is None


def test_environment_keeps_what_the_user_set(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(processes, "cores", lambda: 8)
    assert processes.environment(2)["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert processes.environment(2)["OMP_NUM_THREADS"] == "4"
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert processes.environment(1)["PYTHONPATH"] == str(processes.ROOT)
    monkeypatch.setenv("PYTHONPATH", "of-the-user")
    assert processes.environment(1)["PYTHONPATH"] == f"{processes.ROOT}:of-the-user"


def test_the_hosts_matrices_keep_rows_shards_and_kinds():
    first = row_sharded("a", (64, 4096), [40, 24])
    wide = Layout(2, (first, row_sharded("b", (64, 512), [0, 64])))
    found = host.narrow(wide)
    assert [matrix.shape for matrix in found.matrices] == [(64, 16), (64, 8)]
    shards = [(shard.rank, shard.rows, shard.cols) for shard in found.matrices[0].shards]
    assert shards == [(0, 40, 16), (1, 24, 16)]


@pytest.mark.wide
def test_the_host_of_a_shipped_model_is_measured(tmp_path):
    log = tmp_path / "log"
    program = ("-m", "benchmarks.host", "--configs", QUICKSTART[1], "--ranks", "4")
    run_logged([sys.executable, *program], log, env=dict(os.environ), what="the measurement")
    row = [cell.strip() for cell in log.read_text().splitlines()[-1].split("|")]
    assert row[1:3] == ["quickstart", "4"]
    assert float(row[3]) > 0.0
