"""Output of `megatron-muon train` for made events and lines, on a terminal and in a pipe."""

from __future__ import annotations

import contextlib
import io
import math
import os
from unittest import mock

import pytest

from megatron_muon.megatron.places import RunFolder
from megatron_muon.tools import screen
from megatron_muon.tools.screen import Screen, clock, step_line, validation_line
from megatron_muon.tools.train.resolve import FILLED_IN, Flag, Request, Resolved
from megatron_muon.tools.train.train import Experiment, Outcome
from megatron_muon.tools.train.watcher import Watcher

STEP = {
    "event": "step",
    "step": 130,
    "steps": 200,
    "loss": 2.01234,
    "grad_norm": 0.8123,
    "lr": 8e-3,
    "muon_lr": None,
    "skipped": None,
    "tokens_per_s": 2351.4,
    "mfu": 0.41,
    "optimizer_share": 0.214,
    "peak_bytes": 970e6,
    "seconds_left": 62.4,
}
LARGE = {"step": 123_456, "steps": 500_000, "grad_norm": 123456.7, "muon_lr": 0.02, "skipped": 17}
LARGE |= {"tokens_per_s": 12_345_678.0, "seconds_left": 12 * 86400 + 3.0}
VALIDATION = {"event": "validation", "step": 130, "loss": 1.919, "what": "validation loss"}
EVENTS = (
    {"event": "stage", "stage": "building the model"},
    {"event": "stage", "stage": "taking the first step"},
    {"event": "step", "step": 1, "steps": 200, "loss": 5.5948, "lr": 8e-4, "peak_bytes": 9e8},
    STEP,
    {"event": "stage", "stage": "evaluating"},
    VALIDATION,
    {"event": "stage", "stage": None},
    {"event": "saved", "step": 2000, "folder": "runs/x/checkpoints", "seconds": 75.0},
)
WARNING = "megatron-muon: warning: updates that were not finite: 3"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            step_line(STEP),
            "step 130/200  loss 2.0123  grad norm 0.81  lr 8.0e-03  2,351 tokens/s  MFU 41%"
            "  optimizer 21%  1.0 GB  1:02 left",
        ),
        (
            step_line(LARGE),
            "step 123456/500000  grad norm 1.23e+05  Muon lr 2.0e-02  17 skipped"
            "  12.35 M tokens/s  12 d 00:00 h left",
        ),
        (
            step_line({"step": 1, "steps": 200, "loss": math.nan}),
            "step   1/200  loss not a number",
        ),
        (step_line({"step": 7, "steps": None, "lr": 0.02}), "step 7  lr 2.0e-02"),
        (
            validation_line(VALIDATION | {"what": "final validation loss code"}),
            "final validation loss code 1.9190  perplexity 6.81  at step 130",
        ),
        (
            validation_line(VALIDATION | {"loss": math.nan}),
            "validation loss not a number  at step 130",
        ),
        (
            " ".join(map(clock, (0.42, 9.96, 62.4, 3599.6, 7265, 2e5))),
            "0:00 0:10 1:02 1:00:00 2:01:05 2 d 07:33 h",
        ),
    ],
)
def test_lines_show_what_is_known_and_nothing_else(line, expected):
    assert line == expected


def experiment_in(root):
    settings = {
        "optimizer": "muon",
        "num_layers": 32,
        "hidden_size": 4096,
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": "optim",
        "train_iters": 1000,
        "global_batch_size": 512,
        "seq_length": 8192,
        "tensor_model_parallel_size": 2,
    }
    resolved = Resolved(
        flags=(Flag("--lr", ("0.008",), "my.yaml"),),
        filled_in=(Flag("--no-rope-fusion", (), FILLED_IN),),
        env={"PYTHON_EXEC": "/tmp/\x1bpython", "A": "2"},
        notes=("environment wins over my.yaml: A=1, not 2",),
        device="cpu",
        ranks=8,
        folder=RunFolder(root, root / "tensorboard", None),
        settings=settings,
        files=(),
    )
    return Experiment(Request("configs/my.yaml"), resolved, None)


