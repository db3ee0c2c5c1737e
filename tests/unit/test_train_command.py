"""`megatron-muon train` without a training: where a run's files go, what is refused and
recorded.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.tensorboard import SummaryWriter

from megatron_muon import cli
from megatron_muon.checkpoint.locks import locked
from megatron_muon.errors import ExitStatus, UserError
from megatron_muon.megatron import STATUS_FOLDER, prepare
from megatron_muon.megatron.flags.config_file import load_config
from megatron_muon.megatron.places import refuse_taken
from megatron_muon.tools.train import resolve, train
from megatron_muon.tools.train.processes import Ended
from megatron_muon.tools.train.resolve import Experiment, Setting
from megatron_muon.tools.train.train_command import complete

TB = "--tensorboard-dir"
MODEL = """\
MODEL_ARGS:
  --num-layers: 2
  --hidden-size: 32
  --num-attention-heads: 2
  --seq-length: 32
  --max-position-embeddings: 32
  --micro-batch-size: 1
  --train-iters: 9
  --lr: 0.01
  --weight-decay: 0.3
  --seed: 4
  --mock-data: true
  --tokenizer-type: NullTokenizer
  --vocab-size: 256
"""


@pytest.fixture
def requested(tmp_path, monkeypatch):
    """A parsed command line, where run.yaml is."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(MODEL)

    def parse(line: str) -> argparse.Namespace:
        argv = ["train", *line.split()]
        args = cli._build_parser(argv)[0].parse_args(argv)
        complete(args)
        return args

    return parse


def test_each_layer_wins_over_those_before_it_and_is_shown(requested):
    line = "--config run.yaml --nproc 1 --out o --seed 5 --unset weight-decay"
    experiment = resolve.resolve(requested(line))
    found = {flag: (" ".join(values), source) for flag, values, source in experiment.settings}
    assert len(found) == len(experiment.settings)
    assert found["--lr"] == ("0.01", "run.yaml")
    assert found["--seed"] == ("5", "command line")
    assert found["--save"] == ("o/checkpoints", "run folder")
    assert found["--transformer-impl"] == ("local", "filled in")
    assert "--weight-decay" not in found
    assert (experiment.args.seed, experiment.args.weight_decay) == (5, 0.01)
    places = "--config o/config.yaml --tensorboard-dir o/tensorboard --save o/checkpoints"
    assert " ".join(train.torchrun(experiment)).endswith(places)


@pytest.mark.parametrize(
    "named", ["--optimizer soap", "--matrix-optimizer mop --matrix-optimizer-args momentum=0.8"]
)
def test_muons_flags_of_a_file_do_not_reach_another_optimizer(requested, named):
    """The file that `train` writes had them again, and ranks refused them as typed."""
    muon = "  --optimizer: muon\n  --use-megatron-fsdp: true\n  --muon-nesterov: true\n"
    Path("run.yaml").write_text(MODEL + muon)
    experiment = resolve.resolve(requested(f"--config run.yaml --nproc 1 --out o {named}"))
    flags = {setting.flag for setting in experiment.settings}
    assert "--muon-nesterov" not in flags
    assert ("--optimizer" in flags) is named.startswith("--optimizer")
    assert experiment.args.optimizer == named.split()[1]


PLACED = "--tensorboard-dir o/tensorboard --save o/checkpoints"
AT_THE_END = "--save-interval 1000000000 --exit-signal-handler"


@pytest.mark.parametrize(
    ("line", "file", "expected"),
    [
        ("--config run.yaml --out o", "", f"{PLACED} {AT_THE_END}"),
        # all goes to --out, and variables of the file may be unset
        ("--config run.yaml --out o", "--save: ${NOT_SET}", f"{PLACED} {AT_THE_END}"),
        ("--config run.yaml --out o --no-save", "--save: a", f"{TB} o/tensorboard --unset --save"),
        (f"--config run.yaml {TB} t", "--save: a", AT_THE_END),
        # the file of a run keeps a --save elsewhere
        ("--resume --out o", "", f"{PLACED} {AT_THE_END}"),
        ("--resume --out o", "--save: big", f"{TB} o/tensorboard {AT_THE_END}"),
    ],
)
def test_where_a_run_goes(requested, monkeypatch, line, file, expected):
    """A copy of a run's folder wrote into the original: its config.yaml names no place in it."""
    Path("o").mkdir()
    for path in ("run.yaml", "o/config.yaml"):
        Path(path).write_text(MODEL + (f"  {file}\n" if file else ""))
    monkeypatch.setattr(resolve, "_validated", lambda line, root, placed, replaced: placed)
    assert " ".join(resolve.resolve(requested(line))) == expected


