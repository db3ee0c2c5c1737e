"""What a training tells, in lines: they fit their width, say what is known, and invent nothing."""

import math
import shlex

import pytest

from megatron_muon.tools.train import wording
from megatron_muon.tools.train.wording import WIDTH

STEP = {
    "event": "step", "step": 130, "steps": 200, "loss": 2.01234, "grad_norm": 0.8123, "lr": 8e-3, "muon_lr": None,
    "skipped": 0, "step_s": 0.871, "tokens_per_s": 2351.4, "mfu": None, "optimizer_share": 0.214,
    "peak_bytes": 970e6, "seconds_left": 62.4,
}  # fmt: skip
LARGE = STEP | {
    "step": 123_456, "steps": 500_000, "loss": 12.34567, "grad_norm": 123456.7, "muon_lr": 0.02, "skipped": 17,
    "tokens_per_s": 12_345_678.0, "mfu": 0.4123, "peak_bytes": 75.3e9, "seconds_left": 12 * 86400 + 3.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("told", "width", "line"),
    [
        (
            STEP, 100,
            "step 130/200  loss 2.0123  grad norm 0.81  lr 8.0e-03  2,351 tokens/s  optimizer 21%  1:02 left",
        ),
        (STEP, 80, "step 130/200  loss 2.0123  2,351 tokens/s  optimizer 21%  1:02 left"),
        (
            LARGE, 100,
            "step 123456/500000  loss 12.3457  17 skipped  12.35 M tokens/s  MFU 41%  12 d 00:00 h left",
        ),
        (
            {"step": 1, "steps": 200, "loss": math.nan, "lr": 8e-4}, 100,
            "step   1/200  loss not a number  lr 8.0e-04",
        ),
        ({"step": 7, "steps": None}, 100, "step 7"),
    ],
)  # fmt: skip
def test_a_log_interval_in_a_line(told, width, line):
    assert wording.step_line(told, width) == line


@pytest.mark.parametrize("told", [STEP, LARGE])
@pytest.mark.parametrize("width", [40, 60, 79, 80, 99, WIDTH, 120])
def test_no_line_is_wider_than_it_may_be(told, width):
    assert len(wording.step_line(told, width)) <= width
    assert f"{told['step']}/{told['steps']}" in wording.step_line(told, width)


def test_what_is_not_known_is_left_out():
    assert "MFU" not in wording.step_line(STEP)
    assert "left" not in wording.step_line(STEP | {"seconds_left": None})
    assert "Muon's lr 2.0e-02" in wording.step_line(STEP | {"muon_lr": 0.02}, 130)


VALIDATION = {"step": 200, "loss": 1.919, "set": "", "data": "validation", "last": False, "seconds": 4.21}


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({}, "validation loss 1.9190  perplexity 6.81  at step 200  took 4.2 s"),
        ({"set": "code"}, "validation loss code 1.9190  perplexity 6.81  at step 200  took 4.2 s"),
        ({"last": True}, "validation loss 1.9190  perplexity 6.81  after training, on different batches"),
        ({"last": True, "data": "test"}, "test loss 1.9190  perplexity 6.81  at step 200  took 4.2 s"),
        ({"loss": math.inf}, "validation loss not a number  at step 200  took 4.2 s"),
    ],
)
def test_an_evaluation_in_a_line(more, line):
    assert wording.validation_line(VALIDATION | more) == line


def test_a_checkpoint_in_a_line():
    told = {"step": 2000, "folder": "runs/x/checkpoints", "seconds": 75.0, "background": False}
    assert wording.saved_line(told) == "checkpoint of step 2,000 saved in 1:15 to runs/x/checkpoints"
    assert "is being written to runs" in wording.saved_line(told | {"background": True})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.4 s"), (9.96, "0:10"), (62.4, "1:02"), (3599.6, "1:00:00"), (7265, "2:01:05"), (2e5, "2 d 07:33 h")],
)
def test_durations(seconds, text):
    assert wording.duration(seconds) == text


def test_a_command_stays_whole_when_it_is_broken():
    command = "megatron-muon train --config runs/quickstart/config.yaml --nproc 2 --set optimizer=adam --set 'a b=null'"
    command += " --set muon-nesterov=null --set muon-extra-scale-factor=null --out runs/quickstart-adam"
    lines = wording.command_lines(command, indent=4)
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) > 1
    assert all(line.endswith(" \\") for line in lines[:-1])
    joined = " ".join(line.removesuffix("\\") for line in lines)
    assert shlex.split(joined) == shlex.split(command)
    assert wording.command_lines("one --two 3") == ["one --two 3"]


def test_a_note_is_wrapped_between_words():
    lines = wording.wrapped("megatron-muon: warning: " + "--some-flag-of-megatron /a/long/path " * 8, width=80)
    assert max(map(len, lines)) <= 80
    assert all(line.startswith("  ") for line in lines[1:])
    assert "--some-flag-of-megatron" in lines[1]
