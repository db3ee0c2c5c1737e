"""What a run reports beside Megatron's log."""

import itertools
import json
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.timers import Timers
from megatron.training import global_vars

from megatron_muon import cpu
from megatron_muon.megatron import LOSS, REPORTS, tell, tells
from megatron_muon.megatron.patches import progress as module
from megatron_muon.megatron.patches.progress import Clock, Progress, muon_rate
from megatron_muon.metrics import _StepProbe

ADAM = {"optimizer": "adam", "lr": 0.001, "default_config": True}


@pytest.fixture
def told(monkeypatch):
    """The events of this process."""
    events = []
    monkeypatch.setattr(module, "tell", lambda event, **facts: events.append((event, facts)))
    monkeypatch.setattr(module, "tells", lambda: True)
    return events


def test_muons_rate_is_shown_where_megatron_does_not_log_it():
    """With --muon-lr the log and TensorBoard had Adam's rate alone."""
    own = {"lr": 0.02, "default_config": False}
    assert muon_rate([ADAM, own]) == 0.02
    assert muon_rate([ADAM, {**own, "default_config": True}]) is None  # one schedule for both
    # Adam's embeddings with --decoupled-lr
    assert muon_rate([{**ADAM, "default_config": False}]) is None


def test_a_step_that_is_not_finite_is_told_before_the_run_ends(told):
    """Megatron ends it before it is logged; without --save in an error of its own about where to
    save.
    """
    fine = ({}, 0, False, False, 0)
    assert Progress().step(lambda iteration: fine, iteration=5) == fine
    Progress().step(lambda iteration: ({}, True, True, True, 16), iteration=6)
    assert told == [("diverged", {"step": 7})]


def test_a_fault_ends_every_script_with_status_1(monkeypatch):
    """megatron-core ends a run with 0 after what it takes for --exit-interval."""
    settings = SimpleNamespace(muon_audit_action="stop", exit_interval=None)
    monkeypatch.setattr(module, "get_args", lambda: settings)
    progress = Progress()
    with pytest.raises(SystemExit, match=r"^0$"):
        progress.train(sys.exit, 0)
    progress.keep_optimizer(lambda: SimpleNamespace(audit_faults=["layer 0 differs"]))
    assert progress.decide_exit(lambda: settings.exit_interval == 1)
    with pytest.raises(SystemExit, match=r"layer 0 differs; .*--ckpt-step"):
        progress.train(sys.exit, 0)


def test_the_loss_is_the_mean_of_an_interval_and_facts_are_written_once(
    tmp_path, monkeypatch, told
):
    """Skipped steps count for nothing; the first step is shown, too."""
    settings = SimpleNamespace(
        tensorboard_dir=str(tmp_path),
        tensorboard_log_interval=1,
        log_interval=3,
        timing_log_level=0,
        train_iters=6,
        global_batch_size=4,
        seq_length=32,
    )
    monkeypatch.setattr(module, "get_args", lambda: settings)
    monkeypatch.setattr(module, "report_state", lambda _: {"all of it": 8})
    seconds = itertools.count(1.0)
    timer = SimpleNamespace(active_time=lambda: next(seconds))
    monkeypatch.setattr(module, "get_timers", lambda: lambda name: timer)
    progress = Progress()
    progress.keep_optimizer(lambda: SimpleNamespace(param_groups=[ADAM]))

    def log(loss_dict, learning_rate, iteration, skipped_iter, grad_norm):
        pass

    for iteration, loss in enumerate((4.0, 2.0, 9.0, 1.0, 2.0, 3.0), 1):
        losses = {LOSS: torch.tensor([loss])}
        progress.log(log, losses, 0.1, iteration, int(iteration == 3), 1.0)
    steps = [facts for event, facts in told if event == "step"]
    assert [
        (
            step["step"],
            step["loss"],
        )
        for step in steps
    ] == [(1, 4.0), (3, 3.0), (6, 2.0)]
    assert [step.get("tokens_per_s") for step in steps] == [None, 256.0, 384.0]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["state_bytes"] == {"all of it": 8}
    assert torch.__version__.startswith(facts["versions"]["torch"])
    assert list(tmp_path.iterdir()) == [tmp_path / "facts.json"]  # it is written aside and renamed


