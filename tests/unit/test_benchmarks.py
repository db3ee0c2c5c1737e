"""The benchmarks: arguments, tables of given figures, errors, the floor; published steps against
their simulation.
"""

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from benchmarks import backtest, command, step
from benchmarks import train as bench_train
from benchmarks.command import run_logged
from benchmarks.floor import _travels, _work, products
from benchmarks.host import narrow
from benchmarks.layouts import gpt_layout, layout_of
from benchmarks.peers import NS_METHODS
from megatron_muon.core.assignment import TeamRules
from megatron_muon.core.cost import DENSE, GRAM, HALVES, KERNEL, STANDARD, Iteration
from megatron_muon.core.layout import Layout, row_sharded
from megatron_muon.core.memory import Memory
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.plan import make_plan
from megatron_muon.errors import ExitStatus, RunFailedError, UserError
from megatron_muon.tools.parser import CommandParser
from megatron_muon.tools.train import processes

STEP = ("--ranks", "2", "--hidden-size", "64", "--num-layers", "1")
PROVENANCE = {
    "machine": {
        "processor": "a processor",
        "cores": 2,
        "load_average_before": 0.5,
        "system": "Linux",
    },
    "versions": {},
    "commit": "0123456789",
}


def parsed(*argv):
    parser = CommandParser()
    step.configure(parser)
    return parser.parse_args(argv)


def shown(results, monkeypatch):
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    monkeypatch.setattr("rich.console.Console", lambda **_: console)
    command.show(results, (step if results["bench"] == "step" else bench_train).tables(results))
    return console.export_text()


def step_results():
    method = {
        "median_ms": 1500.0,
        "min_ms": 1400.0,
        "phases_ms": {"momentum": 12.3, "orthogonalize": 1200.0},
        "exchange_bytes_per_rank": 50_000_000,
        "peak_extra_bytes": 7_000_000,
    }
    figures = {
        "floor_ms": {"ns": 900.0, "exchange": 100.0, "total": 1000.0},
        "rates": {"matmul_gflop_per_s": 123.0, "bandwidth_gb_per_s": 1.5, "ns_gflop": 1.0},
        "methods": {
            "owner": method,
            "adam": {
                **method,
                "median_ms": 60.0,
                "phases_ms": {"apply": 60.0},
                "exchange_bytes_per_rank": 0,
            },
        },
    }
    setting = {
        "hidden_size": 64,
        "num_layers": 1,
        "matrices": [],
        "team_size": [],
        "ranks": 2,
        "ns_dtype": "bf16",
    }
    plan = {"matrices_of_teams": {}}
    return {
        "bench": "step",
        **step._with_ratios(figures),
        "plan": plan,
        "setting": setting,
        **PROVENANCE,
    }


def test_arguments_reach_the_specification():
    spec = step.step_spec(parsed(*STEP))
    assert (spec.ranks, spec.ns_dtype, spec.repeat, spec.peers, spec.offload) == (
        2,
        "bf16",
        5,
        [],
        [],
    )
    assert spec.methods == ["owner", "allgather", "allgather-tuned", "adam"]
    spec = step.step_spec(
        parsed(
            *STEP,
            "--ns-dtype",
            "fp32",
            "--methods",
            "adam",
            "owner",
            "adam",
            "--buffer-mb",
            "0.5",
            "--repeat",
            "3",
        )
    )
    assert (spec.ns_dtype, spec.methods, spec.buffer_mb, spec.repeat) == (
        "fp32",
        ["adam", "owner"],
        0.5,
        3,
    )
    given = ("--ranks", "4", "--matrices", "8192x1024", "8x96x64", "--team-size", "4", "1", "4")
    spec = step.step_spec(parsed(*given))
    assert (spec.matrices, spec.team_size, spec.variants) == (
        [(1, 8192, 1024), (8, 96, 64)],
        ["4", "1"],
        [],
    )
    spec = step.step_spec(parsed(*given, "--variants", "hyperball", "cautious"))
    assert spec.variants == ["hyperball", "cautious"]