SHOWN = """\
checking the settings of configs/my.yaml ...
megatron-muon: environment wins over my.yaml: A=1, not 2
my: muon
  model       num_layers 32, hidden_size 4096
  ranks       8 on cpu, Megatron-FSDP optim, tensor parallel 2
  steps       1000, 512 sequences of 8192
  environment PYTHON_EXEC=/tmp/\\x1bpython A=2
  run folder  x
  filled in   1 settings for this machine; see --dry-run
building the model ...
taking the first step ...
step   1/200  loss 5.5948  lr 8.0e-04  0.9 GB
step 130/200  loss 2.0123  grad norm 0.81  lr 8.0e-03  2,351 tokens/s  MFU 41%  optimizer 21%  1.0 GB  1:02 left
validation loss 1.9190  perplexity 6.81  at step 130
checkpoint of step 2,000  took 1:15  runs/x/checkpoints
megatron-muon: warning: updates that were not finite: 3
pretrain_gpt.py: error: --lr 0 is wrong
"""


def test_in_a_pipe_a_run_is_plain_lines(tmp_path, capsys):
    """No control codes, nothing of Megatron's, and a warning of several ranks once."""
    watcher = Watcher()
    experiment = experiment_in(tmp_path / "x")
    with watcher.screen:
        watcher.enter("checking the settings of configs/my.yaml")
        watcher.head(experiment, all_settings=False)
        for event in EVENTS:
            watcher.event(event)
        error = "pretrain_gpt.py: error: --lr 0 is wrong"
        for line in ("Evaluating iter 1/16", WARNING, WARNING, error):
            watcher.event({"event": "line", "line": line})
    shown = capsys.readouterr().out.replace(f"{tmp_path}/", "")
    assert shown == SHOWN
    watcher.head(experiment, all_settings=True)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["--lr", "0.008", "my.yaml"] in shown
    assert ["--no-rope-fusion", "true", "filled", "in"] in shown
    assert any(line[:2] == ["command", "torchrun"] for line in shown)


def test_the_live_line_says_what_a_run_does(monkeypatch):
    monkeypatch.setattr(screen, "is_terminal", lambda: True)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    watcher = Watcher()
    seen = []
    with watcher.screen as shown:
        for event in (*EVENTS, {"event": "signal", "signal": 2}, EVENTS[0]):
            watcher.event(event)
            task = shown._progress.tasks[0]
            seen.append((task.description, task.completed, task.total))
    assert seen[0] == ("building the model", 0, None)
    assert seen[2] == ("step   1/200  loss 5.5948", 1, 200)
    step = ("step 130/200  loss 2.0123  2,351 tokens/s  1:02 left", 130, 200)
    assert seen[3] == seen[6] == step
    assert seen[4] == ("evaluating", 130, 200)
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


@pytest.mark.parametrize(
    ("terminal", "term", "no_color", "live"),
    [
        (True, "xterm-256color", "", True),
        (True, "dumb", "", False),
        (True, "xterm", "1", False),
        (False, "xterm-256color", "", False),
    ],
)
def test_where_a_live_line_is_shown(monkeypatch, terminal, term, no_color, live):
    monkeypatch.setattr("sys.stdout", stream := io.StringIO())
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", no_color)
    assert screen.is_terminal() is live


def test_a_terminal_that_is_closed_ends_no_run(monkeypatch):
    """The line on SIGHUP raised, and the ranks were killed before they had saved."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
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
    "loss_last": 2.5,
    "validation_loss": None,
    "diverged": False,
    "error": "torch.OutOfMemoryError: CUDA out of memory",
    "go_on": "megatron-muon train --resume --out x",
    "checkpoint": None,
}


def test_a_failure_is_shown_with_its_traceback_and_what_to_type(tmp_path, capsys):
    outcome = Outcome(1, SUMMARY, trace=("Traceback", '  File "x.py"'))
    Watcher().end(outcome, experiment_in(tmp_path / "x"))
    assert capsys.readouterr().out.replace(str(tmp_path), "T").splitlines() == [
        "",
        "failed with status 1 after 20 iterations, training loss 2.5000",
        "why: torch.OutOfMemoryError: CUDA out of memory",
        "  Traceback",
        '    File "x.py"',
        "nothing was saved; to start again: megatron-muon train --resume --out x",
        "see T/x/summary.json, T/x/train.log",
    ]
