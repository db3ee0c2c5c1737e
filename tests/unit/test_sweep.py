"""`megatron-muon sweep` without a training: what a grid means, which runs are to be done, and what
the table says.
"""

import csv
import json
import math
from pathlib import Path

import pytest

from megatron_muon import cli
from megatron_muon.errors import ExitStatus, UserError
from megatron_muon.megatron.places import RunFolder
from megatron_muon.tools import screen
from megatron_muon.tools.sweep import trials as sweep
from megatron_muon.tools.sweep.trials import Results, Task, folder_of, tasks_of
from megatron_muon.tools.train import run_folder
from megatron_muon.tools.train.resolve import (
    FROM_FOLDER,
    FROM_SET,
    Flag,
    Request,
    Resolved,
    check_gpus,
)
from tests.support.made_runs import falling, make_run

# The grid


def names(*grids):
    return [task.point for task in tasks_of([grid.split() for grid in grids], 1, Path())]


def test_a_grid_is_a_product_and_several_are_alternatives():
    assert names("optimizer=adam,muon lr=1,2") == [
        "optimizer=adam,lr=1",
        "optimizer=adam,lr=2",
        "optimizer=muon,lr=1",
        "optimizer=muon,lr=2",
    ]
    assert names("lr=1,2", "lr=2,3 muon_momentum=0.9") == [
        "lr=1",
        "lr=2",
        "lr=2,muon_momentum=0.9",
        "lr=3,muon_momentum=0.9",
    ]
    assert names("--muon-lr=1,2", "muon_lr=2,3") == ["muon_lr=1", "muon_lr=2", "muon_lr=3"]
    assert names('"split=98,2,0","95,5,0"') == ["split=98,2,0", "split=95,5,0"]


@pytest.mark.parametrize("words", ["lr", "1,2", "=1", "lr=", "lr=1,,2", "lr=1 lr=2", "", "lr=1,2 "])
def test_a_malformed_grid_is_refused(words):
    with pytest.raises(UserError, match=r"write KEY=VALUE,VALUE for each key once"):
        tasks_of([words.split(" ")], 1, Path())


def test_folders_can_be_read_and_are_never_shared():
    assert folder_of("optimizer=muon,lr=8e-3") == "optimizer=muon,lr=8e-3"
    assert folder_of("data_path=data/a").startswith("data_path=data-a-")
    assert len({folder_of(f"x={value}") for value in ("a/b", "a-b", "a b")}) == 3
    assert len(long := folder_of("data_path=" + "0.5 data/a " * 50)) < 200
    assert not {"/", " "} & set(long)


def test_all_points_get_the_first_seed_before_the_second():
    tasks = tasks_of([["lr=1,2"]], 2, Path("out"))
    assert [(task.point, task.seed) for task in tasks] == [
        ("lr=1", 1),
        ("lr=2", 1),
        ("lr=1", 2),
        ("lr=2", 2),
    ]
    assert tasks[3].folder == Path("out/lr=2/seed=2")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--lr", "3"], "--lr is in --grid and beside it"),
        (["--muon-lr=3"], "--muon-lr is in --grid and beside it"),
        (["--seed", "5"], "--seed: each run of a sweep has"),
        (["--", "--save", "a"], "--save: each run of a sweep has its own folder below --out"),
        (["--set", "save=x"], "--save: each run of a sweep has its own folder below --out"),
        (["--set", "seed=4"], "its seed from --seeds N"),
    ],
)
def test_flags_that_would_make_all_runs_the_same_are_refused(flags, says, capsys):
    """They win over the grid and over the seeds, so that every run would be the same."""
    argv = [
        "sweep",
        "--config",
        "configs/quickstart.yaml",
        "--grid",
        "lr=1,2",
        "muon_lr=1",
        "--dry-run",
        *flags,
    ]
    assert cli.main(argv) == ExitStatus.USAGE
    assert says in capsys.readouterr().err


# Which runs are to be done


def resolved_of(folder, *, lr="0.01", more=(), env=None, save=False, **changes):
    flags = (Flag("--optimizer", ("muon",), "tiny.yaml"), Flag("--lr", (lr,), FROM_SET), *more)
    flags = (*flags, Flag("--tensorboard-dir", (str(folder / "tensorboard"),), FROM_FOLDER))
    where = RunFolder(folder, folder / "tensorboard", folder / "checkpoints" if save else None)
    given = {
        "filled_in": (),
        "env": env or {},
        "notes": (),
        "device": "cpu",
        "ranks": 1,
        "gpus": 0,
        "settings": {},
    }
    return Resolved(flags=flags, folder=where, files=(), **{**given, **changes})


def plan_of(folder, config="tiny.yaml", **resolved):
    task = Task("lr=0.01", (("lr", "0.01"),), 1, folder)
    return sweep.Plan(task, Request(str(config)), resolved_of(folder, **resolved))


