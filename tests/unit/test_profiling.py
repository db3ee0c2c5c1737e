"""Which steps `--profile` records, what a trace names, and what is refused."""

from types import SimpleNamespace

import megatron.core.pipeline_parallel.schedules as schedules
import megatron.training.training as training
import pytest
import torch
from torch.profiler import ProfilerAction

from megatron_muon.core.probe import SILENT, PhaseTimer, span
from megatron_muon.megatron.patches import install
from megatron_muon.tools.train.run_folder import RunFolder, clear


def names_in(profiler: torch.profiler.profile) -> set[str]:
    return {event.name for event in profiler.events()}


def test_a_phase_is_a_range_of_a_trace_and_otherwise_nothing_is_made():
    assert span("a") is span("b") is SILENT.phase("gather", 3)
    timer = PhaseTimer(torch.device("cpu"))
    with torch.profiler.profile() as profiler, SILENT.phase("gather", 3), timer.phase("momentum"), span("optimizer"):
        torch.ones(2).add_(1)
    assert {"muon/gather wave 3", "muon/momentum", "optimizer"} <= names_in(profiler)
    assert timer.seconds["momentum"] > 0


@pytest.mark.parametrize(
    ("done", "steps", "recorded"),
    [(0, (3, 5), [3, 4]), (0, (1, 3), [1, 2]), (20, (22, 24), [22, 23]), (20, (21, 22), [21]), (20, (10, 13), [])],
)
def test_steps_are_counted_from_the_runs_first(patches, monkeypatch, done, steps, recorded):
    """A run that went on at 20 and was to record from 22 began at 42, and was stopped at 24: it wrote no trace."""
    args = SimpleNamespace(iteration=done, profile_step_start=steps[0])
    monkeypatch.setattr(install, "get_args", lambda: args)
    asked = {"wait": max(steps[0] - 1, 0), "warmup": 1, "active": steps[1] - steps[0], "repeat": 1}
    plain = torch.profiler.schedule(**asked)
    install.count_global_steps(patches)
    mended = torch.profiler.schedule(**asked)

    def records(schedule):
        """The iterations, of which the first after `done` is the schedule's step 1."""
        actions = {done + step: schedule(step) for step in range(1, 60)}
        return [i for i, action in actions.items() if action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)]

    assert records(mended) == recorded
    assert (records(plain) == recorded) is (done == 0)


def test_parts_of_an_iteration_are_named(patches, monkeypatch):
    monkeypatch.setattr(schedules, "forward_backward_no_pipelining", lambda: "losses")
    monkeypatch.setattr(training, "finalize_model_grads", lambda *_: None)

    def train_step(iteration):
        training.finalize_model_grads("model")
        return training.get_forward_backward_func(1, None)()

    monkeypatch.setattr(training, "train_step", train_step)
    install.name_parts(patches)
    with torch.profiler.profile() as profiler:
        assert training.train_step(iteration=4) == "losses"
    assert {"iteration 5", "forward_backward", "finish_grad_sync"} <= names_in(profiler)


def test_starting_over_deletes_traces_and_files_of_weights_and_biases(tmp_path):
    folder = RunFolder(tmp_path, tmp_path / "tensorboard", None)
    for name in ("torch_profile/rank-0.json.gz", "wandb/offline-run", "wandb.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    clear(folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["torch_profile"]
