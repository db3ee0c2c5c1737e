"""`megatron-muon sweep` without a training: what a grid means, which runs are to be done, and what the table says."""

import csv
import json
import math
from pathlib import Path

import pytest

from megatron_muon import cli
from megatron_muon.errors import ExitStatus, UserError
from megatron_muon.tools.sweep import trials as sweep
from megatron_muon.tools.sweep.grid import Point, parse_grids, tasks_of
from megatron_muon.tools.sweep.results import Results, Row
from megatron_muon.tools.train import run_folder, screen
from megatron_muon.tools.train.resolve import FROM_FOLDER, FROM_SET, Flag, Request, Resolved, check_gpus
from megatron_muon.tools.train.run_folder import RunFolder
from tests.support.made_runs import falling, make_run

# The grid


def names(*grids):
    return [point.name for point in parse_grids([grid.split() for grid in grids])]


def test_a_grid_is_a_product():
    assert names("optimizer=adam,muon lr=1,2") == [
        "optimizer=adam,lr=1", "optimizer=adam,lr=2", "optimizer=muon,lr=1", "optimizer=muon,lr=2",
    ]  # fmt: skip
    assert names("lr=1e-3,2e-3,muon_lr=1e-2") == ["lr=1e-3,muon_lr=1e-2", "lr=2e-3,muon_lr=1e-2"]
    assert names("--muon-lr=1") == ["muon_lr=1"]


def test_several_grids_are_alternatives():
    assert names("optimizer=adam lr=1,2", "optimizer=muon lr=2 muon_momentum=0.9") == [
        "optimizer=adam,lr=1", "optimizer=adam,lr=2", "optimizer=muon,lr=2,muon_momentum=0.9",
    ]  # fmt: skip
    assert names("lr=1,2", "lr=2,3") == ["lr=1", "lr=2", "lr=3"]


def test_alternatives_that_were_meant_as_a_product_are_refused():
    with pytest.raises(UserError, match=r"no key in common.*write one: --grid lr=1,2 optimizer=adam,muon"):
        names("lr=1,2", "optimizer=adam,muon")


def test_what_is_taken_away_is_not_in_the_name_unless_it_is_the_point():
    assert names("optimizer=adam muon_momentum=null lr=1,2") == ["optimizer=adam,lr=1", "optimizer=adam,lr=2"]
    assert names("clip_grad=null,1.0") == ["clip_grad=null", "clip_grad=1.0"]
    assert parse_grids([["clip_grad=null"]])[0].name == "clip_grad=null"


def test_a_value_with_a_comma_is_quoted():
    (point,) = parse_grids([['"split=98,2,0"']])
    assert point.settings == (("split", "98,2,0"),)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("lr", r"--grid lr: no key; write KEY=VALUE,VALUE"),
        ("1,2", r"no key; write KEY=VALUE,VALUE"),
        ("lr=", r"a value is empty"),
        ("lr=1,,2", r"a value is empty"),
        ("lr=1 lr=2", r"lr is given twice; write lr=VALUE,VALUE once"),
        ("lr=1,1", r"stands there twice"),
        ("seed=1,2", r"--seeds N"),
    ],
)
def test_a_malformed_grid_is_refused(words, says):
    with pytest.raises(UserError, match=says):
        names(words)


def test_folders_can_be_read_and_are_never_shared():
    first, second = parse_grids([["data_path=data/a,data/b"]])
    assert (first.folder, second.folder) == ("data_path=data-a", "data_path=data-b")
    with pytest.raises(UserError, match="would share the folder data_path=a-b"):
        parse_grids([["data_path=a/b,a-b"]])
    long = Point((("data_path", "0.5 data/a " * 50),)).folder
    assert len(long) < 200
    assert "/" not in long
    assert " " not in long
    assert Point((("x", "a b"),)).folder != Point((("x", "a_20b"),)).folder


