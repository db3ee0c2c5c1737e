"""`megatron-muon train` without a training: where a run's files go, what is refused and recorded."""

import json
import os
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_muon import cli
from megatron_muon.checkpoint import folders
from megatron_muon.errors import ExitStatus, UserError
from megatron_muon.megatron.flags.config_file import load_config
from megatron_muon.megatron.places import RunFolder, beside, locate, settle_places
from megatron_muon.tools.train import run_folder
from megatron_muon.tools.train.resolve import FROM_LINE, Flag, Request, Resolved
from megatron_muon.tools.train.run_folder import (
    check_free,
    clear,
    config_hash,
    config_text,
    name_of,
)
from megatron_muon.tools.train.train import prepare

# The folder

TB = "--tensorboard-dir"


@pytest.mark.parametrize(
    ("values", "chosen", "out", "folder", "flags"),
    [
        ({}, {}, None, ("d", "d/tensorboard", None), {TB: "d/tensorboard"}),
        (
            {TB: "runs/q/tensorboard", "--save": "/big/q"},
            {},
            None,
            ("runs/q", "runs/q/tensorboard", "/big/q"),
            {},
        ),
        (
            {"--save": "x/checkpoints"},
            {},
            None,
            ("x", "x/tensorboard", "x/checkpoints"),
            {TB: "x/tensorboard"},
        ),
        ({TB: "logs"}, {}, None, ("d", "logs", None), {}),
        ({TB: "a/tensorboard"}, {TB: "b/tensorboard"}, None, ("b", "b/tensorboard", None), {}),
        (
            {TB: "a/tensorboard", "--save": "a/c", "--load": "a/c"},
            {},
            "o",
            ("o", "o/tensorboard", "o/checkpoints"),
            {"--save": "o/checkpoints", "--load": "o/checkpoints", TB: "o/tensorboard"},
        ),
        # Events went on to the file's folder, where another run's lay.
        (
            {TB: "a/tensorboard", "--save": "a/checkpoints"},
            {"--save": "b/checkpoints"},
            None,
            ("b", "b/tensorboard", "b/checkpoints"),
            {TB: "b/tensorboard"},
        ),
        (
            {TB: "a/tensorboard"},
            {"--save": "b"},
            None,
            ("b", "b/tensorboard", "b"),
            {TB: "b/tensorboard"},
        ),
        (
            {"--save": "a/c", "--load": "pretrained"},
            {"--save": "/big"},
            "o",
            ("o", "o/tensorboard", "/big"),
            {TB: "o/tensorboard"},
        ),
    ],
)
def test_where_a_run_goes(values, chosen, out, folder, flags):
    root, tensorboard, checkpoints = (path and Path(path) for path in folder)
    assert locate(values, chosen, out=out, default="d") == (
        RunFolder(root, tensorboard, checkpoints),
        flags,
    )


def test_a_run_is_named_after_its_file(tmp_path):
    assert name_of(Path("configs/tiny.yaml")) == "tiny"
    assert name_of(tmp_path / "gpt3_tp2" / "model_config.yaml") == "gpt3_tp2"


@pytest.fixture
def taken(tmp_path):
    """A folder with a run of 7 steps and a checkpoint."""
    folder = RunFolder(tmp_path, tmp_path / "tensorboard", tmp_path / "checkpoints")
    for path in (folder.tensorboard, tmp_path / "checkpoints" / "iter_0000007"):
        path.mkdir(parents=True)
    (folder.tensorboard / "events.out.tfevents.1.host.2.0").write_text("lm loss")
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("7\n")
    (tmp_path / "notes.txt").write_text("mine")
    summary = {"outcome": "stopped", "iterations": 7, "train_iters": 20}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "run.json").write_text(OURS)
    return folder


OURS = '{"config_hash": "0"}'


