"""`megatron-muon train` with real trainings of one rank: what lies in the run's folder, and how a
run is ended.
"""

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_muon import cpu
from megatron_muon.checkpoint import folders
from megatron_muon.cli import main
from megatron_muon.megatron.flags.config_file import load_config
from megatron_muon.tools.train.records import read_events
from tests.support import cli, warm

SECONDS = cli.SECONDS
MANY = "100000"
"""Iterations that no test waits for."""

NAMES = {"checkpoints", "config.yaml", "run.json", "summary.json", "tensorboard", "train.log"}
"""What lies in a run's folder."""


def write_config(path: Path, *flags: str, base: str | None = None) -> None:
    """Write `flags`, as on a command line, as an experiment file; the last of a repeated flag
    counts.
    """
    values: dict[str, str] = {}
    for token, following in zip(flags, [*flags[1:], "--"], strict=True):
        if token.startswith("--"):
            values[token] = "true" if following.startswith("--") else following
    lines = [
        *([f"BASE: {base}"] if base else []),
        "MODEL_ARGS:",
        *(f"  {flag}: {values[flag]}" for flag in values),
    ]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "megatron_muon.cli", *args]


def train(cwd: Path, *args: str) -> cli.Run:
    return cli.run(command("train", *args), cwd, seconds=SECONDS)


def read(*files: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in files]


