"""What `megatron-muon train` shows, from events and lines that are made here: on a terminal, in a pipe, quiet."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.tools.train import screen, watching
from megatron_muon.tools.train.resolve import FILLED_IN, Flag, Nodes, Request, Resolved
from megatron_muon.tools.train.run_folder import RunFolder
from megatron_muon.tools.train.screen import STOPPING, Screen, Status
from megatron_muon.tools.train.train import Experiment, Outcome, Told
from megatron_muon.tools.train.watching import Watcher
from tests.unit.test_wording import STEP as KNOWN

STEP = KNOWN | {"mfu": 0.41}
EVENTS: tuple[dict[str, Any], ...] = (
    {"event": "stage", "stage": "building the model"},
    {"event": "model", "parameters": 3_287_296, "muon_parameters": 3_145_728, "device": None},
    {"event": "stage", "stage": "taking the first step"},
    {"event": "step", "step": 1, "steps": 200, "loss": 5.5948, "grad_norm": 17.9, "lr": 8e-4, "peak_bytes": 9e8},
    {"event": "tick", "step": 2},
    STEP,
    {"event": "stage", "stage": "evaluating"},
    {"event": "validation", "step": 130, "loss": 1.919, "set": "", "data": "validation", "last": False, "seconds": 4.2},
    {"event": "stage", "stage": None},
    {"event": "saved", "step": 130, "folder": "runs/x/checkpoints", "seconds": 0.44, "background": False},
)
WARNING = (
    "megatron-muon: warning: updates that were not finite: 3; these matrices kept their weights: " + "a.long.name " * 9
)


def experiment_in(root: Path, **more: Any) -> Experiment:
    settings = {
        "optimizer": "muon", "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_experts": 8,
        "use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params", "train_iters": 100_000,
        "global_batch_size": 512, "seq_length": 8192, "eval_iters": 10, "eval_interval": 1000, "save": "x",
        "save_interval": 5000, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 4,
    }  # fmt: skip
    resolved = Resolved(
        flags=(Flag("--lr", ("0.008",), "my.yaml"),),
        filled_in=(Flag("--num-workers", ("0",), FILLED_IN), Flag("--no-rope-fusion", (), FILLED_IN)),
        env={"PYTHON_EXEC": "/tmp/\x1bpython", "A": "2"},
        notes=("environment wins over my.yaml: A=1, not 2",), device="cpu", ranks=8, gpus=0,
        folder=RunFolder(root, root / "tensorboard", None), settings=settings, files=(),
    )  # fmt: skip
    return Experiment(Request("configs/my.yaml", **more), resolved, None, False)


def watched(capsys: pytest.CaptureFixture[str], tmp_path: Path, *, settings: bool = False, **how: Any) -> list[str]:
    """The lines that a whole run shows."""
    watcher, experiment = Watcher(**how), experiment_in(tmp_path / "x")
    with watcher.screen:
        watcher.enter("checking the settings of configs/my.yaml")
        watcher.head(experiment, settings=settings)
        for event in EVENTS:
            watcher.event(event)
        for line in ("Evaluating iter 1/16", WARNING, WARNING, "pretrain_gpt.py: error: --lr 0 is wrong"):
            watcher.line(line)
        watcher.tick(None)
    return capsys.readouterr().out.splitlines()


def test_in_a_pipe_a_run_is_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No control codes, no line wider than 100 columns, nothing of Megatron's, a warning of several ranks once."""
    lines = watched(capsys, tmp_path)
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in "".join(lines)
    text = "\n".join(line for line in lines if str(tmp_path) not in line)
    assert (
        text
        == """\
checking the settings of configs/my.yaml ...
megatron-muon: environment wins over my.yaml: A=1, not 2
my: muon on a GPT with 32 layers, width 4096, 32 heads, 8 experts
  ranks       8 on CPUs, Megatron-FSDP optim_grads_params, tensor parallel 2, expert parallel 4
  steps       100,000 of 4,194,304 tokens, 512 sequences of 8192; validation every 1,000, checkpoint
              every 5,000
  environment PYTHON_EXEC=/tmp/\\x1bpython A=2
  filled in   2 flags that this machine needs; --dry-run lists all settings
  model       3,287,296 parameters on a model-parallel rank; Muon's are 3,145,728 over all ranks
step   1/200  loss 5.5948  grad norm 17.90  lr 8.0e-04  900 MB
step 130/200  loss 2.0123  grad norm 0.81  2,351 tokens/s  MFU 41%  optimizer 21%  1:02 left
validation loss 1.9190  perplexity 6.81  at step 130  took 4.2 s
checkpoint of step 130 saved in 0.4 s to runs/x/checkpoints
megatron-muon: warning: updates that were not finite: 3; these matrices kept their weights:
  a.long.name a.long.name a.long.name a.long.name a.long.name a.long.name a.long.name a.long.name
  a.long.name
pretrain_gpt.py: error: --lr 0 is wrong"""
    )


def test_quiet_is_the_heading_warnings_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(watched(capsys, tmp_path, quiet=True))
    assert text.startswith("megatron-muon: environment wins")
    assert "  ranks       8 on CPUs" in text
    assert "warning: updates that were not finite: 3" in text
    assert "error: --lr 0 is wrong" in text
    assert not re.search(r"step +\d|checking|validation loss|parameters", text)