def test_a_run_is_not_written_over(taken):
    for gone, said in (
        ((), r"holds a run that stopped after 7 of 20 iterations; .*--out.*--resume.*--overwrite"),
        (("summary.json",), "holds a run that was cut off"),
        (("summary.json", "run.json"), "/tensorboard holds a run"),
    ):
        for name in gone:
            (taken.root / name).unlink(missing_ok=True)
        with pytest.raises(UserError, match=said):
            check_free(taken, resume=False, overwrite=False)
        check_free(taken, resume=True, overwrite=False)
        check_free(taken, resume=False, overwrite=True)


@pytest.mark.parametrize("name", ["config.yaml", "train.log", "run.json", "summary.json"])
@pytest.mark.parametrize("asked", [{}, {"resume": True}, {"overwrite": True}])
def test_a_file_that_train_has_not_written_is_never_replaced(tmp_path, name, asked):
    """`train --config config.yaml --out .` wrote the resolved settings over that config.yaml."""
    (tmp_path / name).write_text('{"mine": 1}')
    folder = RunFolder(tmp_path, tmp_path / "tensorboard", None)
    with pytest.raises(UserError, match=f"{name} was not written by .* --out DIR"):
        check_free(folder, **{"resume": False, "overwrite": False, **asked})
    (tmp_path / "run.json").write_text(OURS)
    check_free(folder, **{"resume": False, "overwrite": False, **asked})


FILE = {TB: "{}/tensorboard", "--save": "{}/checkpoints"}
BESIDE = {TB: "{}-2/tensorboard", "--save": "{}-2/checkpoints"}


@pytest.mark.parametrize(
    ("file", "typed", "moves"),
    [
        (FILE, {}, BESIDE),
        (FILE, {"--load": "other"}, BESIDE),
        ({TB: "{}/tensorboard"}, {}, {TB: "{}-2/tensorboard"}),
        (FILE, {"--load": "{}/checkpoints"}, {}),  # goes on
        ({**FILE, "--load": "{}/checkpoints"}, {}, {}),
        # from weights of the run that lies there
        ({**FILE, "--load": "{}/checkpoints", "--finetune": ""}, {}, BESIDE),
        (FILE, {"--save": "{}-x/checkpoints"}, {TB: "{}-x/tensorboard"}),
        ({}, {"--save": "{}/checkpoints"}, "add --load {}/checkpoints"),
        ({}, {"--save": "{}/checkpoints", "--load": "other"}, "add --load {}/checkpoints"),
        (FILE, {TB: "{}/tensorboard"}, "another --save DIR and --tensorboard-dir DIR"),
        ({}, {TB: "{}/tensorboard", "--save": "{}-x/checkpoints"}, "another --save DIR"),
        ({}, {TB: "{}/tensorboard", "--save": "{}-x/checkpoints", "--load": "{}/checkpoints"}, {}),
        ({}, {}, {}),
    ],
)
def test_ranks_without_a_folder_of_their_own_keep_off_another_run(taken, file, typed, moves):
    """A command of docs/offload.md replaced the checkpoint of the quickstart's run."""

    def here(flags):
        return {flag: path.format(taken.root) for flag, path in flags.items()}

    if isinstance(moves, str):
        with pytest.raises(
            UserError, match=f"holds a run that stopped .*{re.escape(moves.format(taken.root))}"
        ):
            settle_places(here(file), here(typed))
        return
    flags, note = settle_places(here(file), here(typed))
    assert flags == here(moves)
    assert ("; this one goes to " in note) == any("-2" in place for place in moves.values())


def test_the_next_free_folder_is_taken(taken):
    second = taken.numbered(2)
    (second.checkpoints / "iter_0000003").mkdir(parents=True)
    (second.checkpoints / "latest_checkpointed_iteration.txt").write_text("3")
    assert beside(taken, {})[0] == taken.numbered(3)
    assert beside(taken.numbered(3), {}) == (taken.numbered(3), {}, "")