def leave(folder, *, summary=None, lr="0.01", checkpoint=False):
    """What a run of these settings leaves in its folder."""
    flags = [(flag.name, flag.values) for flag in resolved_of(folder, lr=lr).flags]
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "tensorboard" / "events.out.tfevents.1").write_text("lm loss")
    (folder / "config.yaml").write_text(run_folder.config_text(flags, {}, heading=""))
    (folder / "run.json").write_text(json.dumps({"config_hash": run_folder.config_hash(flags, {})}))
    if summary is not None:
        (folder / "summary.json").write_text(
            json.dumps({"iterations": 5, "diverged": False, **summary})
        )
    if checkpoint:
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("5\n")


@pytest.mark.parametrize(
    ("left", "save", "state"),
    [
        (None, False, sweep.FRESH),
        ({"summary": {"outcome": "finished"}}, False, sweep.DONE),
        ({"summary": {"outcome": "failed", "diverged": True}}, False, sweep.DONE),
        ({"summary": {"outcome": "failed"}}, False, sweep.AGAIN),
        ({"summary": {"outcome": "interrupted"}}, False, sweep.AGAIN),
        ({"summary": {"outcome": "interrupted"}, "checkpoint": True}, True, sweep.RESUMED),
        ({}, False, sweep.AGAIN),  # killed with its launcher
        ({"checkpoint": True}, True, sweep.RESUMED),
        ({"summary": {"outcome": "finished"}, "lr": "0.02"}, False, sweep.CHANGED),
    ],
)
def test_the_state_of_a_run(tmp_path, left, save, state):
    if left is not None:
        leave(tmp_path / "run", **left)
    plan = plan_of(tmp_path / "run", save=save)
    assert plan.state == state
    if state != sweep.CHANGED:
        return sweep.refuse_changed([plan])
    with pytest.raises(
        UserError, match=r"1 of 1 runs have results of other settings.*--out.*--overwrite"
    ):
        sweep.refuse_changed([plan])


def test_events_of_other_runs_are_not_deleted(tmp_path):
    make_run(tmp_path / "run", falling(0.1), summary=False)
    assert plan_of(tmp_path / "run").state == sweep.CHANGED


def test_a_line_of_flags_says_all_that_the_point_changes(tmp_path):
    (tmp_path / "tiny.yaml").write_text(
        "MODEL_ARGS:\n  --optimizer: muon\n  --lr: 1\n  --muon-momentum: 0.9\n  --save: ${X}\n"
    )
    more = (Flag("--offset", ("-3",), FROM_SET), Flag("--data-path", ("a b", "c"), FROM_SET))
    assert plan_of(tmp_path / "run", tmp_path / "tiny.yaml", more=more).flags() == [
        "--unset",
        "--muon-momentum",
        "--unset",
        "--save",
        "--lr",
        "0.01",
        "--offset=-3",
        "--data-path",
        "a b",
        "c",
        "--tensorboard-dir",
        str(tmp_path / "run" / "tensorboard"),
    ]


