"""`megatron-muon sweep` with real trainings of one rank: interrupted, gone on with, summed up,
reported on.
"""

import csv
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from megatron_muon.cli import main
from tests.functional.test_train import Running, command, write_config
from tests.support import cli

pytestmark = pytest.mark.timeout(700)

POINTS = ("lr=0.01", "lr=1e20")
"""One that trains and one whose loss is soon no number."""


def test_a_sweep_goes_on_where_it_was_interrupted(tmp_path, monkeypatch, capsys):
    """Ctrl-C leaves no process; the second start trains what is missing, marks what diverged, and
    makes the table.
    """
    model = cli.TINY[: cli.TINY.index("--eval-iters")]
    flags = (
        "--global-batch-size",
        "4",
        "--train-iters",
        "4",
        "--eval-interval",
        "2",
        "--eval-iters",
        "1",
    )
    write_config(tmp_path / "tiny.yaml", *model, *cli.make_corpus(tmp_path), *cli.MUON, *flags)
    line = (
        "sweep",
        "--config",
        "tiny.yaml",
        "--grid",
        "lr=0.01,1e20",
        "--seeds",
        "2",
        "--jobs",
        "2",
        "--out",
        "s",
    )
    with Running(tmp_path, *line) as running:
        running.wait_for(lambda: "[1/4]" in running.output and running.trains)
        assert running.end(signal.SIGINT) == 130, running.output[-4000:]
    assert "stopped; the same command resumes it" in running.output
    folders = {
        (point, seed): tmp_path / "s" / point / f"seed={seed}"
        for seed in (1, 2)
        for point in POINTS
    }
    before = {
        key: folder / "summary.json"
        for key, folder in folders.items()
        if (folder / "summary.json").exists()
    }
    read = {key: json.loads(file.read_text()) for key, file in before.items()}
    ends = {key: (found["outcome"], found["diverged"]) for key, found in read.items()}
    done = {key for key, end in ends.items() if end in (("finished", False), ("failed", True))}
    assert done
    assert len(done) < 4

    again = cli.run(command(*line), tmp_path, seconds=2 * cli.SECONDS).checked()
    assert f"{len(done)} done before, {4 - len(done)} to do" in again.output
    for key in done:  # they were not touched
        assert json.loads(before[key].read_text()) == read[key]
    summaries = {
        key: json.loads((folder / "summary.json").read_text()) for key, folder in folders.items()
    }
    assert all(summaries[POINTS[0], seed]["outcome"] == "finished" for seed in (1, 2))
    assert all(summaries[POINTS[1], seed]["diverged"] for seed in (1, 2))
    # Megatron ends, with a status of its own
    assert not any(summaries[POINTS[1], seed]["error"] for seed in (1, 2))
    assert summaries[POINTS[0], 1]["loss_last"] != summaries[POINTS[0], 2]["loss_last"]

    with (tmp_path / "s" / "results.csv").open() as file:
        rows = {(row["point"], int(row["seed"])): row for row in csv.DictReader(file)}
    assert {key: row["diverged"] for key, row in rows.items()} == {
        key: str(found["diverged"]) for key, found in summaries.items()
    }
    one, summary = rows[POINTS[0], 1], summaries[POINTS[0], 1]
    assert float(one["loss_last"]) == pytest.approx(summary["loss_last"])
    assert float(one["validation_loss"]) == pytest.approx(summary["validation_loss"]["validation"])
    assert (int(one["tokens"]), int(one["iterations"])) == (4 * 4 * 32, 4)
    points = json.loads((tmp_path / "s" / "results.json").read_text())["points"]
    assert [(point["finished"], point["diverged"], point["best"]) for point in points] == [
        (2, 0, True),
        (0, 2, False),
    ]

    monkeypatch.chdir(tmp_path)
    cli.start_warm(monkeypatch)
    assert main([*line, "--set", "weight_decay=0.3"]) == 2
    assert "runs have results of other settings, such as s/lr=" in capsys.readouterr().err
    assert main(["report", "s", "--out", "page"]) == 0
    assert "diverged: 2 of 2" in (tmp_path / "page" / "report.md").read_text()


@pytest.mark.wide
def test_examples_sweep_as_they_say(tmp_path):
    """Rates across widths: two of one scale mode, two steps each, and the page; --dry-run lists all
    runs.
    """
    data_path = cli.make_corpus(tmp_path)[1]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    places = {"CORPUS": data_path, "OUT": str(tmp_path / "out"), "PATH": path}
    script = ("bash", str(cli.ROOT / "examples" / "lr_transfer.sh"))
    few = {**places, "MODES": "unit_rms_norm", "WIDTHS": "64 128", "RATES": "0.05"}
    short = (
        "--train-iters",
        "2",
        "--eval-iters",
        "1",
        "--eval-interval",
        "1",
        "--log-interval",
        "1",
    )
    run = cli.run([*script, *short], tmp_path, seconds=3 * cli.SECONDS, env=few).checked()
    assert "2 runs in " in run.output
    page = (tmp_path / "out" / "report" / "rate-transfer.md").read_text()
    assert "| unit_rms_norm | 64 |" in page or "| all | 64 |" in page, page
    assert (tmp_path / "out" / "report" / "rate-transfer.png").exists()
    anew = {**places, "OUT": str(tmp_path / "anew"), "MODES": "spectral"}
    recipes = ("bash", str(cli.ROOT / "examples" / "recipes.sh"))
    for example, runs in ((script, 15), (recipes, 6 * 3)):
        dry = cli.run(
            [*example, "--dry-run"], tmp_path, seconds=3 * cli.SECONDS, env=anew
        ).checked()
        assert dry.output.count(": to do, ") == runs, dry.output[-2000:]
