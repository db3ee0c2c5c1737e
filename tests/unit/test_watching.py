"""What `megatron-muon train` shows, from events and lines that are made here: on a terminal, in a
pipe, quiet.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
from unittest import mock

import pytest

from megatron_muon.megatron.places import RunFolder
from megatron_muon.tools import screen
from megatron_muon.tools.screen import STOPPING, Screen, Status
from megatron_muon.tools.train.command import Watcher
from megatron_muon.tools.train.resolve import FILLED_IN, Flag, Request, Resolved
from megatron_muon.tools.train.train import Experiment, Outcome

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
LARGE = STEP | {
    "step": 123_456,
    "steps": 500_000,
    "loss": 12.34567,
    "grad_norm": 123456.7,
    "muon_lr": 0.02,
    "skipped": 17,
    "tokens_per_s": 12_345_678.0,
    "peak_bytes": 75.3e9,
    "seconds_left": 12 * 86400 + 3.0,
}
VALIDATION = {"event": "validation", "step": 130, "loss": 1.919, "what": "validation loss"}
EVENTS = (
    {"event": "stage", "stage": "building the model"},
    {"event": "stage", "stage": "taking the first step"},
    {
        "event": "step",
        "step": 1,
        "steps": 200,
        "loss": 5.5948,
        "grad_norm": 17.9,
        "lr": 8e-4,
        "peak_bytes": 9e8,
    },
    STEP,
    {"event": "stage", "stage": "evaluating"},
    VALIDATION,
    {"event": "stage", "stage": None},
    {"event": "saved", "step": 2000, "folder": "runs/x/checkpoints", "seconds": 75.0},
)
WARNING = (
    "megatron-muon: warning: updates that were not finite: 3; these matrices kept their weights: "
    + "a.long.name " * 9
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            screen.step_line(STEP | {"mfu": None}),
            (
                "step 130/200  loss 2.0123  grad norm 0.81  lr 8.0e-03  2,351 tokens/s  optimizer"
                " 21%  1:02 left"
            ),
        ),
        (
            screen.step_line(STEP, 80),
            "step 130/200  loss 2.0123  2,351 tokens/s  MFU 41%  optimizer 21%  1:02 left",
        ),
        (
            screen.step_line(LARGE),
            (
                "step 123456/500000  loss 12.3457  17 skipped  12.35 M tokens/s  MFU 41%  12 d"
                " 00:00 h left"
            ),
        ),
        (
            screen.step_line({"step": 1, "steps": 200, "loss": math.nan, "lr": 8e-4}),
            "step   1/200  loss not a number  lr 8.0e-04",
        ),
        (
            screen.step_line({"step": 7, "steps": None, "muon_lr": 0.02}),
            "step 7  Muon's lr 2.0e-02",
        ),
        (
            screen.validation_line(VALIDATION | {"what": "final validation loss code"}),
            "final validation loss code 1.9190  perplexity 6.81  at step 130",
        ),
        (
            screen.validation_line(VALIDATION | {"loss": math.nan}),
            "validation loss not a number  at step 130",
        ),
        (
            " ".join(map(screen.clock, (0.42, 9.96, 62.4, 3599.6, 7265, 2e5))),
            "0:00 0:10 1:02 1:00:00 2:01:05 2 d 07:33 h",
        ),
    ],
)
def test_lines_say_what_is_known_and_invent_nothing(line, expected):
    assert line == expected


@pytest.mark.parametrize("width", [40, 60, 79, 99, 100, 120])
def test_no_line_is_wider_than_it_may_be(width):
    for event in (STEP, LARGE):
        assert len(screen.step_line(event, width)) <= width
        assert f"{event['step']}/{event['steps']}" in screen.step_line(event, width)
    lines = screen.wrapped(
        "megatron-muon: " + "--some-flag-of-megatron /a/long/path " * 8, width=width
    ).splitlines()
    assert max(map(len, lines)) <= width
    assert all(line.startswith("  ") for line in lines[1:])
    assert sum(line.count("--some-flag-of-megatron") for line in lines) == 8


def experiment_in(root):
    settings = {
        "optimizer": "muon",
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_experts": 8,
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "train_iters": 100_000,
        "global_batch_size": 512,
        "seq_length": 8192,
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
    }
    resolved = Resolved(
        flags=(Flag("--lr", ("0.008",), "my.yaml"),),
        filled_in=(
            Flag("--num-workers", ("0",), FILLED_IN),
            Flag("--no-rope-fusion", (), FILLED_IN),
        ),
        env={"PYTHON_EXEC": "/tmp/\x1bpython", "A": "2"},
        notes=("environment wins over my.yaml: A=1, not 2",),
        device="cpu",
        ranks=8,
        gpus=0,
        folder=RunFolder(root, root / "tensorboard", None),
        settings=settings,
        files=(),
    )
    return Experiment(Request("configs/my.yaml"), resolved, None)


def watched(capsys, tmp_path, *, settings=False, **how):
    """The lines that a whole run shows."""
    watcher, experiment = Watcher(**how), experiment_in(tmp_path / "x")
    with watcher.screen:
        watcher.enter("checking the settings of configs/my.yaml")
        watcher.head(experiment, settings=settings)
        for event in EVENTS:
            watcher.event(event)
        for line in (
            "Evaluating iter 1/16",
            WARNING,
            WARNING,
            "pretrain_gpt.py: error: --lr 0 is wrong",
        ):
            watcher.event({"event": "line", "line": line})
    return capsys.readouterr().out.splitlines()


SHOWN = """\
checking the settings of configs/my.yaml ...
megatron-muon: environment wins over my.yaml: A=1, not 2
my: muon on a GPT of 32 layers, 4096 wide, 32 heads, 8 experts
  ranks       8 on CPUs, Megatron-FSDP optim_grads_params, tensor parallel 2, expert parallel 4
  steps       100,000 of 4,194,304 tokens, 512 sequences of 8192
  environment PYTHON_EXEC=/tmp/\\x1bpython A=2
  filled in   2 (what this machine needs); --dry-run lists all settings