def test_jobs_share_gpus_and_cores_and_no_more(tmp_path, monkeypatch):
    resolved = resolved_of(tmp_path / "run", device="cuda", ranks=4, gpus=8)
    check_gpus(4, 8, jobs=2)
    with pytest.raises(
        UserError,
        match=r"12 processes at once .* it has 8; give --nproc 2 or --jobs 2, or --device",
    ):
        check_gpus(4, 8, jobs=3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert sweep._share(resolved, 1, 2) == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")
    assert sweep._share(resolved, 0, 2) == {"CUDA_VISIBLE_DEVICES": "7,6,5,4"}
    assert sweep._share(resolved, 0, 1) == {}
    # Cores, unless OMP_NUM_THREADS is set.
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(sweep, "cores", lambda: 16)
    assert sweep._share(resolved_of(tmp_path / "run", ranks=2), 0, 2) == {"OMP_NUM_THREADS": "4"}
    assert sweep._share(resolved_of(tmp_path / "run", env={"OMP_NUM_THREADS": "1"}), 0, 2) == {}


# What is shown

ENDED = {
    "outcome": "finished",
    "status": 0,
    "iterations": 20,
    "loss_last": 2.5,
    "validation_loss": {"validation": 2.25},
    "diverged": False,
    "error": None,
    "seconds": 9.5,
}


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(tmp_path, monkeypatch, capsys, terminal):
    """Two runs of which one is done; the other starts alone until its first step, and is shown
    while it goes on.
    """
    from megatron_muon.tools.train.train import Outcome

    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    monkeypatch.setattr(screen, "is_terminal", lambda: terminal)
    leave(tmp_path / "done", summary={"outcome": "finished"})
    whole = sweep.Sweep([plan_of(tmp_path / "done"), plan_of(tmp_path / "run")], 1)
    live, starting, groups = [], [], []

    def execute(experiment, *, show, stop, env):
        for event in (
            {"event": "stage", "stage": "reading the data"},
            {"event": "step", "step": 12, "steps": 20},
        ):
            show({**event, "loss": 2.851484})
            starting.append(whole._starting.locked())
        groups.append(env["WANDB_RUN_GROUP"])
        live.extend(task.description for task in (whole.screen.progress.tasks if terminal else ()))
        return Outcome(0, ENDED)

    monkeypatch.setattr(sweep, "execute", execute)
    monkeypatch.setattr(sweep, "prepare", lambda request, resolved: None)
    ends = []
    whole.run(lambda: ends.append(1))
    shown = capsys.readouterr().out
    assert (starting, ends, groups) == ([True, False], [1], [tmp_path.parent.name])
    assert live == (["lr=0.01 seed=1  step 12/20  loss 2.8515"] if terminal else [])
    losses = "training loss 2.5000, validation loss 2.2500"
    assert (
        f"[2/2] lr=0.01 seed=1: finished with status 0 after 20 iterations, {losses}, 10 s; about"
        " 0:00 left" in shown
    )
    assert ("\x1b[" in shown) is terminal


# The table


def end(task, loss=None, outcome="finished", **figures):
    """What a run of a sweep that has ended leaves."""
    task.folder.mkdir(parents=True)
    found = {
        "outcome": outcome,
        "diverged": loss is None,
        "loss_last": loss and loss - 0.1,
        "step_ms": 100.0,
    }
    found |= {"validation_loss": {"validation": loss}, "iterations": 40, "tokens": 2560, **figures}
    (task.folder / "summary.json").write_text(json.dumps(found))


def test_rows_and_points(tmp_path):
    """Two optimizers, two rates each, two seeds; one run diverged and one never started."""
    swept = tasks_of(
        [["optimizer=adam", "lr=1e-3,2e-3"], ["optimizer=muon", "lr=4e-3,8e-3"]], 2, tmp_path
    )
    losses = {"1e-3": 3.0, "2e-3": 2.5, "4e-3": 2.0}
    for task in swept:
        if loss := losses.get(dict(task.settings)["lr"]):
            end(task, loss + task.seed / 10)
        elif task.seed == 1:
            end(task, outcome="failed")
    results = Results(swept)
    results.write(tmp_path, {"command": "megatron-muon sweep"})
    with (tmp_path / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    first = lines[0]
    assert list(first.items())[:4] == [
        ("point", swept[0].point),
        ("optimizer", "adam"),
        ("lr", "1e-3"),
        ("seed", "1"),
    ]
    assert [float(first[name]) for name in ("validation_loss", "loss_last", "step_ms")] == [
        3.1,
        3.0,
        100.0,
    ]
    assert (first["tokens"], first["iterations"], first["folder"]) == (
        "2560",
        "40",
        str(swept[0].folder),
    )
    diverged, absent = (
        next(r for r in lines if r["lr"] == "8e-3" and r["seed"] == seed) for seed in "12"
    )
    assert (diverged["outcome"], diverged["diverged"], diverged["validation_loss"]) == (
        "failed",
        "True",
        "",
    )
    assert (absent["outcome"], absent["iterations"]) == ("not started", "")

    found = json.loads((tmp_path / "results.json").read_text())
    assert [point["point"] for point in found["points"] if point["best"]] == [
        swept[1].point,
        swept[2].point,
    ]
    best = found["points"][1]["validation_loss"]
    assert best["mean"] == pytest.approx(2.65)
    assert best["std"] == pytest.approx(0.1 / math.sqrt(2))
    assert found["points"][3]["diverged"] == 1
    assert (found["command"], found["compared_by"]) == ("megatron-muon sweep", "validation_loss")
    head, *table = [" ".join(line.split()) for line in results.table().splitlines()]
    assert head == "point runs validation_loss loss_last step_ms"
    assert table[2] == f"{swept[2].point} 2/2 2.1500 ± 0.0707 2.0500 ± 0.0707 100.0 ± 0.0 best"
    assert table[3] == f"{swept[3].point} 0/2 - - 100.0 diverged: 1 of 2"
    assert sorted(results.notes) == [
        "optimizer=adam,lr=2e-3: lr=2e-3 is the most that was tried; a larger one may do better",
        "optimizer=muon,lr=4e-3: lr=4e-3 is the least that was tried; a smaller one may do better",
    ]


def test_points_on_other_data_have_a_best_of_their_own(tmp_path):
    """Their losses are of something else: the lower one is not the better one."""
    tasks = tasks_of([["seq_length=64,128", "lr=1e-3,2e-3"]], 1, tmp_path)
    for task, loss in zip(tasks, (4.0, 3.0, 2.0, 1.0), strict=True):
        end(task, loss)
    results = Results(tasks)
    assert {point.name for point in results.best} == {
        "seq_length=64,lr=2e-3",
        "seq_length=128,lr=2e-3",
    }
    assert [note.partition(": ")[2][:12] for note in results.notes] == [
        "lr=2e-3 is t",
        "lr=2e-3 is t",
    ]