@pytest.fixture
def installed(monkeypatch):
    """The modules of peers, which were sought and are there."""
    sought = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: sought.append(name) or object())
    return sought


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "required"),
        ([*STEP, "--repeat", "0"], "at least 1"),
        ([*STEP, "--buffer-mb", "-1"], "out of range"),
        ([*STEP, "--methods", "sgd"], "invalid choice"),
        ([*STEP, "--team-size", "auto"], "invalid choice"),
        (["--ranks", "2", "--matrices", "8192"], "8192 is not ROWSxCOLS or COUNTxROWSxCOLS"),
        (["--ranks", "2", "--matrices", "0x64x64"], "0x64x64 is not ROWSxCOLS"),
        (["--ranks", "2"], "give --hidden-size H and --num-layers L, or --matrices"),
        (
            ["--ranks", "2", "--hidden-size", "64"],
            "give --hidden-size H and --num-layers L, or --matrices",
        ),
        (
            [*STEP, "--matrices", "64x64"],
            "give --hidden-size H and --num-layers L, or --matrices ROWSxCOLS alone",
        ),
        (
            [*STEP, "--team-size", "4"],
            "--team-size 4 is more than --ranks 2; lower it, or raise --ranks",
        ),
        (
            [*STEP, "--hidden-size", "63", "--peers", "muon-fsdp2"],
            "--ranks 2 --hidden-size 63: it takes shards of eq",
        ),
        (
            ["--ranks", "2", "--peers", "muon-fsdp2", "--matrices", "64x7", "7x64"],
            "multiple of 2 as rows of each",
        ),
        (
            [*STEP, "--peers", "muonium"],
            "takes CUDA tensors alone, and peers are measured on CPU; leave muonium out",
        ),
        (
            [*STEP, "--peers", "dtensor-muon"],
            "takes CUDA tensors alone, and peers are measured on CPU; leave dtensor",
        ),
        ([*STEP, "--peers", "deepspeed", "--device", "cuda"], "type --device cpu"),
        (
            [*STEP, "--offload", "nvme", "--offload-dir", "/nowhere"],
            "--offload-dir /nowhere: cannot write there: No",
        ),
        ([*STEP, "--offload", "nvme"], "--offload nvme and --offload-dir DIR go together"),
        ([*STEP, "--momentum-dtype", "bf16"], "--momentum-dtype bf16 needs --offload"),
        ([*STEP, "--json", "absent/x.json"], "there is no directory"),
    ],
)
def test_usage_errors(argv, said, capsys, installed):
    assert step.run(argv) == ExitStatus.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("peer", step.PEERS)
def test_missing_peer_says_what_to_type(peer, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"(deepspeed|muon-fsdp2) is not installed; type pip install '\.\[bench\]'"
    ):
        step.step_spec(parsed(*STEP, "--peers", peer))


def test_installed_peers_reach_the_specification(installed):
    spec = step.step_spec(parsed(*STEP, "--peers", "deepspeed-gram", "deepspeed", "deepspeed-gram"))
    assert spec.peers == ["deepspeed-gram", "deepspeed"]
    assert set(installed) == {"deepspeed"}
    assert set(step.PEERS) == {*NS_METHODS, "muon-fsdp2"}
    equal = parsed("--ranks", "2", "--peers", "muon-fsdp2", "--matrices", "64x7")
    assert step.step_spec(equal).peers == ["muon-fsdp2"]


def test_warmup_must_leave_steps(capsys):
    argv = ["--config", "configs/quickstart.yaml", "--steps", "5", "--warmup", "5"]
    assert bench_train.run(argv) == ExitStatus.USAGE
    assert "--warmup 5 leaves none of --steps 5" in capsys.readouterr().err


def test_step_table(monkeypatch):
    results = step_results()
    assert results["ratios"] == {"owner_over_floor": 1.5, "adam_over_owner": 0.04}
    text = shown(json.loads(json.dumps(results)), monkeypatch)
    owner = next(line for line in text.splitlines() if "owner" in line and "1,500.0" in line)
    assert [cell.strip() for cell in owner.split("│")[1:-1]] == [
        "owner",
        "1,500.0",
        "1,400.0",
        "1.50",
        "50.00",
        "7.00",
    ]
    assert any("orthogonalize" in line and "1,200.0" in line for line in text.splitlines())
    assert "commit 0123456789" in text
    assert "teams" not in text


def test_step_table_of_peers_and_teams(monkeypatch):
    """It names what a peer computes in, and which matrices teams own."""
    results = step_results()
    results["methods"]["deepspeed"] = {**results["methods"]["owner"], "ns_dtype": "bfloat16"}
    results["methods"]["owner"]["plan"] = {"matrices_of_teams": {"2": 1, "4": 3}}
    results["methods"]["team-1"] = {**results["methods"]["adam"], "plan": {"matrices_of_teams": {}}}
    results["setting"] |= {"matrices": [[1, 8192, 1024], [8, 96, 64]], "team_size": ["1"]}
    text = shown(results, monkeypatch)
    assert "Newton-Schulz of deepspeed in bfloat16" in text
    assert "matrices owned by teams: owner 1 by 2 ranks and 3 by 4 ranks, team-1 none" in text
    assert "Optimizer step, 8192x1024, 8 of 96x64, 2 ranks, bf16" in text