class Running:
    """A command that is ended by a signal; it must leave no process behind."""

    def __init__(self, cwd: Path, *args: str) -> None:
        self.log = cwd / f"{args[0]}-{time.monotonic_ns()}.log"
        self.cwd = cwd
        code = (
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "import sys; from megatron_muon.cli import main; sys.exit(main())"
        )
        self.process = subprocess.Popen(
            [str(warm.PYTHON), "-c", code, *args],
            cwd=cwd,
            env=cli.environment(),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            # A shell that runs tests in the background has SIGINT ignored, which children inherit.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    @property
    def family(self) -> list[psutil.Process]:
        """All processes that work in its folder: a warm child is no descendant of who started
        it.
        """
        found = psutil.process_iter(["cwd", "cmdline"])
        here = [one for one in found if one.info["cwd"] == str(self.cwd)]
        return [one for one in here if one.pid != os.getpid()]

    @property
    def trains(self) -> bool:
        """Whether ranks are up, or about to be."""
        launchers = {"megatron_muon.tools.train.node", "torch.distributed.run"}
        return any(launchers & {*(one.info["cmdline"] or ())} for one in self.family)

    @property
    def output(self) -> str:
        return self.log.read_text("utf-8", errors="replace")

    def wait_for(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not what():
            assert self.process.poll() is None, self.output[-4000:]
            assert time.monotonic() < deadline, self.output[-4000:]
            time.sleep(0.1)

    def end(self, number: int) -> int:
        """Send the signal; the exit status, once all processes are gone."""
        assert self.trains, self.output[-4000:]
        family = self.family
        self.process.send_signal(number)
        status = self.process.wait(timeout=120)
        assert not [
            one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE
        ]
        return status

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.family:
            one.kill()
        self.process.wait(timeout=30)


BASE = "--weight-decay 0.3 --train-iters 99"
FILE = "--global-batch-size 4 --train-iters 6 --log-interval 2 --eval-interval 3"
LINE = "--config tiny.yaml --muon-lr 0.02 --unset weight-decay --eval-iters 1 --out"


def test_from_a_file_to_a_summary(tmp_path, corpus):
    """Composed files and flags; then the folder is not overwritten, and the resolved file is whole.

    In a pipe there are plain lines, with the figures of Megatron's own, which are in train.log.
    """
    write_config(tmp_path / "base.yaml", *cli.TINY, *corpus, *BASE.split())
    write_config(tmp_path / "tiny.yaml", *cli.MUON, *FILE.split(), base="base.yaml")
    run = train(tmp_path, *LINE.split(), "runs/one").checked()
    folder = tmp_path / "runs/one"
    assert {path.name for path in folder.iterdir()} == NAMES
    assert (folder / "checkpoints/iter_0000006").is_dir()
    log = cli.Run(0, (folder / "train.log").read_text(), 0.0)

    lines = run.output.splitlines()
    assert lines[0] == "checking the settings of tiny.yaml ..."
    assert "\x1b" not in run.output
    assert len(lines) < 32, run.output
    steps = re.findall(r"^step (\d)/6  loss (\d\.\d{4})  ", run.output, re.MULTILINE)
    assert [int(step) for step, _ in steps] == [1, 2, 4, 6]
    assert [float(loss) for _, loss in steps] == pytest.approx(log.losses, abs=1e-4)
    assert re.search(r"^step 4/6 .*  [\d,]+ tokens/s  .*:\d\d left$", run.output, re.MULTILINE)
    validations = re.findall(r"^validation loss (\d\.\d{4})  at", run.output, re.MULTILINE)
    assert [float(loss) for loss in validations] == pytest.approx(log.validation_losses, abs=1e-4)
    assert "\ncheckpoint of step 6  runs/one/checkpoints\n" in run.output
    assert lines[-2].startswith("finished with status 0 after 6 iterations, training loss ")
    assert lines[-1] == "see runs/one/summary.json, runs/one/train.log"

    summary, record = read(folder / "summary.json", folder / "run.json")
    assert (summary["outcome"], summary["status"], summary["diverged"]) == ("finished", 0, False)
    assert (summary["iterations"], summary["train_iters"]) == (6, 6)
    losses = [point.value for point in read_events(folder / "tensorboard").points("lm loss")]
    assert summary["loss"] == pytest.approx(sum(losses[-2:]) / 2)
    validated = pytest.approx(log.validation_losses[1], abs=1e-5)
    assert summary["validation_loss"] == validated, "the first of step 6"
    assert {"python", "torch", "megatron-core", "megatron-muon"} <= record["versions"].keys()

    resolved = dict(load_config(folder / "config.yaml").flags)
    assert resolved["--muon-lr"] == ("0.02",)
    assert not {"--tensorboard-dir", "--save", "--weight-decay"} & resolved.keys()
    again = train(tmp_path, *LINE.split(), "runs/one")
    assert again.returncode == 2
    assert "error: runs/one/checkpoints holds a run; give another --out DIR" in again.output
    assert read(folder / "summary.json") == [summary]


UPSTREAM_FORM = """\
ENV_VARS:
  NCCL_ALGO: Ring
  SKIP_PYTEST: 1
BEFORE_SCRIPT: |
  echo before
TEST_TYPE: ckpt-resume
MODEL_ARGS:
  --num-layers: 2
  --hidden-size: 32
  --num-attention-heads: 2
  --seq-length: 32
  --max-position-embeddings: 32
  --micro-batch-size: 1
  --train-iters: 5
  --lr: 0.00015
  --mock-data: true
  --tokenizer-type: NullTokenizer
  --vocab-size: 256
  --tensorboard-dir: ${TENSORBOARD_PATH}
  --save: ${CHECKPOINT_SAVE_PATH}
  --save-interval: 50
  --data-cache-path: ${DATA_CACHE_PATH}
  --use-checkpoint-opt_param-scheduler: true
  --transformer-impl: local
  --use-mcore-models: true
  --bf16: true
MODEL_ARGS_2:
  --train-iters: 10
METRICS:
  - "lm loss"
LAUNCHER: ft_launcher
"""


def test_a_file_of_megatron_lms_tests_as_it_is(tmp_path, capfd, monkeypatch):
    """Placeholders come from the environment; a dry run leaves nothing behind."""
    folder = tmp_path / "gpt3_tiny"
    folder.mkdir()
    (folder / "model_config.yaml").write_text(UPSTREAM_FORM)
    monkeypatch.chdir(tmp_path)
    cli.start_warm(monkeypatch)
    monkeypatch.setenv("DATA_CACHE_PATH", "cache")
    line = ["train", "--config", "gpt3_tiny/model_config.yaml", "--dry-run"]
    assert main([*line, "--tensorboard-dir", "tb"]) == 2
    assert "--save needs the environment variable CHECKPOINT_SAVE_PATH" in capfd.readouterr().err
    line += ["--out", "x", "--unset", "use-checkpoint-opt_param-scheduler"]
    try:
        assert main([*line, "--device", "cuda"]) == 0
        assert "checked for CUDA, without the data" in capfd.readouterr().out
        assert main(line) == 0
    finally:
        cpu.uninstall()
    shown = capfd.readouterr().out
    ignored = "BEFORE_SCRIPT, TEST_TYPE, MODEL_ARGS_2, METRICS, LAUNCHER"
    assert f"gpt3_tiny/model_config.yaml: ignored, no meaning here: {ignored}\n" in shown
    assert re.search(r"--data-cache-path +cache +gpt3_tiny/model_config.yaml$", shown, re.MULTILINE)
    assert re.search(r"^ *run folder +x$", shown, re.MULTILINE)
    assert "pretrain_gpt.py --config x/config.yaml" in shown
    assert "opt_param" not in shown
    assert [path.name for path in tmp_path.iterdir()] == ["gpt3_tiny"]


def test_a_run_is_ended_and_resumed_without_a_step_lost(tmp_path, corpus):
    """SIGTERM: a checkpoint and 75. The resumed run continues; Ctrl-C: a checkpoint and 130.

    No flag asks for checkpoints: a training lost all of its work at its end, or by Ctrl-C, without
    a word.
    """
    flags = f"--global-batch-size 4 --train-iters {MANY}".split()
    write_config(tmp_path / "long.yaml", *cli.TINY, *corpus, *cli.MUON, *flags)
    summary, checkpoints = tmp_path / "x/summary.json", tmp_path / "x/checkpoints"
    line = ("train", "--config", "long.yaml", "--resume", "--out", "x")
    with Running(tmp_path, *line) as running:
        running.wait_for(lambda: f"step      5/{MANY}" in running.output)
        assert running.end(signal.SIGTERM) == 75, running.output[-4000:]
    (stopped,) = read(summary)
    assert (stopped["outcome"], stopped["status"]) == ("stopped", 75)
    assert folders.latest(checkpoints) == stopped["iterations"]
    assert "to go on: megatron-muon train --resume --out x" in running.output

    following = stopped["iterations"] + 5
    with Running(tmp_path, "train", "--resume", "--out", "x") as running:
        running.wait_for(lambda: f"step {following:6d}/{MANY}" in running.output)
        assert running.end(signal.SIGINT) == 130, running.output[-4000:]
    assert f"continuing from x/checkpoints, iteration {stopped['iterations']}" in running.output
    assert f"step {stopped['iterations']:6d}/" not in running.output
    (interrupted,) = read(summary)
    assert interrupted["outcome"] == "interrupted"
    assert folders.latest(checkpoints) == interrupted["iterations"]
    steps = [point.step for point in read_events(tmp_path / "x" / "tensorboard").points("lm loss")]
    assert steps == list(range(1, interrupted["iterations"] + 1))


def test_of_three_starts_in_one_folder_one_trains(tmp_path, corpus):
    """They used to train with the settings of whichever wrote config.yaml last, all three."""
    flags = ["--global-batch-size", "4", "--train-iters", "8"]
    write_config(tmp_path / "tiny.yaml", *cli.TINY, *corpus, *cli.MUON, *flags)
    line = ("--config", "tiny.yaml", "--out", "x", "--lr")
    rates = ("0.01", "0.02", "0.03")
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        runs = list(pool.map(lambda rate: train(tmp_path, *line, rate), rates))
    (winner,) = (number for number, run in enumerate(runs) if run.returncode == 0)
    for run in runs[:winner] + runs[winner + 1 :]:
        assert run.returncode == 2, run.tail
        assert re.search(r"error: .*(wait for its end|holds a run)", run.output)
        assert "step 1/8" not in run.output
    folder = tmp_path / "x"
    assert {path.name for path in folder.iterdir()} == NAMES
    assert dict(load_config(folder / "config.yaml").flags)["--lr"] == (rates[winner],)
    record, summary = read(folder / "run.json", folder / "summary.json")
    assert f"--lr {rates[winner]}" in record["command"]
    assert (summary["outcome"], summary["iterations"]) == ("finished", 8)
    log = cli.Run(0, (folder / "train.log").read_text(), 0.0)
    assert {iteration.learning_rate for iteration in log.iterations} == {float(rates[winner])}
    assert len(list((folder / "tensorboard").glob("events.*"))) == 1