building the model ...
taking the first step ...
step   1/200  loss 5.5948  grad norm 17.90  lr 8.0e-04  0.9 GB
step 130/200  loss 2.0123  grad norm 0.81  2,351 tokens/s  MFU 41%  optimizer 21%  1:02 left
validation loss 1.9190  perplexity 6.81  at step 130
checkpoint of step 2,000  took 1:15  runs/x/checkpoints
megatron-muon: warning: updates that were not finite: 3; these matrices kept their weights:
  a.long.name a.long.name a.long.name a.long.name a.long.name a.long.name a.long.name a.long.name
  a.long.name
pretrain_gpt.py: error: --lr 0 is wrong
"""


def test_in_a_pipe_a_run_is_plain_lines(tmp_path, capsys):
    """No control codes, no line wider than 100 columns, nothing of Megatron's, a warning of several
    ranks once.
    """
    lines = watched(capsys, tmp_path)
    assert max(map(len, lines)) <= 100
    assert [line for line in lines if str(tmp_path) not in line] == SHOWN.splitlines()


def test_quiet_and_verbose(tmp_path, capsys):
    """Quiet is heading, warnings and errors; verbose all output, which says what our lines would,
    and all settings.
    """
    quiet = [line for line in watched(capsys, tmp_path, quiet=True) if str(tmp_path) not in line]
    of_events = re.compile(r"step +\d|checking|validation loss|building|taking|checkpoint of")
    assert quiet == [line for line in SHOWN.splitlines() if not of_events.match(line)]
    text = "\n".join(watched(capsys, tmp_path, verbose=True, settings=True))
    assert "Evaluating iter 1/16" in text
    assert re.search(r"^  --lr +0.008 +my.yaml$", text, re.MULTILINE)
    assert "command     torchrun" in text
    assert text.count(WARNING) == 2
    assert "step 130/200" not in text


@pytest.mark.parametrize(("seconds", "shown"), [(161.4, True), (59.0, False)])
def test_after_ten_steps_a_run_says_how_long_it_takes_and_how_to_shorten_it(capsys, seconds, shown):
    Watcher().event({"event": "estimate", "step": 10, "seconds_left": seconds})
    advice = (
        "about 2:41 left; for less, Ctrl-C (it saves), then --train-iters N or"
        " --exit-duration-in-mins N\n"
    )
    assert capsys.readouterr().out == (advice if shown else "")


def test_the_live_line_says_what_a_run_does(monkeypatch):
    monkeypatch.setattr(screen, "is_terminal", lambda: True)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    seen = []
    with Screen() as shown:
        status = Status(shown, "starting 2 ranks", name="a run")
        for event in EVENTS:
            status.take(event)
            task = shown.progress.tasks[0]
            seen.append((task.description, task.completed, task.total))
        status.enter(STOPPING)
        status.take(EVENTS[0])
        assert task.description == "a run  stopping"
        status.end()
        assert shown.progress.tasks == []
    assert seen[0] == ("a run  building the model", 0, None)
    assert seen[2] == ("a run  step   1/200  loss 5.5948  grad norm 17.90", 1, 200)
    assert (
        seen[3]
        == seen[6]
        == ("a run  step 130/200  loss 2.0123  2,351 tokens/s  1:02 left", 130, 200)
    )
    assert seen[4] == ("a run  evaluating", 130, 200)


def test_a_signal_is_answered_and_warnings_come_once_an_interval(capsys):
    """A matrix that was never finite was named once, as if it had recovered."""
    watcher = Watcher()
    for _ in range(2):
        for _ in range(2):  # of two ranks
            watcher.event({"event": "line", "line": "megatron-muon: warning: it"})
        watcher.event(STEP)
    watcher.event({"event": "signal", "signal": 2})
    watcher.event(STEP)
    assert watcher.status.stage == STOPPING
    shown = capsys.readouterr().out
    assert shown.count("warning: it") == 2
    assert shown.count("SIGINT: asking the ranks to end; a second signal kills them\n") == 1


@pytest.mark.parametrize(
    ("terminal", "term", "no_color", "live"),
    [
        (True, "xterm-256color", "", True),
        (True, "dumb", "", False),
        (True, "xterm", "1", False),
        (True, "unknown", "", False),
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
    (ours, theirs), ended = os.openpty(), False
    # closing it writes what is left
    with contextlib.suppress(OSError), open(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        with Screen() as shown:
            assert shown.live
            status = Status(shown, "reading the data")
            os.close(ours)
            shown.print("SIGHUP: asking the ranks to end")
            Status(shown, "another")
            status.take(STEP)
            status.end()
        # the control: nothing can be written any more
        with pytest.raises(OSError, match="Input/output error"):
            print("x", file=terminal, flush=True)
        ended = True
    assert ended


def test_neither_a_strange_character_nor_a_reader_that_left_ends_a_run(monkeypatch):
    """A rank's line in another alphabet, or `| head`, ended what reads the ranks' output."""
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
    Watcher().end(
        Outcome(1, SUMMARY, trace=("Traceback", '  File "x.py"')), experiment_in(tmp_path / "x")
    )
    assert capsys.readouterr().out.replace(str(tmp_path), "T").splitlines() == [
        "",
        "failed with status 1 after 20 iterations, training loss 2.5000",
        "why: torch.OutOfMemoryError: CUDA out of memory",
        "  Traceback",
        '    File "x.py"',
        "nothing was saved; to start again: megatron-muon train --resume --out x",
        "see T/x/summary.json, T/x/train.log",
    ]
