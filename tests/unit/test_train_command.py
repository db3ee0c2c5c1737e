"""`megatron-muon train` without a training: where a run's files go, what is refused and
recorded.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_muon import cli
from megatron_muon.errors import ExitStatus, UserError
from megatron_muon.megatron.flags.config_file import load_config
from megatron_muon.megatron.places import RunFolder, beside, locate, settle_places
from megatron_muon.tools.train import run_folder, train
from megatron_muon.tools.train.resolve import Flag, Request, Resolved
from megatron_muon.tools.train.run_folder import check_free, config_hash, config_text, name_of

TB = "--tensorboard-dir"
OURS = '{"config_hash": "0", "host": "a", "started": "2026-11-28"}'
A = {TB: "a/tensorboard", "--save": "a/checkpoints"}
IN_B = (("b", "b/tensorboard", "b/checkpoints"), {TB: "b/tensorboard"})


@pytest.mark.parametrize(
    ("values", "chosen", "out", "folder", "flags"),
    [
        ({}, {}, None, ("d", "d/tensorboard", None), {TB: "d/tensorboard"}),
        (A | {"--save": "/big"}, {}, None, ("a", "a/tensorboard", "/big"), {}),
        ({"--save": "b/checkpoints"}, {}, None, *IN_B),
        ({TB: "logs"}, {}, None, ("d", "logs", None), {}),
        (A, {TB: "b/tensorboard"}, None, ("b", "b/tensorboard", "a/checkpoints"), {}),
        # Events went on to the file's folder, where another run's were.
        (A, {"--save": "b/checkpoints"}, None, *IN_B),
        ({TB: "a"}, {"--save": "b"}, None, ("b", "b/tensorboard", "b"), {TB: "b/tensorboard"}),
        (
            A | {"--load": A["--save"]},
            {},
            "o",
            ("o", "o/tensorboard", "o/checkpoints"),
            {"--save": "o/checkpoints", "--load": "o/checkpoints", TB: "o/tensorboard"},
        ),
        (
            A | {"--load": "pretrained"},
            {"--save": "/big"},
            "o",
            ("o", "o/tensorboard", "/big"),
            {TB: "o/tensorboard"},
        ),
    ],
)
def test_where_a_run_goes(values, chosen, out, folder, flags):
    root, tensorboard, checkpoints = (path and Path(path) for path in folder)
    expected = RunFolder(root, tensorboard, checkpoints)
    assert locate(values, chosen, out=out, default="d") == (expected, flags)


def test_a_run_is_named_after_its_file(tmp_path):
    assert name_of(Path("configs/tiny.yaml")) == "tiny"
    assert name_of(tmp_path / "gpt3_tp2" / "model_config.yaml") == "gpt3_tp2"


@pytest.fixture
def taken(tmp_path):
    """A folder with a run of 7 steps and a checkpoint."""
    folder = RunFolder(tmp_path, tmp_path / "tensorboard", tmp_path / "checkpoints")
    for path in (folder.tensorboard, folder.checkpoints / "iter_0000007"):
        path.mkdir(parents=True)
    (folder.tensorboard / "events.out.tfevents.1.host.2.0").write_text("lm loss")
    (folder.checkpoints / "latest_checkpointed_iteration.txt").write_text("7\n")
    summary = {"outcome": "stopped", "iterations": 7, "train_iters": 20}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "run.json").write_text(OURS)
    return folder


def test_a_run_is_not_overwritten(taken):
    for gone, said in (
        ("", r"holds a run that stopped after 7 of 20 iterations; .*--out.*--resume.*rm -r"),
        ("summary.json", "holds a run that was cut off"),
        ("run.json", "/tensorboard holds a run"),
    ):
        if gone:
            (taken.root / gone).unlink()
        with pytest.raises(UserError, match=said):
            check_free(taken, resume=False)
        check_free(taken, resume=True)


@pytest.mark.parametrize("name", ["config.yaml", "train.log", "run.json", "summary.json"])
def test_a_file_that_train_has_not_written_is_never_replaced(tmp_path, name):
    """`train --config config.yaml --out .` wrote the resolved settings over that config.yaml."""
    (tmp_path / name).write_text('{"mine": 1}')
    folder = RunFolder(tmp_path, tmp_path / "tensorboard", None)
    for resume in (False, True):
        with pytest.raises(UserError, match=rf"{name} was not written by .* --out DIR"):
            check_free(folder, resume=resume)
    (tmp_path / "run.json").write_text(OURS)
    check_free(folder, resume=False)


FILE = {TB: "{}/tensorboard", "--save": "{}/checkpoints"}
OWN = {"--load": "{}/checkpoints"}
APART = {TB: "{}/tensorboard", "--save": "{}-x/checkpoints"}
BESIDE = {TB: "{}-2/tensorboard", "--save": "{}-2/checkpoints"}


@pytest.mark.parametrize(
    ("file", "typed", "expected"),
    [
        (FILE, {}, BESIDE),
        (FILE, {"--load": "other"}, BESIDE),
        ({TB: "{}/tensorboard"}, {}, {TB: "{}-2/tensorboard"}),
        (FILE, OWN, {}),  # continues
        (FILE | OWN, {}, {}),
        (FILE | OWN | {"--finetune": ""}, {}, BESIDE),  # takes the weights of the run that is there
        (FILE, {"--save": "{}-x/checkpoints"}, {TB: "{}-x/tensorboard"}),
        ({}, {"--save": "{}/checkpoints"}, "add --load {}/checkpoints"),
        ({}, {"--save": "{}/checkpoints", "--load": "other"}, "add --load {}/checkpoints"),
        (FILE, {TB: "{}/tensorboard"}, "another --save DIR and --tensorboard-dir DIR"),
        ({}, APART, "another --save DIR"),
        ({}, APART | OWN, {}),
        ({}, {}, {}),
    ],
)
def test_ranks_without_a_launcher_keep_off_another_run(taken, file, typed, expected):
    """A command of docs/offload.md replaced the checkpoint of the quickstart's run."""

    def here(flags):
        return {flag: path.format(taken.root) for flag, path in flags.items()}

    if isinstance(expected, str):
        said = f"holds a run that stopped .*{re.escape(expected.format(taken.root))}"
        with pytest.raises(UserError, match=said):
            settle_places(here(file), here(typed))
        return
    flags, note = settle_places(here(file), here(typed))
    assert flags == here(expected)
    assert ("; writing to " in note) == any("-2" in place for place in expected.values())