def test_a_run_is_named_after_its_file_and_a_time(requested, monkeypatch):
    monkeypatch.setattr(resolve, "_validated", lambda line, root, placed, replaced: root)
    assert resolve.resolve(requested("--config run.yaml")).name.startswith("run-20")


@pytest.fixture
def taken(tmp_path):
    """The --save and --tensorboard-dir of a run of 7 steps with a checkpoint."""
    save, events = tmp_path / "checkpoints", tmp_path / "tensorboard"
    save.mkdir()
    (save / "latest_checkpointed_iteration.txt").write_text("7\n")
    with SummaryWriter(log_dir=str(events)) as writer:
        writer.add_scalar("lm loss", 5.0, 1)
    return str(save), str(events)


def test_a_start_without_a_step_may_be_repeated(tmp_path, taken):
    """Megatron writes its arguments to TensorBoard before it reads data: these are no results."""
    with pytest.raises(UserError, match=r"tensorboard holds a run; do x, or delete it: rm -r "):
        refuse_taken(None, taken[1], remedy="do x")
    with SummaryWriter(log_dir=str(tmp_path / "other")) as writer:
        writer.add_text("seq_length", "32", global_step=0)
    refuse_taken(str(tmp_path), str(tmp_path / "other"), remedy="")


def test_a_continuation_may_name_its_folder_in_another_way(taken):
    """It was refused, with the advice to delete the run."""
    save, events = taken
    args = SimpleNamespace(load=save, save=f"{save}/", tensorboard_dir=events, finetune=False)
    prepare._refuse_taken(args)
    args.finetune = True
    with pytest.raises(UserError, match="holds a run"):
        prepare._refuse_taken(args)


def experiment_of(root: Path, *, resume: bool = False, **args: object) -> Experiment:
    given = {"save": str(root / "ck"), "tensorboard_dir": str(root / "tb"), "train_iters": 20}
    return Experiment(
        root=root,
        resumes=resume,
        settings=(Setting("--lr", ("1",), "x.yaml"),),
        env={},
        notes=(),
        device="cpu",
        ranks=1,
        args=SimpleNamespace(**{**given, "optimizer": "muon", **args}),
    )


def test_a_run_is_neither_overwritten_nor_started_twice(tmp_path, taken):
    """--resume started a second trainer on a run that was under way."""
    save, events = taken
    places = {"save": save, "tensorboard_dir": events}
    with pytest.raises(UserError, match=r"holds a run; give another --out DIR, .* with --resume"):
        train.execute(experiment_of(tmp_path, **places), show=print)
    resumed = experiment_of(tmp_path, resume=True, **places)
    resumed.check_free()
    with locked(Path(events)), pytest.raises(UserError, match="wait for its end"):
        train.execute(resumed, show=print)
    assert not (tmp_path / "run.json").exists()


def test_a_file_that_train_has_not_written_is_never_replaced(tmp_path):
    """`train --config config.yaml --out .` wrote the resolved settings over that config.yaml."""
    (tmp_path / "config.yaml").write_text("MODEL_ARGS: {}")
    with pytest.raises(UserError, match=r"config.yaml does not belong to a run; .* --out DIR"):
        train.execute(experiment_of(tmp_path), show=print)
    (tmp_path / "run.json").write_text("{}")
    experiment_of(tmp_path).check_free()


@pytest.mark.parametrize(
    ("given", "is_refused"),
    [
        ({"save": 0, "tensorboard_dir": 1}, True),
        ({"save": 0, "load": "other"}, True),
        ({"save": 0, "load": 0, "finetune": True}, True),
        ({"save": 0, "load": 0}, False),  # continues
        ({"save": "new", "tensorboard_dir": 1}, True),
        ({"save": "new", "tensorboard_dir": 1, "load": 0}, False),
        ({}, False),
    ],
)
def test_ranks_without_a_launcher_keep_off_another_run(taken, monkeypatch, given, is_refused):
    """A command of docs/offload.md replaced the checkpoint of the quickstart's run."""
    places = {name: taken[value] if value in (0, 1) else value for name, value in given.items()}
    none = {"save": None, "load": None, "tensorboard_dir": None, "finetune": False}
    checked = SimpleNamespace(
        args=SimpleNamespace(**{**none, **places, "finetune": "finetune" in given})
    )
    opened = SimpleNamespace(notes=[], resumes=False, merged=list)
    monkeypatch.setattr(prepare, "open_line", lambda *_, **__: opened)
    monkeypatch.setattr(prepare, "check", lambda *_, **__: checked)
    if is_refused:
        with pytest.raises(UserError, match="give another --save DIR and --tensorboard-dir DIR"):
            prepare.prepare(["--config", "x"])
        monkeypatch.setenv(STATUS_FOLDER, "x")  # a launcher has checked it
    assert prepare.prepare(["--config", "x"]) is checked


