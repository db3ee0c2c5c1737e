"""Folders of runs as a training leaves them: events by the real SummaryWriter, facts, config and
summary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SEQ_LENGTH, BATCH = 64, 8
STEP_S = 0.1
FACTS = {
    "muon_parameters": 1000,
    "state_bytes": {"momentum fp32": 5_000_000, "all else": 1_500_000},
}
PEAK = 90.5 * 2**20


def falling(fast: float) -> Callable[[float], float]:
    """A loss that falls from 6 towards 2."""
    return lambda step: 2.0 + 4.0 * math.exp(-fast * step)


def make_run(
    folder: Path,
    loss: Callable[[float], float],
    *,
    optimizer: str = "muon",
    lr: str = "0.01",
    seed: int = 1,
    steps: int = 40,
    every: int = 10,
    outcome: str = "finished",
    flags: Mapping[str, str] | None = None,
    args: Mapping[str, str] | None = None,
    run: Mapping[str, object] | None = None,
    validation: bool = True,
    skipped: int = 0,
    summary: bool = True,
) -> Path:
    """Write a run of `steps` steps with a validation after every few; `args` are Megatron's, `run`
    adds to run.json.
    """
    from torch.utils.tensorboard import SummaryWriter

    folder.mkdir(parents=True)
    of_megatron = {
        "seq_length": SEQ_LENGTH,
        "optimizer": optimizer,
        "lr": lr,
        "seed": seed,
        "train_iters": steps,
    }
    of_megatron |= {"global_batch_size": BATCH, **(args or {})}
    began = 1000.0
    with SummaryWriter(log_dir=str(folder / "tensorboard")) as writer:
        for name, value in of_megatron.items():
            writer.add_text(name, str(value), global_step=0, walltime=began)
        for step in range(1, steps + 1):
            now = began + step * STEP_S
            scalars = {
                "lm loss": loss(step),
                "batch-size": BATCH,
                "iteration-time": STEP_S,
                "optimizer-time": 0.04,
            }
            scalars["mem-max-allocated-bytes"] = PEAK
            if step % every == 0 and validation:
                scalars["lm loss validation"] = loss(step) + 0.1
            scalars |= {"skipped-iterations": 1} if step == skipped else {}
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, step, walltime=now)
            for tag in scalars.keys() & {"lm loss", "lm loss validation"}:
                writer.add_scalar(f"{tag} vs samples", scalars[tag], step * BATCH, walltime=now)
        if validation:  # the test set, under the same tag
            writer.add_scalar("lm loss validation", 9.0, steps, walltime=now)
    (folder / "tensorboard" / "facts.json").write_text(json.dumps(FACTS))
    given = {
        "--optimizer": optimizer,
        "--lr": lr,
        "--seed": str(seed),
        "--train-iters": str(steps),
        **(flags or {}),
    }
    lines = [f"  {name}: {value}" for name, value in given.items()]
    (folder / "config.yaml").write_text("\n".join(["MODEL_ARGS:", *lines, ""]))
    if summary:
        diverged = not math.isfinite(loss(steps))
        found = {
            "outcome": outcome,
            "status": 0,
            "diverged": diverged,
            "seconds": 9.5,
            "iterations": steps,
        }
        (folder / "summary.json").write_text(json.dumps(found))
        started = {
            **{
                "command": "megatron-muon sweep ...",
                "torchrun": "torchrun x",
                "ranks": 2,
                "device": "cpu",
            },
            **{"commit": "abc", "dirty": False, "versions": {"python": "3.12.1"}},
            "machine": {"processor": "P", "cores": 2, "system": "Linux x86_64"},
        }
        (folder / "run.json").write_text(json.dumps({**started, **(run or {})}))
    return folder


def report_of(place: Path) -> Any:
    """The report of the runs at or below a folder."""
    from megatron_muon.tools.report.arms import find_runs, read_arms
    from megatron_muon.tools.report.page import Report

    return Report(*read_arms(find_runs([place])))