def test_train_table(monkeypatch):
    runs = {
        "muon": [bench_train.TrainRun((100.0, 110.0, 120.0), 2048, 1000)],
        "adam": [bench_train.TrainRun((100.0,), 2048, None)],
    }
    figures = bench_train.figures(runs)
    assert figures["muon_step_ms"] == 110.0
    assert figures["ratio"] == pytest.approx(1.1)
    assert figures["optimizer_state_bytes"] == {"muon": 4000, "adam": 8000}
    text = shown({"bench": "train", **figures, **PROVENANCE}, monkeypatch)
    assert "1.100" in text
    assert "2,048 tokens" in text


def test_train_table_with_further_flags(monkeypatch):
    """Runs of a round are neighbours, so a machine that is slower in one round does not change the
    ratio.
    """
    rounds = [(100.0, 101.0), (200.0, 206.0), (300.0, 303.0)]
    runs = {
        "muon": [bench_train.TrainRun((plain,), 2048, 1000) for plain, _ in rounds],
        "adam": [bench_train.TrainRun((100.0,), 2048, None) for _ in rounds],
        bench_train.COMPARED: [bench_train.TrainRun((more,), 2048, 1000) for _, more in rounds],
    }
    figures = bench_train.figures(runs)
    assert figures["compared_step_ms"] == 206.0
    assert figures["compared_over_muon"] == pytest.approx(1.01)
    text = shown(
        {"bench": "train", **figures, "compared_flags": "--qk-clip", **PROVENANCE}, monkeypatch
    )
    assert "Muon with --qk-clip / Muon: 1.010" in text
    assert "101 206 303" in text


def test_train_flags_take_back_what_is_not_training():
    flags = bench_train.run_flags(["--save", "--lr"], "adam", steps=20, tensorboard=Path("log"))
    assert flags[:2] == ["--unset", "--save"]
    assert flags.count("--unset") == 1
    assert flags[flags.index("--optimizer") + 1] == "adam"


@pytest.mark.parametrize("precision", ["medium", "highest"])
@pytest.mark.parametrize("method", [STANDARD, GRAM])
@pytest.mark.parametrize("block", [(64, 64), (64, 256), (256, 64), (512, 1024)])
@pytest.mark.parametrize("steps", [3, 5, 6])
@pytest.mark.parametrize("kind", [DENSE, HALVES])
def test_floors_products_do_the_operations_that_are_counted(kind, method, precision, block, steps):
    iteration = Iteration(steps=steps, precision=precision, method=method, products=kind)
    for team in (1, 2, 4):
        done = products(block, iteration, batch=3, team=team)
        assert sum(product.flops * count for product, count in done.items()) == 3 * iteration.flops(
            *block, team
        )


def test_the_floor_counts_what_a_team_sends():
    """Two ranks own 64x16 alone or together: half of it there and back, or no rows and half of
    three sums, twice.
    """
    orthogonalizer = Orthogonalizer(Iteration(method=GRAM, precision="medium"))
    layout = layout_of(2, [(1, 64, 16)])
    rules = TeamRules(orthogonalizer.iteration.cost, [0, 0], 2)
    alone, together = (make_plan(layout, [1.0], memory=Memory(2), rules=of) for of in (None, rules))
    assert [len(team.ranks) for team in together.teams] == [2]
    assert sorted(map(sum, _travels(alone, orthogonalizer))) == [32 * 16 * 2] * 2
    sums = 3 * 16 * 16 * 4
    # rows lie where they are needed
    assert _travels(together, orthogonalizer) == [[0, sums], [sums, 0]]
    for team, plan in ((1, alone), (2, together)):
        work = sum(product.flops * count for product, count in _work(plan, orthogonalizer).items())
        assert work == team * orthogonalizer.iteration.flops(64, 16, team)


def test_layout_of_more_ranks_than_rows():
    layout = gpt_layout(7, 5, 1)
    assert [matrix.shape for matrix in layout.matrices] == [(15, 5), (5, 5), (20, 5), (5, 20)]
    assert layout.matrices[0].blocks == [(5, 5)] * 3
    assert layout.matrices[1].shard_of(6) is None


