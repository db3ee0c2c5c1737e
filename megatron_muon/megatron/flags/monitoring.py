"""Checks of the flags by which a run is watched: Megatron's profiler, and Weights & Biases."""

from __future__ import annotations

import argparse
import importlib.util

from megatron_muon.errors import Reasons, UserError, install

TRACES = "torch_profile"
"""Where Megatron writes the traces of --use-pytorch-profiler: a folder beside --tensorboard-dir, with `TRACE` of each
rank."""

TRACE = "rank-*.json.gz"


def check_profile(args: argparse.Namespace, *, on_cpu: bool) -> None:
    """Refuse a profile that Megatron would not record, or not write."""
    if not args.profile:
        if args.use_pytorch_profiler:
            raise UserError("--use-pytorch-profiler does nothing without --profile; add it, or leave both out")
        return
    start, end, reasons = args.profile_step_start, args.profile_step_end, Reasons()
    steps = f"--profile-step-start {start} --profile-step-end {end}"
    with reasons:
        if start >= end:
            raise UserError(f"{steps}: no step lies between them; the second number must be larger")
    with reasons:
        if args.train_iters is not None and end > args.train_iters:
            raise UserError(
                f"{steps}: a trace is written when step {end} begins, and --train-iters {args.train_iters} ends "
                "before; give earlier steps (`train`: --profile-steps FIRST:END), or train longer"
            )
    with reasons:
        if args.use_pytorch_profiler and args.tensorboard_dir is None:
            raise UserError(
                "--use-pytorch-profiler writes its traces beside --tensorboard-dir; give that too, such as "
                "--tensorboard-dir runs/profiled/tensorboard"
            )
    with reasons:
        if on_cpu and not args.use_pytorch_profiler:
            raise UserError("--profile alone is for nsys, on a GPU; add --use-pytorch-profiler on a CPU")
    reasons.tell()


def check_wandb(args: argparse.Namespace, *, elsewhere: bool) -> None:
    """Refuse --wandb-project where its package is missing; megatron-core finds that out on the last rank alone."""
    if args.wandb_project and not elsewhere and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"--wandb-project {args.wandb_project}: wandb is not installed; {install('wandb')}, or leave the flag out"
        )