def test_the_next_free_folder_is_taken(taken):
    second = taken.numbered(2)
    (second.checkpoints / "iter_0000003").mkdir(parents=True)
    (second.checkpoints / "latest_checkpointed_iteration.txt").write_text("3")
    assert beside(taken, {})[0] == taken.numbered(3)
    assert beside(taken.numbered(3), {}) == (taken.numbered(3), {}, "")


def test_a_running_run_is_left_alone(taken, monkeypatch):
    """--resume started a second trainer on it."""
    request = Request("x.yaml", out=str(taken.root), resume=True)
    experiment = SimpleNamespace(folder=taken, request=request, resolved=None)
    before = sorted(taken.root.rglob("*"))
    said = rf"a run is under way in {taken.root} \(on a, since 2026-11-28\); wait for its end"
    with run_folder.claimed(taken.root):
        with pytest.raises(UserError, match=said):
            train.execute(experiment, show=print)
        assert sorted(taken.root.rglob("*")) == sorted([*before, taken.root / "train.log"])
    monkeypatch.setattr(train, "_finished", lambda experiment: {"iterations": 20})
    assert not train.execute(experiment, show=print).started


def test_a_start_without_a_step_may_be_repeated(tmp_path):
    """Megatron writes its arguments to TensorBoard before it reads data: these are no results."""
    from torch.utils.tensorboard import SummaryWriter

    folder = RunFolder(tmp_path, tmp_path / "tensorboard", tmp_path / "checkpoints")
    with SummaryWriter(log_dir=str(folder.tensorboard)) as writer:
        writer.add_text("seq_length", "32", global_step=0)
    (tmp_path / "run.json").write_text(OURS)
    check_free(folder, resume=False)  # killed
    (tmp_path / "summary.json").write_text('{"outcome": "failed", "iterations": 0}')
    check_free(folder, resume=False)
    with SummaryWriter(log_dir=str(folder.tensorboard)) as writer:
        writer.add_scalar("lm loss", 5.0, 1)
    with pytest.raises(UserError, match="holds a run that failed"):
        check_free(folder, resume=False)


def test_places_of_a_run_move_with_its_folder(tmp_path):
    """A copy resumed from the original's checkpoints and wrote into them."""
    run = {"folder": "runs/first", "checkpoint_dir": "runs/first/ckpt/x"}
    places = run_folder.places_of(tmp_path, run)
    assert places == RunFolder(tmp_path, tmp_path / "tensorboard", tmp_path / "ckpt/x")
    assert run_folder.moved("/scratch/checkpoints", run, tmp_path) == "/scratch/checkpoints"
    assert run_folder.moved("runs/first/x", {}, tmp_path) == "runs/first/x"


# The resolved file


def test_the_resolved_file_says_the_same(tmp_path):
    alone = ("8.0e-3", "98,2,0", "true", "[0]*1+[1]*2", "null", "", 'say "no": # $HOME', "-3")
    flags = [(f"--flag-{number}", (value,)) for number, value in enumerate(alone)]
    flags += [("--bf16", ()), ("--data-path", ("0.3", "a b", "null", "it's $5"))]
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PLAIN": "1"}
    path = tmp_path / "config.yaml"
    path.write_text(config_text(flags, env, heading="made for\na test"), "utf-8")
    read = load_config(path, {})
    assert read.flags == tuple(flags)
    assert read.env == env


def test_equal_experiments_have_equal_hashes():
    one = config_hash(
        [("--lr", ("1",)), ("--bf16", ()), ("--save", ("a",))],
        {"A": "1"},
    )
    same = [("--bf16", ()), ("--lr", ("1",)), (TB, ("b",))]
    assert one == config_hash(same, {"A": "1"})
    assert one != config_hash(same, {"A": "2"})
    assert one != config_hash([("--bf16", ()), ("--lr", ("2",))], {"A": "1"})


def test_a_ckpt_step_of_the_file_is_for_the_first_start(taken, monkeypatch):
    """`--load pretrained --ckpt-step 3` asked the run's own checkpoints for iteration 3."""
    flags = (Flag("--ckpt-step", ("3",), "my.yaml"), Flag("--load", ("pretrained",), "my.yaml"))
    resolved = Resolved(flags, (), {}, (), "cpu", 1, taken, {"train_iters": 20}, ())
    monkeypatch.setattr(train, "resolve", lambda request: resolved)
    experiment = train.prepare(Request("x.yaml", resume=True))
    expected = ["--load", str(taken.checkpoints), "--unset", "--ckpt-step"]
    assert experiment.torchrun[-4:] == expected
    assert experiment.checkpoint == taken.checkpoints / "iter_0000007"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "give --config FILE, or --resume --out DIR"),
        ("--config x --no-save --save y", "--no-save writes no checkpoint and --save says where"),
        ("--resume --out x --ckpt-step 3", "to go back, start another run"),
        ("--resume --out x -- --unset ckpt-step", "cannot read"),  # config.yaml
    ],
)
def test_arguments_that_exclude_each_other(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *argv.split()]) == ExitStatus.USAGE
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
