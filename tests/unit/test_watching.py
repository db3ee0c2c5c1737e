"""Output of `megatron-muon train` for made events and lines, on a terminal and in a pipe."""

from __future__ import annotations

import contextlib
import io
import math
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from megatron_muon.tools.screen import Screen, step_line
from megatron_muon.tools.train.resolve import FILLED_IN, Experiment, Setting
from megatron_muon.tools.train.watcher import Watcher

STEP = {
    "event": "step",
    "step": 130,
    "steps": 200,
    "loss": 2.01234,
    "grad_norm": 0.8123,
    "lr": 8e-3,
    "muon_lr": None,
    "tokens_per_s": 2351.4,
    "optimizer_share": 0.214,
    "seconds_left": 62.4,
}
VALIDATION = {"event": "validation", "step": 130, "loss": 1.919, "at": "iteration 130"}
EVENTS = (
    {"event": "stage", "stage": "building the model"},
    {"event": "step", "step": 1, "steps": 200, "loss": 5.5948, "lr": 8e-4},
    STEP,
    {"event": "stage", "stage": "evaluating"},
    VALIDATION,
    {"event": "saved", "step": 2000, "folder": "runs/x/checkpoints"},
)
WARNING = "megatron-muon: warning: updates that were not finite: 3"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            step_line({"step": 7, "steps": None, "lr": 0.02, "seconds_left": 12 * 86400 + 3.0}),
            "step 7  lr 2.0e-02  12 days, 0:00:03 left",
        ),
        (step_line({"step": 1, "steps": 200, "loss": math.nan}), "step   1/200  loss nan"),
    ],
)
def test_lines_show_what_is_known_and_nothing_else(line, expected):
    assert line == expected


EXPERIMENT = Experiment(
    root=Path("x"),
    resumes=False,
    settings=(
        Setting("--lr", ("0.008",), "my.yaml"),
        Setting("--no-rope-fusion", (), FILLED_IN),
    ),
    env={},
    notes=("environment wins over my.yaml: A=1, not 2",),
    device="cpu",
    ranks=8,
    args=SimpleNamespace(
        optimizer="muon",
        num_layers=32,
        hidden_size=4096,
        train_iters=1000,
        global_batch_size=512,
        seq_length=8192,
    ),
)


SHOWN = """\
checking the settings of configs/my.yaml ...
megatron-muon: environment wins over my.yaml: A=1, not 2
model       32 layers of 4096
ranks       8 on cpu
steps       1000, 512 sequences of 8192, muon
run folder  x
building the model ...
step   1/200  loss 5.5948  lr 8.0e-04
step 130/200  loss 2.0123  grad norm 0.8123  lr 8.0e-03  2,351 tokens/s  optimizer 21%  0:01:02 left
validation loss 1.9190  at iteration 130
checkpoint of step 2000  runs/x/checkpoints
megatron-muon: warning: updates that were not finite: 3
pretrain_gpt.py: error: --lr 0 is wrong
"""


def test_in_a_pipe_a_run_is_plain_lines(capsys):
    """No control codes, nothing of Megatron's, and a warning of several ranks once."""
    watcher = Watcher()
    with watcher.screen:
        watcher.enter("checking the settings of configs/my.yaml")
        watcher.head(EXPERIMENT, "torchrun", all_settings=False)
        for event in EVENTS:
            watcher.event(event)
        error = "pretrain_gpt.py: error: --lr 0 is wrong"
        for line in ("Evaluating iter 1/16", WARNING, WARNING, error):
            watcher.event({"event": "line", "line": line})
    assert capsys.readouterr().out == SHOWN
    watcher.head(EXPERIMENT, "torchrun x", all_settings=True)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["--lr", "0.008", "my.yaml"] in shown
    assert ["--no-rope-fusion", "true", "filled", "in"] in shown
    assert ["command", "torchrun", "x"] in shown


def test_the_live_line_says_what_a_run_does(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    watcher = Watcher()
    seen = []
    with watcher.screen as shown:
        for event in (*EVENTS, {"event": "signal", "signal": 2}, EVENTS[0]):
            watcher.event(event)
            task = shown._progress.tasks[0]
            seen.append((task.description, task.completed, task.total))
    assert seen[0] == ("building the model", 0, None)
    assert seen[1] == ("step   1/200  loss 5.5948", 1, 200)
    assert seen[2] == ("step 130/200  loss 2.0123  2,351 tokens/s  0:01:02 left", 130, 200)
    assert seen[3] == ("evaluating", 130, 200)
    assert seen[-1] == seen[-2] == ("stopping", 130, 200)


def test_a_signal_is_answered_and_warnings_come_once_an_interval(capsys):
    """A matrix that was never finite was named once, as if it had recovered."""
    watcher = Watcher()
    for _ in range(2):
        for _ in range(2):  # ranks
            watcher.event({"event": "line", "line": WARNING})
        watcher.event(STEP)
    watcher.event({"event": "signal", "signal": 2})
    shown = capsys.readouterr().out
    assert shown.count(WARNING) == 2
    assert shown.count("SIGINT: asking the ranks to end; a second signal kills them\n") == 1


def test_a_terminal_that_is_closed_ends_no_run(monkeypatch):
    """The line on SIGHUP raised, and the ranks were killed before they had saved."""
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = os.openpty()
    has_ended = False
    # closing it writes what is left
    with contextlib.suppress(OSError), open(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        with Screen() as shown:
            assert shown.live
            os.close(ours)
            shown.print("SIGHUP: asking the ranks to end")
            shown.update("step 1", 1, 2)
        # the control: nothing can be written any more
        with pytest.raises(OSError, match="Input/output error"):
            print("x", file=terminal, flush=True)
        has_ended = True
    assert has_ended


def test_neither_a_strange_character_nor_a_reader_that_left_ends_a_run(monkeypatch):
    """A rank's line in another alphabet, or `| head`, ended the launcher."""
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii"))
    with Screen() as of_ascii:
        of_ascii.print("a \N{REPLACEMENT CHARACTER}")
    assert shown.getvalue() == b"a ?\n"
    monkeypatch.setattr("sys.stdout", mock.Mock(**{"flush.side_effect": BrokenPipeError}))
    Screen().print("to nobody")


SUMMARY = {
    "outcome": "failed",
    "status": 1,
    "iterations": 20,
    "train_iters": 40,
    "loss": 2.5,
    "validation_loss": None,
    "diverged": False,
    "error": "torch.OutOfMemoryError: CUDA out of memory",
    "checkpoint": "x/checkpoints",
}


def test_a_failure_is_shown_with_its_reason_and_what_to_type(capsys):
    Watcher().end(SUMMARY, Path("a run"))
    assert capsys.readouterr().out.splitlines() == [
        "",
        "failed with status 1 after 20 iterations, training loss 2.5000",
        "why: torch.OutOfMemoryError: CUDA out of memory",
        "to go on: megatron-muon train --resume --out 'a run'",
        "see a run/summary.json, a run/train.log",
    ]


def test_nobody_is_sent_to_the_checkpoint_of_a_faulty_step(capsys):
    watcher = Watcher()
    watcher.event({"event": "audit", "step": 20, "fault": "audit of step 20: update differs"})
    watcher.end(SUMMARY, Path("a run"))
    assert "to go on" not in capsys.readouterr().out