@pytest.mark.parametrize(
    ("flags", "found", "note"),
    [
        ("--save new --load pre --finetune --lr -1", None, "no checkpoint in new yet"),
        (
            "--lr -1 --load pre --finetune --ckpt-step=7 --no-load-rng --save ck",
            "--lr -1 --load pre --save ck --load ck",
            "continuing from ck, iteration 40",
        ),
    ],
)
def test_a_run_goes_on_from_its_own_checkpoint(tmp_path, monkeypatch, flags, found, note):
    """With --finetune or --ckpt-step once more it would begin again, and lose what it had
    trained.
    """
    monkeypatch.chdir(tmp_path)
    Path("ck").mkdir()
    Path("ck/latest_checkpointed_iteration.txt").write_text("40")
    notes: list[str] = []
    assert prepare.resumed(flags.split(), notes) == (found or flags).split()
    assert notes[0].startswith(note)
    with pytest.raises(UserError, match="no --save, so the run could not be resumed"):
        prepare.resumed(["--lr", "1"], notes)


def test_the_resolved_file_says_the_same(tmp_path):
    alone = ("8.0e-3", "98,2,0", "true", "[0]*1+[1]*2", "null", "", 'say "no": # $HOME', "-3")
    flags = [(f"--flag-{number}", (value,)) for number, value in enumerate(alone)]
    flags += [("--bf16", ()), ("--data-path", ("0.3", "a b", "null", "it's $5"))]
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PLAIN": "1"}
    path = tmp_path / "config.yaml"
    path.write_text(train.config_text(flags, env, heading="made for\na test"), "utf-8")
    read = load_config(path, {})
    assert read.flags == tuple(flags)
    assert read.env == env


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "give --config FILE, or --resume --out DIR"),
        ("--config x --no-save --save y", "--no-save writes no checkpoint and --save says where"),
        ("--config x --resume", "--resume continues the run in a folder; give --out DIR"),
        ("--resume --out x", "cannot read"),  # config.yaml
    ],
)
def test_arguments_that_exclude_each_other(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *argv.split()]) == ExitStatus.USAGE
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


STEP = {"event": "step", "step": 6, "loss": 2.5, "tokens_per_s": 9.0}
VALIDATIONS = [{"event": "validation", "step": 6, "loss": loss} for loss in (2.0, 7.0)]
FAILED = {"event": "line", "line": "node: error: RuntimeError: iteration 5: Unexpected result nan"}


@pytest.mark.parametrize(
    ("ended", "events", "expected"),
    [
        (
            Ended(0),
            [STEP, *VALIDATIONS, {"event": "saved", "step": 9, "folder": "ck"}],
            {
                "outcome": "finished",
                "iterations": 9,
                "loss": 2.5,
                "validation_loss": 2.0,  # not the test set's
                "tokens_per_second": 9.0,
                "checkpoint": "ck",
                "diverged": False,
            },
        ),
        (
            Ended(1, 15),
            [],
            {"outcome": "failed", "status": 143, "iterations": 3, "loss": 4.0},
        ),
        (Ended(75, 15), [], {"outcome": "stopped", "status": 75}),
        (Ended(75, 2), [], {"outcome": "interrupted", "status": 130}),
        (Ended(2), [], {"outcome": "refused"}),
        # Megatron ends such a step before it is logged; with --rerun-mode disabled by an error
        (
            Ended(16),
            [{"event": "diverged", "step": 5}],
            {"outcome": "failed", "diverged": True},
        ),
        (Ended(1), [FAILED], {"status": 1, "diverged": True}),
        (Ended(0), [STEP | {"loss": math.nan}], {"diverged": True}),
    ],
)
def test_the_summary_is_of_the_last_events(tmp_path, monkeypatch, ended, events, expected):
    """A resumed run that takes no step keeps the figures that it had."""

    def watch(command, log, *, show, **_):
        for event in events:
            show(event)
        return ended

    monkeypatch.setattr(train.processes, "watch", watch)
    (tmp_path / "summary.json").write_text('{"iterations": 3, "loss": 4.0, "error": "old"}')
    summary = train.execute(experiment_of(tmp_path, resume=True), show=lambda _: None)
    assert expected.items() <= summary.items()
    assert summary["error"] in (None, FAILED["line"].removeprefix("node: error: "))