@pytest.mark.parametrize("asked", [(), ("--resume",), ("--overwrite",), ("--resume", "--dry-run")])
def test_a_living_run_is_left_alone_whatever_is_asked(taken, asked, capsys):
    """--overwrite deleted its files, and --resume started a second trainer on it."""
    before = sorted(taken.root.rglob("*"))
    line = ["train", "--config", "x.yaml", "--out", str(taken.root), *asked]
    with run_folder.lock_of(taken.root).held():
        assert cli.main(line) == ExitStatus.USAGE
    who = f"(process {os.getpid()} on {socket.gethostname()}, since "
    assert f"error: a run is under way in {taken.root} {who}" in capsys.readouterr().err
    saves = re.escape(f"a training saves its checkpoints to {taken.checkpoints} {who}")
    with folders.lock_of(taken.checkpoints).held(), pytest.raises(UserError, match=saves):
        run_folder.refuse_living(taken)
    run_folder.refuse_living(taken)
    assert sorted(taken.root.rglob("*")) == before


def test_a_start_without_a_step_may_be_overwritten(tmp_path):
    """Megatron writes its arguments to TensorBoard before it reads data: these events are no run's
    results.
    """
    from torch.utils.tensorboard import SummaryWriter

    folder = RunFolder(tmp_path, tmp_path / "tensorboard", tmp_path / "checkpoints")
    with SummaryWriter(log_dir=str(folder.tensorboard)) as writer:
        writer.add_text("seq_length", "32", global_step=0)
    (tmp_path / "run.json").write_text(OURS)
    check_free(folder, resume=False, overwrite=False)  # killed
    (tmp_path / "summary.json").write_text('{"outcome": "failed", "iterations": 0}')
    check_free(folder, resume=False, overwrite=False)
    with SummaryWriter(log_dir=str(folder.tensorboard)) as writer:
        writer.add_scalar("lm loss", 5.0, 1)
    with pytest.raises(UserError, match="holds a run that failed"):
        check_free(folder, resume=False, overwrite=False)


def test_places_of_a_run_move_with_its_folder(tmp_path):
    """A copy went on from the original's checkpoints and wrote into them; a renamed run began at
    step 1.
    """
    run = {"folder": "runs/first", "directory": str(tmp_path)}
    first, copy = tmp_path / "runs" / "first", tmp_path / "runs" / "copy"
    first.mkdir(parents=True)
    copy.mkdir()
    assert run_folder.moved("runs/first/checkpoints", run, first) == "runs/first/checkpoints"
    assert run_folder.moved("runs/first/ckpt/x", run, copy) == str(copy / "ckpt" / "x")
    assert run_folder.moved(str(first / "tensorboard"), run, copy) == str(copy / "tensorboard")
    assert run_folder.moved("/scratch/checkpoints", run, copy) == "/scratch/checkpoints"
    first.rmdir()
    assert run_folder.moved("runs/first/checkpoints", run, copy) == str(copy / "checkpoints")
    assert run_folder.moved("runs/first/checkpoints", {}, copy) == "runs/first/checkpoints"
    of_first = {
        **run,
        "tensorboard_dir": "runs/first/tensorboard",
        "checkpoint_dir": "runs/first/checkpoints",
    }
    assert run_folder.places_of(copy, of_first) == RunFolder(
        copy, copy / "tensorboard", copy / "checkpoints"
    )


def test_overwriting_deletes_the_run_and_nothing_else(taken):
    """Traces and files of Weights & Biases belong to it."""
    for name in ("torch_profile/rank-0.json.gz", "wandb/offline-run", "wandb.json"):
        (taken.root / name).parent.mkdir(exist_ok=True)
        (taken.root / name).touch()
    clear(taken)
    assert sorted(path.name for path in taken.root.rglob("*")) == [
        "notes.txt",
        "tensorboard",
        "torch_profile",
    ]
    assert not taken.has_steps