def test_all_points_get_the_first_seed_before_the_second():
    tasks = tasks_of(parse_grids([["lr=1,2"]]), 2, Path("out"))
    assert [(task.point.name, task.seed) for task in tasks] == [("lr=1", 1), ("lr=2", 1), ("lr=1", 2), ("lr=2", 2)]
    assert tasks[3].folder == Path("out/lr=2/seed=2")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--lr", "3"], "--lr is in --grid and beside it"),
        (["--muon-lr=3"], "--muon-lr is in --grid and beside it"),
        (["--seed", "5"], "seeds come from --seeds N"),
        (["--", "--save", "a"], "every run of a sweep has its own folder below --out"),
        (["--set", "save=x"], "every run of a sweep has its own folder below --out"),
        (["--set", "seed=4"], "seeds come from --seeds N"),
    ],
)
def test_flags_that_would_make_all_runs_the_same_are_refused(flags, says, capsys):
    """They win over the grid and over the seeds, so that every run would be the same."""
    argv = ["sweep", "--config", "configs/quickstart.yaml", "--grid", "lr=1,2", "muon_lr=1", "--dry-run", *flags]
    assert cli.main(argv) == ExitStatus.USAGE
    assert says in capsys.readouterr().err


# Which runs are to be done


def resolved_of(folder, *, lr="0.01", more=(), env=None, save=False, **changes):
    flags = (Flag("--optimizer", ("muon",), "tiny.yaml"), Flag("--lr", (lr,), FROM_SET), *more)
    flags = (*flags, Flag("--tensorboard-dir", (str(folder / "tensorboard"),), FROM_FOLDER))
    where = RunFolder(folder, folder / "tensorboard", folder / "checkpoints" if save else None)
    given = {"filled_in": (), "env": env or {}, "notes": (), "device": "cpu", "ranks": 1, "gpus": 0, "settings": {}}
    return Resolved(flags=flags, folder=where, files=(), **{**given, **changes})


def leave(folder, *, summary=None, lr="0.01", checkpoint=False):
    """What a run of these settings leaves in its folder."""
    flags = [(flag.name, flag.values) for flag in resolved_of(folder, lr=lr).flags]
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "tensorboard" / "events.out.tfevents.1").write_text("lm loss")
    (folder / "config.yaml").write_text(run_folder.config_text(flags, {}, heading=""))
    (folder / "run.json").write_text(json.dumps({"config_hash": run_folder.config_hash(flags, {})}))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps({"iterations": 5, "diverged": False, **summary}))
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
    assert plan_of(tmp_path / "run", save=save).state == state


def test_events_of_other_runs_are_not_deleted(tmp_path):
    make_run(tmp_path / "run", falling(0.1), summary=False)
    assert plan_of(tmp_path / "run").state == sweep.CHANGED


def plan_of(folder, **resolved):
    task = tasks_of([Point((("lr", "0.01"),))], 1, folder.parent)[0]
    return sweep.Plan(task, Request("tiny.yaml"), resolved_of(folder, **resolved))


def test_changed_settings_are_named(tmp_path):
    leave(tmp_path / "run", summary={"outcome": "finished"}, lr="0.02")
    plan = plan_of(tmp_path / "run", more=(Flag("--bf16", (), FROM_SET),))
    with pytest.raises(UserError, match=r"--lr was 0.02, now 0.01; --bf16 was not given, now true.*--out.*--overwrite"):
        sweep.refuse_changed([plan])


def test_a_line_of_flags_says_all_that_the_point_changes(tmp_path):
    (tmp_path / "tiny.yaml").write_text(
        "MODEL_ARGS:\n  --optimizer: muon\n  --lr: 1\n  --muon-momentum: 0.9\n  --save: ${X}\n"
    )
    task = tasks_of([Point((("lr", "0.01"),))], 1, tmp_path)[0]
    more = (Flag("--offset", ("-3",), FROM_SET), Flag("--data-path", ("a b", "c"), FROM_SET))
    settled = resolved_of(tmp_path / "run", more=more)
    plan = sweep.Plan(task, Request(str(tmp_path / "tiny.yaml")), settled)
    assert plan.flags() == [
        "--unset", "--muon-momentum", "--unset", "--save", "--lr", "0.01", "--offset=-3", "--data-path", "a b", "c",
        "--tensorboard-dir", str(tmp_path / "run" / "tensorboard"),
    ]  # fmt: skip