def test_verbose_is_all_output_and_all_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron's lines say what ours would say again."""
    text = "\n".join(watched(capsys, tmp_path, verbose=True, settings=True))
    assert "Evaluating iter 1/16" in text
    assert re.search(r"^  --lr +0.008 +my.yaml$", text, re.MULTILINE)
    assert "command     torchrun" in text
    assert text.count(WARNING) == 2
    assert "step 130/200" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_line_says_what_a_run_does(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "is_terminal", lambda: True)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.setenv("COLUMNS", str(width))
    seen = []
    with Screen() as shown:
        status = Status(shown, "starting 2 ranks", name="a run")
        for event in EVENTS:
            status.take(event)
            task = shown.progress.tasks[0]
            seen.append((task.description, task.completed, task.total))
        status.enter(STOPPING)
        status.take(EVENTS[0])
        assert task.description == "a run  130/200  stopping"
        status.end()
        assert shown.progress.tasks == []
    figures = "loss 2.0123  2,351 tokens/s  MFU 41%  optimizer 21%  1:02 left"
    assert seen[0] == ("a run  building the model", 0, None)
    assert seen[4] == ("a run    2/200  loss 5.5948", 2, 200)
    assert seen[5] == (f"a run  130/200  {figures}", 130, 200)
    assert seen[6] == ("a run  130/200  evaluating", 130, 200)
    assert seen[8] == seen[5]


def test_a_run_that_hangs_is_seen_to(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line says what it does, ever more rarely; one whose steps take long is left in peace."""
    watcher, slow = Watcher(), Watcher()
    watcher.event(STEP)
    slow.event(STEP | {"step_s": 90.0})
    now = time.monotonic()
    capsys.readouterr()
    monkeypatch.setattr(time, "monotonic", lambda: now + 200)
    slow.tick(None)
    assert capsys.readouterr().out == ""  # two of its steps
    for seconds in range(0, 500, 5):
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: now + seconds)
        watcher.tick(None)
    assert capsys.readouterr().out.splitlines() == [
        f"nothing new for {passed}: after step 130" for passed in ("1:00", "2:00", "4:00", "8:00")
    ]


def test_a_signal_is_answered_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    watcher = Watcher()
    for got in (None, 2, 2):
        watcher.tick(got)
    assert capsys.readouterr().out == "SIGINT: asking the ranks to end; a second signal kills them\n"
    for event in EVENTS:
        watcher.event(event)
    assert watcher.status.stage == "stopping"


def test_a_warning_is_shown_again_in_the_next_interval(capsys: pytest.CaptureFixture[str]) -> None:
    """A matrix that was never finite was told of once, as if it had recovered."""
    watcher = Watcher()
    for _ in range(2):
        for _ in range(2):  # of two ranks
            watcher.line("megatron-muon: warning: it")
        watcher.event(STEP)
    assert capsys.readouterr().out.count("warning: it") == 2


def test_another_machine_than_the_first_ends_without_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the first had refused the folder there is no run.json: a traceback took the place of the status."""
    Watcher().end(Outcome(130, {}), experiment_in(tmp_path / "x", nodes=Nodes(2, 1, "node0:29500")))
    assert capsys.readouterr().out.startswith("ended with status 130; see ")


@pytest.mark.parametrize(
    ("terminal", "environ", "live"),
    [
        (True, {"TERM": "xterm-256color"}, True),
        (True, {"TERM": "dumb"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {}, False),
        (False, {"TERM": "xterm-256color"}, False),
    ],
)
def test_where_a_live_line_is_shown(
    terminal: bool, environ: dict[str, str], live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("sys.stdout", stream)
    assert screen.is_terminal() is live


def test_a_character_that_the_terminal_lacks_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's line in another alphabet ended the thread that reads them, and torchrun waited for it for ever."""
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii"))
    with Screen() as of_ascii:
        of_ascii.print("a \N{REPLACEMENT CHARACTER}")
    assert shown.getvalue() == b"a ?\n"


SUMMARY = {
    "outcome": "failed", "status": 1, "iterations": 20, "loss_last": 2.5, "validation_loss": None, "diverged": False,
    "error": "torch.OutOfMemoryError: CUDA out of memory", "go_on": "megatron-muon train --resume --out x",
    "checkpoint": None,
}  # fmt: skip


def test_a_failure_is_shown_with_its_traceback_and_what_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = experiment_in(tmp_path / "x")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "run.json").write_text("{}")
    Watcher().end(Outcome(1, SUMMARY, trace=("Traceback", '  File "x.py"')), experiment)
    assert capsys.readouterr().out.replace(str(tmp_path), "T").splitlines() == [
        "",
        "failed with status 1 after 20 iterations, training loss 2.5000",
        "why: torch.OutOfMemoryError: CUDA out of memory",
        "  Traceback",
        '    File "x.py"',
        "nothing was saved; to start again: megatron-muon train --resume --out x",
        "see T/x/summary.json, T/x/train.log",
    ]


def test_events_are_read_as_they_come(tmp_path: Path) -> None:
    """A line that is half written is read when it is whole; one that a full disk cut is passed over."""
    file = tmp_path / "told.jsonl"
    told = Told(file)
    assert told.new() == []
    first, second = (json.dumps(event) for event in EVENTS[:2])
    with file.open("a", buffering=1) as stream:
        stream.write(f"{first}\n{second[:9]}")
        stream.flush()
        assert told.new() == [EVENTS[0]]
        stream.write(f"{second[9:]}\n{first[:9]}{second}\n{first}\n")
        stream.flush()
        assert told.new() == [EVENTS[1], EVENTS[0]]
    assert told.new() == []
    assert watching.model_line(EVENTS[1], is_part=False) == "3,287,296 parameters, 95.7% of them Muon's"