def test_environment_keeps_what_the_user_set(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(processes, "cores", lambda: 8)
    assert processes.environment(2)["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert processes.environment(2)["OMP_NUM_THREADS"] == "4"


def test_environment_finds_the_modules_that_an_experiment_names(monkeypatch):
    """ENV_VARS may say where a dataset's or tokenizer's code lies; the user's own variable wins
    over it.
    """
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert processes.environment(1)["PYTHONPATH"] == str(processes.ROOT)
    asked = {"PYTHONPATH": "of-the-file"}
    assert processes.environment(1, settings=asked)["PYTHONPATH"] == f"{processes.ROOT}:of-the-file"
    monkeypatch.setenv("PYTHONPATH", "of-the-user")
    assert processes.environment(1, settings=asked)["PYTHONPATH"] == f"{processes.ROOT}:of-the-user"


@pytest.mark.parametrize(
    ("number", "end"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_ends_a_bench(tmp_path, monkeypatch, number, end):
    monkeypatch.setattr(processes, "watch", lambda *_, **__: processes.Ended(1, number))
    with pytest.raises(end):
        run_logged(["true"], tmp_path / "log", env={}, what="the run")


def test_a_training_is_measured_by_pretrain_gpt_under_torchrun(monkeypatch):
    watched = mock.Mock(return_value=processes.Ended(1, signal.SIGINT))
    monkeypatch.setattr(processes, "watch", watched)
    assert (
        bench_train.run(["--config", "configs/quickstart.yaml", "--steps", "2", "--warmup", "1"])
        == 130
    )
    line = watched.call_args.args[0]
    for part in (
        ["-m", "torch.distributed.run"],
        ["--config", "configs/quickstart.yaml"],
        ["--train-iters", "2"],
    ):
        assert " ".join(part) in " ".join(line)
    program = line[line.index("--config") - 1]
    assert Path(program).exists() or importlib.util.find_spec(program), program


def test_failed_run_shows_the_end_of_its_log(tmp_path, capsys):
    command = [
        sys.executable,
        "-c",
        "print('first'); print('what went wrong'); raise SystemExit(3)",
    ]
    with pytest.raises(RunFailedError, match="the run ended with status 3"):
        run_logged(command, tmp_path / "log", env=dict(os.environ), what="the run")
    assert "what went wrong" in capsys.readouterr().err


def test_the_hosts_matrices_keep_rows_shards_and_kinds():
    wide = Layout(2, (row_sharded("a", (64, 4096), [40, 24]), row_sharded("b", (64, 512), [0, 64])))
    found = narrow(wide)
    assert [matrix.shape for matrix in found.matrices] == [(64, 16), (64, 8)]
    assert [(shard.rank, shard.rows, shard.cols) for shard in found.matrices[0].shards] == [
        (0, 40, 16),
        (1, 24, 16),
    ]


def test_the_host_of_a_shipped_model_is_measured():
    command = [
        sys.executable,
        "-m",
        "benchmarks.host",
        "--configs",
        "configs/quickstart.yaml",
        "--ranks",
        "4",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    *_, line = run.stdout.splitlines()
    _, model, ranks, measured, _ = (cell.strip() for cell in line.split("|"))
    assert (model, ranks) == ("quickstart", "4")
    assert float(measured) > 0.0


def test_the_page_has_what_the_backtest_prints(monkeypatch, capsys):
    monkeypatch.setattr(backtest, "table", functools.cache(backtest.table))
    backtest.main([])
    printed, notes = capsys.readouterr().out.rstrip().split("\n\n")
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text("utf-8")
    section = page.split("\n## Back-test\n")[1].split("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("|")] == printed.splitlines()
    assert not [note for note in notes.splitlines() if note not in " ".join(section.split())]


def test_one_restart_counts_what_its_authors_say():
    """6 a + 14 units of n^3 for a block of sides n and a n: gram-newton-schulz with symmetric
    products.
    """
    iteration = backtest.OneRestart(method=GRAM, products=KERNEL)
    counts, n, ratio = iteration.counts(GRAM), 1024, 4
    assert (
        2 * counts.gram * ratio / 2 + counts.square + counts.symmetric + 2 * counts.wide * ratio
    ) == 6 * ratio + 14
    halved = backtest.OneRestart("quintic", 5, "medium", GRAM, backtest.SYMMETRIC)
    assert halved.flops(n, ratio * n) == (6 * ratio + 14) * n**3


def test_the_models_have_their_published_sizes():
    dense = backtest.COPIES * backtest.numel(backtest.DENSE_MATRICES)
    experts = backtest.COPIES * backtest.EXPERT * backtest.numel(backtest.EXPERT_MATRICES)
    assert dense + experts == pytest.approx(120e9, rel=0.04)  # without embeddings
    embeddings = {
        backtest.QWEN_1B: 151936 * 1536,
        backtest.LLAMA_3B: 2 * 128256 * 3072,
        backtest.QWEN_7B: 2 * 152064 * 3584,
        backtest.LLAMA_8B: 2 * 128256 * 4096,
    }
    for model, others in embeddings.items():
        assert backtest.numel(model.matrices) + others == pytest.approx(model.parameters, rel=0.005)
