"""Phases are ranges of a trace."""

import torch

from megatron_muon.core.probe import SILENT, span
from megatron_muon.metrics import PhaseTimer


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