def test_jobs_share_the_gpus_and_no_more(tmp_path, monkeypatch):
    plan = plan_of(tmp_path / "run", device="cuda", ranks=4, gpus=8)
    check_gpus(4, 8, jobs=2)
    with pytest.raises(UserError, match=r"12 processes at once .* it has 8; give --nproc 2 or --jobs 2, or --device"):
        check_gpus(4, 8, jobs=3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert sweep._share(plan.resolved, 1, 2) == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")
    assert sweep._share(plan.resolved, 0, 2) == {"CUDA_VISIBLE_DEVICES": "7,6,5,4"}
    assert sweep._share(plan.resolved, 0, 1) == {}


def test_cores_are_shared_unless_omp_num_threads_is_set(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(sweep, "cores", lambda: 16)
    plan = plan_of(tmp_path / "run", ranks=2)
    assert sweep._share(plan.resolved, 0, 2) == {"OMP_NUM_THREADS": "4"}
    chosen = plan_of(tmp_path / "run", env={"OMP_NUM_THREADS": "1"})
    assert sweep._share(chosen.resolved, 0, 2) == {}


def test_runs_that_may_share_an_index_of_their_data():
    points = parse_grids([["optimizer=muon", "lr=1,2", "muon_lr=1", "seq_length=32,64"]])
    tasks = tasks_of(points, 2, Path("out"))
    assert [sweep._data_of(task) for task in tasks[:4]] == [
        (1, (("seq_length", "32"),)), (1, (("seq_length", "64"),)), (1, (("seq_length", "32"),)),
        (1, (("seq_length", "64"),)),
    ]  # fmt: skip
    assert sweep._data_of(tasks[4]) == (2, (("seq_length", "32"),))


def test_two_sweeps_do_not_share_a_folder(tmp_path):
    with (
        sweep.only_one(tmp_path),
        pytest.raises(UserError, match=r"a sweep is under way in .*--out"),
        sweep.only_one(tmp_path),
    ):
        pass
    with sweep.only_one(tmp_path):
        pass


# What is shown

STEP = {"event": "step", "step": 12, "steps": 20, "loss": 2.851484, "lr": 0.01}
ENDED = {
    "outcome": "finished", "status": 0, "iterations": 20, "loss_last": 2.5, "validation_loss": {"validation": 2.25},
    "diverged": False, "error": None, "seconds": 9.5,
}  # fmt: skip


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(tmp_path, monkeypatch, capsys, terminal):
    from megatron_muon.tools.train.train import Outcome

    monkeypatch.setattr(screen, "is_terminal", lambda: terminal)
    monkeypatch.setattr(sweep, "_LINE_EVERY_S", 0.0)
    plan = plan_of(tmp_path / "run")
    whole = sweep.Sweep([plan_of(tmp_path / "done"), plan], 1)
    with whole.screen:
        listener = sweep.Listener(plan, whole, lambda: None)
        listener.event({"event": "stage", "stage": "reading the data"})
        listener.event(STEP)
        live = [task.description for task in whole.screen.progress.tasks] if terminal else []
        listener.status.end()
        whole.ended(plan, Outcome(0, ENDED))
    shown = capsys.readouterr().out
    assert live == (["lr=0.01 seed=1  step 12/20  loss 2.8515  lr 1.0e-02"] if terminal else [])
    assert ("lr=0.01 seed=1: step 12/20  loss 2.8515  lr 1.0e-02\n" in shown) is not terminal
    losses = "training loss 2.5000, validation loss 2.2500"
    assert f"[1/2] lr=0.01 seed=1: finished with status 0 after 20 iterations, {losses}" in shown
    assert ("\x1b[" in shown) is terminal


# The table


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Two optimizers, two rates each, two seeds; one run diverged and one never started."""
    out = tmp_path_factory.mktemp("swept")
    points = parse_grids([["optimizer=adam", "lr=1e-3,2e-3"], ["optimizer=muon", "lr=4e-3,8e-3"]])
    tasks = tasks_of(points, 2, out)
    speeds = {"optimizer=adam,lr=1e-3": 0.02, "optimizer=adam,lr=2e-3": 0.03, "optimizer=muon,lr=4e-3": 0.05}
    for task in tasks:
        kind = {**dict(task.point.settings), "seed": task.seed}
        if task.point.name in speeds:
            make_run(task.folder, falling(speeds[task.point.name] + task.seed / 1000), **kind)
        elif task.seed == 1:
            make_run(task.folder, lambda step: 6.0 if step < 20 else math.nan, outcome="failed", **kind)
    return out, points, tasks


def test_rows_and_points(swept):
    out, points, tasks = swept
    Results(points, [Row.of(task) for task in tasks]).write(out, {"command": "megatron-muon sweep"})
    with (out / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    first = lines[0]
    assert (first["point"], first["optimizer"], first["lr"], first["seed"]) == (points[0].name, "adam", "1e-3", "1")
    loss = falling(0.021)(40)
    assert float(first["validation_loss"]) == pytest.approx(loss + 0.1, rel=1e-6)
    assert float(first["loss_last"]) == pytest.approx(sum(falling(0.021)(step) for step in range(31, 41)) / 10)
    assert (first["tokens"], first["iterations"], first["state_bytes"]) == (str(40 * 8 * 64), "40", "6500000")
    assert float(first["step_ms"]) == pytest.approx(100.0)
    assert int(first["peak_bytes"]) == pytest.approx(90.5 * 2**20)
    diverged, absent = (next(r for r in lines if r["lr"] == "8e-3" and r["seed"] == seed) for seed in "12")
    assert (diverged["outcome"], diverged["diverged"], diverged["validation_loss"]) == ("failed", "True", "")
    assert (absent["outcome"], absent["iterations"]) == ("not started", "")

    found = json.loads((out / "results.json").read_text())
    assert [point["point"] for point in found["points"] if point["best"]] == [points[1].name, points[2].name]
    best = found["points"][1]["validation_loss"]
    own = [float(r["validation_loss"]) for r in lines if r["point"] == points[1].name]
    assert best["mean"] == pytest.approx(sum(own) / 2)
    assert best["std"] == pytest.approx(abs(own[0] - own[1]) / math.sqrt(2))
    assert found["points"][3]["diverged"] == 1
    assert found["compared_by"] == "validation_loss"


def test_the_best_rate_at_an_edge_is_told(swept):
    _, points, tasks = swept
    assert Results(points, [Row.of(task) for task in tasks]).notes() == [
        "optimizer=adam,lr=2e-3: lr=2e-3 is the most that was tried; try larger ones too",
        "optimizer=muon,lr=4e-3: lr=4e-3 is the least that was tried; try smaller ones too",
    ]


def test_points_on_other_data_have_a_best_of_their_own(tmp_path):
    """Their losses are of something else: the lower one is not the better one."""
    points = parse_grids([["seq_length=64,128", "lr=1e-3,2e-3"]])
    for task in tasks_of(points, 1, tmp_path):
        settings = dict(task.point.settings)
        lower, loss = settings["seq_length"] == "128", falling({"1e-3": 0.1, "2e-3": 0.2}[settings["lr"]])
        make_run(task.folder, lambda step, loss=loss, lower=lower: loss(step) - lower)
    results = Results(points, [Row.of(task) for task in tasks_of(points, 1, tmp_path)])
    assert {point.name for point in results.best} == {"seq_length=64,lr=2e-3", "seq_length=128,lr=2e-3"}
    assert [note.partition(": ")[2][:12] for note in results.notes()] == ["lr=2e-3 is t", "lr=2e-3 is t"]


def test_a_sweep_says_how_long_it_takes_as_soon_as_its_first_run_knows(tmp_path, capsys):
    """It was silent on this until it had ended."""
    plan = plan_of(tmp_path / "run")
    listener = sweep.Listener(plan, sweep.Sweep([plan] * 7, 2), lambda: None)
    step = {"event": "step", "step": 1, "steps": 10, "loss": 5.0}
    listener.event(step)
    assert "about" not in capsys.readouterr().out
    for left in (150.0, 75.0):
        listener.event({**step, "seconds_left": left})
    assert capsys.readouterr().out == "about 10:00 for all, by the speed of the first run\n"
