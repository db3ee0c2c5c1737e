"""Scalars for Weights & Biases, and a metric of teams."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.training import global_vars

from megatron_muon.core.probe import _StepProbe
from megatron_muon.megatron.patches import progress


def test_weights_and_biases_gets_what_tensorboard_gets(patches, monkeypatch, tmp_path):
    """Memory and validation perplexity were TensorBoard's alone."""
    wandb = mock.Mock(["log"])
    writer = mock.Mock(["add_scalar"])
    tensorboards = writer.add_scalar

    def set_wandb_writer(args):
        global_vars._GLOBAL_WANDB_WRITER = wandb

    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", writer)
    monkeypatch.setattr(global_vars, "_GLOBAL_WANDB_WRITER", None)
    monkeypatch.setattr(global_vars, "_set_wandb_writer", set_wandb_writer)
    progress.log_to_both(patches)
    events = str(tmp_path / "run/tensorboard")
    args = SimpleNamespace(tensorboard_dir=events, wandb_exp_name="", wandb_save_dir="there")
    global_vars._set_wandb_writer(args)
    assert (args.wandb_exp_name, args.wandb_save_dir) == ("run", "there")
    calls = [("lm loss", torch.tensor(2.5), 7), ("lm loss vs samples", torch.tensor(2.5), 56)]
    for call in calls:
        writer.add_scalar(*call)
    assert wandb.log.mock_calls == [mock.call({"lm loss": 2.5}, 7)]
    assert tensorboards.mock_calls == [mock.call(*call) for call in calls]
    patches.undo()
    assert writer.add_scalar is tensorboards


def test_other_ranks_are_left_alone(patches, monkeypatch):
    writer = SimpleNamespace(add_scalar=None)
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", writer)
    monkeypatch.setattr(global_vars, "_GLOBAL_WANDB_WRITER", None)
    monkeypatch.setattr(global_vars, "_set_wandb_writer", lambda args: None)
    progress.log_to_both(patches)
    global_vars._set_wandb_writer(SimpleNamespace(tensorboard_dir=None))
    assert writer.add_scalar is None


def test_the_error_of_a_teams_block_is_the_blocks():
    """Where teams owned every matrix there was no such metric."""
    block = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    whole = _StepProbe(torch.device("cpu"), copies=1)
    whole.block(block, 0.5)
    parts = [_StepProbe(torch.device("cpu"), copies=1) for _ in range(2)]
    team = SimpleNamespace(
        ranks=(0, 1),
        total=lambda part: (block / 0.5) @ (block / 0.5).mT,
    )
    for probe, part in zip(parts, block.split([4, 6], dim=1), strict=True):
        probe.block(part, 0.5, team)
    error, measured = (
        sum(getattr(probe, name).item() for probe in parts) for name in ("_error", "_measured")
    )
    assert measured == whole._measured.item() == 1.0
    assert error == pytest.approx(whole._error.item(), rel=1e-6)
