"""What `--profile` needs beside megatron-core's own profiling: which steps, and the names of a step's larger parts.

The optimizer names its phases itself (`core.probe`), in whatever profiler runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import megatron.core.pipeline_parallel.schedules as schedules
import megatron.training.training as training
import torch
from megatron.training import get_args

from megatron_muon.core.probe import span
from megatron_muon.patching import Patches


def profile(patches: Patches) -> None:
    """Install what a run of `--profile` needs."""
    count_global_steps(patches)
    name_parts(patches)


def count_global_steps(patches: Patches) -> None:
    """Let `--profile-step-start` count from the run's first step in a run that goes on from a checkpoint, too.

    0.19 calls the two flags global steps and stops the profiler at that of --profile-step-end, but has torch's schedule
    count from the step that the run goes on with. So it would record other steps, or none. Steps that were done before
    are not recorded: their trace, if there is one, stays.
    """

    @patches.around(torch.profiler, "schedule", takes=["wait", "warmup", "active", "repeat"])
    def schedule(make: Callable[..., Any], *, wait: int, **more: int) -> Any:
        args = get_args()
        if args.profile_step_start <= args.iteration > 0:
            return lambda _: torch.profiler.ProfilerAction.NONE
        return make(wait=wait - args.iteration, **more)


def name_parts(patches: Patches) -> None:
    """Name iterations, forward and backward passes, and the end of the gradients' reduction, in a trace.

    0.19 names none of them; the steps that torch names are counted from where the run goes on.
    """

    @patches.around(training, "train_step", takes=["iteration"])
    def train_step(step: Callable[..., Any], *args: Any, iteration: int, **kwargs: Any) -> Any:
        with span(f"iteration {iteration + 1}"):
            return step(*args, iteration=iteration, **kwargs)

    for owner, name, label in (
        (schedules, "forward_backward_no_pipelining", "forward_backward"),
        (training, "finalize_model_grads", "finish_grad_sync"),
    ):
        patches.around(owner, name)(functools.partial(_within, label))


def _within(label: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with span(label):
        return call(*args, **kwargs)
