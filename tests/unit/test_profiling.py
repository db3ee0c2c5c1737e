"""Which steps `--profile` records, and that phases are ranges of a trace."""

from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerAction

from megatron_muon.core.probe import SILENT, PhaseTimer, span
from megatron_muon.megatron.patches import install


def names_in(profiler):
    return {event.name for event in profiler.events()}


def test_a_phase_is_a_range_of_a_trace_and_otherwise_nothing_is_made():
    assert span("a") is span("b") is SILENT.phase("gather", 3)
    timer = PhaseTimer(torch.device("cpu"))
    with (
        torch.profiler.profile() as profiler,
        SILENT.phase("gather", 3),
        timer.phase("momentum"),
        span("optimizer"),
    ):
        torch.ones(2).add_(1)
    assert {"muon/gather wave 3", "muon/momentum", "optimizer"} <= names_in(profiler)
    assert timer.seconds["momentum"] > 0


@pytest.mark.parametrize(
    ("done", "steps", "recorded"),
    [(0, (3, 5), [3, 4]), (20, (22, 24), [22, 23]), (20, (10, 13), [])],
)
def test_profiled_steps_are_counted_from_the_first_step_of_the_run(
    patches, monkeypatch, done, steps, recorded
):
    """A run resumed at 20 to record from 22 began at 42 and was stopped at 24: it wrote no
    trace.
    """
    start, end = steps
    args = SimpleNamespace(iteration=done, profile_step_start=start)
    monkeypatch.setattr(install, "get_args", lambda: args)
    windows = {"wait": max(start - 1, 0), "warmup": 1, "active": end - start, "repeat": 1}
    upstream = torch.profiler.schedule(**windows)
    install.count_global_steps(patches)
    patched = torch.profiler.schedule(**windows)
    recording = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)

    def records(schedule):
        """The recorded iterations; the schedule's step 1 is the one after `done`."""
        return [done + step for step in range(1, 60) if schedule(step) in recording]

    assert records(patched) == recorded
    assert (records(upstream) == recorded) is (done == 0)