def test_overwriting_leaves_checkpoints_elsewhere(taken, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "checkpoints"
    elsewhere.mkdir()
    for folder in (
        RunFolder(taken.root, taken.tensorboard, elsewhere),
        RunFolder(taken.root, elsewhere, None),
    ):
        with pytest.raises(
            UserError, match=r"deletes nothing outside of .*; remove .*elsewhere.*/checkpoints"
        ):
            clear(folder)
    assert elsewhere.exists()
    assert taken.checkpoint is not None
    assert taken.has_steps


# The resolved file


def test_the_resolved_file_says_the_same(tmp_path):
    alone = ("8.0e-3", "98,2,0", "true", "[0]*1+[1]*2", "null", "", 'say "no": # $HOME', "-3")
    flags = (
        *((f"--flag-{number}", (value,)) for number, value in enumerate(alone)),
        ("--bf16", ()),
    )
    flags = (*flags, ("--data-path", ("0.3", "a b", "null", "it's $5")))
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PLAIN": "1"}
    path = tmp_path / "config.yaml"
    path.write_text(config_text(flags, env, heading="made for\na test"), "utf-8")
    read = load_config(path, {})
    assert read.flags == flags
    assert read.env == env


def test_equal_experiments_have_equal_hashes():
    one = config_hash([("--lr", ("1",)), ("--bf16", ()), ("--save", ("a",))], {"A": "1"})
    assert one == config_hash(
        [("--bf16", ()), ("--lr", ("1",)), ("--tensorboard-dir", ("b",))], {"A": "1"}
    )
    assert one != config_hash([("--bf16", ()), ("--lr", ("2",))], {"A": "1"})
    assert one != config_hash([("--bf16", ()), ("--lr", ("1",))], {"A": "2"})


# Going on


def test_a_ckpt_step_of_the_file_is_for_the_first_start(taken):
    """`--load pretrained --ckpt-step 3` once more asked the run's own checkpoints for an iteration
    they lack.
    """
    step = Flag("--ckpt-step", ("3",), "my.yaml")
    for flags in (
        (step,),
        (step, Flag("--load", ("pretrained",), "my.yaml")),
        (replace(step, source=FROM_LINE), Flag("--load", ("pretrained",), FROM_LINE)),
    ):
        resolved = Resolved(
            flags=flags,
            filled_in=(),
            env={},
            notes=(),
            device="cpu",
            ranks=1,
            gpus=0,
            folder=taken,
            settings={"train_iters": 20},
            files=(),
        )
        experiment = prepare(Request("x.yaml", default_out=str(taken.root), resume=True), resolved)
        assert experiment.torchrun[-4:] == [
            "--load",
            str(taken.checkpoints),
            "--unset",
            "--ckpt-step",
        ]
        assert experiment.checkpoint == taken.checkpoints / "iter_0000007"


# The command line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give --config FILE, or --resume --out DIR"),
        (["--config", "x", "--resume", "--overwrite"], "give one of them"),
        (
            ["--config", "x", "--no-save", "--set", "save=y"],
            "--no-save writes no checkpoint and --save says where to",
        ),
        (["--config", "x", "--set", "lr"], "--set lr: write KEY=VALUE"),
        (["--resume", "--out", "x", "--ckpt-step", "3"], "to go back, start another run"),
    ],
)
def test_arguments_that_do_not_go_together(argv, message, capsys):
    assert cli.main(["train", *argv]) == ExitStatus.USAGE
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "taken_away", [["--set", "ckpt_step=null"], ["--", "--unset", "ckpt-step"]]
)
def test_a_ckpt_step_that_is_taken_away_is_no_step_to_go_back_to(taken_away, tmp_path, capsys):
    line = ["train", "--resume", "--out", str(tmp_path), *taken_away]
    assert cli.main(line) == ExitStatus.USAGE
    assert "cannot read" in capsys.readouterr().err  # config.yaml, and no more