def test_speed_is_that_of_the_steps_and_the_time_left_counts_evaluations_and_saves():
    """The first step, which is slow, is left out."""
    settings = SimpleNamespace(global_batch_size=4, seq_length=32, train_iters=40)
    progress = Progress()
    assert progress._speed(settings, Clock(1, 100.0, 9.0, 8.0)) == {}
    expected = {"tokens_per_s": 128.0, "optimizer_share": 0.25, "seconds_left": 60.0}
    assert progress._speed(settings, Clock(10, 118.0, 18.0, 10.25)) == expected
    assert progress._speed(settings, Clock(20, 157.0, 28.0, None))["seconds_left"] == 60.0


def test_an_evaluation_that_runs_out_of_time_leaves_no_timer_running(monkeypatch, told):
    """--exit-duration-in-mins: the evaluation of the test set, which follows, failed."""
    cpu.install(force=True)
    timers = Timers(0, "minmax")
    monkeypatch.setattr(module, "get_timers", lambda: timers)
    progress = Progress()

    def results(prefix, forward_step, iteration):
        timers("evaluate", log_level=0).start()
        found = (None, None, True)
        if "test" in prefix:
            found = ({LOSS: torch.tensor(2.0)}, None, False)
        progress.evaluate(lambda *_: found)

    progress.name_evaluation(results, "iteration 20 on validation set", None, iteration=20)
    progress.name_evaluation(results, "iteration 20 on test set", None, 20)
    expected = {"step": 20, "loss": 2.0, "at": "iteration 20 on test set"}
    assert told == [("validation", expected)]


def test_a_save_is_told_and_none_is_tried_without_a_place(monkeypatch, told):
    settings = SimpleNamespace(save="s")
    monkeypatch.setattr(module, "get_args", lambda: settings)
    module.save(lambda iteration: None, 20)
    assert told == [("saved", {"step": 20, "folder": "s"})]
    settings.save = None
    module.save(lambda iteration: 1 / 0, 21)


def test_weights_and_biases_gets_our_metrics_too(monkeypatch):
    wandb = mock.Mock(["log"])
    writer = mock.Mock(["add_scalar"])
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", writer)
    monkeypatch.setattr(global_vars, "_GLOBAL_WANDB_WRITER", wandb)
    module.write({"muon/step_ms": 2.5}, 7)
    assert wandb.log.mock_calls == [mock.call({"muon/step_ms": 2.5}, 7)]
    assert writer.add_scalar.mock_calls == [mock.call("muon/step_ms", 2.5, 7)]


def test_one_rank_of_a_machine_tells_and_only_where_it_was_asked(tmp_path, monkeypatch):
    for name, value in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(REPORTS, str(tmp_path / "told"))
    assert not tells()
    monkeypatch.setenv("LOCAL_RANK", "1")
    tell("stage", step=2)
    assert json.loads((tmp_path / "told").read_text()) == {"event": "stage", "step": 2}
    monkeypatch.setenv(REPORTS, str(tmp_path / "gone/told"))
    tell("stage", step=3)  # the launcher was killed: training goes on
    monkeypatch.delenv(REPORTS)
    assert not tells()


def test_the_error_of_a_teams_block_is_the_blocks():
    """Where teams owned every matrix there was no such metric."""
    block = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    whole = _StepProbe(torch.device("cpu"), copies=1)
    whole.blocks(block[None], 0.5)
    parts = [_StepProbe(torch.device("cpu"), copies=1) for _ in range(2)]
    team = SimpleNamespace(
        ranks=(0, 1),
        total=lambda part, buffer: part.copy_((block / 0.5) @ (block / 0.5).mT),
    )
    for probe, part in zip(
        parts,
        block.split([4, 6], dim=1),
        strict=True,
    ):
        probe.blocks(part[None], 0.5, team)
    error, measured = (
        sum(probe.sums[name].item() for probe in parts) for name in ("error", "blocks")
    )
    assert measured == whole.sums["blocks"].item() == 1.0
    assert error == pytest.approx(whole.sums["error"].item(), rel=1e-6)
