"""What TensorBoard gets, Weights & Biases gets too; which run it is there; what is shown of it."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.training import global_vars

from megatron_muon.core.probe import _StepProbe
from megatron_muon.errors import UserError
from megatron_muon.megatron.patches import progress


def flags_of(folder, **flags):
    """Megatron's, of a run of two ranks."""
    given = {
        "rank": 1,
        "world_size": 2,
        "wandb_project": "mine",
        "wandb_exp_name": None,
        "wandb_save_dir": None,
    }
    places = {"tensorboard_dir": str(folder / "tensorboard"), "save": None, "load": None}
    return SimpleNamespace(**{**given, **places, "finetune": False, "ckpt_step": None, **flags})


def start(patches, monkeypatch, tmp_path, writer, *, error=None, **flags):
    """What Megatron does as a run starts; what stands for the package of Weights & Biases."""
    wandb = mock.Mock(["log"])

    def set_wandb_writer(args):
        if error is not None:
            raise error
        if args.wandb_project and args.rank == 1:
            global_vars._GLOBAL_WANDB_WRITER = wandb

    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", writer)
    monkeypatch.setattr(global_vars, "_GLOBAL_WANDB_WRITER", None)
    monkeypatch.setattr(global_vars, "_set_wandb_writer", set_wandb_writer)
    monkeypatch.setenv("WANDB_RUN_ID", "set here, to be undone")
    progress.log_to_both(patches)
    global_vars._set_wandb_writer(flags_of(tmp_path / "run", **flags))
    return wandb


@pytest.mark.parametrize("writes", [True, False])
def test_weights_and_biases_gets_what_tensorboard_gets(patches, monkeypatch, tmp_path, writes):
    """Memory and validation perplexity were TensorBoard's alone; without it Megatron logged no
    losses at all.
    """
    writer = mock.Mock(["add_scalar", "add_text", "flush"]) if writes else None
    tensorboards = writer and writer.add_scalar
    wandb = start(patches, monkeypatch, tmp_path, writer)
    written = global_vars.get_tensorboard_writer()
    written.add_text("lr", "0.1")
    calls = [("lm loss", torch.tensor(2.5), 7), ("lm loss vs samples", torch.tensor(2.5), 56)]
    for call in calls:
        written.add_scalar(*call)
    written.flush()
    assert wandb.log.mock_calls == [mock.call({"lm loss": 2.5}, 7)]
    assert writer is None or tensorboards.mock_calls == [mock.call(*call) for call in calls]
    patches.undo()
    assert global_vars.get_tensorboard_writer() is writer


@pytest.mark.parametrize("flags", [{"rank": 0}, {"wandb_project": ""}])
def test_other_ranks_and_runs_are_left_alone(patches, monkeypatch, tmp_path, flags):
    writer = SimpleNamespace(add_scalar=None)
    monkeypatch.setattr(progress, "choose_run", lambda *_: pytest.fail("it is not this rank's run"))
    start(patches, monkeypatch, tmp_path, writer, **flags)
    assert writer.add_scalar is None


def test_a_refusal_of_weights_and_biases_says_what_to_type(patches, monkeypatch, tmp_path):
    no_key = type("UsageError", (Exception,), {"__module__": "wandb.errors.errors"})(
        "No API key configured"
    )
    with pytest.raises(
        UserError, match=r"--wandb-project mine: No API key configured; type wandb login, or"
    ):
        start(patches, monkeypatch, tmp_path, None, error=no_key)


# Which run it is


def settle(folder, *, environ=None, **flags):
    own = str(folder / "saves")
    args, environ = (
        flags_of(folder, **{"load": own, "save": own, **flags}),
        ({} if environ is None else environ),
    )
    progress.choose_run(args, environ)
    return args, environ


@pytest.fixture
def folder(tmp_path):
    """A run's, with a checkpoint."""
    (tmp_path / "run" / "saves").mkdir(parents=True)
    (tmp_path / "run" / "saves" / "latest_checkpointed_iteration.txt").write_text("4")
    return tmp_path / "run"


def test_which_run_it_is(folder):
    """One that goes on is the same; steps of one that starts anew would be dropped, where the first
    had later ones.
    """
    args, first = settle(folder, load=None)
    assert (args.wandb_exp_name, args.wandb_save_dir) == ("run", str(folder))
    assert "WANDB_RESUME" not in first
    own = first["WANDB_RUN_ID"]
    assert settle(folder)[1] == {"WANDB_RUN_ID": own, "WANDB_RESUME": "allow"}
    ids = []
    for start in (
        {"load": None},
        {"ckpt_step": 2},
        {"save": str(folder / "others")},
        {"finetune": True},
    ):
        ids.append(settle(folder, **start)[1]["WANDB_RUN_ID"])
    (folder / "saves" / "latest_checkpointed_iteration.txt").unlink()
    ids.append(settle(folder)[1]["WANDB_RUN_ID"])
    assert len({own, *ids}) == 6
    assert json.loads((folder / "wandb.json").read_text())["id"] == ids[-1]


def test_what_somebody_has_said_holds(folder):
    given = {"WANDB_RUN_ID": "theirs"}
    _, environ = settle(folder, environ=given)
    assert environ == {"WANDB_RUN_ID": "theirs"}
    assert not (folder / "wandb.json").exists()
    args, _ = settle(folder, environ=given, wandb_exp_name="my name", wandb_save_dir="there")
    assert (args.wandb_exp_name, args.wandb_save_dir) == ("my name", "there")


def test_a_run_has_its_folders_name(tmp_path):
    save = str(tmp_path / "a" / "checkpoints")
    args, _ = settle(tmp_path / "a", load=None, tensorboard_dir=None, save=save)
    assert args.wandb_exp_name == "a"


def test_the_error_of_a_teams_block_is_the_blocks():
    """Where teams owned every matrix there was no such metric."""
    block = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    whole = _StepProbe(torch.device("cpu"), copies=1)
    whole.block(block, 0.5)
    parts = [_StepProbe(torch.device("cpu"), copies=1) for _ in range(2)]
    team = SimpleNamespace(ranks=(0, 1), total=lambda part: (block / 0.5) @ (block / 0.5).mT)
    for probe, part in zip(parts, block.split([4, 6], dim=1), strict=True):
        probe.block(part, 0.5, team)
    error, measured = (
        sum(getattr(probe, name).item() for probe in parts) for name in ("_error", "_measured")
    )
    assert measured == whole._measured.item() == 1.0
    assert error == pytest.approx(whole._error.item(), rel=1e-6)
