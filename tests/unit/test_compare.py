"""`megatron-muon compare`: its table, its notes and its picture, of runs as a training leaves
them.
"""

from __future__ import annotations

import math
import shutil
import statistics
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from megatron_muon import cli
from megatron_muon.errors import ExitStatus
from tests.support.made_runs import BATCH, SEQ_LENGTH, STEP_S, falling, make_run

STEPS = (10, 20, 30, 40)
"""Where made runs are validated."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds of AdamW and of Muon, which is faster, and runs that compare with none of
    them.
    """
    root = tmp_path_factory.mktemp("runs")
    for seed in (1, 2, 3):
        slow = falling(0.03 + seed / 1000)
        fast = falling(0.06 + seed / 1000)
        make_run(root / f"adam-{seed}", slow, optimizer="adam", lr="0.002", seed=seed)
        make_run(
            root / f"muon-{seed}",
            fast,
            seed=seed,
            args={"save": f"ck-{seed}"},
        )
    make_run(root / "whole", falling(0.06))
    make_run(root / "late", falling(0.01))
    make_run(root / "diverged", lambda step: math.nan)
    make_run(root / "early", falling(0.5))
    make_run(root / "other-data", falling(0.06), args={"data_path": "['data/other']"})
    make_run(root / "larger-batch", falling(0.06), args={"global_batch_size": "16"})
    make_run(root / "stopped", falling(0.06), args={"train_iters": "100"})
    make_run(root / "no-validation", falling(0.06), validation=False)
    make_run(root / "$odd$ name", falling(0.06), args={"muon_scale_mode": r"$\rac$"})
    return root


@pytest.fixture
def compare(made: Path, monkeypatch, capsys):
    """Compares runs by name; the status, the table by setting, and all output."""
    monkeypatch.chdir(made)

    def compared(*line: str):
        status = cli.main(["compare", *line])
        shown = capsys.readouterr()
        table = {}
        for text in shown.out.splitlines():
            name, *figures = [cell.strip() for cell in text.split("  ") if cell.strip()]
            table[name] = figures
        return status, table, shown.out + shown.err

    return compared


def test_seeds_are_one_row_with_mean_and_spread_and_steps_to_the_baselines_loss(compare):
    names = ["adam-1", "adam-2", "adam-3", "muon-1", "muon-2", "muon-3"]
    status, table, output = compare(*names)
    assert status == ExitStatus.OK
    finals = [falling(0.03 + seed / 1000)(40) + 0.1 for seed in (1, 2, 3)]
    target = sum(finals) / 3
    assert f"baseline: optimizer=adam lr=0.002, final validation loss {target:.4f}\n" in output
    runs, loss, steps, hours, speed, share, state = table["optimizer=muon lr=0.01"]
    assert (runs, share, state) == ("3", "40.0% ± 0.0%", "6.50 ± 0.00")
    assert speed == "5,120 ± 0"
    expected = []
    for seed in (1, 2, 3):
        loss_at = falling(0.06 + seed / 1000)
        curve = {step: loss_at(step) + 0.1 for step in STEPS}
        after = next(step for step in curve if curve[step] <= target)
        part = (curve[after - 10] - target) / (curve[after - 10] - curve[after])
        expected.append(after - 10 + 10 * part)
    mean = sum(expected) / 3
    assert steps == f"{mean:.0f} ± {statistics.stdev(expected):.0f}"
    assert hours.startswith(f"{mean * STEP_S / 3600:.3f} ± ")
    finals = [falling(0.06 + seed / 1000)(40) + 0.1 for seed in (1, 2, 3)]
    spread = f"{sum(finals) / 3:.4f} ± {statistics.stdev(finals):.4f}"
    assert loss == spread, "not the test set's 9.0"


def test_the_baseline_is_the_first_run_or_the_one_named(compare):
    assert "baseline: optimizer=adam" in compare("adam-1", "muon-1")[2]
    output = compare("adam-1", "muon-1", "--baseline", "muon-1")[2]
    assert "baseline: optimizer=muon" in output
    assert "not reached" not in output


def test_a_single_run_is_shown_without_notes(compare):
    _, table, output = compare("adam-1")
    assert table["optimizer=adam"][0] == "1"
    assert "note" not in output


@pytest.mark.parametrize(
    ("other", "steps", "note"),
    [
        ("late", "-", ""),
        ("diverged", "-", ""),
        ("early", "10", "is at the baseline's loss by its first validation"),
        ("other-data", "-", "is not comparable with the baseline: it has another data_path"),
        ("larger-batch", "-", "it has another global_batch_size"),
        ("stopped", "", "ended after 40 of 100 steps"),
    ],
)
def test_what_would_mislead_is_left_out_or_noted(compare, other, steps, note):
    status, table, output = compare("adam-1", other)
    assert status == ExitStatus.OK
    (row,) = [figures for name, figures in table.items() if name.startswith("optimizer=muon")]
    assert row[2] == steps or steps == ""
    assert f"note: {other} " in output if note else "note:" not in output
    assert note in output


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (["adam-1", "nowhere"], "no run in nowhere; give a folder that `megatron-muon train`"),
        (["adam-1", "."], ". holds 15 runs; give each: ./*"),
        (["adam-1", "no-validation"], "no-validation has no validation loss; lower its --eval-in"),
        (["adam-1", "muon-1", "--png", "none/a.png"], "none/a.png"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(compare, line, error):
    status, _, output = compare(*line)
    assert status == ExitStatus.USAGE
    assert "megatron-muon: error: " in output.splitlines()[-1]
    assert error in output.splitlines()[-1]


def test_a_resumed_run_counts_repeated_steps_once(compare, tmp_path):
    """The second start repeats the steps of the first, in a file of its own."""
    resumed, again = tmp_path / "resumed", tmp_path / "again"
    make_run(resumed, falling(0.06), steps=30, args={"train_iters": "40"})
    make_run(again, falling(0.06))
    (events,) = again.rglob("events.*")
    shutil.move(events, resumed / "tensorboard" / "events.out.tfevents.9999999999.b")
    _, table, output = compare("adam-1", str(resumed))
    _, expected, _ = compare("adam-1", "whole")
    assert table["optimizer=muon lr=0.01"] == expected["optimizer=muon lr=0.01"]
    assert "ended after" not in output


def test_a_picture_has_a_line_for_each_run_and_a_name_for_each_setting(
    compare, monkeypatch, tmp_path
):
    """A dollar sign in a name is not mathematics."""
    figures = []
    save = Figure.savefig

    def keep(figure, file, **how):
        figures.append(figure)
        save(figure, file, **how)

    monkeypatch.setattr(Figure, "savefig", keep)
    file = tmp_path / "losses.png"
    status, _, output = compare("adam-1", "adam-2", "muon-1", "$odd$ name", "--png", str(file))
    assert (status, f"picture: {file}" in output) == (ExitStatus.OK, True)
    assert file.read_bytes().startswith(b"\x89PNG")
    tokens, hours = figures[0].axes
    curves = [line for line in tokens.get_lines() if len(line.get_xdata()) > 0]
    assert [len(line.get_xdata()) for line in curves] == [4] * 4
    expected = [step * BATCH * SEQ_LENGTH for step in STEPS]
    assert list(curves[0].get_xdata()) == expected
    assert all(math.isfinite(y) for line in curves for y in line.get_ydata())
    (legend,) = figures[0].legends
    names = [text.get_text() for text in legend.get_texts()]
    assert len(names) == 3
    assert r"muon_scale_mode=\$\rac\$" in names[2]
    assert hours.get_xlabel() == "hours of training"
